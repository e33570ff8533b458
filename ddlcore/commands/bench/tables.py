"""Format results in columns whose widths are known before the first result. Prints nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ddlcore.commands.bench.plan import BenchPlan
from ddlcore.commands.bench.results import TRANSPORT, WHOLE, Row, interval_words, ratio
from ddlcore.text.numbers import UNKNOWN, exact_size

_RATIO = 21  # width, enough for 1234 [1234, 1234]


def ranks_and_hosts(ranks: int, hosts: int) -> str:
    """Return how many ranks there are in words, with the number of hosts if there are several."""
    return f"{ranks} ranks" + (f" on {hosts} hosts" if hosts > 1 else "")


def heading(operation: str, plan: BenchPlan, ranks: str, transport: str) -> list[str]:
    """Return the lines above the rows of one operation: a title and the names of the columns.

    ``ranks`` says how many ranks there are, such as "4 ranks on 2 hosts".
    """
    columns = [f"{'size':>8}"]
    for name in (transport, "ddl"):
        columns.append(f"{name + ' µs':>10} {'GB/s':>6}")
    for peer in plan.peers:
        columns.append(f"{peer + ' µs':>10}")
        columns += [f"{f'{peer}/{other}':<{_RATIO}}" for other in (transport, "ddl")]
    return ["", f"{operation}, {ranks}, {plan.dtype}", "  ".join(columns).rstrip()]


def line(row: Row, peers: Sequence[str]) -> str:
    """Return one row as text. Values that were not measured are dashes."""
    cells = [f"{exact_size(row.nbytes):>8}"]
    for name in (TRANSPORT, WHOLE):
        rate = f"{row.gbytes_per_s(name):6.2f}" if name in row.times else f"{UNKNOWN:>6}"
        cells.append(f"{_microseconds(row, name)} {rate}")
    for peer in peers:
        cells.append(_microseconds(row, peer))
        for other in (TRANSPORT, WHOLE):
            both = peer in row.times and other in row.times
            cells.append(f"{str(ratio(row, peer, other)) if both else UNKNOWN:<{_RATIO}}")
    return "  ".join(cells).rstrip()


def closing(rows: Sequence[Row], plan: BenchPlan, transport: str) -> list[str]:
    """Return lines that explain the columns and say what is missing from them."""
    lines = [
        "",
        f"{transport}: the open transport alone; ddl: the whole call, from array to array. Medians of {plan.rounds} "
        "rounds in alternation;",
        f"a ratio says how many times longer the peer takes, [{interval_words(plan.rounds)}].",
    ]
    shares = [row.replayed for row in rows]
    if not any(shares):
        lines.append("Every whole call was negotiated; the setting replay lets calls that repeat run from memory.")
    elif min(shares) < 1:
        lines.append(f"{sum(shares) / len(shares):.0%} of the whole calls ran from memory; the others were negotiated.")
    missing = sorted({(peer, row.operation) for row in rows for peer in plan.peers if peer not in row.times})
    lines += [f"{peer} has no {operation} of {plan.dtype}." for peer, operation in missing]
    return lines


def _microseconds(row: Row, name: str) -> str:
    return f"{row.median_s(name) * 1e6:10.1f}" if name in row.times else f"{UNKNOWN:>10}"
