"""Describe what ddl_horovod adds to ddl, as plain data: a check of `ddl doctor`."""

from __future__ import annotations

from ddlcore.hooks import CheckProvider, hookimpl


@hookimpl
def ddl_checks() -> list[CheckProvider]:
    """Return the provider of the check that no host has the original Horovod as well."""
    return [CheckProvider("known-bad-horovod", "ddl_horovod.checks:KnownBadHorovod", doc="Horovod beside ddl-horovod")]
