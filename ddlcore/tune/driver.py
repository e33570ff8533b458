"""Run a search during a training: give trials to the coordinator and record their times.

Meanwhile the tuner computes in its own thread.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from ddlcore.contracts.tuner import Knob, Tuner, Value
from ddlcore.tune.session import Phase, Sample, Session
from ddlcore.tune.space import narrowed

LEAST_SAMPLE_S = 0.05  # a sample takes at least this long, so very short steps need more of them
MOST_TIMES = 20  # but at most this many times the steps that were asked for
THINKING_S = 0.02  # time until the driver is asked again whether the tuner has proposed something
MOST_THINKING = 200
FIRST_STEPS = 10  # further steps that do not count, in the first trial of all
FEWEST_STEPS = 3  # steps of a sample if the loop leaves replay again and again
DISCARDED_IN_A_ROW = 2


@dataclass(frozen=True)
class Plan:
    """The description of what a search is to do."""

    knobs: tuple[Knob, ...]
    default: Mapping[str, Value]  # value of each knob without a search
    make_tuner: Callable[[Sequence[Knob]], Tuner]
    trials: int
    steps: int  # least number of measured steps in a sample
    warmup: int  # steps after each change that are not measured
    warm: tuple[Mapping[str, Value], ...] = ()  # settings to try first


@dataclass(frozen=True)
class Stretch:
    """A number of whole periods that run with the same settings. 0 periods: all periods from now on."""

    values: Mapping[str, Value]
    periods: int


class Watcher(Protocol):
    """An object that is told how a search goes on.

    One thread at a time calls it, not always the same one. No training step waits for the thread that calls it.
    """

    def began(self, session: Session, nbytes: int) -> None:
        """Handle the begin of the search ``session``, for steps that move ``nbytes`` bytes.

        This is called again if another number of bytes begins a search of its own.
        """

    def sampled(self, session: Session, sample: Sample, nbytes: int) -> None:
        """Handle one more sample of the search."""

    def ended(self, session: Session, why: str) -> None:
        """Handle the end of the search. If it has no ``session.result``, ``why`` says why it could not go on."""


def in_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread of its own."""
    threading.Thread(target=work, name="ddl-tuner", daemon=True).start()


