"""Format the results of ``ddl bench`` as a table. Column widths are fixed before the first result. Prints nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ddl_doctor.bench.plan import BenchPlan
from ddl_doctor.bench.results import TRANSPORT, WHOLE, MeasuredRow, interval_words, ratio
from ddl_doctor.sizes import exact_size
from ddlcore.text.numbers import UNKNOWN

_RATIO = 21  # width, enough for 1234 [1234, 1234]


def ranks_and_hosts(ranks: int, hosts: int) -> str:
    """Return a text such as "4 ranks on 2 hosts"; for one host, only "4 ranks"."""
    return f"{ranks} ranks" + (f" on {hosts} hosts" if hosts > 1 else "")


def heading(operation: str, plan: BenchPlan, ranks: str, transport: str) -> list[str]:
    """Return the lines above the rows of one operation: an empty line, a title, and the names of the columns.

    ``ranks`` is a text such as "4 ranks on 2 hosts", and ``transport`` is the name of the open transport.
    """
    columns = [f"{'size':>8}"]
    for name in (transport, "ddl"):
        columns.append(f"{name + ' µs':>10} {'GB/s':>6}")
    for peer in plan.peers:
        columns.append(f"{peer + ' µs':>10}")
        columns += [f"{f'{peer}/{other}':<{_RATIO}}" for other in (transport, "ddl")]
    return ["", f"{operation}, {ranks}, {plan.dtype}", "  ".join(columns).rstrip()]


def line(row: MeasuredRow, peers: Sequence[str]) -> str:
    """Return one row of the table as text, with the columns of ``peers``. A value that was not measured is a dash."""
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


def closing(rows: Sequence[MeasuredRow], plan: BenchPlan, transport: str) -> list[str]:
    """Return the lines below the table. They explain the columns, and list the peers that lack an operation.

    They also say which share of ddl's whole calls ran in replay, unless all of them did. ``transport`` is the name of
    the open transport.
    """
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


def _microseconds(row: MeasuredRow, name: str) -> str:
    return f"{row.median_s(name) * 1e6:10.1f}" if name in row.times else f"{UNKNOWN:>10}"
