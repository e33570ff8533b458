"""Implement ``ddl run --top``: show a table of all ranks while they train.

On a terminal the table is updated in place. Without a terminal it is printed as plain lines at intervals.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ddl_doctor.reports import Pulse, report_in

from ddl_dashboard.rank_statistics import HEADINGS, LEFT, RankFigures, cells, known_columns, rows_of, table_lines
from ddlcore.config.loading import Settings
from ddlcore.launch.job.watch import RunningRanks, Watch, WatchedJob
from ddlcore.launch.output.screen import Screen
from ddlcore.messages.observing import Observation
from ddlcore.text.numbers import UNKNOWN

if TYPE_CHECKING:
    from rich.table import Table

LIVE_S = 1.0  # interval at which the table on a terminal is updated
PLAIN_S = 10.0  # interval of the table's lines without a terminal
_MOST_ROWS = 40  # on a terminal
_KEPT = 60  # the last so many pulses of each rank are stored: a minute, if one pulse is sent in each second


def console_of_terminal() -> Any:
    """Return a ``rich.console.Console`` on stderr if that is a terminal, otherwise on stdout if that is one, or None."""
    for fd in (2, 1):
        if os.isatty(fd) and os.environ.get("TERM", "") != "dumb":
            from rich.console import Console

            return Console(stderr=fd == 2)
    return None


class Top(Watch):
    """Observes a job through the launcher, which calls the methods, and shows a table of all ranks.

    The table is on the terminal, or printed as plain lines every ``plain_s`` seconds if there is none.
    """

    def __init__(
        self,
        job: WatchedJob,
        terminal: Callable[[], Any] = console_of_terminal,
        plain_s: float = PLAIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the table. ``terminal`` returns a console of rich or None. ``clock`` returns monotonic seconds."""
        self._clock = clock
        self._heard_s: dict[int, float] = {}  # by rank: when its last pulse arrived
        self._hosts = job.hosts
        self._console = console = terminal()
        self._plain_s = plain_s
        self._lock = threading.Lock()
        self._pulses: dict[int, deque[Pulse]] = {}
        self._err: Screen | None = None
        self._above: _Above | None = None
        self._live: Any = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._say: Callable[[str], None] = lambda text: None
        self._status: Callable[[], str] = lambda: ""
        if console is not None:
            from rich.live import Live

            self._live = Live(console=console, auto_refresh=False, transient=True)

    @classmethod
    def check(cls, settings: Settings) -> None:
        if settings.source("pulse_s") != "default" and not settings.number("pulse_s"):
            raise ValueError("--top needs the pulses that ranks send; --pulse-s must be above 0")

    def screens(self, screens: tuple[Screen, Screen]) -> tuple[Screen, Screen]:
        """Return the screens for the job's output, in place of ``screens`` (for stdout and stderr).

        If there is a live table and the output goes to a terminal, the returned screen writes above the table.
        """
        self._err = screens[1]
        if self._console is None:
            return screens
        self._above = _Above(self._console)
        above = Screen(self._above.write)
        out, err = (above if os.isatty(fd) else screen for fd, screen in zip((1, 2), screens))
        return out, err

    def open(self, say: Callable[[str], None]) -> str:
        """Remember ``say``, which prints a message of the launcher."""
        self._say = say
        return ""

    def begin(self, ranks: RunningRanks) -> None:
        """Start the thread that shows the table, with the present world of an elastic job below it."""
        self._status = ranks.status
        if self._live is not None:
            self._live.start()
        self._thread = threading.Thread(target=self._run, name="ddl-top", daemon=True)
        self._thread.start()

    def heard(self, rank: int, message: Observation) -> None:
        """Store the last pulses of each rank. The control server's thread calls this method."""
        report = report_in(message)
        if isinstance(report, Pulse):
            with self._lock:
                kept = self._pulses.setdefault(rank, deque(maxlen=_KEPT))
                if kept and _begins_anew(kept[-1], report):
                    kept.clear()
                kept.append(report)
                self._heard_s[rank] = self._clock()

    def drained(self) -> None:
        """Remove the live table, and print its last state as lines that remain on the screen."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._above is not None:
            self._above.close()
        if self._live is not None:
            self._live.stop()
        if self._pulses and self._console is not None:
            self._console.print(drawn(self.rows(), self._status()))
        elif self._pulses and self._err is not None:
            self._err.show("ddl", [(f"ddl run: {line}".encode(), b"\n") for line in self._lines()])

    def rows(self) -> list[RankFigures]:
        """Return the rows of the table for the present moment."""
        with self._lock:
            pulses = {rank: tuple(known) for rank, known in self._pulses.items()}
            now_s = self._clock()
            unheard_s = {rank: now_s - at_s for rank, at_s in self._heard_s.items()}
        later = max(pulses, default=-1) + 1 - len(self._hosts)  # ranks that joined the running job
        return rows_of(pulses, [*self._hosts, *[UNKNOWN] * later], unheard_s)

    def _lines(self) -> list[str]:
        status = self._status()
        return [*table_lines(self.rows()), *([status] if status else [])]

    def _run(self) -> None:
        while not self._over.wait(LIVE_S if self._live is not None else self._plain_s):
            if self._live is not None:
                self._live.update(drawn(self.rows(), self._status()), refresh=True)
            elif self._pulses:
                self._say("\nddl run: ".join(self._lines()))


def _begins_anew(last: Pulse, new: Pulse) -> bool:
    """Return whether the totals in ``new`` began again at 0 since ``last``.

    The totals begin again if the rank has another process, or if the ranks of an elastic job have changed.
    """
    return new.steps < last.steps or new.at_s < last.at_s or new.cpu_s < last.cpu_s or new.user_s < last.user_s


def drawn(rows: Sequence[RankFigures], status: str = "") -> Table:
    """Return the table as a ``rich.table.Table``, with the text ``status`` below the table.

    Ranks that differ from the other ranks are red. At most 40 ranks are shown; the ranks that differ come first.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    kept = known_columns(rows)
    for name in (HEADINGS[i] for i in kept):
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    uneven_first = sorted(rows, key=lambda row: (not row.marks, row.rank))[:_MOST_ROWS]
    for row in sorted(uneven_first, key=lambda row: row.rank):
        words = cells(row)
        table.add_row(*(Text(words[i]) for i in kept), style="bold red" if row.marks else "")
    if len(rows) > _MOST_ROWS:
        status = "\n".join(filter(None, [f"{_MOST_ROWS} of {len(rows)} ranks, the uneven ones among them", status]))
    table.caption = status or None
    return table


class _Above:
    """Writes whole lines above the live table. An incomplete line is stored until the rest of the line is written."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._begun = b""

    def write(self, data: bytes) -> None:
        *lines, self._begun = (self._begun + data).split(b"\n")
        if lines:
            self._console.out("\n".join(line.decode("utf-8", "replace") for line in lines), highlight=False)

    def close(self) -> None:
        """Write the incomplete line, too, because no more output will follow."""
        if self._begun:
            self.write(b"\n")
