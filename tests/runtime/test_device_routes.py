"""Which transport a set's tensors on a device are given, for facts alone; labels, fences and memory of a device."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator

import pytest
from ddl_conform.pretend import KIND, PretendEvent, PretendRuntime

from ddlcore.contracts.device import DeviceRuntime
from ddlcore.contracts.transport import Memory
from ddlcore.errors import Closed, DeviceError
from ddlcore.hooks import TransportProvider
from ddlcore.runtime.backend import SOLO
from ddlcore.runtime.device.devices import Devices, DeviceStream, Pool
from ddlcore.runtime.device.routes import Choice, DeviceRoutes, Fact, choose
from ddlcore.runtime.device_labels import ON_HOST, describe_device, kind_of, label_of_stream
from ddlcore.runtime.meter import Meter
from ddlcore.types import CPU, Buffer, Device, DType, Member

FAST = TransportProvider("fast", "x:Fast", devices=("gpu",), priority=9, own_device=True)
SLOW = TransportProvider("slow", "x:Slow", devices=("cpu", "gpu"), priority=1)
NEAR = TransportProvider("near", "x:Near", devices=("gpu",), priority=5, one_host=True)
WITHIN = TransportProvider("within", "x:Within", devices=("gpu",), priority=99, in_process=True)
STARTED = TransportProvider("started", "x:Started", devices=("gpu",), priority=98, launcher="mpiexec")
OTHER = TransportProvider("other", "x:Other", devices=("npu",), priority=97)
ALL = [FAST, SLOW, NEAR, WITHIN, STARTED, OTHER]


def fact(identity: str, **missing: str) -> Fact:
    return Fact(identity, {one.name: missing.get(one.name, "") for one in ALL})


TWO = [Member(0, 0), Member(1, 0)]
APART = [Member(0, 0), Member(3, 1)]


@pytest.mark.parametrize(
    ("wanted", "members", "facts", "name", "reason"),
    [
        ("auto", TWO, [fact("a"), fact("b")], "fast", "auto: 2 ranks"),
        ("auto", TWO[:1], [fact("a")], SOLO, "auto: a world of one"),
        ("fast", TWO[:1], [fact("a")], "fast", "asked for"),
        ("cpu", TWO, [fact("a"), fact("b")], "", "asked for"),
        ("slow", TWO, [fact("a"), fact("b")], "slow", "asked for"),
        ("within", TWO, [fact("a"), fact("b")], "within", "asked for"),
        ("auto", TWO, [fact("a"), fact("a")], "near", "auto: 2 ranks"),
        ("auto", APART, [fact("a"), fact("a")], "fast", "auto: 2 ranks"),
        ("auto", APART, [fact("a"), fact("b", fast="no driver")], "slow", "auto: 2 ranks"),
        ("auto", APART, [fact("a"), Fact("b", {})], "", None),
    ],
)
def test_what_is_taken(wanted: str, members: list[Member], facts: list[Fact], name: str, reason: str | None) -> None:
    """The best that all can use; two ranks of one host on one device rule out what needs one each."""
    choice = choose("gpu", wanted, ALL, members, facts)
    assert (choice.name, choice.error) == (name, False)
    assert reason is None or choice.reason == reason


def test_why_nothing_will_do_is_said_of_each() -> None:
    """By way of the host with every objection; an error where one was asked for."""
    facts = [fact("a"), fact("a", slow="no such library", near="no such library")]
    choice = choose("gpu", "auto", ALL, TWO, facts)
    assert choice == Choice(
        "",
        "fast: ranks 0 and 1 share device a, and it needs one for each rank; near: rank 1: no such library; "
        "slow: rank 1: no such library",
    )
    asked = choose("gpu", "fast", ALL, TWO, facts)
    assert asked.error
    assert asked.reason.startswith("transport fast was asked for gpu, and cannot be used: fast: ranks 0 and 1 share")
    assert choose("gpu", "auto", [OTHER], TWO, facts) == Choice("", "no installed transport serves gpu")
    assert choose("gpu", "other", ALL, TWO, facts).error
    assert choose("gpu", "auto", [STARTED], TWO, facts, "mpiexec").name == "started"


# --- devices


def open_pretend(device: Device) -> DeviceRuntime:
    runtime = PretendRuntime()
    runtime.open(device)
    return runtime


@pytest.fixture
def devices() -> Iterator[Devices]:
    over: list[bool] = []
    one = Devices(open_pretend, lambda kind, number: Device(kind, 3 + number), lambda: bool(over), Meter())
    yield one
    over.append(True)
    one.close(5.0)


def test_labels_count_a_ranks_devices(devices: Devices) -> None:
    """By the order in which they come, whatever their index; the host is the host."""
    assert devices.label(CPU) == "cpu"
    assert devices.label(CPU, stage_on_host=True) == "cpu"
    assert devices.label(Device(KIND, 5)) == KIND
    assert devices.label(Device(KIND, 2)) == f"{KIND}+1"
    assert devices.label(Device(KIND, 5), stage_on_host=True) == KIND + ON_HOST
    assert [devices.stream(label).device.index for label in (KIND, f"{KIND}+1", KIND + ON_HOST)] == [5, 2, 5]
    label = f"{KIND}+1{ON_HOST}"
    assert (kind_of(label), label_of_stream(label)) == (KIND, f"{KIND}+1")
    assert describe_device(label) == f"{KIND}, device 2 of the rank, staged on the host"
    with pytest.raises(DeviceError, match="no device pretend:9"):
        devices.label(Device(KIND, 9))


def test_a_rank_that_has_none_opens_its_own(devices: Devices) -> None:
    """What it would use by itself, past those that it uses already."""
    devices.label(Device(KIND, 3))
    assert devices.stream(f"{KIND}+2").device == Device(KIND, 5)
    assert [stream.device.index for stream in devices.streams] == [3, 4, 5]


def test_after_the_end_nothing_is_opened(devices: Devices) -> None:
    """A thread of the user's that comes late is told so."""
    devices.close(5.0)
    with pytest.raises(Closed):
        devices.label(Device(KIND, 1))


