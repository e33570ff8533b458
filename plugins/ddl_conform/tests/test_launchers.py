"""The built-in launchers pass the launcher suite."""

from __future__ import annotations

from ddl_conform.builtin import SrunSuite, SshSuite

from ddlcore.builtin.allocations import GrantedLauncher
from ddlcore.contracts.launcher import Launcher
from ddlcore.testing import LauncherSuite


class TestSsh(SshSuite):
    """As `ddl conform ssh` runs it, commands and all."""


class TestSrun(SrunSuite):
    """As `ddl conform srun` runs it."""


class TestGranted(LauncherSuite):
    def make(self) -> Launcher:
        return GrantedLauncher()
