"""Forward to ddl-doctor, which defines the check contract: by it, plugins add checks to ``ddl doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddlcore.contracts.forwarding import taken_from

if TYPE_CHECKING:
    from ddl_doctor.contracts.check import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        return taken_from("ddl_doctor.contracts.check", name, __name__)
