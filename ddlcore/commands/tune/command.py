"""Implement ``ddl tune``: run a training until the search for its settings has ended, and write the result."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from ddlcore.commands.help import Group, examples, option
from ddlcore.commands.run.command import JobCommand, job_options, prepare, unread_variables
from ddlcore.commands.search_bar import Bar
from ddlcore.commands.search_lines import SearchLines
from ddlcore.commands.tune.report import write_report
from ddlcore.commands.tune.results import about_text, kept_beside, settings_found, values_of, write_config
from ddlcore.config.file import read_toml
from ddlcore.config.setting import GROUPS
from ddlcore.contracts.tuner import Value
from ddlcore.errors import DdlInternalError, PluginError
from ddlcore.launch.job.launcher import EndEarly, JobDescription, prepare_directory, run_job
from ddlcore.launch.job.watch import draws
from ddlcore.launch.ranks.exit_status import NotStarted
from ddlcore.process.search import build_search_driver, chosen_tuner
from ddlcore.tune.driver import SearchDriver, SearchWatcher
from ddlcore.tune.log import read_log
from ddlcore.tune.session import Phase, Session, TimedSteps, Values

_SEARCH = Group("Search", "how long it takes, and what it writes")


@click.command(
    cls=JobCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="-np N [OPTIONS]",
    epilog=examples(
        ("ddl tune -np 4 --out tuned.toml python train.py", "search, and write the best settings"),
        ("ddl run -np 4 --config tuned.toml python train.py", "train with them"),
    ),
)
@option(
    "--trials",
    type=click.IntRange(min=1),
    metavar="N",
    group=_SEARCH,
    brief="Samples to take. [default 20]",
    help="Samples to take. [default 20; DDL_AUTOTUNE_TRIALS]",
)
@option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("tuned.toml"),
    metavar="FILE",
    group=_SEARCH,
    brief="Config file for `ddl run --config`. [default tuned.toml]",
)
@option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    group=_SEARCH,
    brief="HTML report. [default: OUT with .html, and .png]",
)
@option(
    "--warm-start",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    group=_SEARCH,
    brief="Try first the settings of an earlier search.",
    help="Try first the settings of an earlier config file or --autotune-log.",
)
@option(
    "--runs",
    type=click.IntRange(min=1),
    metavar="N",
    group=_SEARCH,
    brief="Run the command at most N times.",
    help="Start the command again, at most N times in all, if it ends before the search. [default: no limit]",
)
@job_options(
    in_brief=set(GROUPS) - {"tuning", "faults"}
)  # the search is what the command is for, and its runs are short
@click.pass_context
def tune(
    ctx: click.Context,
    /,
    trials: int | None,
    out: Path,
    report: Path | None,
    warm_start: tuple[Path, ...],
    runs: int | None,
    **given: Any,
) -> None:
    """Find good settings for COMMAND, such as: ddl tune -np 4 --out tuned.toml python train.py

    The training runs as under `ddl run`. Meanwhile ddl changes its settings, and measures the steps with each, until
    the search ends. A setting is written only if it is faster by more than the noise of the measurements.
    """
    try:
        flags = {**given, "autotune": True}
        if trials is not None:
            flags["autotune_trials"] = trials
        launch = prepare(os.environ, **flags)
        report = report or (out.with_suffix(".html") if out.name else out)
        _check_writable(out, report)
        goal = _Goal()
        search = _search(launch, warm_start, goal)
        if launch.output_dir is not None:
            prepare_directory(launch.output_dir, launch.size)
    except (ValueError, PluginError, DdlInternalError, OSError) as error:
        raise click.ClickException(f"ddl tune: {error}") from None
    for note in unread_variables(os.environ):
        _say(note)
    try:
        code = _run(search, goal, runs)
    except (NotStarted, KeyboardInterrupt) as error:
        code = error.code if isinstance(error, NotStarted) else 130
        _say(str(error) or "interrupted")
        if search.driver.session is None:
            ctx.exit(code)
        # Still write the report: earlier runs may have measured something.
    hosts = len(set(launch.layout.ranks))
    about = about_text(given["command"], launch.size, hosts)
    try:
        ctx.exit(_conclude(search, out, report, about, code, goal.why))
    except ValueError as error:
        raise click.ClickException(f"ddl tune: {error}") from None


@dataclass(frozen=True)
class _Search:
    launch: JobDescription
    driver: SearchDriver
    bar: Bar | None


class _Goal:
    """Observes a search, and ends the ranks when the search has ended. The search driver calls the methods."""

    def __init__(self) -> None:
        self.end = EndEarly()
        self.why = ""  # the reason why the search was given up; "": it was not given up

    def began(self, session: Session, nbytes: int) -> None:
        pass

    def sampled(self, session: Session, sample: TimedSteps, nbytes: int) -> None:
        pass

    def ended(self, session: Session, why: str) -> None:
        self.why = why
        self.end()


def _say(text: str, bar: Bar | None = None) -> None:
    (bar or Bar()).say(f"ddl tune: {text}")


def _search(launch: JobDescription, warm_start: Sequence[Path], goal: _Goal) -> _Search:
    bar = Bar() if os.isatty(2) and not draws(launch.settings, launch.registry) else None
    watchers: list[SearchWatcher] = [
        SearchLines(partial(_say, bar=bar), samples=bar is None),
        *([bar] if bar is not None else []),
        goal,
    ]
    warm = [values for path in warm_start for values in _read_warm(path)]
    driver = build_search_driver(
        launch.settings, launch.registry, launch.layout.ranks, launch.launched_by, watchers, warm
    )
    name = chosen_tuner(launch.settings, launch.registry)
    if launch.settings["tuner"] == "auto" and name != "bayes":
        _say(f"tuner {name}; for the Gaussian process: {launch.registry.missing(launch.registry.tuners['bayes'])}")
    return _Search(launch, driver, bar)


def _read_warm(path: Path) -> list[Values]:
    if path.suffix == ".csv" or _is_log(path):
        return read_log(path)
    try:
        file: Mapping[str, object] = read_toml(path)
    except ValueError as error:
        raise ValueError(f"--warm-start: {error}") from None
    values: dict[str, Value] = values_of(file)
    return [values] if values else []


def _is_log(path: Path) -> bool:
    """Return whether the file at ``path`` is the log of a search, not a config file.

    The first line decides. The name does not tell, because the name of a log may end in .csv, .log or .txt.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError), open(path) as file:
        return file.readline().startswith("sample,phase,")
    return False


