"""Starts a request and launches its bucket in one step, if the request is alone in the next bucket of the schedule.

The functions change a TensorQueue as its own methods do. The docstring of TensorQueue explains why the order of the
assignments matters.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ddlcore.runtime.request import IDLE, PENDING, Entry, PersistentRequest
from ddlcore.runtime.schedule import Launch, Replay
from ddlcore.runtime.tensor_queue import TensorQueue

LaunchingAlone = Callable[[TensorQueue, int, PersistentRequest, int, object, int], Launch[Entry] | None]


def launch_alone(
    queue: TensorQueue, runner: int, alone: PersistentRequest, address: int, owner: object, at_ns: int
) -> Launch[Entry] | None:
    """Start the idle request ``alone``, launch its bucket, and return the launch.

    If that is impossible, return None and start nothing. The request is started on the tensor at ``address``, whose
    memory ``owner`` keeps alive. ``at_ns`` is the present time. ``runner`` is the id of the user thread that will run the
    bucket. The caller holds the lock of ``queue``.
    """
    if queue.behind:
        queue.catch_up()
    replay = queue.replay
    if replay is None:
        return None
    position = replay.current
    if (
        alone.position is not position
        or alone.replay is not queue.open
        or alone.state != IDLE
        or position.missing != 1
        or len(position.entries) != 1
        or position.resumable is None
    ):
        return None
    return _launch(queue, replay, runner, alone, address, owner, at_ns)


def launch_unnamed(
    queue: TensorQueue, runner: int, alone: PersistentRequest, address: int, owner: object, at_ns: int
) -> Launch[Entry] | None:
    """Do what ``launch_alone`` does, for a request that is used for calls without a name.

    The number of the call becomes the name of the request. If the bucket is valid, the request is only in ``launches``.
    If the bucket is void, ``put_back`` adds the request to the unfinished ones. Also return None if another thread has
    not seen the end of its own call with this request yet: a new start would delete the error of that call.
    """
    if queue.behind:
        queue.catch_up()
    replay, unnamed = queue.open, queue.unnamed
    if replay is None or unnamed.strays:
        return None
    position = replay.current
    if alone.state != IDLE or alone.user not in (0, runner):  # ``runner`` itself has left its last call, if by a signal
        return None
    if position.missing != 1 or len(position.entries) != 1 or position.resumable is None:
        return None
    if not replay.is_next(alone.set_id, alone.spec_bytes):
        return None
    if unnamed.readmitted:
        unnamed.forget_readmitted(queue.unfinished)
    return _launch(queue, replay, runner, alone, address, owner, at_ns, unnamed.next_name(alone.set_id))


def _launch(
    queue: TensorQueue,
    replay: Replay[Entry],
    runner: int,
    alone: PersistentRequest,
    address: int,
    owner: object,
    at_ns: int,
    name: str = "",
) -> Launch[Entry]:
    position = replay.current
    number = queue.launched + 1
    observed = queue.completion.observed
    waits_since_s = None
    if replay.filled or (replay.negotiated_slots and replay.filled_negotiated_slots):  # mostly neither: no call
        waits_since_s = time.monotonic()
    launch, _, following, current, paused, turn_at = replay.step(number, alone)
    key = (alone.set_id, alone.spec_bytes)
    # Nothing from here on calls a function, see ``TensorQueue.launch``. The slot stays empty: the launch has the entry.
    if name:
        alone.name = name
        alone.user = runner
        queue.unnamed.counts[alone.set_id] += 1
        replay.turns[key] += 1
    alone.stamp = observed
    alone.state = PENDING
    alone.error = None
    alone.source.address = address
    alone.source.owner = owner
    alone.starts += 1
    replay.launched[position.set_id] = launch.place
    replay.next = following
    replay.current = current
    replay.paused = paused
    if turn_at >= 0:
        replay.turned = True
        replay.turn_at = turn_at
        queue.behind = True
    queue.launched = number
    queue.launches[number] = launch
    queue.recent[number & queue.recent_mask] = (number, launch.place, position.planned, at_ns)
    queue.waits_since_s = waits_since_s
    queue.own = launch
    queue.running = runner
    if queue.behind:
        queue.catch_up()
    return launch
