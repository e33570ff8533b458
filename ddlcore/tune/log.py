"""Write the samples of a search to a CSV file while the search runs, in a form like that of Horovod's log."""

from __future__ import annotations

import csv
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ddlcore.contracts.tuner import Value
from ddlcore.tune.session import Session, TimedSteps, Values

log = logging.getLogger("ddl")
_OURS = ("sample", "phase", "steps", "step_ms", "score")


class CsvLog:
    """Observes a search, and writes its samples to a CSV file. The search driver calls the methods.

    The last column, ``score``, is the number of bytes of a step divided by the step's duration in µs, as in Horovod. A
    higher score is better.
    """

    def __init__(self, path: str | Path) -> None:
        """Create the file, or empty it. Raises ValueError, with a message of one line, if it cannot be written."""
        self._path = Path(path)
        self._header: list[str] = []
        try:
            self._path.write_text("")
        except OSError as error:
            raise ValueError(f"--autotune-log {path}: {error.strerror}") from None

    def began(self, session: Session, nbytes: int) -> None:
        """Write a header for a new search, unless the last header has the same columns.

        A header has a column for each setting that is searched.
        """
        names = [knob.name for knob in session.knobs]
        header = ["sample", "phase", *names, "steps", "step_ms", "score"]
        if header != self._header:
            self._header = header
            self._append(header)

    def sampled(self, session: Session, sample: TimedSteps, nbytes: int) -> None:
        """Write a line for ``sample``. The values of the settings are written as in a config file."""
        ours = [len(sample.steps_s), f"{sample.cost_s * 1e3:.4f}", f"{nbytes / (sample.cost_s * 1e6):.4f}"]
        self._append([sample.number, sample.phase.value, *(sample.values[k.name] for k in session.knobs), *ours])

    def ended(self, session: Session, why: str) -> None:
        """Write the last line of the search, with the settings that are used from now on."""
        values = session.result if session.result is not None else session.default
        self._append(["", "given up" if why else "result", *(values[knob.name] for knob in session.knobs), "", "", ""])

    def _append(self, row: Sequence[object]) -> None:
        try:
            with open(self._path, "a", newline="") as file:
                _write(file, row)
        except OSError as error:  # a full disk must not end the training
            log.warning("autotune: %s cannot be written: %s", self._path, error.strerror)


def _write(file: TextIO, row: Sequence[object]) -> None:
    csv.writer(file, lineterminator="\n").writerow(row)


def read_log(path: str | Path, most: int = 3) -> list[Values]:
    """Return the fastest combinations of settings in the log of a search, the fastest first, at most ``most`` of them.

    Raises ValueError, with a message of one line, if the file cannot be read or is not the log of a search.
    """
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: {error}") from None
    if not rows or not {"phase", "step_ms"} <= set(rows[0]):
        raise ValueError(f"{path}: no line of it is a sample of a search, as --autotune-log writes them")
    best: dict[tuple[tuple[str, Value], ...], float] = {}
    for row in rows:
        try:
            step_ms = float(row["step_ms"] or "inf")
        except ValueError:
            continue  # another header
        # csv stores cells beyond the header's columns under the key None. A missing cell has the value None.
        values = tuple(
            (name, _parse(text))
            for name, text in row.items()
            if name is not None and name not in _OURS and text is not None
        )
        best[values] = min(step_ms, best.get(values, float("inf")))
    return [dict(values) for values in sorted(best, key=lambda one: best[one])[:most]]


def _parse(text: str) -> Value:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
