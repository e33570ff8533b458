"""The suites of the built-in parts that need a word more than the kit's own: how lossy, which tensors, what surroundings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ddlcore.builtin.compressors import Bf16Compression, Fp16Compression
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.builtin.slurm import SrunLauncher
from ddlcore.builtin.ssh import SshLauncher
from ddlcore.builtin.threads import ThreadsTransport
from ddlcore.contracts.launcher import Launcher
from ddlcore.contracts.transport import Transport
from ddlcore.testing.adapters import AdapterSuite
from ddlcore.testing.composed import ComposedSuite
from ddlcore.testing.compressors import CompressorSuite
from ddlcore.testing.launchers import LauncherSuite

__all__ = ["Bf16Suite", "Fp16Suite", "HierarchicalSuite", "NumpySuite", "SrunSuite", "SshSuite", "with_stand_in"]

# A stand-in that connects to nothing: it runs what it is given, here.
_SSH = (
    '#!/bin/sh\nwhile case "$1" in -p|-i) shift 2;; -*) shift;; *) false;; esac; do :; done\nshift\nexec sh -c "$*"\n'
)
# As many tasks as srun is asked for, each of which gets all of the standard input.
_SRUN = """#!/bin/sh
tasks=1
for word; do case "$word" in --ntasks=*) tasks=${word#--ntasks=};; esac; done
while case "$1" in -*) true;; *) false;; esac; do shift; done
input=$(cat)
for task in $(seq 0 $((tasks - 1))); do echo "$input" | SLURM_PROCID=$task "$@" & done
wait
"""


class NumpySuite(AdapterSuite):
    """numpy's arrays are the oracle's own."""

    adapter = NumpyAdapter()

    def make(self, array: Any) -> Any:
        return array.copy()

    def to_numpy(self, tensor: Any) -> Any:
        return tensor


class Fp16Suite(CompressorSuite):
    """Half a unit of float16's last place."""

    compressor = Fp16Compression
    error = 2.0**-11


class Bf16Suite(CompressorSuite):
    """Half a unit of bfloat16's last place."""

    compressor = Bf16Compression
    error = 2.0**-8


class HierarchicalSuite(ComposedSuite):
    """Threads within hosts and across them; one host has fewer ranks than another."""

    layouts: ClassVar[Mapping[int, Sequence[int]]] = {3: (0, 0, 1), 4: (0, 1, 0, 1)}

    def cross(self) -> Transport:
        return ThreadsTransport()


class SshSuite(LauncherSuite):
    """An ssh that stays here."""

    runs_here = True

    def make(self) -> Launcher:
        return SshLauncher()

    def settings(self) -> Mapping[str, str | int | float | bool]:
        return {**super().settings(), "ssh_port": 2222, "ssh_identity_file": "/home/me/my key"}

    def surroundings(self, folder: Path) -> Mapping[str, str]:
        return {"PATH": with_stand_in(folder, "ssh", _SSH)}


class SrunSuite(LauncherSuite):
    """A batch script's environment, with an srun that stays here."""

    runs_here = True

    def make(self) -> Launcher:
        return SrunLauncher()

    def surroundings(self, folder: Path) -> Mapping[str, str]:
        path = with_stand_in(folder, "srun", _SRUN)
        return {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_NTASKS": "6"}


def with_stand_in(folder: Path, name: str, text: str) -> str:
    """A PATH on which ``name`` is a script with ``text``."""
    script = folder / "bin" / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(text)
    script.chmod(0o755)
    return os.pathsep.join((str(script.parent), dict(os.environ)["PATH"]))
