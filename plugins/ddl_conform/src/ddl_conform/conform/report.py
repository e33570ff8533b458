"""Makes the report that ``ddl conform`` prints about one run of a suite, as text or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ddl_conform.conform.watch import ConformRun
from ddl_conform.levels import BASIC, FAULT_TOLERANT, FULL, LevelResult, highest, level_of, reached

WIDTH = 118
OUTCOMES = ("passed", "failed", "not run", "skipped")


def succeeded(run: ConformRun) -> bool:
    """Return whether the run was successful.

    A run is successful if at least one test passed, all other tests passed or were skipped, and no method of the plugin
    is still to be written.
    """
    outcomes = {result.outcome for result in run.results}
    return not run.refused and "passed" in outcomes and outcomes <= {"passed", "skipped"} and not run.unwritten


def as_json(run: ConformRun, partial: bool) -> dict[str, Any]:
    """Return the whole report about ``run`` as a dict for JSON, with one entry for each test case.

    If ``partial`` is true, the user has selected only some tests, so the report gives no level.
    """
    level, why = reached(run.subject.kind, run.results)
    name, _, version = run.subject.origin.partition(" ")
    return {
        "name": run.subject.provider.name,
        "kind": run.subject.kind,
        "distribution": name,
        "version": version,
        "level": None if partial or run.refused else level,
        "highest": highest(run.subject.kind),
        "next": None if partial or run.refused else why,
        "ok": succeeded(run),
        "refused": run.refused,
        "over": run.subject.provider.suite_over,
        "missing": run.subject.missing,
        "unwritten": run.unwritten,
        "seconds": round(run.seconds, 2),
        "tests": [
            {
                "name": result.name,
                "level": level_of(run.subject.kind, result.test),
                "outcome": result.outcome,
                "reason": result.reason,
                "seconds": result.seconds,
                **({"detail": result.detail} if result.detail else {}),
                **({"unwritten": result.unwritten} if result.unwritten else {}),
            }
            for result in run.results
        ],
    }


def as_text(run: ConformRun, partial: bool) -> str:
    """Return the report about ``run`` as text.

    The report begins with a line for each standard test, level by level. After these lines come the failures and their
    reasons, the methods that are still to be written, and the level reached. If ``partial`` is true, the user has
    selected only some tests, so the report gives no level.
    """
    kind = run.subject.kind
    lines = [str(run.subject), *(f"  {line}" for line in _over(run))]
    if run.refused:
        return "\n".join([*lines, f"  nothing ran: {run.refused}"])
    for level in (BASIC, FULL, FAULT_TOLERANT):
        here = [result for result in run.results if level_of(kind, result.test) == level]
        if here:
            lines += ["", f"  {level}", *(f"    {line}" for line in _by_test(here))]
    failures = [result for result in run.results if result.outcome == "failed"]
    if failures:
        lines += ["", "  failed, and why", *(f"    {line}" for line in _failures(failures))]
    if run.unwritten:
        lines += ["", "  still to be written", *(f"    {line}" for line in run.unwritten)]
    return "\n".join([*lines, "", *(f"  {line}" for line in _end(run, partial))])


def _over(run: ConformRun) -> Iterator[str]:
    """Yield the lines about a suite that did not test the plugin itself on this machine.

    One line names the replacement for missing hardware or software that the suite used (``Provider.suite_over``). The
    other line says why the plugin itself cannot be used here. Each line is left out if it does not apply.
    """
    subject = run.subject
    if subject.provider.suite_over:
        yield f"its suite runs over {subject.provider.suite_over}"
    if subject.missing:
        yield f"{subject.provider.name} itself cannot be used here: {subject.missing}"


def _by_test(results: Sequence[LevelResult]) -> Iterator[str]:
    for test in dict.fromkeys(result.test for result in results):
        cases = [result for result in results if result.test == test]
        counts = _counts(cases)
        word = "FAILED" if counts["failed"] else next(o for o in ("not run", "passed", "skipped") if counts[o])
        text = f"{word:7}  {test}"
        if len(cases) > 1:
            text += "  " + ", ".join(f"{n} {o}" for o, n in counts.items() if n)
        reasons = list(dict.fromkeys(r.reason for r in cases if r.outcome in ("skipped", "not run")))
        yield text + (f": {_cut('; '.join(reasons))}" if reasons else "")


def _failures(failures: Sequence[LevelResult]) -> Iterator[str]:
    """Yield the lines about failures: for each reason, a line with the tests that failed, and a line with the reason.

    At most three tests are named for one reason.
    """
    by_reason: dict[str, list[str]] = {}
    for result in failures:
        key = f"{result.unwritten}() is still to be written" if result.unwritten else _cut(result.reason, 400)
        by_reason.setdefault(key, []).append(result.name)
    for reason, names in by_reason.items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        yield shown
        yield f"  {reason}"


def _end(run: ConformRun, partial: bool) -> Iterator[str]:
    counts = [(o, n) for o, n in _counts(run.results).items() if n or o != "not run"]
    yield f"{', '.join(f'{n} {o}' for o, n in counts)} in {run.seconds:.1f} s"
    if partial:
        yield "level: not judged, as not all tests were asked for"
        return
    level, why = reached(run.subject.kind, run.results)
    more = f"; to go higher: {_cut(why, 300)}" if why else ""
    top = "" if level == highest(run.subject.kind) or why else f" (the highest here is {highest(run.subject.kind)})"
    yield f"level: {level}{top}{more}"


def _counts(results: Sequence[LevelResult]) -> dict[str, int]:
    """Return the number of ``results`` for each outcome, in the order in which the report shows the outcomes."""
    return {outcome: sum(result.outcome == outcome for result in results) for outcome in OUTCOMES}


def _cut(text: str, width: int = WIDTH) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
