"""Try each usable thing that plugins add, in separate processes, and report the results.

Each thing is tried with a tensor of three elements.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from ddlcore.commands.plugins.listing import Row
from ddlcore.hooks import TransportProvider
from ddlcore.launch.ranks.command import own_python

WORKS, FAILED = "works", "fails"
LIMIT_S = 60.0
_TRIAL = "from ddl_conform.quick.trial import main; main()"
_OURS = "ddlcore"  # its own plugins, except transports, are tried in one process, because they do not crash it


def tried(rows: Sequence[Row], told: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Try the provider of each row. Return the rows, in the same order, with the results as state and reason.

    ``told`` is called with each row before its provider is tried. If a provider cannot be tried on this machine, its
    row keeps the state, and the reason says why.
    """
    together = [row for row in rows if row.distribution == _OURS and not isinstance(row.provider, TransportProvider)]
    outcomes: dict[int, Row] = {}
    for group in [together, *([row] for row in rows if row not in together)]:
        for row in group:
            told(row)
        outcomes.update(zip(map(id, group), _outcomes(group)))
    return [outcomes[id(row)] for row in rows]


def _outcomes(group: Sequence[Row]) -> list[Row]:
    if not group:
        return []
    try:
        done = subprocess.run(
            _command(group),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path)},
        )
    except subprocess.TimeoutExpired:
        return [row.told(FAILED, f"its trial did not end within {LIMIT_S:g} s") for row in group]
    lines = [json.loads(line.rpartition("trial: ")[2]) for line in done.stdout.splitlines() if "trial: " in line]
    told = {(kind, name): (state, reason) for kind, name, state, reason in lines}
    return [_judged(row, told.get((row.kind, row.name)), done) for row in group]


def _judged(row: Row, told: tuple[str, str] | None, done: subprocess.CompletedProcess[str]) -> Row:
    if told is None or done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        last = words[-1] if words else "it wrote nothing"
        return row.told(FAILED, f"its trial ended with code {done.returncode}: {last}")
    state, reason = told
    return row.told(state, reason) if state else row.told(row.state, f"not tried: {reason}")


def _command(group: Sequence[Row]) -> list[str]:
    trial = own_python(_TRIAL, *(word for row in group for word in (row.kind, row.name)))
    provider = group[0].provider
    if not (isinstance(provider, TransportProvider) and provider.launcher):
        return trial
    start = own_python("from ddlcore.commands.cli import main; sys.exit(main())", "run", "-np", "2")
    return [*start, "--backend", provider.name, *trial]
