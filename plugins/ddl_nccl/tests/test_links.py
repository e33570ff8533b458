"""Tests of copies between GPUs, with a stand-in for libcuda: the facts, their order, and copies that hang."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ddl_nccl import links
from ddl_nccl.links import Cuda, LinksCheck, main, put_together

from ddlcore.contracts.check import Gpu, HostView, Seen
from ddlcore.contracts.check import Links as Measured

BUSES = ("0000:83:00.0", "0000:02:00.0", "0000:03:00.0")  # in CUDA's order, which differs from the bus order
PEERS = {(1, 2), (2, 1)}
GPUS = [Gpu(i, "H100", f"GPU-{i}", bus) for i, bus in enumerate(sorted(BUSES))]


class Library:
    """Three GPUs with real memory.

    A copy with peer access takes 1 µs and 0.01 ns for each byte; other copies take ten times as long.
    """

    def __init__(self, broken: tuple[int, int] | None = None) -> None:
        self.broken = broken  # a pair whose copies with peer access arrive damaged
        self.on: set[tuple[int, int]] = set()
        self.current = -1
        self.now_ms = 0.0
        self.events: dict[int, float] = {}
        self.memory: dict[int, Any] = {}

    def cuInit(self, flags: Any) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 3
        return 0

    def cuDeviceGet(self, device: Any, index: Any) -> int:
        device._obj.value = index.value
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = device.value + 1
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, length: Any, device: Any) -> int:
        text.value = BUSES[device.value].upper().encode()
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.current = context.value - 1
        return 0

    def cuMemAlloc_v2(self, address: Any, nbytes: Any) -> int:
        self.memory[self.current] = memory = ctypes.create_string_buffer(nbytes.value)
        address._obj.value = ctypes.addressof(memory)
        return 0

    def cuDeviceCanAccessPeer(self, able: Any, a: Any, b: Any) -> int:
        able._obj.value = (a.value, b.value) in PEERS
        return 0

    def cuCtxEnablePeerAccess(self, context: Any, flags: Any) -> int:
        self.on.add((self.current, context.value - 1))
        return 0

    def cuCtxDisablePeerAccess(self, context: Any) -> int:
        pair = (self.current, context.value - 1)
        code = 0 if pair in self.on else 705
        self.on.discard(pair)
        return code

    def cuStreamCreate(self, stream: Any, flags: Any) -> int:
        return 0

    cuEventCreate = cuStreamCreate

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        event.value = len(self.events) + 1
        self.events[event.value] = self.now_ms
        return 0

    def cuEventSynchronize(self, event: Any) -> int:
        return 0

    cuEventDestroy_v2 = cuStreamDestroy_v2 = cuEventSynchronize

    def cuEventElapsedTime(self, took_ms: Any, begin: Any, end: Any) -> int:
        took_ms._obj.value = self.events[end.value] - self.events[begin.value]
        return 0

    def cuCtxSynchronize(self) -> int:
        return 0

    def cuMemsetD8_v2(self, address: Any, value: Any, nbytes: Any) -> int:
        ctypes.memset(address.value, value.value, nbytes.value)
        return 0

    def cuMemcpyPeerAsync(self, target: Any, there: Any, source: Any, here: Any, nbytes: Any, stream: Any) -> int:
        pair = (here.value - 1, there.value - 1)
        assert self.current == pair[0]
        quick = pair in self.on or pair[0] == pair[1]
        self.now_ms += (1e-3 + nbytes.value * 1e-8) * (1 if quick else 10)
        ctypes.memmove(target.value, source.value, nbytes.value)
        if pair in self.on and pair == self.broken:
            ctypes.memset(target.value, 1, 1)
        return 0

    def cuMemcpyDtoH_v2(self, target: Any, source: Any, nbytes: Any) -> int:
        ctypes.memmove(target, source.value, nbytes.value)
        return 0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LARGE_BYTES", 1 << 16)


def told(library: Library) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    main(library, lambda message: messages.append(json.loads(json.dumps(message))))
    return messages


def test_matrices_in_the_driver_s_order() -> None:
    """Matrices are in the driver's order of GPUs, and copies with peer access are ten times as fast."""
    facts = put_together(told(Library()), sorted(BUSES), True)
    on, off = facts["latency_us"]["on"], facts["latency_us"]["off"]
    assert on[0][1] == pytest.approx(1.0, rel=0.01) and off[0][1] == pytest.approx(10.0, rel=0.03)
    assert on[0][2] == pytest.approx(off[0][2], rel=0.01) and on[2][2] < 1.1
    assert facts["gbytes_per_s"]["on"][1][0] == pytest.approx(10 * facts["gbytes_per_s"]["off"][1][0], rel=0.01)
    assert facts["wrong"] == [] and "stuck" not in facts


