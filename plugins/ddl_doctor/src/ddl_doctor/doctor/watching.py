"""Run a user's program for some steps, and report the share of a step in which the ranks wait for input."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from ddl_doctor.doctor.report import DoctorReport
from ddl_doctor.doctor.subject import ExaminedJob, Question
from ddl_doctor.reports import Profile, report_in
from ddlcore.contracts.check import Finding
from ddlcore.launch.job.launcher import JobDescription, run_job
from ddlcore.launch.job.watch import RunningRanks, Watch
from ddlcore.launch.output.screen import Screen
from ddlcore.launch.ranks.command import own_script
from ddlcore.launch.ranks.exit_status import NotStarted
from ddlcore.messages.observing import Observation

SAMPLE_MS = 5.0
LARGE_SHARE = 0.1  # of a step: a larger share is reported
LEAST_STEPS = 3
_LAST_LINES = 8


class InputWatch(Watch):
    """Observes a job through the launcher, and ends the job when the ranks have run enough steps.

    The job ends when every rank has run ``steps`` steps, or after ``seconds`` seconds. The launcher calls the methods.
    """

    def __init__(self, size: int, steps: int, seconds: float) -> None:
        self.profiles: dict[int, Profile] = {}
        self.written: deque[str] = deque(maxlen=_LAST_LINES)
        self.stopped = False  # this object has ended the job
        self._size = size
        self._steps = steps
        self._seconds = seconds
        self._stop: Callable[[], None] = lambda: None
        self._timer: threading.Timer | None = None

    def screens(self, screens: tuple[Screen, Screen]) -> tuple[Screen, Screen]:
        """Return two screens that take the place of ``screens`` and show nothing: nobody needs the program's output.

        The last lines of the output are stored, so that the report of an error can show them.
        """
        quiet = Screen(self._keep)
        return quiet, quiet

    def begin(self, ranks: RunningRanks) -> None:
        """Start the timer. When the time has passed, the job is ended."""
        self._stop = ranks.stop
        self._timer = threading.Timer(self._seconds, self._enough)
        self._timer.daemon = True
        self._timer.start()

    def heard(self, rank: int, message: Observation) -> None:
        """Store the newest profile of each rank. End the job when all ranks have run enough steps.

        A profile says in which lines of code a rank has spent the time of its steps.
        """
        report = report_in(message)
        if isinstance(report, Profile):
            self.profiles[rank] = report
            if len(self.profiles) == self._size and min(one.steps for one in self.profiles.values()) >= self._steps:
                self._enough()

    def drained(self) -> None:
        """Stop the timer, because the program has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def _enough(self) -> None:
        if not self.stopped:
            self.stopped = True
            self._stop()

    def _keep(self, data: bytes) -> None:
        self.written.extend(line for line in data.decode("utf-8", "replace").splitlines() if line.strip())


def watch_input(subject: ExaminedJob, question: Question, report: DoctorReport) -> None:
    """Run the program of ``question``, and add to the report the share of a step in which the ranks wait for input.

    If the ranks cannot be started or end too early, add that fact to the report instead.
    """
    watch = InputWatch(subject.layout.size, question.steps, question.seconds)
    launch = JobDescription(
        command=question.program,
        placed=subject.placed,
        settings=subject.settings_with(sample_ms=SAMPLE_MS),
        registry=subject.registry,
        environ=subject.environ,
        port=0,
        needs=own_script(question.command),
        watches=(watch,),
    )
    command = " ".join(question.command)
    try:
        code = run_job(launch)
    except NotStarted as error:  # keep the report of what was found so far
        finding = Finding(
            "input",
            f"`{command}` could not be started: {error}",
            "`ddl run` with these hosts and this program would start nothing, either",
            "do what the line says; the program must lie at the same path on all hosts",
        )
        report.add("input", [finding])
        return
    if code != 0 and not watch.stopped:
        finding = Finding(
            "input",
            f"`{command}` ended with exit code {code} before {question.steps} of its steps were seen",
            f"nothing can be said about its input; its last lines: {' | '.join(watch.written) or 'none'}",
            f"run it alone first: ddl run -np {subject.layout.size} {command}",
        )
        report.add("input", [finding])
        return
    profiles = {rank: one for rank, one in sorted(watch.profiles.items()) if one.steps >= LEAST_STEPS}
    if not profiles:
        report.left_out("input", _why_nothing(command, watch, question.seconds))
        return
    words, lines = _words(profiles)
    report.add("input", judge_input(profiles, subject.host_of), words)
    report.notes += lines


def judge_input(profiles: dict[int, Profile], host_of: Callable[[int], str]) -> Sequence[Finding]:
    """Return a finding about the rank that waits longest for input, if it waits for more than a tenth of a step.

    There is no finding about the other ranks, because they wait for the slowest rank in any case. ``host_of`` returns
    the name of the host of a rank.
    """
    rank, worst = max(profiles.items(), key=lambda item: item[1].input_s / item[1].seconds)
    share = worst.input_s / worst.seconds
    if share <= LARGE_SHARE:
        return []
    step_ms = worst.seconds / worst.steps * 1e3
    place, text, *_ = max(worst.lines, key=lambda line: line[3])
    where = f" at {place} `{text}`"
    return [
        Finding(
            "input",
            f"rank {rank} waits for input for {share:.0%} of a step: {share * step_ms:.1f} of {step_ms:.1f} ms{where}",
            f"a step would take {(1 - share) * step_ms:.1f} ms if input were there in time"
            + ("; while one rank waits, all others wait for it in their next reduction" if len(profiles) > 1 else ""),
            "load ahead and with more processes: "
            "DataLoader(num_workers=4, persistent_workers=True, prefetch_factor=4), "
            "tf.data .map(…, num_parallel_calls=AUTOTUNE).prefetch(AUTOTUNE); keep data decoded, and on a local disk; "
            "`top` shows whether the cores are busy with it",
            host_of(rank),
        )
    ]


def _words(profiles: dict[int, Profile]) -> tuple[str, list[str]]:
    """Return a line with the ranks' shares of waiting for input, and lines about the code of the first rank.

    The share is the part of a step in which the rank waits for input; at most eight ranks are named. The lines about
    the code show where the first rank spends at least 1 % of its time.
    """
    shares = ", ".join(f"rank {rank} {one.input_s / one.seconds:.0%}" for rank, one in list(profiles.items())[:8])
    rank, first = next(iter(profiles.items()))
    lines = [f"a step of rank {rank}, by lines of {first.loop} ({first.seconds / first.steps * 1e3:.1f} ms)"]
    for where, text, seconds, _ in first.lines:
        if seconds >= 0.01 * first.seconds:
            lines.append(f"  {seconds / first.seconds:5.0%}  {where}  {text}")
    return f"{shares} of a step is waiting for input", lines


def _why_nothing(command: str, watch: InputWatch, seconds: float) -> str:
    if watch.stopped:
        return f"`{command}` showed no steps that repeat within {seconds:g} s (--seconds)"
    return f"`{command}` ended before it had shown {LEAST_STEPS} steps that repeat"
