"""Run a search during a training: pass settings to the coordinator, and record the times of the steps.

At the same time, the tuner computes in a separate thread.
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
from ddlcore.threads import OwnThread
from ddlcore.tune.session import Phase, Session, TimedSteps
from ddlcore.tune.space import narrowed

LEAST_SAMPLE_S = 0.05  # a sample takes at least this time, so a sample of very short steps has more steps,
MOST_TIMES = 20  # but at most this number of times the requested number of steps
THINKING_S = 0.02  # time until the driver is asked again whether the tuner has proposed settings
MOST_THINKING = 200  # steps; an upper limit for the steps that run in this time
FIRST_STEPS = 10  # further steps that do not count, only in the first trial of a training
FEWEST_STEPS = 3  # least number of steps in a sample, if the loop leaves replay again and again
DISCARDED_IN_A_ROW = 2


@dataclass(frozen=True)
class SearchPlan:
    """The description of a search: the settings to search, the tuner, and the numbers of trials and steps.

    A knob is a setting that is searched, with its possible values.
    """

    knobs: tuple[Knob, ...]
    default: Mapping[str, Value]  # value of each knob without a search
    make_tuner: Callable[[Sequence[Knob]], Tuner]
    trials: int
    steps: int  # least number of measured steps in a sample
    warmup: int  # steps after each change that are not measured
    warm: tuple[Mapping[str, Value], ...] = ()  # settings to try first


@dataclass(frozen=True)
class Stretch:
    """A number of whole steps that run with the same settings.

    ``periods`` is the number of steps (periods of the schedule). 0 means all steps from now on.
    """

    values: Mapping[str, Value]
    periods: int


class SearchWatcher(Protocol):
    """An object that is informed about the progress of a search.

    Only one thread at a time calls the methods, but not always the same thread. No training step waits for that thread.
    """

    def began(self, session: Session, nbytes: int) -> None:
        """Handle the begin of the search ``session``, for steps that reduce ``nbytes`` bytes.

        The method is called again if the number of bytes of a step changes, because then another search begins.
        """

    def sampled(self, session: Session, sample: TimedSteps, nbytes: int) -> None:
        """Handle ``sample``, the newest sample of the search ``session``."""

    def ended(self, session: Session, why: str) -> None:
        """Handle the end of the search ``session``.

        If the search was given up, ``session.result`` is None and ``why`` is the reason; otherwise ``why`` is "".
        """


def in_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in a new thread."""
    OwnThread(target=work, name="ddl-tuner").start()


class SearchDriver:
    """Passes the settings of a search to the coordinator, and records the times of the steps with these settings.

    The methods that the coordinator calls never wait for the tuner.
    """

    def __init__(
        self,
        plan: SearchPlan,
        watchers: Sequence[SearchWatcher] = (),
        aside: Callable[[Callable[[], None]], None] = in_thread,
    ) -> None:
        """Prepare the search that ``plan`` describes. ``watchers`` are informed about the progress.

        ``aside(work)`` must run the function ``work``, which is slow, in another thread.
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

    # --- called by the coordinator

    def trial(self, nbytes: int) -> Stretch:
        """Return the settings for the next steps, and the number of these steps.

        ``nbytes`` is the number of bytes that a step reduces. Usually these steps are measured as one sample. While the
        tuner computes, the steps are not measured, and the settings do not change. When the search has ended, the
        number is 0: the settings are final, and are used for all later steps.
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
        """Return the number of steps that the next sample must measure."""
        if not self._step_s:
            return self._steps
        return max(self._steps, min(math.ceil(LEAST_SAMPLE_S / self._step_s), MOST_TIMES * self._steps))

    def trial_over(self, periods_ns: Sequence[Sequence[int]]) -> None:
        """Record the times of the trial that has ended.

        ``periods_ns`` has a row for each rank: the durations of the trial's steps in ns, without the first step. For
        each step, the duration on the slowest rank counts.
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
            else:  # the tuner is not needed for a comparison: the next settings are known at once
                sample = self._learn(session, counted)
                self._do_aside(lambda: self._tell(session, sample, nbytes))

    def trial_discarded(self) -> None:
        """Repeat the present trial: it was discarded, because the training loop left its schedule.

        If two trials in a row are discarded, the next trials have fewer steps.
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
        """End the search without a result. From the next trial on, the default settings are used.

        ``why`` is the reason in words, for the watchers.
        """
        with self._lock:
            session = self.session
            if self._why or (session is not None and session.phase is Phase.DONE):
                return
            self._why = why
            self._holds = dict(self._plan.default)
            # The watchers are informed even if the search has not begun, because a caller may wait for the end.
            self._do_aside(lambda: self._tell_ended(self.session or Session((), {}, self._plan.make_tuner, 0), why))

    # --- for the code that runs the training

    @property
    def why(self) -> str:
        """The reason why the search was given up; "" if it was not given up."""
        return self._why

    def settle(self, timeout_s: float = 10.0) -> None:
        """Wait until the tuner has processed all measured times, but at most ``timeout_s`` seconds.

        Call this method after the end of a training. The driver can then be used for the next training.
        """
        with self._idle:
            self._idle.wait_for(lambda: not self._working, timeout_s)
            self._current = None
            self._step_s = 0.0  # the next training starts from the beginning
            self._cold = True

    # --- aside, one thing at a time

    def _do_aside(self, work: Callable[[], None]) -> None:
        """Add ``work`` to the queue of functions that run in another thread, one after the other.

        The caller must hold the lock.
        """
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
        known = self._sessions.get(nbytes)  # with other ranks (elastic job), or of an earlier run of the script
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

    def _learn(self, session: Session, steps_s: Sequence[float]) -> TimedSteps:
        sample = session.measured(steps_s)
        with self._lock:
            if session is self.session and session.phase is not Phase.DONE:
                self._values = session.next()
        return sample

    def _tell(self, session: Session, sample: TimedSteps, nbytes: int) -> None:
        for watcher in self._watchers:
            watcher.sampled(session, sample, nbytes)
        if session.phase is Phase.DONE and sample is session.samples[-1]:
            self._tell_ended(session, "")

    def _tell_ended(self, session: Session, why: str) -> None:
        for watcher in self._watchers:
            watcher.ended(session, why)
