"""The order in which the coordinator's decisions reach the engine, and that no message is left without an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from ddlcore.messages.coding import encode
from ddlcore.messages.elastic import Complete, Dismissed, NextWorld
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_rank import Adjust, Arranged, Arrivals, Bucket, Drain, FromCoordinator, Planned, Resume
from ddlcore.process.jobs import lone_job
from ddlcore.runtime.completion import Completion
from ddlcore.runtime.decisions import Decisions
from ddlcore.runtime.epochs import Epochs
from ddlcore.runtime.outbox import Outbox
from ddlcore.runtime.request import Entry, Todo
from ddlcore.runtime.tensor_queue import TensorQueue
from ddlcore.types import Kind

SPEC = encode(Spec(Kind.ALLREDUCE))


class Engine:
    """Notes what is asked of it, and runs its queue when ``run`` is called."""

    def __init__(self) -> None:
        self.queue: list[Todo] = []
        self.done: list[str] = []

    def post(self, item: Todo) -> None:
        self.queue.append(item)

    def resume(self, message: Resume) -> None:
        self.done.append(f"resume {message.epoch}")

    def drain(self, message: Drain) -> None:
        self.done.append(f"drain {message.epoch}")

    def adjust(self, message: Adjust) -> None:
        self.done.append(f"adjust {dict(message.values)}")

    def fail(self, entries: Sequence[Entry | None], error: BaseException | None) -> None:
        self.done.append(f"fail {error}")

    def run(self) -> None:
        for item in self.queue:
            if callable(item):
                item()
            else:
                self.done.append(f"bucket {item[0].index}")


def decisions_of(engine: Engine) -> Decisions:
    tensor_queue = TensorQueue(Completion(), Outbox(lambda: None))
    return Decisions(tensor_queue, Epochs(tensor_queue), engine)


def test_what_a_drain_decides_comes_after_the_drain() -> None:
    """New settings open communicators anew, for which ranks must wait that others need in the drain's buckets."""
    engine = Engine()
    decisions = decisions_of(engine)
    bucket = Bucket(3, 0, Kind.ALLREDUCE, ("x",))
    arranged = Arranged(0, b"", (Planned(0, Kind.ALLREDUCE, ("x",), (SPEC,)),))
    decisions.drain(Drain(1, (), (), (bucket, arranged, Adjust((("fusion_bytes", 5),)), Resume(2, 0, 0))))
    reported = decisions.engaged()
    assert reported is not None and reported.what == "the end of a replay (Drain of epoch 1)"
    engine.run()
    assert engine.done == ["drain 1", "bucket 3", "adjust {'fusion_bytes': 5}", "resume 2"]
    assert decisions.engaged() is None


def test_every_message_of_the_coordinator_is_known() -> None:
    """But for those that a process gets before its control thread begins."""
    job = lone_job(None, {})
    job.start()
    try:
        known = set(job._parts.control_thread._deeds)
    finally:
        job.shutdown()
    assert set(get_args(FromCoordinator)) - known == {Arrivals, NextWorld, Complete, Dismissed}
    assert known <= set(get_args(FromCoordinator))
