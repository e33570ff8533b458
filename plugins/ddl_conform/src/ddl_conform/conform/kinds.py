"""Decides which suites test a plugin: the suite that the plugin's provider names, or the kit's suite for its kind.

A provider is the description of one thing that a plugin adds, such as a transport.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ddlcore.contracts import Adapter, Compressor, FusionPolicy, Launcher, Transport, Tuner
from ddlcore.errors import PluginError
from ddlcore.hooks import Provider
from ddlcore.plug import PluginKind, Registry


class SuitedKind(NamedTuple):
    """A kind of plugin for which the conformance kit has a suite."""

    table: str  # attribute of the registry
    suite: str  # "module:Class" in the kit; a plugin's own suite must be a subclass of it
    contract: type  # the class whose methods a plugin must write
    standard: bool = True  # whether standard.py has a function, named as the key in KINDS, that makes a suite

    def kind(self) -> PluginKind[Any]:
        """Return the registry's own object for this kind of plugin."""
        return Registry.kinds()[self.table]


KINDS: Mapping[str, SuitedKind] = {
    "transport": SuitedKind("transports", "ddl_conform.transports:TransportSuite", Transport),
    "adapter": SuitedKind("adapters", "ddl_conform.adapters:AdapterSuite", Adapter, standard=False),
    "fusion": SuitedKind("fusion_policies", "ddl_conform.fusion:FusionSuite", FusionPolicy),
    "tuner": SuitedKind("tuners", "ddl_conform.tuners:TunerSuite", Tuner),
    "compressor": SuitedKind("compressors", "ddl_conform.compressors:CompressorSuite", Compressor),
    "launcher": SuitedKind("launchers", "ddl_conform.launchers:LauncherSuite", Launcher),
}


# The suites of the core's own plugins that the kit cannot test without more information, by kind and name.
OWN_SUITES: Mapping[tuple[str, str], str] = {
    ("adapter", "numpy"): "ddl_conform.builtin:NumpySuite",
    ("compressor", "fp16"): "ddl_conform.builtin:Fp16Suite",
    ("compressor", "bf16"): "ddl_conform.builtin:Bf16Suite",
    ("launcher", "ssh"): "ddl_conform.builtin:SshSuite",
    ("launcher", "srun"): "ddl_conform.builtin:SrunSuite",
}


def suite_of(kind: str, provider: Provider) -> str:
    """Return the suite for ``provider`` as "module:Class". Return "" if the standard suite of ``kind`` is used."""
    return provider.suite or OWN_SUITES.get((kind, provider.name), "")


@dataclass(frozen=True)
class ProviderUnderTest:
    """A provider that is tested, and its kind."""

    kind: str  # key of KINDS
    provider: Provider
    origin: str  # its distribution, name and version
    missing: str = ""  # why it cannot be used here; then only a suite with ``suite_over`` can run

    def __str__(self) -> str:
        word = KINDS[self.kind].kind().word
        return f"{self.provider.name}, {'an' if word[0] in 'aeiou' else 'a'} {word} of {self.origin}"


def subjects(registry: Registry, name: str, kind: str = "") -> list[ProviderUnderTest]:
    """Return the providers to test for ``name``, which is the name of a provider or of an installed distribution.

    If no provider has this name, return all providers of the distribution ``name``. Only providers of kinds for which
    the kit has a suite are returned. If ``kind`` is not empty, only providers of this kind are returned. Raises
    PluginError, with a message of one line, if nothing is found.
    """
    all_of_them = [
        ProviderUnderTest(key, provider, str(registry.distribution(provider)))
        for key, row in KINDS.items()
        if kind in ("", key)
        for provider in registry.of(row.kind()).values()
    ]
    found = [one for one in all_of_them if one.provider.name == name]
    found = found or [one for one in all_of_them if _plain(one.origin.partition(" ")[0]) == _plain(name)]
    found = [replace(one, missing=registry.missing(one.provider)) for one in found]
    if not found:
        where = f"no {KINDS[kind].kind().word}" if kind else "nothing that has a suite"
        known = ", ".join(dict.fromkeys(one.provider.name for one in all_of_them))
        text = f"{where} is called '{name}'; there are {known or 'none'} (`ddl plugins` shows all)"
        raise PluginError(text + registry.left_out(name))
    return found


def suites_of(subject: ProviderUnderTest, registry: Registry) -> tuple[Any, list[Any]]:
    """Return (the class to test, the list of suite classes that test it).

    Raises PluginError if the suite that the provider names is not a subclass of the kit's suite. Also raises
    PluginError if the provider names no suite, and the kit cannot make a suite for plugins of this kind.
    """
    row = KINDS[subject.kind]
    tested = _tested(subject, registry)
    standard = _named(row.suite)
    named = suite_of(subject.kind, subject.provider)
    if named:
        suite = _own(subject, named)
        if not (isinstance(suite, type) and issubclass(suite, standard)):
            raise PluginError(f"{subject}: its suite {named} is not a {standard.__name__}")
        return tested, [suite, *_besides(subject, registry)]
    if not row.standard:
        raise PluginError(
            f"{subject}: its provider names no suite; write a subclass of ddlcore.testing.{standard.__name__} "
            'that says how tensors are made, and name it by suite="module:Class"'
        )
    make = _named(f"ddl_conform.conform.standard:{subject.kind}")
    return tested, [make(subject.provider, tested, registry), *_besides(subject, registry)]


def _tested(subject: ProviderUnderTest, registry: Registry) -> Any:
    if not (subject.missing and subject.provider.suite_over):
        return registry.load(subject.provider)  # type: ignore[call-overload]  # each provider by its own overload
    try:
        return _named(subject.provider.target)
    except Exception as error:  # importing a plugin's module can raise anything
        text = f"{subject} cannot be used: {subject.missing}; nor does it load ({type(error).__name__}: {error})"
        raise PluginError(text) from error


def _besides(subject: ProviderUnderTest, registry: Registry) -> list[Any]:
    """Return the suites of the kit that are run in addition to the plugin's suite; none if the plugin is no transport."""
    if subject.kind != "transport":
        return []
    return [_named("ddl_conform.conform.standard:killed")(subject.provider, registry)]


def _own(subject: ProviderUnderTest, named: str) -> Any:
    try:
        return _named(named)
    except Exception as error:  # importing a plugin's module can raise anything
        raise PluginError(f"{subject}: its suite {named} cannot be loaded ({type(error).__name__}: {error})") from error


def _named(target: str) -> Any:
    module, _, attribute = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def contract_methods(contract: type) -> Sequence[str]:
    """Return the names of the public methods of the class ``contract``, in the order of their definition."""
    return [name for name, value in vars(contract).items() if callable(value) and not name.startswith("_")]
