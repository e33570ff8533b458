"""Start the process that serves a job's live page (a web page), and send the events of the job to this process.

``ddl run`` and ``ddlcore.run`` use this module. The process is separate from the launcher, so that neither a slow
browser nor a hostile client can delay the launcher. The launcher waits for this process only after the job has ended.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO

from ddl_doctor.reports import Pulse, report_in

from ddl_dashboard import records
from ddl_dashboard.place import chart_library, listen, place_of, url_of
from ddl_dashboard.records import Heard, JobBegin, JobEvent, Over, RankState, Record, WorldState, encoded
from ddlcore.config.loading import Settings
from ddlcore.launch.job.watch import RunningRanks, Watch, WatchedJob
from ddlcore.launch.ranks.command import own_python
from ddlcore.launch.ranks.exit_status import End
from ddlcore.messages.elastic import WorldReport
from ddlcore.messages.observing import Observation
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_coordinator import Bye, Hello, Leave, ToCoordinator
from ddlcore.messages.to_rank import Answer, Outgoing, Resume, Welcome
from ddlcore.text.installing import pip_install
from ddlcore.version import VERSION

# An empty entry of sys.path means the user's directory, where a file queue.py would hide Python's own module queue.
_PROGRAM = """
sys.path[:] = [one for one in sys.path if one]
from ddl_dashboard.serving import main
main()
"""
_MOST_RECORDS = 20000  # limit for the records that the process has not yet read; the oldest are dropped
_END_S = 3.0  # time within which the process must end
_SELDOM_S = 10.0  # shortest time between two events about replay, because a job may leave replay in every step


class JobPage(Watch):
    """The live page of one job, from before the start of the job to after its end.

    Any thread may call the methods that record events: ``heard``, ``passed``, ``rank_ended``, ``said`` and ``over``.
    """

    @classmethod
    def check(cls, settings: Settings) -> None:
        """Raise ValueError, with a message of one line, if the setting ``dashboard`` has no valid address."""
        place_of(settings.text("dashboard"))
        if chart_library() is None:
            raise ValueError(f"--dashboard: plotly has no plotly.min.js; {pip_install('plotly')}")

    def __init__(self, job: WatchedJob) -> None:
        """Start the process that serves the page of ``job``.

        Raises ValueError, with a message of one line, if the page cannot be served at the address in the setting
        ``dashboard``. Raises OSError if the process cannot be started.
        """
        place = place_of(job.settings.text("dashboard"))
        token = "" if place.is_local else secrets.token_urlsafe(24)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 — `close` closes it
        try:
            with listen(place) as listening:
                self.url = url_of(listening, place, token)
                self._process = subprocess.Popen(
                    own_python(_PROGRAM, str(listening.fileno())),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    pass_fds=(listening.fileno(),),
                    start_new_session=True,  # a Ctrl-C on the terminal is for the launcher
                )
        except BaseException:
            self._errors.close()
            raise
        self._records: deque[Record] = deque(maxlen=_MOST_RECORDS)
        self._wake = threading.Event()
        self._closing = False
        self._over = False
        self._epoch = -1
        self._seldom_s = 0.0
        self._generation = 0  # of the last world that was told
        self._say: Callable[[str], None] = lambda text: None  # shows a line to the user
        self._host_of: Callable[[int], str] = lambda rank: ""  # the host of a rank's process; "": that of the beginning
        self._tell(JobBegin(job.title, job.hosts, VERSION, time.time(), token, job.settings.number("pulse_s")))
        self._thread = threading.Thread(target=self._write, name="ddl-page", daemon=True)
        self._thread.start()
        for rank in range(len(job.hosts)):
            self._tell(RankState(rank, records.STARTING))

    # --- what happens

    def open(self, say: Callable[[str], None]) -> str:
        """Return the line that tells the address of the page."""
        self._say = say
        return f"live page: {self.url}"

    def begin(self, ranks: RunningRanks) -> None:
        """Show the hosts of the ranks as they are from now on."""
        self._host_of = ranks.host_of

    def heard(self, rank: int, message: Observation) -> None:
        """Record a pulse, in which ``rank`` reports its own state. Profiles are ignored."""
        report = report_in(message)
        if isinstance(report, Pulse):
            self._tell(Heard(rank, report))

    def passed(self, rank: int, message: ToCoordinator, outgoing: Outgoing[LaunchedRank]) -> None:
        """Record the events that follow from ``message``, which ``rank`` has sent to the coordinator.

        ``outgoing`` is the messages that the coordinator sends because of ``message``.
        """
        if isinstance(message, Hello):
            self._tell(RankState(rank, records.INIT, host=self._host_of(rank)))
        elif isinstance(message, Bye):
            self._tell(RankState(rank, records.LEFT, message.reason))
            if message.reason.startswith(("raised ", "init failed")):
                self._event("error", f"rank {rank} {message.reason}")
        elif isinstance(message, Leave) and not message.slow:
            self._seldom(f"rank {rank} asks to leave replay: {message.reason}")
        for other, answer in outgoing:
            if isinstance(answer, Welcome):
                self._tell(RankState(other, records.RUNNING))
                if answer.report is not None:
                    self._begins(answer.report)
            elif isinstance(answer, Answer):
                for item in answer.items:
                    if isinstance(item, Resume) and item.epoch != self._epoch:
                        self._epoch = item.epoch
                        self._seldom("the steps repeat: the ranks run them from memory")

    def _begins(self, report: WorldReport) -> None:
        if report.generation != self._generation:
            self._generation = report.generation
            totals = report.ranks_lost, report.ranks_joined, report.seconds_lost
            self._tell(WorldState(report.generation, report.size, *totals))

    def rank_ended(self, end: End) -> None:
        """Record the end of a rank's process."""
        failed = records.STOPPED if end.stopped else records.FAILED
        self._tell(RankState(end.rank, records.ENDED if end.returncode == 0 else failed, end.reason))
        if end.failed:
            self._event("error", f"rank {end.rank} {end.reason}")

    def said(self, text: str) -> None:
        """Record a message that the launcher has shown to the user, such as the report of a stall."""
        self._event("warning" if text.startswith("stalled") else "info", text)

    def over(self, code: int, text: str = "") -> None:
        """Record that the job has ended with exit code ``code``. Only the first call has an effect.

        A code of -1 means that the job has no exit code. ``text`` then says why the job has ended.
        """
        if not self._over:
            self._over = True
            self._tell(Over(code, text))

    def close(self) -> None:
        """Send all remaining records to the process, and wait until the process has ended.

        If the process has not ended after some seconds, kill it.
        """
        self.over(-1, "The launcher has given up.")
        self._closing = True
        self._wake.set()
        self._thread.join(_END_S)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(_END_S)  # if the thread is blocked in a write, the end of the process ends the write
        self._errors.close()

    # --- to the process

    def _event(self, kind: str, text: str) -> None:
        self._tell(JobEvent(time.time(), kind, text))

    def _seldom(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._seldom_s:
            self._seldom_s = now_s + _SELDOM_S
            self._event("info", text)

    def _tell(self, record: Record) -> None:
        self._records.append(record)
        self._wake.set()

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            while True:
                self._wake.wait()
                self._wake.clear()
                closing = self._closing  # read first, so that records added before it was set are still written
                while self._records:
                    pipe.write(encoded(self._records.popleft()))
                pipe.flush()
                if closing:
                    return
        except OSError:
            if not self._closing:
                self._say(f"the live page is gone, the job goes on: {self._why()}")
        finally:
            with contextlib.suppress(OSError):
                pipe.close()

    def _why(self) -> str:
        """Return the last line that the process has written to stderr.

        If there is no such line, return the exit code of the process in words.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), f"exit code {self._process.returncode}")
