"""Describe the processes that a launch would start, for ``ddl run --dry-run``.

Opens no socket or file, contacts no host and creates no key.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ddlcore.launch.job.launcher import JobDescription
from ddlcore.launch.ranks.environment import (
    HostFacts,
    RankVariables,
    own_environments,
    setting_variables,
    thread_variables,
    usable_cores,
)
from ddlcore.text.columns import indented, table
from ddlcore.text.ranks import ranks_text
from ddlcore.types import Placement

_AT_START = "<made at the start>"


def describe(launch: JobDescription) -> list[str]:
    """Return lines of text that show the ranks of ``launch``, the environments of the ranks, and the commands.

    Some values are known only after the start. In their place is a description in angle brackets.
    """
    lines = ["ranks", *indented(table(_rank_rows(launch)))]
    lines += ["", "environment of every rank, over that of this shell", *indented(_shared(launch))]
    owns = _own_environments(launch)
    for rank, own in enumerate(owns):
        lines += ["", f"environment of rank {rank}", *indented(f"{name}={value}" for name, value in own.items())]
    lines += ["", "commands"]
    if launch.remote_plan is not None:
        for command in launch.remote_plan.commands():
            added = [f"{name}={shlex.quote(value)}" for name, value in command.environ.items()]
            lines += indented([" ".join([*added, shlex.join(command.argv)])])
            lines += [f"    its task, with the job's key: {_task(command.task)}"]
        if launch.remote_plan.local_ranks:
            ranks = ranks_text(launch.remote_plan.local_ranks)
            lines += indented([f"here, for {ranks}: {shlex.join(launch.command)}"])
        lines += indented([f"by each agent, for each of its ranks: {shlex.join(launch.command)}"])
    else:
        lines += indented([f"{launch.size} times: {shlex.join(launch.command)}"])
    return lines


def _rank_rows(launch: JobDescription) -> list[dict[str, str]]:
    layout = launch.layout
    rows = []
    for rank, host in enumerate(layout.ranks):
        placement = Placement(rank, layout.ranks)
        rows.append(
            {
                "rank": str(rank),
                "host": layout.hosts[host],
                "local rank": f"{placement.local_rank} of {placement.local_size}",
                "cross rank": f"{placement.cross_rank} of {placement.cross_size}",
            }
        )
    return rows


def _shared(launch: JobDescription) -> list[str]:
    layout = launch.layout
    variables = setting_variables(launch.settings)
    if layout.here >= 0:
        variables |= thread_variables(launch.environ, usable_cores(), layout.ranks.count(layout.here))
    variables |= {name: value for name, value in launch.environ.items() if name.startswith("DDL_")}
    return [f"{name}={value}" for name, value in sorted(variables.items())] or ["nothing"]


def _own_environments(launch: JobDescription) -> Sequence[dict[str, str]]:
    layout, reach = launch.layout, launch.remote_plan.reach.own if launch.remote_plan is not None else ""
    facts = []
    for index, name in enumerate(layout.hosts):
        address = reach if index == layout.here else f"<address of {name}>"
        ports = (f"<free port of {name}>",) * layout.ranks.count(index)
        facts.append(HostFacts(_AT_START, address, ports))
    port = launch.port or f"<free port of {layout.hosts[layout.ranks[0]]}>"
    settings = launch.settings
    return own_environments(layout.ranks, facts, port, RankVariables.of(settings), settings.whole("min_np") > 0)


def _task(way: str) -> str:
    return {
        "stdin": "by standard input",
        "environment": "by the environment",
        "public": "none; the agent makes keys of its own",
    }[way]
