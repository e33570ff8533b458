"""Forward to the conformance kit, ``ddl_conform``: plugins import its suites from here, by the plugin contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddlcore.contracts.forwarding import taken_from

if TYPE_CHECKING:
    from ddl_conform import *  # noqa: F403


def __getattr__(name: str) -> Any:  # also for type checkers: some names are modules of the kit
    return taken_from("ddl_conform", name, __name__)
