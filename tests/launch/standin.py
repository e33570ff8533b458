"""An ``ssh`` that connects to nothing: "hosts" whose processes all run on this machine, told apart by their index alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

__all__ = ["LOOPBACK", "STAND_IN_WORKS", "install_shell", "install_ssh"]

LOOPBACK = {"DDL_CONTROL_ADDRESS": "tcp://127.0.0.1:0"}  # such hosts have no address of their own
STAND_IN_WORKS = pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for ssh uses setsid of util-linux")

_SSH = """#!/bin/sh
printf '%s\\n' "$*" >> "$0.log"
while case "$1" in -p|-i) shift 2;; -*) shift;; *) false;; esac; do :; done
host=$1; shift
command=$*
case $host in
  refuses) echo "me@refuses: Permission denied (publickey)." >&2; exit 255;;
  unknown) echo "ssh: Could not resolve hostname unknown: Name or service not known" >&2; exit 255;;
  down) echo "ssh: connect to host down port 22: No route to host" >&2; exit 255;;
  silent) if [ -n "$command" ]; then exec sleep 60; fi;;
  bare) command=$(printf %s "$command" | sed 's,^exec [^ ]*,exec /no/such/python,');;
  older) command=$(printf %s "$command" | sed 's,== ([0-9]*\\, [0-9]*),== (3\\, 1),');;
  former) command="$command.0rc1";;
  elsewhere) command="cd /; $command";;
esac
exec setsid --fork --wait sh -c "$command"
"""
_SHELL = """#!/bin/sh
printf '%s\\n' "$*" >> "$0.log"
shift
exec setsid --fork --wait sh -c "$*" < /dev/null
"""


def install_ssh(folder: Path) -> dict[str, str]:
    """The environment in which ``ssh`` is the stand-in; it notes its arguments in ``folder / "ssh.log"``."""
    return {**_written(folder, "ssh", _SSH), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def install_shell(folder: Path) -> dict[str, str]:
    """The environment in which a remote shell that passes no standard input on, as Kubeflow's, leads to hosts."""
    return {**_written(folder, "rsh", _SHELL), "OMPI_MCA_plm_rsh_agent": str(folder / "rsh")}


def _written(folder: Path, name: str, text: str) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return dict(LOOPBACK)
