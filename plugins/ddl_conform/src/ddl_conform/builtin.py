"""The suites of those built-in plugins that the kit cannot test without more information.

Such a suite adds a bound for errors, a way to make tensors, or an environment with stand-ins for programs. A stand-in
is a script that replaces a program in a test.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ddl_conform.adapter_carried import ELEMENTS
from ddl_conform.adapters import AdapterSuite
from ddl_conform.composed import ComposedSuite
from ddl_conform.compressors import CompressorSuite
from ddl_conform.launchers import LauncherSuite
from ddl_conform.threads import ThreadsTransport
from ddlcore.builtin.compressors import Bf16Compression, Fp16Compression
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.builtin.slurm import SrunLauncher
from ddlcore.builtin.ssh import SshLauncher
from ddlcore.contracts.launcher import Launcher
from ddlcore.contracts.transport import Transport

__all__ = ["Bf16Suite", "Fp16Suite", "HierarchicalSuite", "NumpySuite", "SrunSuite", "SshSuite", "with_stand_in"]

# A stand-in for ssh that connects to nothing: it skips the options and the host, and runs the command on this machine.
_SSH = (
    '#!/bin/sh\nwhile case "$1" in -p|-i) shift 2;; -*) shift;; *) false;; esac; do :; done\nshift\nexec sh -c "$*"\n'
)
# A stand-in for srun: starts as many tasks as it is asked for, and gives each the whole standard input.
_SRUN = """#!/bin/sh
tasks=1
for word; do case "$word" in --ntasks=*) tasks=${word#--ntasks=};; esac; done
while case "$1" in -*) true;; *) false;; esac; do shift; done
input=$(cat)
for task in $(seq 0 $((tasks - 1))); do echo "$input" | SLURM_PROCID=$task "$@" & done
wait
"""


class NumpySuite(AdapterSuite):
    """The suite of the numpy adapter. Its tensors are numpy arrays, as in ``ddl_conform.oracle``."""

    adapter = NumpyAdapter()
    elements = ELEMENTS

    def make(self, array: Any) -> Any:
        return array.copy()

    def to_numpy(self, tensor: Any) -> Any:
        return tensor

    def unsupported(self) -> Any:
        """Return an array of texts."""
        return np.array(["one", "two"])


class Fp16Suite(CompressorSuite):
    """The suite of float16 compression. The error of a value is at most 2^-11 of the largest value."""

    compressor = Fp16Compression
    error = 2.0**-11


class Bf16Suite(CompressorSuite):
    """The suite of bfloat16 compression. The error of a value is at most 2^-8 of the largest value."""

    compressor = Bf16Compression
    error = 2.0**-8


class HierarchicalSuite(ComposedSuite):
    """The suite of the hierarchical transport, with the ``threads`` transport both within each host and across hosts.

    The hosts are only numbers: all ranks are threads of one process. In the world of three ranks, one host has two
    ranks and the other host has one.
    """

    layouts: ClassVar[Mapping[int, Sequence[int]]] = {3: (0, 0, 1), 4: (0, 1, 0, 1)}

    def cross(self) -> Transport:
        return ThreadsTransport()


class SshSuite(LauncherSuite):
    """The suite of the ssh launcher, with a stand-in for ssh that runs commands on this machine."""

    runs_here = True

    def make(self) -> Launcher:
        return SshLauncher()

    def settings(self) -> Mapping[str, str | int | float | bool]:
        return {**super().settings(), "ssh_port": 2222, "ssh_identity_file": "/home/me/my key"}

    def surroundings(self, folder: Path) -> Mapping[str, str]:
        return {"PATH": with_stand_in(folder, "ssh", _SSH)}


class SrunSuite(LauncherSuite):
    """The suite of the srun launcher, with the environment of a batch script, and with a stand-in for srun.

    The stand-in runs the tasks on this machine.
    """

    runs_here = True

    def make(self) -> Launcher:
        return SrunLauncher()

    def surroundings(self, folder: Path) -> Mapping[str, str]:
        path = with_stand_in(folder, "srun", _SRUN)
        return {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_NTASKS": "6"}


def with_stand_in(folder: Path, name: str, text: str) -> str:
    """Write ``text`` into an executable script called ``name``, and return a value of PATH with which it is found.

    The script is in the directory ``bin`` of ``folder``. PATH lists this directory before all others.
    """
    script = folder / "bin" / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(text)
    script.chmod(0o755)
    return os.pathsep.join((str(script.parent), dict(os.environ)["PATH"]))
