"""Forward to ddl-doctor, which defines the tables of components that are known to be bad. Plugins may add rows to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddlcore.contracts.forwarding import taken_from

if TYPE_CHECKING:
    from ddl_doctor.contracts.known_bad import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        return taken_from("ddl_doctor.contracts.known_bad", name, __name__)