def test_queues_that_never_end_are_left_behind_together(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the time that all of them have, which is counted once; and each is named."""
    for index in (0, 1):
        devices.label(Device(KIND, index))
    streams = devices.streams
    for stream in streams:
        monkeypatch.setattr(stream.queue, "record", PretendEvent)  # one that never comes
    closed: list[float] = []
    monkeypatch.setattr(DeviceStream, "close", lambda self, timeout_s: closed.append(timeout_s))
    routes = DeviceRoutes(None, None, devices, None)  # type: ignore[arg-type]  # nothing is opened
    begun_s = time.monotonic()
    routes.close(1.5)
    assert 1.5 <= time.monotonic() - begun_s < 2.9  # one after the other they would take 3
    assert closed == [0.0, 0.0]
    for index in (0, 1):
        assert f"{KIND}:{index} has not ended what was queued within 1.5 s" in caplog.text
    monkeypatch.undo()
    for stream in streams:
        stream.close(5.0)


@pytest.mark.parametrize("comes", [True, False])
def test_what_a_queue_left_behind_uses_is_never_let_go(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """It may still be written; a framework that had it back would have given it to another tensor by then."""
    left: list[object] = []
    monkeypatch.setattr("ddlcore.runtime.device.devices._left_behind", left)
    devices.label(Device(KIND, 0))
    (stream,) = devices.streams
    event = PretendEvent()
    used = Memory(64)
    gone = weakref.ref(used)
    stream.keep(event, (used,))
    del used
    if comes:
        event.come(None)
    stream.close(5.0)
    gc.collect()
    assert (gone() is None) is comes
    assert bool(left) is not comes


def buffer(event: int, stream: int, order: int) -> Buffer:
    return Buffer(64, 1, DType.F32, (1,), event=event, stream=stream, order=order)


def test_of_each_stream_the_last_event_is_waited_for(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without an order each, host memory never."""
    devices.label(Device(KIND, 0))
    stream = devices.stream(KIND)
    waited: list[int] = []
    monkeypatch.setattr(stream.queue, "wait_for", waited.append)
    stream.after([buffer(11, 1, 1), buffer(13, 1, 3), buffer(12, 1, 2), buffer(21, 2, 1), buffer(0, 0, 0)])
    assert sorted(waited) == [13, 21]
    waited.clear()
    stream.after([buffer(31, 3, 0), buffer(32, 3, 0)])
    assert waited == [31, 32]


def test_a_wait_for_a_device_ends_with_the_job() -> None:
    """However long the device takes."""
    over: list[bool] = []
    stream = DeviceStream(open_pretend(Device(KIND, 0)), lambda: bool(over), Meter(), lambda: None)
    with stream.queue.held():  # type: ignore[attr-defined]  # a pretend one
        event = stream.mark(())
        over.append(True)
        with pytest.raises(Closed):
            stream.wait(event)
    stream.wait(event)
    stream.close(5.0)


def test_a_pool_gives_what_is_free(devices: Devices) -> None:
    """The smallest that fits; what a queue still fills for the host only when it is done; what is too small goes."""
    devices.label(Device(KIND, 0))
    stream = devices.stream(KIND)
    pool = Pool(stream, stream.runtime.pinned)
    small, large = pool.take(5000), pool.take(9000)
    pool.give(large)
    pool.give(small)
    assert pool.take(5000) is small
    assert pool.take(10) is large
    with stream.queue.held():  # type: ignore[attr-defined]  # a pretend one
        event = stream.mark(())
        pool.give(large, event)
        other = pool.take(9000)
        assert other is not large
    stream.wait(event)
    pool.give(other)
    assert {pool.take(9000), pool.take(9000)} == {large, other}, "it was only not free yet"
    pool.give(small)
    assert pool.take(20000) not in (small, large, other)
    assert pool.take(5000) is not small
