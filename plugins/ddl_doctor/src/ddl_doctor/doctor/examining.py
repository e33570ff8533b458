"""Examine hosts in three steps.

First find the hosts on which no rank can run, then run the checks on the remaining hosts, then measure the links.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ddl_doctor.doctor.links import MeasuredLinks, judge_clocks, judge_links, matrices
from ddl_doctor.doctor.looking import PATIENCE_S, load_checks, look, put_together, recorded_view
from ddl_doctor.doctor.outliers import judge_outliers, repeated_lines
from ddl_doctor.doctor.rank import RankAnswer, doctor_rank
from ddl_doctor.doctor.report import DoctorReport, judge
from ddl_doctor.doctor.subject import ExaminedJob, Question
from ddl_doctor.doctor.watching import watch_input
from ddlcore.contracts.check import Finding, Seen
from ddlcore.errors import RankFailed
from ddlcore.launch.job.function import run_placed
from ddlcore.launch.ranks.exit_status import NotStarted
from ddlcore.runtime.backend import AUTO, parse_backend
from ddlcore.text.installing import pip_install
from ddlcore.version import VERSION

STALL_S = 120.0  # twice the time limit for a pair of ranks: if other ranks wait longer for a rank, it hangs

Tell = Callable[[str], object]


def examine_recorded(root: str, subject: ExaminedJob, question: Question) -> DoctorReport:
    """Run the checks on a recorded host, with as many ranks as ``subject`` has, and return the report.

    ``root`` is the folder that contains the recording (copies of /proc and /sys). Nothing is measured.
    """
    checks, problems = load_checks(subject.registry)
    views = [recorded_view(root, subject.environ, rank, rank) for rank in range(subject.layout.size)]
    looks = [look(checks, view) for view in views]
    for one in looks:
        problems |= one.problems
    for name in ("versions", "tested", "known-bad"):  # the record does not say what is installed there
        checks.pop(name, None)
    report = DoctorReport(f"ddl doctor: {views[0].name}, as recorded in {root}, with {_ranks(subject.layout.size)}")
    judge(report, checks, put_together(checks, looks, lambda rank: views[rank].name), problems)
    return report


def examine(subject: ExaminedJob, question: Question, tell: Tell) -> DoctorReport:
    """Examine the live hosts of ``subject``, and return the report.

    ``question`` says what to measure. ``tell`` is called with a text about each activity that begins.
    """
    names = ", ".join(subject.layout.hosts)
    hosts = len(subject.layout.hosts)
    title = f"ddl doctor: {_ranks(subject.layout.size)} on {hosts} host{'' if hosts == 1 else 's'} ({names})"
    report = DoctorReport(title)
    tell("asking the hosts")
    told, left = _told(subject, question, report, tell)
    if left is None:
        return report
    checks, problems = load_checks(subject.registry)
    for one in told:
        problems |= {**one.checks, **one.looks.problems}
    seen = put_together(checks, [one.looks for one in told], left.host_of)
    judge(report, checks, seen, problems)
    _add_links(report, left, told, question, seen)
    if question.program:
        tell(f"watching {question.steps} steps of {' '.join(question.command)}")
        watch_input(left, question, report)
    return report


def _told(
    subject: ExaminedJob, question: Question, report: DoctorReport, tell: Tell
) -> tuple[list[RankAnswer], ExaminedJob | None]:
    """Run the ranks. Return the reports of the ranks, and ``subject`` without the hosts on which no rank can run.

    The second value is None if no host remains. A host on which no rank can run is added to ``report`` as a finding,
    and then the ranks are run again without this host.
    """
    wrong: list[Finding] = []
    left: ExaminedJob | None = subject
    told: list[RankAnswer] = []
    wanted = _transports_of(subject.settings.text("backend"))
    while left is not None:
        measures = question.links and left.layout.size > 1
        tell(
            f"looking at {', '.join(left.layout.hosts)}" + (", and measuring what is between ranks" if measures else "")
        )
        try:
            told = _run(left, measures, wanted)
            break
        except NotStarted as error:
            if not error.hosts:
                raise
            wrong += [
                Finding("hosts", problem, _meaning(problem), _fix(problem, host), host)
                for host, problems in error.hosts.items()
                for problem in problems
            ]
            left = left.without(list(error.hosts))
    report.add("hosts", wrong, f"{len(left.layout.hosts) if left else 0} of {len(subject.layout.hosts)} can take part")
    return told, left


def _run(subject: ExaminedJob, measures: bool, wanted: tuple[str, ...]) -> list[RankAnswer]:
    # A rank calls init only after its checks, and the checks of one rank may take much longer than those of another
    # rank. So init must have time to wait for the slowest rank's checks.
    settings = subject.settings_with(
        start_timeout_s=subject.settings.number("start_timeout_s") + 2 * PATIENCE_S,
        stall_shutdown_s=max(STALL_S, subject.settings.number("stall_shutdown_s")),
    )

    def started(with_links: bool) -> list[RankAnswer]:
        with contextlib.redirect_stdout(sys.stderr):  # what libraries print in the ranks does not belong to the report
            return run_placed(
                subject.placed,
                settings,
                subject.registry,
                subject.environ,
                (doctor_rank, (with_links, wanted), None),
                remarks=False,
            )

    try:
        return started(measures)
    except RankFailed as error:
        if not measures:
            raise
        told = started(False)  # a transport made a rank fail: report the checks without the measurements
        return [replace(one, error=str(error).partition("\n")[0]) for one in told]


def _transports_of(backend: str) -> tuple[str, ...]:
    """Return the names of the transports in ``backend``, the value of that setting; an empty tuple for "auto"."""
    wanted = parse_backend(backend)
    names = [name for choice in (wanted.default, *wanted.kinds.values()) for name in choice.names]
    return () if AUTO in names else tuple(dict.fromkeys(names))


def _meaning(problem: str) -> str:
    return "`ddl run` starts nothing anywhere while this host is among the hosts" + (
        ": ranks must speak the same protocol" if " there" in problem and " here" in problem else ""
    )


def _fix(problem: str, host: str) -> str:
    if re.search(r"ddlcore \S+ (is installed )?there", problem):
        return f"install ddlcore {VERSION} on {host}; or share one environment, at the same path, by a file system"
    if re.search(r"Python \S+ (runs )?there", problem):
        return f"put the same Python at the same path on {host}: one environment on a shared file system will do"
    if " there, " in problem:
        name, here = problem.split()[0], problem.split()[-2]
        install = pip_install(f"{name}=={here}", absolute=True)
        return f"on {host}: {install if here[0].isdecimal() else f'pip uninstall {name}'}"
    return f"see that `ssh {host} true` works without a question and that the job's directory is there, too"


def _add_links(
    report: DoctorReport,
    subject: ExaminedJob,
    told: Sequence[RankAnswer],
    question: Question,
    seen: Mapping[str, Sequence[Seen]],
) -> None:
    if not question.links or subject.layout.size < 2:
        report.left_out("links", "--no-links" if not question.links else "one rank has no pair")
        return
    links: MeasuredLinks | None = told[0].links
    errors = [f"rank {one.looks.rank}: {one.error}" for one in told if one.error]
    if links is None:
        finding = Finding(
            "links",
            f"the ranks could not meet: {errors[0] if errors else 'nothing was measured'}",
            "`ddl run` with these hosts and settings would fail in init()",
            "do what the line says; `ddl info` shows which transports are ready, and --backend chooses one",
        )
        report.add("links", [finding])
        return
    host_of = {rank: subject.host_of(rank) for rank in links.ranks}
    cards = {one.host: ", ".join(one.facts) for one in seen.get("network-cards", ())}
    words = ", ".join(
        f"{name} {len(pairs) // 2} pair{'s' if len(pairs) > 2 else ''}" for name, pairs in links.pairs.items()
    )
    if len(links.ranks) < subject.layout.size:
        words += f"; {len(links.ranks)} of {subject.layout.size} ranks"
    findings = [
        *judge_links(links, host_of, question.model_mb, cards),
        *judge_outliers(links, host_of, _cores(subject, told)),
    ]
    report.add("links", findings, words, matrices(links, host_of))
    report.notes += repeated_lines(links)
    if len(subject.layout.hosts) > 1:
        first = subject.host_of(links.ranks[0])
        worst = max((abs(clock.offset_s) for clock in links.clocks), default=0.0)
        report.add("clocks", judge_clocks(links.clocks, host_of, first), f"{worst * 1e3:.2g} ms apart at most")


def _cores(subject: ExaminedJob, told: Sequence[RankAnswer]) -> dict[str, int]:
    """Return, for each host, the number of cores that all ranks of the host together may use.

    A host is left out if its ranks do not know their cores.
    """
    usable: dict[str, set[int]] = {}
    for one in told:
        usable.setdefault(subject.host_of(one.looks.rank), set()).update(one.cores)
    return {host: len(cores) for host, cores in usable.items() if cores}


def _ranks(size: int) -> str:
    return f"{size} rank{'' if size == 1 else 's'}"
