"""Tensors on devices, in worlds of threads on pretend devices: whose wait it is, what is kept, what is refused."""

from __future__ import annotations

import gc
import random
import re
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from ddl_conform.pretend import KIND, PretendRuntime
from ddl_conform.pretend_tensors import PretendTensor, current_stream, stream
from ddl_conform.pretend_transport import PretendTransport
from ddl_conform.pretend_world import PRETEND, PretendWorld, pretend_registry
from ddl_conform.world import PATIENCE
from hypothesis import given
from hypothesis import strategies as st

import ddlcore as ddl
from ddlcore.api import enabled
from ddlcore.builtin.tuners.grid import GridTuner
from ddlcore.contracts.tuner import Knob
from ddlcore.control.local import LocalNetwork
from ddlcore.errors import DdlInternalError, DeviceError, MismatchError, PeerLost, PluginError, TransportError
from ddlcore.hooks import CompressorProvider, KernelsProvider, TransportProvider
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.plug.registry import Distribution, Registry
from ddlcore.process.job import Job
from ddlcore.runtime.device.devices import DeviceStream
from ddlcore.runtime.device.routes import DeviceRoutes
from ddlcore.runtime.fenced import FencedPersistentRequest
from ddlcore.runtime.in_flight import DevicesInFlight
from ddlcore.testing import World
from ddlcore.text.installing import pip_install
from ddlcore.tune.driver import SearchDriver, SearchPlan
from ddlcore.tune.session import Phase
from ddlcore.types import Device, DType, Value
from tests.runtime.effort import examples
from tests.runtime.rounding import Noting, Rounding

pytestmark = pytest.mark.timeout(360)

WAYS = pytest.mark.parametrize(
    "way",
    [("shm", KIND), ("threads", KIND), ("mute", KIND), ("shm", "cpu"), ("threads", "cpu")],
    ids=lambda way: "-".join(way),
)
STEPS = 12  # enough for replay to begin


def filled(value: float, count: int = 4) -> PretendTensor:
    return PretendTensor.of(np.full(count, value, np.float32))


@pytest.mark.parametrize("step", [0, STEPS], ids=["discovery", "replay"])
def test_waiting_is_the_streams_business(step: int) -> None:
    """The producer has not even begun: wait returns all the same, poll is False, and what follows sees the result."""

    def play(rank: int, job: Job) -> Any:
        mine = current_stream()
        for _ in range(step):
            PRETEND.allreduce_async(filled(1), name="x").wait()
        with mine.held():
            tensor = filled(rank + 1)
            handle = PRETEND.allreduce_async(tensor, output=tensor, name="x", op=ddl.Sum)
            assert handle.wait() is tensor
            tensor.change(lambda array: np.multiply(array, 10, out=array))
            assert not handle.poll()
        values = tensor.numpy()
        assert handle.poll()
        assert (job.stats()["buckets_replayed"] > 0) is (step > 0)
        return values

    with PretendWorld(2) as world:
        for values in world.on_streams(play):
            assert (values == 30).all()


@WAYS
def test_a_steady_step_needs_no_control_message(way: tuple[str, str]) -> None:
    """On devices as on the host; where hosts tell each other that all have come, none waits for the device either."""

    def play(rank: int, job: Job) -> tuple[int, int, float]:
        entries = _persistent(job, [filled(0, 5), filled(0, 3)])
        for step in range(60):
            if step == 40:
                before = job.stats()
            for entry, count in zip(entries, (5, 3)):
                _start(job, entry, filled(rank + step, count))
            for entry in entries:
                entry.wait()
        after = job.stats()
        assert after["buckets_replayed"] > before["buckets_replayed"]
        messages = after["control_messages"] - before["control_messages"]
        commits = after["commit_messages"] - before["commit_messages"]
        return messages, commits, after["seconds"]["device"] - before["seconds"]["device"]

    with PretendWorld(2, backend=way[0], route=way[1]) as world:
        for messages, commits, waited_s in world.on_streams(play):
            assert messages == 0
            assert commits == (20 if way == ("threads", KIND) else 0), "one a step"
            assert (waited_s > 0) is (way not in (("shm", KIND), ("threads", KIND)))