class SearchDriver:
    """The part that gives trials to the coordinator and records their times. It never waits for the tuner."""

    def __init__(
        self,
        plan: Plan,
        watchers: Sequence[Watcher] = (),
        aside: Callable[[Callable[[], None]], None] = in_thread,
    ) -> None:
        """Prepare the search that ``plan`` describes; ``watchers`` are told how it goes on.

        ``aside`` is called with slow work, and must run it in another thread than the caller's.
        """
        self.given: dict[str, Value] = dict(plan.default)
        self.reopens = frozenset(knob.name for knob in plan.knobs if knob.reopens)
        self.session: Session | None = None
        self._sessions: dict[int, Session] = {}  # by the bytes of a step; used only by work in ``aside``
        self._plan = plan
        self._watchers = tuple(watchers)
        self._aside = aside
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._works: deque[Callable[[], None]] = deque()  # work to be done in ``aside``, one after the other
        self._working = False
        self._nbytes = 0
        self._values: dict[str, Value] | None = None  # settings to be measured; None: the tuner is computing them
        self._current: Stretch | None = None  # the running trial, if it counts
        self._holds: dict[str, Value] = dict(plan.default)  # settings of the last trial
        self._step_s = 0.0  # approximate duration of a step; 0: unknown
        self._steps = plan.steps
        self._skipped = 0  # steps of the running trial that are not measured
        self._cold = True  # the training has just begun: nothing was measured yet
        self._discarded = 0
        self._why = ""

    # --- for the coordinator

    def trial(self, nbytes: int) -> Stretch:
        """Return the settings for the next steps, and how many steps that are. ``nbytes``: the bytes that a step moves.

        These steps are usually measured as one sample. While the tuner computes, they are not measured and the settings
        stay as they are. When the search is over, the number is 0: the settings are final and hold for all later steps.
        """
        with self._lock:
            self._current = None
            if self._why:
                return Stretch(dict(self._holds), 0)
            if nbytes != self._nbytes:  # another schedule: earlier measurements are not comparable
                self._nbytes = nbytes
                self.session = self._values = None
                self._do_aside(lambda: self._begin(nbytes))  # it may have to import a library
            session = self.session
            if session is not None and session.phase is Phase.DONE:
                self._holds = session.next()
                return Stretch(dict(self._holds), 0)
            if self._values is None:
                patience = math.ceil(THINKING_S / self._step_s) if self._step_s else 0
                return Stretch(dict(self._holds), min(max(patience, FEWEST_STEPS), MOST_THINKING))
            assert session is not None
            self._holds = dict(self._values)
            # The first steps of a loop are slower than later ones.
            self._skipped = self._plan.warmup + (FIRST_STEPS if self._cold or not session.samples else 0)
            self._current = Stretch(dict(self._values), 1 + self._skipped + self._counted())
            return self._current

    def _counted(self) -> int:
        """Return how many steps of the next sample are to be measured."""
        if not self._step_s:
            return self._steps
        return max(self._steps, min(math.ceil(LEAST_SAMPLE_S / self._step_s), MOST_TIMES * self._steps))

    def trial_over(self, periods_ns: Sequence[Sequence[int]]) -> None:
        """Record the times of the trial that has ended.

        ``periods_ns`` has a row for each rank, with the durations of the trial's periods, without the first. The
        duration of a step is the one on the rank that was slowest in it.
        """
        fewest = min(len(row) for row in periods_ns)
        steps_s = [max(row[len(row) - fewest + i] for row in periods_ns) * 1e-9 for i in range(fewest)]
        with self._lock:
            current, self._current = self._current, None
            session, nbytes = self.session, self._nbytes
            counted = steps_s[self._skipped :] if current is not None else steps_s
            if not counted or min(counted) <= 0.0:
                return
            self._step_s = median(counted)
            if current is None or session is None:
                return
            self._discarded = 0
            self._cold = False
            self._values = None
            if session.phase is Phase.SEARCH:
                self._do_aside(lambda: self._think(session, counted, nbytes))
            else:  # no tuner is asked: the next trial is the next sample
                sample = self._learn(session, counted)
                self._do_aside(lambda: self._tell(session, sample, nbytes))

    def trial_discarded(self) -> None:
        """Repeat the present trial, which was discarded because the loop left its schedule, as the next one.

        If several trials in a row are discarded, the next ones have fewer steps.
        """
        with self._lock:
            if self._current is None:
                return
            self._current = None
            self._discarded += 1
            if self._discarded >= DISCARDED_IN_A_ROW:
                self._discarded = 0
                self._steps = max(FEWEST_STEPS, self._steps // 2)

    def gave_up(self, why: str) -> None:
        """End the search without a result: the default settings hold from the next trial on."""
        with self._lock:
            session = self.session
            if self._why or (session is not None and session.phase is Phase.DONE):
                return
            self._why = why
            self._holds = dict(self._plan.default)
            # The watchers are told even if the search has not begun, because a caller may wait for its end.
            self._do_aside(lambda: self._tell_ended(self.session or Session((), {}, self._plan.make_tuner, 0), why))

    # --- for the code that runs the training

    @property
    def why(self) -> str:
        """The reason why the search was given up; "" if it was not."""
        return self._why

    def settle(self, timeout_s: float = 10.0) -> None:
        """Wait until the tuner has used all results that it was given, at most for ``timeout_s``.

        Call this after the end of a training.
        """
        with self._idle:
            self._idle.wait_for(lambda: not self._working, timeout_s)
            self._current = None
            self._step_s = 0.0  # the next training starts from the beginning
            self._cold = True

    # --- aside, one thing at a time

    def _do_aside(self, work: Callable[[], None]) -> None:
        """Add ``work`` to the queue of ``aside``. Call it with the lock held."""
        self._works.append(work)
        if not self._working:
            self._working = True
            self._aside(self._work)

    def _work(self) -> None:
        while True:
            with self._idle:
                if not self._works:
                    self._working = False
                    self._idle.notify_all()
                    return
                work = self._works.popleft()
            try:
                work()
            except Exception as error:  # a plugin's tuner may raise anything: the training goes on
                self.gave_up(f"the tuner failed: {type(error).__name__}: {error}")

    def _begin(self, nbytes: int) -> None:
        plan = self._plan
        known = self._sessions.get(nbytes)  # from another world, or from an earlier run of the script
        knobs = narrowed(plan.knobs, nbytes, plan.default)
        session = known or Session(knobs, plan.default, plan.make_tuner, plan.trials, plan.warm)
        self._sessions[nbytes] = session
        with self._lock:
            if nbytes == self._nbytes:
                self.session = session
                self._values = session.next()
        if known is not None:
            return
        for watcher in self._watchers:
            watcher.began(session, nbytes)

    def _think(self, session: Session, steps_s: Sequence[float], nbytes: int) -> None:
        self._tell(session, self._learn(session, steps_s), nbytes)

    def _learn(self, session: Session, steps_s: Sequence[float]) -> Sample:
        sample = session.measured(steps_s)
        with self._lock:
            if session is self.session and session.phase is not Phase.DONE:
                self._values = session.next()
        return sample

    def _tell(self, session: Session, sample: Sample, nbytes: int) -> None:
        for watcher in self._watchers:
            watcher.sampled(session, sample, nbytes)
        if session.phase is Phase.DONE and sample is session.samples[-1]:
            self._tell_ended(session, "")

    def _tell_ended(self, session: Session, why: str) -> None:
        for watcher in self._watchers:
            watcher.ended(session, why)
