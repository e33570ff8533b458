"""Runs one search through a training: trials out, times in; the tuner thinks in a thread of its own meanwhile."""

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

__all__ = ["Plan", "SearchDriver", "Stretch", "Watcher", "in_thread"]

LEAST_SAMPLE_S = 0.05  # a sample of very short steps has more of them
MOST_TIMES = 20  # but not so many times what was asked for
THINKING_S = 0.02  # how long the steps go on before it is asked again whether the tuner has come to something
MOST_THINKING = 200
FIRST_STEPS = 10  # more, that do not count, in the first trial of all
FEWEST_STEPS = 3  # of a sample in a loop that is left all the time
DISCARDED_IN_A_ROW = 2


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    knobs: tuple[Knob, ...]
    default: Mapping[str, Value]  # for each knob, what holds without a search
    make_tuner: Callable[[Sequence[Knob]], Tuner]
    trials: int
    steps: int  # that count, in a sample at least
    warmup: int  # steps after a change that do not count
    warm: tuple[Mapping[str, Value], ...] = ()  # settings to try first


@dataclass(frozen=True)
class Stretch:
    """Whole periods with the same settings; 0: for ever."""

    values: Mapping[str, Value]
    periods: int


class Watcher(Protocol):
    """Who wants to know how a search goes. Called by one thread at a time, not always the same, and off the step's path."""

    def began(self, session: Session, nbytes: int) -> None:
        """A search begins (anew): a step moves ``nbytes`` bytes."""

    def sampled(self, session: Session, sample: Sample, nbytes: int) -> None:
        """One more sample."""

    def ended(self, session: Session, why: str) -> None:
        """The search is over: ``session.result`` stands, or it cannot go on, and ``why`` says why not."""


def in_thread(work: Callable[[], None]) -> None:
    """Does ``work`` in a thread of its own."""
    threading.Thread(target=work, name="ddl-tuner", daemon=True).start()


class SearchDriver:
    """What the coordinator asks for trials, and tells what they took; it never waits for the tuner."""

    def __init__(
        self,
        plan: Plan,
        watchers: Sequence[Watcher] = (),
        aside: Callable[[Callable[[], None]], None] = in_thread,
    ) -> None:
        """``aside`` runs what takes long beside the caller."""
        self.given: dict[str, Value] = dict(plan.default)
        self.reopens = frozenset(knob.name for knob in plan.knobs if knob.reopens)
        self.session: Session | None = None
        self._sessions: dict[int, Session] = {}  # by the bytes of a step; only what works aside looks at it
        self._plan = plan
        self._watchers = tuple(watchers)
        self._aside = aside
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._works: deque[Callable[[], None]] = deque()  # to be done aside, one after the other
        self._working = False
        self._nbytes = 0
        self._values: dict[str, Value] | None = None  # to be measured; None: the tuner is at it
        self._current: Stretch | None = None  # the trial under way, where it counts
        self._holds: dict[str, Value] = dict(plan.default)  # what the last trial had
        self._step_s = 0.0  # what a step takes, about; 0: not known
        self._steps = plan.steps
        self._skipped = 0  # steps of the trial under way that do not count
        self._cold = True  # the training has just begun: nothing of it was measured yet
        self._discarded = 0
        self._why = ""

    # --- for the coordinator

    def trial(self, nbytes: int) -> Stretch:
        """The next trial: a sample; or, while the tuner thinks, more of the same; or what was found, for ever."""
        with self._lock:
            self._current = None
            if self._why:
                return Stretch(dict(self._holds), 0)
            if nbytes != self._nbytes:  # another schedule: what was measured before is not comparable
                self._nbytes = nbytes
                self.session = self._values = None
                self._do_aside(lambda: self._begin(nbytes))  # which may have to import a library
            session = self.session
            if session is not None and session.phase is Phase.DONE:
                self._holds = session.next()
                return Stretch(dict(self._holds), 0)
            if self._values is None:
                patience = math.ceil(THINKING_S / self._step_s) if self._step_s else 0
                return Stretch(dict(self._holds), min(max(patience, FEWEST_STEPS), MOST_THINKING))
            assert session is not None
            self._holds = dict(self._values)
            # A loop that has just begun is not yet what it will be.
            self._skipped = self._plan.warmup + (FIRST_STEPS if self._cold or not session.samples else 0)
            self._current = Stretch(dict(self._values), 1 + self._skipped + self._counted())
            return self._current

    def _counted(self) -> int:
        """How many steps of a sample count."""
        if not self._step_s:
            return self._steps
        return max(self._steps, min(math.ceil(LEAST_SAMPLE_S / self._step_s), MOST_TIMES * self._steps))

    def trial_over(self, periods_ns: Sequence[Sequence[int]]) -> None:
        """A trial is over. Each rank's periods, the first left out; the slowest rank of a step decides."""
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
            else:  # no tuner has to be asked: the next trial is the next sample
                sample = self._learn(session, counted)
                self._do_aside(lambda: self._tell(session, sample, nbytes))

    def trial_discarded(self) -> None:
        """The loop left its period in the middle of a trial: it is repeated, with fewer steps if that goes on."""
        with self._lock:
            if self._current is None:
                return
            self._current = None
            self._discarded += 1
            if self._discarded >= DISCARDED_IN_A_ROW:
                self._discarded = 0
                self._steps = max(FEWEST_STEPS, self._steps // 2)

    def gave_up(self, why: str) -> None:
        """The search is over without a result: the default holds from the next trial on."""
        with self._lock:
            session = self.session
            if self._why or (session is not None and session.phase is Phase.DONE):
                return
            self._why = why
            self._holds = dict(self._plan.default)
            # Also where the search had not even begun: whoever waits for its end must hear of it.
            self._do_aside(lambda: self._tell_ended(self.session or Session((), {}, self._plan.make_tuner, 0), why))

    # --- for whoever runs the training

    @property
    def why(self) -> str:
        """Why the search was given up; empty where it was not."""
        return self._why

    def settle(self, timeout_s: float = 10.0) -> None:
        """The training has ended: waits until the tuner has thought about what it was told."""
        with self._idle:
            self._idle.wait_for(lambda: not self._working, timeout_s)
            self._current = None
            self._step_s = 0.0  # whatever comes next begins anew
            self._cold = True

    # --- aside, one thing at a time

    def _do_aside(self, work: Callable[[], None]) -> None:
        """Lock held."""
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
            except Exception as error:  # whatever a foreign tuner raises: the training goes on
                self.gave_up(f"the tuner failed: {type(error).__name__}: {error}")

    def _begin(self, nbytes: int) -> None:
        plan = self._plan
        known = self._sessions.get(nbytes)  # of another world, or of an earlier run of the script
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
