"""Show a progress line of a search for better settings, below all other lines on a terminal.

The line shows how many samples were measured and the best result so far.
"""

from __future__ import annotations

import io
import shutil
import sys
import threading
from collections.abc import Callable
from typing import Any

from ddlcore.launch.job.watch import Watch
from ddlcore.launch.output.screen import Screen
from ddlcore.tune.session import LOOKS, PAIRS, Phase, Session, TimedSteps

_ERASE = b"\r\x1b[2K"


class Bar(Watch):
    """A SearchWatcher (see tune/driver.py) that shows the progress line of a search. Any thread may call its methods.

    As a watch of the job, it shows the job's output above this line.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._write: Callable[[bytes], None] | None = None
        self._line = b""
        self._shown = False

    def screens(self, screens: tuple[Screen, Screen]) -> tuple[Screen, Screen]:
        """Return screens that show what ``screens`` would show; terminals show it above the progress line."""
        out, err = screens
        above = out.wrapped(self.beneath)
        return above, above if err is out else err.wrapped(self.beneath)

    def beneath(self, write: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Return a function that writes text above the progress line. It calls ``write`` to write to the terminal."""

        def above(data: bytes) -> None:
            with self._lock:
                if self._shown:
                    write(_ERASE)
                write(data)
                self._shown = bool(self._line) and data.endswith(b"\n")
                if self._shown:
                    write(self._line)

        with self._lock:
            self._write = write
        return above

    def began(self, session: Session, nbytes: int) -> None:
        self._show(session)

    def sampled(self, session: Session, sample: TimedSteps, nbytes: int) -> None:
        self._show(session)

    def ended(self, session: Session, why: str) -> None:
        self.clear()

    def say(self, text: str) -> None:
        """Show ``text``, one line, above the progress line. If ``beneath`` was not called, write it to stderr."""
        with self._lock:
            if self._write is None:
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()
                return
            erased, drawn = (_ERASE, self._line) if self._shown else (b"", b"")
            self._write(erased + f"{text}\n".encode() + drawn)

    def clear(self) -> None:
        """Remove the progress line from the terminal. The next sample shows the line again."""
        with self._lock:
            if self._shown and self._write is not None:
                self._write(_ERASE)
            self._line, self._shown = b"", False

    def _show(self, session: Session) -> None:
        line = _drawn(session).encode()
        with self._lock:
            self._line = line
            if self._write is not None:
                self._write((_ERASE if self._shown else b"\r") + line)
                self._shown = True


def progress(session: Session) -> tuple[int, int]:
    """Return the number of samples measured so far, and the total number of samples that is expected at present."""
    done = len(session.samples)
    if session.phase is Phase.DONE:
        return done, done
    if session.phase is Phase.SEARCH:
        return done, session.trials + LOOKS + 2 * PAIRS
    comparison = session.comparisons[-1]
    return done, done - len(comparison.before_s) - len(comparison.after_s) + 2 * comparison.pairs


def gain_text(session: Session) -> str:
    """Return words about the best result so far and its gain over the default settings.

    If there is no result yet, the words say that the default is being measured.
    """
    base, best = session.cost_s(session.default), session.cost_s(session.best)
    if base is None or best is None:
        return "measuring the default"
    return f"best {best * 1e3:.2f} ms a step, {(1 - best / base) * 100:+.1f} % over the default"


def _drawn(session: Session) -> str:
    """Return the progress line as text, with colours. The library rich draws it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    done, total = progress(session)
    sink = io.StringIO()
    width = shutil.get_terminal_size().columns
    console: Any = Console(file=sink, force_terminal=True, width=width - 1)
    bar = Progress(
        TextColumn("tune {task.description}", style="bold", markup=False),
        BarColumn(bar_width=max(8, min(24, width // 5))),
        MofNCompleteColumn(),
        TextColumn("samples · {task.fields[gain]}", markup=False),
        console=console,
    )
    bar.add_task(session.phase.value, total=total, completed=done, gain=gain_text(session))
    console.print(bar.get_renderable(), end="", no_wrap=True, overflow="ellipsis", crop=True)
    return sink.getvalue().splitlines()[0] if sink.getvalue() else ""