@pytest.mark.parametrize("backend", ["threads", "shm+threads"])
def test_hosts_tell_each_other_once_for_what_is_waited_for_together(backend: str) -> None:
    """Two layers whose second depends on the first, then gradients: no message more, and no wait for the device."""

    def play(rank: int, job: Job) -> tuple[int, int, int, float]:
        for step in range(60):
            if step == 40:
                before = job.stats()
            for layer in range(2):
                tensor = filled(rank)
                PRETEND.allreduce_async(tensor, output=tensor, name=f"norm{layer}", op=ddl.Sum).wait()
            tensors = [filled(rank) for _ in range(3)]
            handles = [PRETEND.allreduce_async(t, output=t, name=f"g{i}", op=ddl.Sum) for i, t in enumerate(tensors)]
            for handle in handles:
                handle.wait()
        after = job.stats()
        assert (tensors[2].numpy() == 3).all()
        keys = ("steps", "commit_messages", "buckets_replayed")
        steps, commits, buckets = (after[key] - before[key] for key in keys)  # type: ignore[literal-required]
        assert after["seconds"]["commit"] > before["seconds"]["commit"]
        return steps, commits, buckets, after["seconds"]["device"] - before["seconds"]["device"]

    with PretendWorld(3, backend=backend, hosts=(0, 0, 1), settings={"fusion_bytes": 0}) as world:
        for steps, commits, buckets, waited_s in world.on_streams(play):
            # The engine counts the end of a step just after the step's last handle is complete, so that a look at the
            # counts may miss the last one.
            assert (steps, commits, buckets) == pytest.approx((20, 3 * 20, 5 * 20), abs=1)
            assert waited_s == 0.0


def _persistent(job: Job, tensors: list[PretendTensor]) -> list[FencedPersistentRequest]:
    entries = [PRETEND.persistent_allreduce(t, name=f"r{i}", op=ddl.Sum, job=job) for i, t in enumerate(tensors)]
    assert all(isinstance(entry, FencedPersistentRequest) for entry in entries)
    return entries  # type: ignore[return-value]  # as has just been seen


def _start(job: Job, entry: FencedPersistentRequest, tensor: PretendTensor) -> None:
    """As a gradient's hook would: the event is told, then the tensor starts."""
    buffer = PRETEND.adapter.buffer(tensor, elementwise=True)
    entry.mark_ready(buffer.event, buffer.stream, buffer.order)
    job.start_request(entry, buffer.address, buffer.owner)


@WAYS
def test_persistent_tensors_arrive_with_an_event(way: tuple[str, str]) -> None:
    """``arrive`` leaves the fence to its caller, who needs one for many; ``poll`` is true when the device is done."""

    def play(rank: int, job: Job) -> None:
        entries = _persistent(job, [filled(0), filled(0)])
        for step in range(STEPS):
            tensors = [filled(rank + step), filled(rank - step)]
            for entry, tensor in zip(entries, tensors):
                _start(job, entry, tensor)
            events = [entry.arrive() for entry in entries]
            assert all(events)
            for event in events:
                current_stream().wait_for(event.handle)  # type: ignore[union-attr]  # there is one
            assert (tensors[0].numpy() == 2 * step + 1).all()
            assert (tensors[1].numpy() == 1 - 2 * step).all()
            assert all(entry.poll() for entry in entries)

    with PretendWorld(2, backend=way[0], route=way[1]) as world:
        world.on_streams(play)


@WAYS
def test_a_rank_that_has_joined_stands_in(way: tuple[str, str]) -> None:
    """Also one that never had a tensor on a device: every kind, in every way, as if it had brought what changes nothing."""

    def play(rank: int, job: Job) -> int:
        if rank == 1:
            assert ddl.join() >= 0
            return 0
        two = filled(2)
        assert (PRETEND.allreduce_async(two, name="a", op=ddl.Average, prescale_factor=3.0).wait().numpy() == 6).all()
        assert (PRETEND.reducescatter_async(two, name="v", op=ddl.Average).wait().numpy() == 2).all()
        assert (PRETEND.allreduce_async(two, name="p", op=ddl.Product).wait().numpy() == 2).all()
        group = PRETEND.grouped_allreduce_async([filled(1), filled(5)], name="g", op=ddl.Max).wait()
        assert [one.numpy()[0] for one in group] == [1, 5]
        assert (PRETEND.allgather_async(filled(7), name="h").wait().numpy() == [7] * 4).all()
        assert (PRETEND.broadcast_async(two, 0, name="b").wait().numpy() == 2).all()
        assert (PRETEND.reducescatter_async(filled(6), name="s", op=ddl.Sum).wait().numpy() == [6, 6]).all()
        compressed = PRETEND.allreduce_async(filled(8), name="c", op=ddl.Sum, compression="bf16").wait()
        assert (compressed.numpy() == 8).all()
        ddl.join()
        return 1

    with PretendWorld(2, backend=way[0], route=way[1]) as world:
        assert world.on_streams(play) == [1, 0]


