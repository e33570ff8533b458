"""Imported by the server of forks: what a rank imports and loads on its way through init(), done once for hundreds of ranks."""

from __future__ import annotations

import os

import ddl_shm.transport  # noqa: F401
import pytest  # noqa: F401  # the programs of ranks stand in test modules
import zmq  # noqa: F401  # and all else that only a connection needs
from ddl_shm.machine_code import SHM

import ddlcore.control.client  # noqa: F401
import tests.faults.harness  # noqa: F401
from ddlcore.contracts.machine_code.loading import load
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.plug.settings import settings_of

__all__: list[str] = []

settings_of(os.environ)
CpuKernels()
load(SHM)
