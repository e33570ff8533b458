"""Forward to ddl-doctor, which defines the bench peer contract: by it, plugins add libraries to ``ddl bench``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddlcore.contracts.forwarding import taken_from

if TYPE_CHECKING:
    from ddl_doctor.contracts.bench import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        return taken_from("ddl_doctor.contracts.bench", name, __name__)