@pytest.mark.parametrize("backend", ["shm", "threads", "mute"])
def test_devices_may_appear_after_init(backend: str) -> None:
    """For ranks with a tensor there, and for one that has joined without; the routes and the end are as usual."""
    registry = pretend_registry(kernels=False)
    ours = Distribution("tests", "1")
    provider = KernelsProvider(name=KIND, target="ddl_conform.pretend:PretendRuntime", device=KIND)

    def play(rank: int, job: Job) -> str:
        runtime = PretendRuntime()
        runtime.open(Device(KIND, rank))
        if rank == 0:
            with stream(runtime), pytest.raises(PluginError, match="no installed plugin serves it"):
                PRETEND.allreduce_async(filled(1), name="x")
            registry.offer(provider, ours)
        ddl.barrier()
        if rank == 1:
            ddl.join()
        else:
            with stream(runtime):
                for _ in range(STEPS):
                    assert (PRETEND.allreduce_async(filled(1), name="x", op=ddl.Sum).wait().numpy() == 1).all()
            ddl.join()
        assert job.device_label(Device(KIND, rank)) == KIND
        return job.stats()["routes"][0]

    with World(2, backend=backend, registry=registry, settings={"device_dense": KIND}) as world:
        for text in world.run(play):
            assert text == f"{backend} (asked for); {KIND}: {KIND} (asked for)"


@WAYS
def test_sets_that_overlap_have_routes_of_their_own(way: tuple[str, str]) -> None:
    """Each set's buckets run on its own communicator, in the one order of all; a set that is removed is closed."""

    def play(rank: int, job: Job) -> dict[int, str]:
        low, high = ddl.add_process_set([0, 1]), ddl.add_process_set([1, 2])
        for step in range(STEPS):
            handles = [PRETEND.allreduce_async(filled(1 << rank), name="all", op=ddl.Sum)]
            handles += [
                PRETEND.allreduce_async(filled(1 << rank), name=f"s{i}", op=ddl.Sum, process_set=one)
                for i, one in enumerate((low, high))
                if one.included()
            ]
            sums = [int(handle.wait().numpy()[0]) for handle in handles]
            assert sums == {0: [7, 3], 1: [7, 3, 6], 2: [7, 6]}[rank], (step, sums)
        routes = ddl.stats()["routes"]
        ddl.remove_process_set(low)
        ddl.remove_process_set(high)
        assert (PRETEND.allreduce_async(filled(1), name="all", op=ddl.Sum).wait().numpy() == 3).all()
        return routes

    with PretendWorld(3, backend=way[0], route=way[1]) as world:
        routes = world.on_streams(play)
    assert [sorted(one) for one in routes] == [[0, 1], [0, 1, 2], [0, 2]]
    how = f"{KIND}: {KIND} (asked for)" if way[1] == KIND else f"{KIND}: staged on the host, {way[0]} (asked for)"
    assert all(text.endswith(how) for one in routes for text in one.values())


@WAYS
def test_what_a_device_uses_is_enabled(way: tuple[str, str]) -> None:
    """From the first bucket there on; a bucket of another set, or one staged on the host, does not count."""

    def play(rank: int, job: Job) -> None:
        low = ddl.add_process_set([0, 1])
        if low.included():
            PRETEND.allreduce_async(filled(1), name="other", process_set=low).wait()
        assert enabled(way[0]) and not enabled(KIND)
        PRETEND.allreduce_async(filled(1), name="own").wait()
        assert enabled(way[0]) and enabled(KIND) is (way[1] == KIND)
        assert not enabled("none such")

    with PretendWorld(3, backend=way[0], route=way[1]) as world:
        world.on_streams(play)


@WAYS
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressors_work_on_the_device(way: tuple[str, str], compression: str) -> None:
    """Values that 16 bits hold come through as they are; in replay, too."""

    def play(rank: int, job: Job) -> None:
        for step in range(STEPS):
            tensors = [filled(rank + i, 3 + i) for i in range(3)]
            handles = [
                PRETEND.allreduce_async(t, output=t, name=f"t{i}", op=ddl.Average, compression=compression)
                for i, t in enumerate(tensors)
            ]
            for i, handle in enumerate(handles):
                assert (handle.wait().numpy() == 0.5 + i).all(), step
        assert job.stats()["buckets_replayed"] > 0

    with PretendWorld(2, backend=way[0], route=way[1]) as world:
        world.on_streams(play)