def _check_writable(out: Path, report: Path) -> None:
    """Raise ValueError if the config file ``out`` or the report cannot be written.

    This is checked before the search, because a search may take hours.
    """
    for flag, path in (("--out", out), ("--report", report)):
        if not path.parent.is_dir():
            raise ValueError(f"{flag} {path}: there is no directory {path.parent}")
        if path.is_dir():
            raise ValueError(f"{flag} {path}: it is a directory; name a file in it")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{flag} {path}: no permission to write it")
    if out in (report, report.with_suffix(".png")) or report.suffix == ".png":
        raise ValueError(f"--report {report}: --out {out} and the report with its .png need names of their own")


def _run(search: _Search, goal: _Goal, runs: int | None) -> int:
    """Run the command until the search ends, and return the exit code.

    If the command ends before the search, the command is run again, but at most ``runs`` times in all (None: no limit).
    It is not run again after a run that fails or measures nothing. The exit code is 0 if the search has ended the
    command, otherwise the exit code of the last run.
    """
    for number in range(1, runs + 1) if runs else itertools.count(1):
        before = len(search.driver.session.samples) if search.driver.session is not None else 0
        goal.end = EndEarly()
        watches = () if search.bar is None else (search.bar,)
        code = run_job(replace(search.launch, driver=search.driver, watches=watches, end=goal.end))
        search.driver.settle()
        if search.bar is not None:
            search.bar.clear()
        session = search.driver.session
        if goal.end.asked:
            return 0
        if code != 0 or session is None or session.phase is Phase.DONE or len(session.samples) == before:
            return code
        if number != runs:
            which = f"{number + 1} of {runs}" if runs else f"run {number + 1}"
            _say(f"the command has ended; still to do: {session.lacks()}. Running it again ({which})")
    return 0


def _conclude(search: _Search, out: Path, report: Path, about: str, code: int, why: str) -> int:
    """Write the config file ``out`` and the report, and return the exit code of ``ddl tune``.

    ``about`` is a line that says which command was tuned. ``code`` is the exit code of the last run. ``why`` is the
    reason why the search was given up, or "" if it was not given up. The exit code is 1 if the search is unfinished.
    """
    session, settings = search.driver.session, search.launch.settings
    base = {
        name: value
        for name, value in settings.items()
        if settings.source(name) == "file" and not name.startswith("autotune")
    }
    lacks = session.lacks() if session is not None and session.samples else "everything"
    if code or lacks:
        earlier = out
        out, report = kept_beside(out, report)
        if out != earlier:
            _say(f"{earlier} and the report beside it stay as they were")
    write_config(out, session, about, base)
    if session is None or not session.samples:
        needs = "a search needs a loop whose steps repeat and allreduce, at least about ten of them"
        _say(f"no step was measured: {why or needs}; {out} changes nothing")
        return code or 1
    pictures = write_report(report, session, about)
    if lacks:
        _say(f"there are {len(session.samples)} samples and a best so far; still to do: {lacks}")
        fix = "" if why else "let the training run longer, raise --runs, or lower --trials; "
        _say(f"{fix}nothing is certain yet, so no setting is changed")
    found = settings_found(session)
    what = f"{len(found)} setting{'s' if len(found) != 1 else ''}" if found else "no change of the default"
    _say(f"wrote {out} ({what}) and {', '.join(map(str, pictures))}")
    return code or (1 if lacks else 0)
