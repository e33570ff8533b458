"""What a rank tells the live page about its activity."""

from __future__ import annotations

import sys
import time
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ddl_conform.world import World
from ddl_doctor.input_clock import InputClock, WhoWaits
from ddl_doctor.pulses.activity import MOST_NAMES, ActivityMeter
from ddl_doctor.pulses.traffic import TrafficMeter
from ddl_doctor.reports import Pulse, report_in, to_send

import ddlcore as ddl
from ddlcore.contracts.interfaces import interface_addresses
from ddlcore.messages.coding import decode_to_coordinator, encode
from ddlcore.messages.observing import Observation
from ddlcore.process.job import Job


def stats(buckets: int) -> dict[str, Any]:
    return {
        "buckets_negotiated": 1,
        "buckets_replayed": buckets,
        "bytes": {"allreduce": 10, "broadcast": 5},
        "seconds": {"transport": 0.5},
        "routes": {0: "shm (all ranks are on one host)"},
    }


def test_how_long_nothing_has_moved() -> None:
    """The waiting time counts from the first look at the present number of ended buckets.

    It is 0 while nothing is in flight.
    """
    now_s = 0.0
    meter = ActivityMeter(lambda set_id: (0, 3) if set_id else (), lambda: now_s)
    assert meter.read(stats(5), "it waits", [("b", 0), ("a", 2)]).waits_s == 0.0
    now_s = 2.0
    told = meter.read(stats(5), "it waits", [("b", 0), ("a", 2)])
    assert (told.waits_s, told.in_flight, told.pending) == (2.0, (("a", (0, 3)), ("b", ())), 2)
    assert (told.nbytes, told.transport_s, told.route) == (15, 0.5, "shm")
    now_s = 3.0
    assert meter.read(stats(6), "it waits", [("b", 0)]).waits_s == 0.0, "a bucket has ended"
    now_s = 5.0
    assert meter.read(stats(6), "it runs", []).waits_s == 0.0, "nothing is in flight"
    now_s = 6.0
    assert meter.read(stats(6), "it waits", [("b", 0)]).waits_s == 1.0


def test_the_message_is_small() -> None:
    """The message is small, however many tensors wait and however long their names are."""
    meter = ActivityMeter(lambda set_id: ())
    told = meter.read(stats(0), "x" * 5000, [(f"{number:05}" + "n" * 5000, 0) for number in range(5000)])
    assert (len(told.in_flight), told.pending) == (MOST_NAMES, 5000)
    pulse = Pulse(1.0, 2, 3.0, 4.0, 5, activity=told)
    data = encode(to_send(pulse))
    assert len(data) < 3000
    sent = decode_to_coordinator(data)
    assert isinstance(sent, Observation) and report_in(sent) == pulse
    assert report_in(Observation("another's", data)) is None
    assert report_in(Observation("ddl-doctor", b"\xc1")) is None, "of another form"


def test_a_pulse_without_activity_is_as_before() -> None:
    """A pulse without activity is a short message, as the ranks of ``ddl run --top`` send it."""
    assert len(encode(to_send(Pulse(1.0, 2, 3.0, 4.0, 5)))) < 90


def test_nothing_is_sent_unless_the_page_is_served() -> None:
    """Without a live page, no pulse is sent, neither by a thread nor within a step."""

    def body(rank: int, job: Job) -> int:
        for _ in range(20):
            ddl.allreduce(np.ones(4, np.float32), name="x")
        return job.stats()["pulse_messages"]

    with World(2) as world:
        assert world.run(body) == [0, 0]


def test_pulses_of_a_page_have_activity() -> None:
    """With a live page, a rank sends about one pulse a second, however many steps there are."""

    def body(rank: int, job: Job) -> tuple[int, float]:
        begun_s = time.monotonic()
        for _ in range(250):
            ddl.allreduce(np.ones(256, np.float32), name="x")
            time.sleep(0.01)
        return job.stats()["pulse_messages"], time.monotonic() - begun_s

    with World(2, settings={"activity": True, "pulse_s": 1.0}) as world:
        assert all(2 <= count <= 4 + 2 * seconds for count, seconds in world.run(body))


TRAINS = """
def wait(look):
    look()
"""


class Tensor:
    """What a local variable holds."""


def ours(look: Any) -> None:
    """Call ``look`` from a frame of a module of ddl."""
    module = types.ModuleType("ddl_pretended")
    exec(TRAINS, vars(module))
    vars(module)["wait"](look)


def test_input_is_recognized_without_keeping_frames() -> None:
    """A rank that is in its data generator is in input; one that computes or is in ddl is not.

    Before training code was seen, the answer is unknown. No frames are kept.
    """
    who = WhoWaits()
    seen: list[tuple[str, bool | None]] = []
    tensors: list[weakref.ref[Tensor]] = []

    def look(where: str) -> None:
        seen.append((where, who.is_input(sys._getframe(1))))

    def batches() -> Iterator[int]:
        for number in range(3):
            look("batches")
            yield number

    def compute() -> None:
        tensor = Tensor()
        tensors.append(weakref.ref(tensor))
        look("compute")

    def train() -> None:
        for _ in batches():
            compute()
            ours(lambda: look("ddl"))

    train()
    assert seen[0] == ("batches", None)
    later = seen[3:]
    assert dict(later) == {"batches": True, "compute": False, "ddl": False}
    assert [one() for one in tensors] == [None] * 3


def test_the_clock_counts_only_what_it_knows() -> None:
    """Samples of a thread that does not train do not count as input or as other time."""
    clock = InputClock(0, ())  # no thread has this number
    clock.sample()
    assert (clock.input_s, clock.sampled_s) == (0.0, 0.0)


def test_traffic_of_an_interface(tmp_path: Path) -> None:
    """Traffic is read for the interface of the address and for InfiniBand ports; what cannot be read is left out."""
    for name, files in (
        (
            "mlx5_0/ports/1",
            {"counters/port_rcv_data": "250\n", "counters/port_xmit_data": "500\n", "rate": "100 Gb/sec (4X EDR)\n"},
        ),
        ("mlx5_1/ports/1", {"rate": "none\n"}),
    ):
        for file, text in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    loopback = next((name for name, known in interface_addresses().items() if "127.0.0.1" in known), "")
    told = {one.name: one for one in TrafficMeter("127.0.0.1", tmp_path).read()}
    assert set(told) == {loopback, "mlx5_0:1"} - {""}
    port = told["mlx5_0:1"]
    assert (port.received_bytes, port.sent_bytes, port.bits_per_s) == (1000, 2000, 100e9)
    assert TrafficMeter("192.0.2.1", tmp_path / "none").read() == ()