@WAYS
@pytest.mark.parametrize("asked", ["by the call", "by a setting"])
def test_what_cannot_be_added_as_it_travels_goes_by_way_of_the_host(
    way: tuple[str, str], asked: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A compressor that is not summable: right sums in discovery and replay, beside others that stay on the device."""
    registry = pretend_registry()
    registry.offer(CompressorProvider("rounding", "tests.runtime.rounding:Rounding"), Distribution("test", "1"))
    by_call: dict[str, Any] = {"compression": "rounding" if asked == "by the call" else "setting"}
    caplog.set_level("INFO", "ddl")

    def play(rank: int, job: Job) -> tuple[int, int]:
        runtime = PretendRuntime()
        runtime.open(Device(KIND, rank % PretendRuntime.count()))
        with stream(runtime):
            for step in range(STEPS):
                tensors = [filled(rank + 2, 3 + i) for i in range(3)]
                whole = PretendTensor.of(np.full(3, rank + 1, np.float64))
                handles = [
                    PRETEND.allreduce_async(t, output=t, name=f"t{i}", op=ddl.Sum, **by_call)
                    for i, t in enumerate(tensors)
                ]
                handles.append(PRETEND.allreduce_async(whole, output=whole, name="other", op=ddl.Max))
                for handle in handles:
                    handle.wait()
                assert all((tensor.numpy() == 5).all() for tensor in tensors), step
                assert (whole.numpy() == 2).all()
            least = PRETEND.allreduce_async(filled(rank), name="least", op=ddl.Min, compression="rounding")
            with pytest.raises(TransportError, match="'rounding' is for sums and averages, not for min; use another"):
                least.wait()
        stats = job.stats()
        return stats["buckets_replayed"], stats["encoded_bytes"]

    setting = "none" if asked == "by the call" else "rounding"
    settings = {"device_dense": way[1], "compression": setting, "log_level": "INFO"}
    with World(2, backend=way[0], registry=registry, settings=settings) as world:
        for replayed, encoded in world.run(play):
            assert replayed > 0
            assert encoded > 0
        for job in world.jobs:
            rounding = job.compressor("rounding")
            assert isinstance(rounding, Rounding)
            assert rounding.staged == {}
    told = [r.getMessage() for r in caplog.records if "travel as rounding" in r.getMessage()]
    assert len(told) == (1 if way[1] == KIND else 0)


@WAYS
def test_every_encoding_gets_its_verdict(way: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In buckets that turn out void, too, whichever way they go; reducescatter and calls without a name leave no state."""
    monkeypatch.setattr(Noting, "made", [])
    registry = pretend_registry()
    registry.offer(CompressorProvider("noting", "tests.runtime.rounding:Noting"), Distribution("test", "1"))

    def play(rank: int, job: Job) -> int:
        for step in range(40):
            odd = step % 10 == 9
            if odd and rank == 1:  # rank 0 has launched its bucket of the schedule by the time this one leaves
                PRETEND.allreduce_async(filled(1), name=f"other{step}").wait()
            handle = PRETEND.allreduce_async(filled(rank + 1), name="t", op=ddl.Sum, compression="noting")
            if odd and rank == 0:
                PRETEND.allreduce_async(filled(1), name=f"other{step}").wait()
            assert (handle.wait().numpy() == 3).all()
        part = PRETEND.reducescatter_async(filled(1), name="part", op=ddl.Sum, compression="noting").wait()
        assert (part.numpy() == 2).all()
        assert (PRETEND.allreduce_async(filled(1), op=ddl.Sum, compression="noting").wait().numpy() == 2).all()
        return job.stats()["buckets_void"]

    def on_stream(rank: int, job: Job) -> int:
        runtime = PretendRuntime()
        runtime.open(Device(KIND, rank % PretendRuntime.count()))
        with stream(runtime):
            return play(rank, job)

    void = 0
    for _ in range(20):  # on a busy machine, rank 0 may come too late each time
        with World(2, backend=way[0], settings={"device_dense": way[1]}, registry=registry) as world:
            void = sum(world.run(on_stream))
        if void:
            break
    assert void
    logs = [one.log for one in Noting.made]
    assert any(("encode", "allreduce.t") in log for log in logs)
    assert any(("void", "allreduce.t") in log for log in logs)
    assert not any(what == "missed" for log in logs for what, _ in log)
    assert not any(one.open for one in Noting.made)
    assert {name for log in logs for what, name in log if what == "valid"} == {"allreduce.t"}


def test_a_world_of_one_moves_nothing_in_place() -> None:
    """What is in place is left where it is; scales are heeded, and other outputs written."""

    def play(rank: int, job: Job) -> None:
        for _ in range(STEPS):
            tensor = filled(3)
            assert PRETEND.allreduce_async(tensor, output=tensor, name="x").wait() is tensor
            assert (tensor.numpy() == 3).all()
            scaled = PRETEND.allreduce_async(tensor, name="y", prescale_factor=2.0, postscale_factor=5.0).wait()
            assert (scaled.numpy() == 30).all()
            assert (PRETEND.allgather_async(tensor, name="z").wait().numpy() == 3).all()
            assert (PRETEND.reducescatter_async(tensor, name="s").wait().numpy() == 3).all()
            assert (PRETEND.broadcast_async(tensor, 0, name="b").wait().numpy() == 3).all()
            output, received = PRETEND.alltoall_async(tensor, [4], name="t").wait()
            assert (output.numpy() == 3).all() and received == [4]
        assert job.stats()["buckets_replayed"] > 0
        assert job.stats()["routes"] == {0: f"solo (auto: a world of one); {KIND}: solo (auto: a world of one)"}

    with PretendWorld(1, route="auto") as world:
        world.on_streams(play)


@WAYS
def test_what_a_device_has_done_with_is_let_go(way: tuple[str, str]) -> None:
    """The engine keeps a bucket's tensors until the device is done with them, and not until the next bucket comes."""

    def play(rank: int, job: Job) -> None:
        for _ in range(STEPS):
            tensor = filled(1)
            PRETEND.allreduce_async(tensor, output=tensor, name="x").wait()
        gone = weakref.ref(tensor)
        assert current_stream().record().wait(40.0)
        del tensor
        deadline = time.monotonic() + 10.0
        while gone() is not None and time.monotonic() < deadline:
            time.sleep(0.001)  # the engine looks by itself, with no event that a test could wait for
            gc.collect()
        assert gone() is None

    with PretendWorld(2, backend=way[0], route=way[1]) as world:
        world.on_streams(play)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "or it is noticed"])