def test_data_that_arrives_wrong() -> None:
    """A pair is reported if its data arrives wrong, even with peer access only."""
    assert put_together(told(Library(broken=(1, 2))), sorted(BUSES), True)["wrong"] == [[0, 1]]


def test_a_copy_that_does_not_end() -> None:
    """If a copy hangs, the facts name the pair that began last, and keep what was measured before."""
    messages = told(Library())
    at = next(i for i, one in enumerate(messages) if one.get("begin") == [1, 2] and one["state"] == "on")
    facts = put_together(messages[: at + 1], sorted(BUSES), False)
    assert facts["stuck"] == [0, 1]
    assert facts["latency_us"]["off"][0][1] > 9


def test_a_gpu_that_is_hidden() -> None:
    """A GPU that CUDA does not see has no numbers."""
    facts = put_together(told(Library()), [*sorted(BUSES), "0000:84:00.0"], True)
    assert facts["latency_us"]["on"][3] == [None] * 4


def test_a_driver_that_refuses() -> None:
    """An error of the driver names the call that failed."""
    library = Library()
    library.cuInit = lambda flags: 100  # type: ignore[method-assign]  # a stand-in for this test
    with pytest.raises(OSError, match="cuInit failed with CUDA's error 100"):
        Cuda(library)


class Driver:
    def gpus(self) -> list[Gpu]:
        return GPUS

    def peers(self) -> list[list[bool]]:
        return [[a != b and 2 not in (a, b) for b in range(3)] for a in range(3)]

    def links(self) -> Measured | None:
        return None


def test_the_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the child process reports before it hangs or fails is kept; a child that cannot start gives the reason."""
    program = tmp_path / "python"
    lines = "\n".join(json.dumps(message) for message in told(Library())[:4])
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(links, "PATIENCE_S", 0.5)
    facts = LinksCheck().look(HostView("node1", {"PATH": "/bin:/usr/bin"}, gpus=Driver()))
    assert facts["stuck"] == [2, 0]
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\necho 'OSError: error 719' >&2; exit 1\n")
    facts = LinksCheck().look(HostView("node1", {"PATH": "/bin:/usr/bin"}, gpus=Driver()))
    assert facts["failed"] == [2, 0, "OSError: error 719"] and "stuck" not in facts
    assert facts["latency_us"]["off"][2][2] is not None
    program.write_text("#!/bin/sh\necho 'OSError: cuInit failed' >&2; exit 1\n")
    with pytest.raises(RuntimeError, match="OSError: cuInit failed"):
        LinksCheck().look(HostView("node1", {"PATH": "/bin:/usr/bin"}, gpus=Driver()))


def test_where_there_is_no_pair() -> None:
    """Without a pair of GPUs no process is started."""
    assert LinksCheck().look(HostView("node1")) == {}
    assert LinksCheck().look(HostView("node1", root="/somewhere", gpus=Driver())) == {}
    assert list(LinksCheck().judge([Seen("node1", 0, 0, {})])) == []
