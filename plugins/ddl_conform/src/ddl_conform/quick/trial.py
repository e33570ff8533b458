"""Try the things that plugins add, each with a tensor of three elements. This module runs in a separate process.

The process prints one line about each of these trials. (They are not the trials of a search for settings.)
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any

from ddl_conform.conform.kinds import suite_of
from ddl_conform.thread_jobs import thread_jobs
from ddlcore.api import Operations, init, shutdown, size, use_job
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.contracts import AgentPlace, Ready, StartPlan, Surroundings
from ddlcore.hooks import (
    AdapterProvider,
    BenchPeerProvider,
    CheckProvider,
    ClusterProvider,
    CompressorProvider,
    FusionProvider,
    LauncherProvider,
    Provider,
    TransportProvider,
    TunerProvider,
)
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.plug import Registry
from ddlcore.plug.settings import settings_of
from ddlcore.process.job import Job
from ddlcore.text.installing import pip_install
from ddlcore.types import Buffer, DType, Sum

VALUES = (1.0, 2.0, 3.0)
WAIT_S = 30.0


class _Untried(Exception):
    """Raised if something that a plugin adds cannot be tried on this machine. The message says why."""


def main() -> None:
    """Try the providers named on the command line, in pairs of words: ``kind name kind name …``.

    A provider describes one thing that a plugin adds. Print a line about each result, then end the process.
    """
    registry = settings_of(os.environ)[1]
    offers = {(kind, provider.name): provider for kind, provider in registry.offers()}
    for kind, name in zip(sys.argv[1::2], sys.argv[2::2]):
        try:
            state, reason = "works", _trial(offers[kind, name], registry)
        except _Untried as why:
            state, reason = "", str(why)
        except Exception as error:  # plugin code may raise anything
            state, reason = "fails", " ".join(f"{type(error).__name__}: {error}".split())[:400]
        print(f"trial: {json.dumps([kind, name, state, reason])}", flush=True)
    os._exit(0)  # do not wait for threads of imported modules


def _trial(provider: Provider, registry: Registry) -> str:
    for kind, trial in _TRIALS.items():
        if isinstance(provider, kind):
            return trial(provider, registry)
    registry.load(provider)  # type: ignore[call-overload]  # each provider by its own overload
    return "it loads"


# --- transports: 1, 2, 3 from each rank are added


def _transport(provider: TransportProvider, registry: Registry) -> str:
    if "cpu" not in provider.devices:
        raise _Untried(f"it moves memory of {', '.join(provider.devices)} only")
    if provider.launcher:
        return _as_rank(provider)
    if provider.composes:
        return _world(4, "threads+threads", (0, 0, 1, 1), registry)
    size = max(2, provider.sizes[0]) if provider.sizes[1] is None else min(2, provider.sizes[1])
    return _world(size, provider.name, (0,) * size, registry)


def _world(size: int, backend: str, hosts: Sequence[int], registry: Registry) -> str:
    """Run an allreduce of (1, 2, 3) on ``size`` ranks, and return the result in words.

    The ranks are threads of this process. ``backend`` names the transport, and ``hosts`` holds the host index of each
    rank. Raises an exception if the sum is wrong or a rank does not end within ``WAIT_S`` seconds.
    """
    jobs = thread_jobs(size, backend=backend, hosts=hosts, registry=registry)
    results: list[Any] = [None] * size
    errors: list[Exception] = []

    def rank(number: int, job: Job) -> None:
        try:
            job.start()
            results[number] = _sum(job)
        except Exception as error:
            errors.append(error)
        finally:
            job.shutdown()

    threads = [threading.Thread(target=rank, args=pair, daemon=True) for pair in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    if errors:
        raise errors[0]
    if any(result is None for result in results):
        raise TimeoutError(f"{size} ranks did not add three numbers within {WAIT_S:g} s")
    return _right(results, size)


def _sum(job: Job) -> list[float]:
    with use_job(job):
        return _added()


def _added() -> list[float]:
    handle = Operations(NumpyAdapter()).allreduce_async(_array(), op=Sum, name="trial")
    return [float(value) for value in handle.wait()]


def _as_rank(provider: TransportProvider) -> str:
    """Run an allreduce of (1, 2, 3) as one of the ranks that ``ddl run`` has started, and return the result in words.

    Raises ValueError if the sum is wrong.
    """
    init()
    result, ranks = _added(), size()
    shutdown()
    return _right([result], ranks)


def _right(results: Sequence[Sequence[float]], size: int) -> str:
    wanted = [size * value for value in VALUES]
    for result in results:
        if list(result) != wanted:
            raise ValueError(f"the sum of 1, 2, 3 over {size} ranks came out as {list(result)}")
    return f"added 1, 2, 3 over {size} rank{'s' if size > 1 else ''}"


def _array() -> Any:
    import numpy as np

    return np.array(VALUES, np.float32)


# --- the others


def _adapter(provider: AdapterProvider, registry: Registry) -> str:
    """Check that the adapter gives access to the memory of a tensor, and return the result in words.

    The conformance suite of the plugin creates the tensor, because only the suite knows how the framework does that.
    """
    registry.load(provider)
    named = suite_of("adapter", provider)
    if not named:
        raise _Untried("its provider names no suite, which would say how a tensor is made")
    try:
        import pytest  # noqa: F401  # check that it is installed
    except ImportError:
        raise _Untried(f"its suite needs pytest; {pip_install('ddl-conform')}") from None
    from importlib import import_module

    module, _, attribute = named.partition(":")
    suite = getattr(import_module(module), attribute)()
    tensor = suite.make(_array())
    buffer = suite.adapter.buffer(tensor, elementwise=True)
    if buffer.wait is not None:
        buffer.wait()
    seen = list((ctypes.c_float * 3).from_address(buffer.address)) if buffer.device.kind == "cpu" else list(VALUES)
    back = [float(value) for value in suite.to_numpy(tensor)]
    if (seen, back) != (list(VALUES), list(VALUES)):
        raise ValueError(f"a tensor of 1, 2, 3 shows {seen} in memory and reads {back}")
    return "a tensor of 1, 2, 3 shows its memory"


def _compressor(provider: CompressorProvider, registry: Registry) -> str:
    compressor = registry.load(provider)(CpuKernels())
    wire = compressor.wire_dtype(DType.F32)
    source, back = (ctypes.c_float * 3)(*VALUES), (ctypes.c_float * 3)()
    middle = (ctypes.c_char * 64)()
    given, taken = _buffer(source, DType.F32), _buffer(back, DType.F32)
    encoded = Buffer(ctypes.addressof(middle), 3, wire, (3,), owner=middle)
    compressor.encode("trial", given, encoded, 1.0)
    compressor.decode("trial", encoded, taken, 1.0)
    compressor.commit("trial", True)
    if not all(math.isclose(a, b, rel_tol=0.5) for a, b in zip(VALUES, back)):
        raise ValueError(f"1, 2, 3 came back as {list(back)}")
    return f"1, 2, 3 travelled as {wire.label}"


def _buffer(array: Any, dtype: DType) -> Buffer:
    return Buffer(ctypes.addressof(array), 3, dtype, (3,), owner=array)


def _fusion(provider: FusionProvider, registry: Registry) -> str:
    ready = [Ready(f"{i}", "float32", 4 * i, group=None) for i in (1, 2, 3)]
    buckets = registry.load(provider)().arrange(ready, {"fusion_bytes": 16.0})
    if sorted(chain(*buckets)) != [0, 1, 2]:
        raise ValueError(f"three tensors were placed as {buckets}")
    return f"laid three tensors out as {buckets}"


def _tuner(provider: TunerProvider, registry: Registry) -> str:
    from ddlcore.contracts import Knob

    tuner = registry.load(provider)([Knob("fusion_bytes", 1, 1 << 26, logarithmic=True)], 0)
    for _ in range(3):
        values = tuner.ask()
        if values is None:
            break
        tuner.tell(values, float(values["fusion_bytes"]))
    return "asked and told three times"


def _launcher(provider: LauncherProvider, registry: Registry) -> str:
    launcher = registry.load(provider)()
    absent = [name for name in provider.variables if name not in os.environ]
    if absent:
        raise _Untried(f"it applies where {', '.join(absent)} is set")
    settings = settings_of(os.environ, registry=registry)[0]
    places = tuple(AgentPlace(i, "localhost", (i,)) for i in range(3))
    plan = StartPlan(places, (sys.executable, "agent"), (), os.getcwd(), dict(os.environ), settings)
    count = len(launcher.commands(plan))
    return f"three agents by {count} command{'s' if count > 1 else ''}"


def _cluster(provider: ClusterProvider, registry: Registry) -> str:
    rank_info = registry.load(provider)().rank_info(Surroundings(dict(os.environ)))
    return f"rank {rank_info.rank} of {rank_info.size}" if rank_info is not None else "it has not started this process"


def _of_doctor(provider: CheckProvider | BenchPeerProvider, registry: Registry) -> str:
    if find_spec("ddl_doctor") is None:
        raise _Untried(f"ddl-doctor uses it, and is not installed; {pip_install('ddl-doctor')}")
    registry.load(provider)
    return "it loads"


_TRIALS: dict[type[Provider], Callable[[Any, Registry], str]] = {
    TransportProvider: _transport,
    AdapterProvider: _adapter,
    CompressorProvider: _compressor,
    FusionProvider: _fusion,
    TunerProvider: _tuner,
    LauncherProvider: _launcher,
    ClusterProvider: _cluster,
    CheckProvider: _of_doctor,
    BenchPeerProvider: _of_doctor,
}