def test_what_nobody_holds_lives_until_the_device_is_done(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that the user lets go while the device has not even begun; were they not kept, the device would say so."""
    if not kept:
        monkeypatch.setattr(DeviceStream, "keep", lambda self, event, kept: None)

    def play(rank: int, job: Job) -> None:
        for _ in range(STEPS):
            with current_stream().held():
                PRETEND.allreduce_async(filled(1), name="x").wait()
                gc.collect()
        assert (PRETEND.allreduce_async(filled(1), name="x", op=ddl.Sum).wait().numpy() == job.size).all()

    with PretendWorld(2 if kept else 1) as world:  # a peer would wait for the one that failed
        if kept:
            world.on_streams(play)
        else:
            with pytest.raises(DdlInternalError, match="memory that nobody has kept"):
                world.on_streams(play)


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_on_its_way_up_lives_until_it_is_there(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that the user lets go at once, while the copy from the host's memory is still queued."""
    if not kept:
        monkeypatch.setattr(DeviceStream, "keep", lambda self, event, kept: None)

    def play(rank: int, job: Job) -> None:
        for _ in range(100):
            PRETEND.allreduce_async(filled(1), name="x").wait()

    with PretendWorld(2, route="cpu") as world:
        if kept:
            world.on_streams(play)
        else:
            with pytest.raises(DdlInternalError, match="memory that nobody has kept"):
                world.on_streams(play)


@WAYS
def test_leaving_lets_the_queue_come_to_its_end(way: tuple[str, str]) -> None:
    """A rank that shuts down right behind ``wait`` takes nothing back: the result still comes."""

    def play(rank: int, job: Job) -> None:
        with current_stream().held():
            tensor = filled(rank + 1)
            handle = PRETEND.allreduce_async(tensor, output=tensor, name="x", op=ddl.Sum)
            if way == ("shm", KIND):
                handle.wait()
        handle.wait()
        job.shutdown()
        assert (tensor.numpy() == 3).all()

    with PretendWorld(2, backend=way[0], route=way[1]) as world:
        world.on_streams(play)


def test_leaving_waits_for_devices_that_are_late() -> None:
    """Longer than for hosts: were the transport gone before a peer's device comes to it, that one's step would be garbage."""

    def play(rank: int, job: Job) -> None:
        tensor = filled(rank + 1)
        leaving = threading.Thread(target=job.shutdown)
        with current_stream().held():
            PRETEND.allreduce_async(tensor, output=tensor, name="x", op=ddl.Sum).wait()
            leaving.start()
            leaving.join(float(PATIENCE["leave_timeout_s"]) + 1.0)  # type: ignore[arg-type]  # a number
            assert leaving.is_alive()
        leaving.join(80.0)
        assert (tensor.numpy() == 3).all()

    with PretendWorld(2) as world:
        world.on_streams(play)


@WAYS
@examples(3)
@given(seed=st.integers(0, 1 << 30), size=st.integers(2, 3))
def test_a_death_ends_every_wait(way: tuple[str, str], seed: int, size: int) -> None:
    """Whatever the queues are in the middle of: each other rank gets PeerLost from its next call or wait, none hangs."""
    networks: list[LocalNetwork] = []
    original = LocalNetwork.__init__

    def remember(self: LocalNetwork, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        networks.append(self)

    rng = random.Random(seed)
    victim, last, within = rng.randrange(size), rng.randint(0, 25), rng.randint(0, 3)

    def step(rank: int, number: int) -> bool:
        handles = []
        for i in range(4):
            if rank == victim and number == last and i == within:
                networks[0].rank_ended(LaunchedRank(rank), "killed by signal 9 (SIGKILL)")
                return False
            handles.append(PRETEND.allreduce_async(filled(1), name=f"g{i}", op=ddl.Sum))
        results = [handle.wait() for handle in handles]
        try:
            assert all((result.numpy() == size).all() for result in results)
        except DeviceError:  # the queue was in the middle of it; ddl tells of the death at its next call
            PRETEND.allreduce_async(filled(1), name="after").wait()
        return True

    def play(rank: int, job: Job) -> str:
        try:
            return "ended" if all(step(rank, number) for number in range(200)) else "dead"
        except PeerLost as error:
            return "told" if error.ranks == (victim,) else f"told of {error.ranks}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalNetwork, "__init__", remember)
        with PretendWorld(size, backend=way[0], route=way[1]) as world:
            told = world.on_streams(play)
    assert told == ["dead" if rank == victim else "told" for rank in range(size)]


def test_an_event_that_raises_anything_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device is to tell that a bucket is valid, and a plugin's event breaks: every wait ends, and says why."""
    broken: list[bool] = []
    original = DevicesInFlight.landed

    def landed(in_flight: DevicesInFlight) -> Any:
        if broken:
            raise ValueError("no such event")
        return original(in_flight)

    monkeypatch.setattr(DevicesInFlight, "landed", landed)

    def play(rank: int, job: Job) -> str:
        try:
            for _ in range(STEPS):
                PRETEND.allreduce_async(filled(1), name="x").wait()
            if rank == 0:
                broken.append(True)  # for both ranks; rank 1 may still be waiting for its last step's event
            while True:
                PRETEND.allreduce_async(filled(1), name="x").wait()
        except DdlInternalError as error:
            return str(error)

    with PretendWorld(2, backend="threads") as world:
        assert all("no such event" in text for text in world.on_streams(play))


def test_a_transport_that_fails_by_itself_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody calls it: what has been queued would come with garbage, and the next call may be the last there is."""
    broken = threading.Event()

    def check(self: PretendTransport) -> None:
        if broken.is_set():
            raise TransportError("the link is down")

    monkeypatch.setattr(PretendTransport, "check_queued", check)
    monkeypatch.setattr("ddlcore.runtime.engine.FAILURE_WAIT_S", 0.1)  # for a peer's death, which is none here

    def play(rank: int, job: Job) -> str:
        with current_stream().held():
            PRETEND.allreduce_async(filled(1), name="x").wait()
            broken.set()
            assert job._failure.wait(40.0), "nobody has looked"
        with pytest.raises(DdlInternalError) as caught:
            PRETEND.allreduce_async(filled(1), name="y").wait()
        return str(caught.value)

    with PretendWorld(2) as world:
        assert any("the link is down" in text for text in world.on_streams(play))


# --- what is refused, and what is staged on the host


def test_ranks_on_different_kinds_of_device_learn_who_is_where() -> None:
    """MismatchError on all, with a row for each; the job goes on."""

    def play(rank: int, job: Job) -> str:
        on_host = np.ones(4, np.float32)
        handle = ddl.allreduce_async(on_host, name="x") if rank == 1 else PRETEND.allreduce_async(filled(1), name="x")
        with pytest.raises(MismatchError) as caught:
            handle.wait()
        assert (PRETEND.allreduce_async(filled(1), name="y", op=ddl.Sum).wait().numpy() == 3).all()
        return str(caught.value)

    with PretendWorld(3) as world:
        for text in world.on_streams(play):
            assert "ranks  device" in text and "0,2    pretend" in text and "1      cpu" in text
            assert "on one kind of device" in text


def test_a_group_on_two_devices_is_refused() -> None:
    """ValueError at the call, and nothing has been counted: the next call pairs as before. So is an output elsewhere."""

    def play(rank: int, job: Job) -> None:
        other = PretendRuntime()
        other.open(Device(KIND, 7))
        stranger = PretendTensor(other.allocate(16), (4,), DType.F32, other)
        with pytest.raises(ValueError, match=r"its tensors lie on pretend:. and pretend:7; make one call for those"):
            PRETEND.grouped_allreduce_async([filled(1), stranger])
        with pytest.raises(ValueError, match="output lies on pretend:7"):
            PRETEND.allreduce_async(filled(1), output=stranger)
        assert (PRETEND.allreduce_async(filled(1), op=ddl.Sum).wait().numpy() == 2).all()

    with PretendWorld(2) as world:
        world.on_streams(play)


def test_several_devices_of_a_rank_never_share_a_bucket() -> None:
    """Devices are known by the order in which a rank came to them, whatever their numbers."""

    def play(rank: int, job: Job) -> list[float]:
        runtimes = [PretendRuntime(), PretendRuntime()]
        for i, runtime in enumerate(runtimes):
            runtime.open(Device(KIND, 2 * rank + i))
        for _ in range(STEPS):
            values = []
            for runtime in runtimes:
                with stream(runtime):
                    tensors = [filled(rank + 1), filled(rank + 2)]
                    handles = [
                        PRETEND.allreduce_async(t, output=t, name=f"{runtimes.index(runtime)}.{i}", op=ddl.Sum)
                        for i, t in enumerate(tensors)
                    ]
                    values += [handle.wait().numpy()[0] for handle in handles]
            assert values == [3, 5, 3, 5]
        assert job.stats()["buckets_replayed"] > 0
        text = job.stats()["routes"][0]
        assert "pretend: pretend" in text and "pretend, device 2 of the rank: pretend" in text
        return values

    with PretendWorld(2) as world:
        world.on_streams(play)


def test_without_kernels_for_it_a_device_is_refused() -> None:
    """In one line, which says what to install where that is known."""

    def play(rank: int, job: Job) -> None:
        runtime = PretendRuntime()
        runtime.open(Device(KIND, 0))
        with (
            stream(runtime),
            pytest.raises(PluginError, match=r"memory of pretend cannot be used \(no installed plugin serves it\)"),
        ):
            PRETEND.allreduce_async(filled(1))
        with pytest.raises(PluginError, match=f"install one: {re.escape(pip_install('ddl-nccl'))}"):
            Registry().kernels_for("cuda")

    with World(1, backend="auto", registry=pretend_registry(kernels=False)) as world:
        world.run(play)


class Shared(PretendRuntime):
    """Two ranks that use one device."""

    def open(self, device: Device) -> None:
        super().open(device)
        self.identity = "the only one"


@pytest.mark.parametrize(
    ("route", "reason"),
    [
        ("auto", "picky: ranks 0 and 1 share device the only one, and it needs one for each rank"),
        ("cpu", "asked for"),
    ],
)
def test_what_no_transport_serves_goes_by_way_of_the_host(route: str, reason: str) -> None:
    """And the route says why, as does the log."""
    registry = pretend_registry(kernels=False)
    ours = Distribution("tests", "1")
    registry.offer(KernelsProvider("shared", f"{__name__}:Shared", device=KIND), ours)
    registry.offer(TransportProvider("picky", "x:Never", devices=(KIND,), own_device=True, priority=9), ours)

    def play(rank: int, job: Job) -> str:
        runtime = Shared()
        runtime.open(Device(KIND, 0))
        with stream(runtime):
            assert (PRETEND.allreduce_async(filled(1), name="x", op=ddl.Sum).wait().numpy() == 2).all()
        return job.stats()["routes"][0]

    with World(2, backend="shm", registry=registry, settings={"device_dense": route}) as world:
        for text in world.run(play):
            assert text == f"shm (asked for); {KIND}: staged on the host, shm ({reason})"


def test_a_transport_that_cannot_serve_what_it_was_asked_for_is_an_error_everywhere() -> None:
    """TransportError on every rank, which names it; nothing is taken in its place, and the job goes on."""

    def play(rank: int, job: Job) -> str:
        for _ in range(2):
            with pytest.raises(TransportError) as caught:
                PRETEND.allreduce_async(filled(1), name="x").wait()
        assert ddl.allreduce(np.ones(2), name="on the host", op=ddl.Sum)[0] == 2
        return str(caught.value)

    with PretendWorld(2, route="gloss") as world:
        for text in world.on_streams(play):
            assert text.startswith("transport gloss was asked for pretend, and cannot be used: no installed transport")


def test_one_call_may_go_by_way_of_the_host() -> None:
    """Where all ranks say so; sparse gradients by a setting."""

    def play(rank: int, job: Job) -> str:
        for _ in range(STEPS):
            assert (
                PRETEND.allreduce_async(filled(1), name="x", op=ddl.Sum, stage_on_host=True).wait().numpy() == 2
            ).all()
            assert (PRETEND.allreduce_async(filled(1), name="y", op=ddl.Sum).wait().numpy() == 2).all()
            assert (PRETEND.allgather_async(filled(1), name="z", sparse=True).wait().numpy() == 1).all()
        return job.stats()["routes"][0]

    with PretendWorld(2, settings={"device_sparse": "cpu"}) as world:
        for text in world.on_streams(play):
            stage_on_host = f"{KIND}: staged on the host, shm (asked for)"
            assert text == f"shm (asked for); {KIND}: {KIND} (asked for); {stage_on_host}"


@pytest.mark.parametrize("route", [KIND, "cpu"])
def test_a_search_that_opens_communicators_anew_opens_the_devices_too(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the hosts' transport confirms a bucket with is gone with it. Whoever asks meanwhile is told of the last."""
    meanwhile: list[dict[int, str]] = []
    anew = DeviceRoutes.reopen

    def reopen(routes: DeviceRoutes, *args: Any) -> None:
        meanwhile.append(routes.routes())
        anew(routes, *args)

    monkeypatch.setattr(DeviceRoutes, "reopen", reopen)
    knob = Knob("shm_chunk_bytes", choices=(0, 65536), reopens=True)
    default: dict[str, Value] = {"fusion_bytes": 8 << 20, "first_bucket_bytes": 0, "overlap": "on"}
    default["shm_chunk_bytes"] = 0
    plan = SearchPlan((knob,), default, lambda knobs: GridTuner(knobs, 1), trials=4, steps=3, warmup=1)
    driver = SearchDriver(plan, (), lambda work: work())

    def play(rank: int, job: Job) -> str:
        runtime = PretendRuntime()
        runtime.open(Device(KIND, rank % PretendRuntime.count()))
        with stream(runtime):
            for _ in range(1000):
                assert (PRETEND.allreduce_async(filled(rank + 1), name="x", op=ddl.Sum).wait().numpy() == 3).all()
                done = driver.session is not None and driver.session.phase is Phase.DONE
                if ddl.broadcast(np.array([done]), root_rank=0, name="done")[0]:
                    return job.stats()["routes"][0]
        raise AssertionError("the search did not end")

    settings = {"device_dense": route}
    with World(2, backend="shm", settings=settings, registry=pretend_registry(), driver=driver) as world:
        for text in world.run(play, last=True):
            assert KIND in text and "asked for" in text
    assert meanwhile and all(KIND in told[0] for told in meanwhile)


def test_objects_and_barriers_are_the_hosts() -> None:
    """Beside tensors on devices they run as ever."""

    def play(rank: int, job: Job) -> None:
        for step in range(STEPS):
            handle = PRETEND.allreduce_async(filled(rank), name="x", op=ddl.Sum)
            assert ddl.allgather_object((rank, step), name="o") == [(0, step), (1, step)]
            ddl.barrier()
            assert ddl.allreduce(np.ones(2), name="h", op=ddl.Sum)[0] == 2
            assert (handle.wait().numpy() == 1).all()

    with PretendWorld(2) as world:
        world.on_streams(play)


def test_a_device_that_cannot_be_opened_says_so_at_the_call() -> None:
    """DeviceError on the rank that has it, before anything is sent."""

    def play(rank: int, job: Job) -> None:
        tensor = filled(1)
        tensor.runtime.device = Device(KIND, 99)
        with pytest.raises(DeviceError, match="there is no device pretend:99"):
            PRETEND.allreduce_async(tensor, name="x")

    with PretendWorld(1, route="auto") as world:
        world.on_streams(play)
