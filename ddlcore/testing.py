"""Forward to the conformance kit, ``ddl_conform``: plugins import its suites from here, by the plugin contract."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddl_conform import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if find_spec("ddl_conform") is None:
        from ddlcore.text.installing import pip_install

        text = f"ddlcore.testing is in a package of its own; {pip_install('ddl-conform')}"
        raise ModuleNotFoundError(text, name="ddl_conform")
    return getattr(import_module("ddl_conform"), name)
