"""Compare the installed releases of libraries with those that plugins were tested with. Imports no library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddlcore.contracts.library import installed_version, version_numbers
from ddlcore.hooks import AdapterProvider, ReleaseRange
from ddlcore.plug.finding import find
from ddlcore.plug.registry import Registry


@dataclass(frozen=True)
class LibraryRelease:
    """A library that plugins depend on."""

    module: str
    version: str  # the installed one; "": none is installed, or its version is not known
    tested: ReleaseRange | None  # the releases that all these plugins were tested with; None: no plugin names any

    @property
    def range(self) -> str:
        """The tested releases in words, such as "2.4 to 2.15", or ""."""
        if self.tested is None:
            return ""
        oldest, newest = self.tested.oldest, self.tested.newest
        return oldest if oldest == newest else f"{oldest} to {newest}"

    @property
    def differs(self) -> str:
        """Say "newer than tested" or "older than tested" if the installed version is outside of the range; else ""."""
        if self.tested is None or not version_numbers(self.version):
            return ""
        if _beyond(self.version, self.tested.newest) > 0:
            return "newer than tested"
        return "older than tested" if _beyond(self.version, self.tested.oldest) < 0 else ""


def library_releases(registry: Registry, known: Mapping[str, tuple[str, ...]]) -> list[LibraryRelease]:
    """Return the libraries in ``known``, and all others that a plugin of ``registry`` names.

    ``known`` has the names of the distributions that may contain a module, as ``aliases.FRAMEWORKS`` does.
    """
    ranges: dict[str, list[ReleaseRange]] = {module: [] for module in known}
    for _, provider in registry.offers():
        if isinstance(provider, AdapterProvider) and provider.framework:
            ranges.setdefault(provider.framework, [])
        for one in provider.tested:
            ranges.setdefault(one.module, []).append(one)
    return [
        LibraryRelease(module, installed_version(module, *known.get(module, ())), _common(found))
        for module, found in ranges.items()
    ]


def refused_releases(registry: Registry) -> dict[str, str]:
    """Return why plugins cannot be used with a library that is installed, by the name of the plugin's part."""
    return {
        f"{kind} '{one.name}'": why
        for kind, one in registry.offers()
        if one.tested and all(find(library.module) for library in one.tested) and (why := registry.missing(one))
    }


def _common(ranges: Sequence[ReleaseRange]) -> ReleaseRange | None:
    """Return the releases that are in all of ``ranges``, which are of one library."""
    if not ranges:
        return None
    oldest = max((one.oldest for one in ranges), key=lambda bound: version_numbers(bound, 3))
    newest = min((one.newest for one in ranges), key=lambda bound: version_numbers(bound, 3))
    return ReleaseRange(ranges[0].module, oldest, newest)


def _beyond(version: str, bound: str) -> int:
    """Return 1 if ``version`` is newer than all releases of ``bound``, -1 if it is older than these, else 0."""
    count = len(bound.split("."))
    numbers, found = version_numbers(bound, count), version_numbers(version, count)
    return (found > numbers) - (found < numbers)
