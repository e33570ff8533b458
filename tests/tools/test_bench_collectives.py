"""Targets and verdicts of `make bench`, and how MPI's ranks become ddl's."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
from ddl_doctor.bench.plan import SIZES, parse_sizes
from ddl_doctor.bench.results import TRANSPORT, MeasuredRow, Ratio

from ddlcore.contracts.transport import Context
from ddlcore.types import Kind, Member
from tools.bench_collectives import PARTS, gloo_target, judged, judged_whole, mpi_target
from tools.bench_verdicts import Judged, machine_words, markdown, missed, put, table
from tools.memory_passes import CHUNK_BYTES, MemoryPasses
from tools.mpi_world import mpi_words

KIB, MIB = 1 << 10, 1 << 20


def row(nbytes: int, ours: float, **peers: float) -> MeasuredRow:
    return MeasuredRow(
        "allreduce", nbytes, {TRANSPORT: [ours] * 9, **{name: [value] * 9 for name, value in peers.items()}}
    )


def test_targets_by_size() -> None:
    """Of the sizes that are measured."""
    sizes = parse_sizes(SIZES)
    assert [gloo_target(nbytes) for nbytes in sizes] == [50, 50, 50, 25, 4, 4, 4, 4, 4]
    assert [mpi_target(nbytes) for nbytes in sizes] == [1, 1, 1, 1, 1, 1.3, 1.3, 1.3, 1.3]


@pytest.mark.parametrize(
    ("measured", "target", "at_least", "verdict"),
    [
        (Ratio(60, 55, 70), 50.0, True, "holds"),
        (Ratio(49, 40, 51), 50.0, True, "holds within its interval"),
        (Ratio(49, 40, 49.5), 50.0, True, "MISSES"),
        (Ratio(59, 50, 70), 60.0, False, "holds"),
        (Ratio(61, 50, 70), 60.0, False, "holds within its interval"),
        (Ratio(70, 61, 90), 60.0, False, "MISSES"),
        (Ratio(1, 1, 1), None, True, ""),
    ],
)
def test_verdicts(measured: Ratio, target: float | None, at_least: bool, verdict: str) -> None:
    """A row misses only where its whole interval does."""
    one = Judged("what", "4 B", "1 µs", "2 µs", measured, target, at_least=at_least)
    assert one.verdict == verdict
    assert missed([one]) == ([one] if verdict == "MISSES" else [])


def test_information_fails_nobody() -> None:
    """It says that it misses, and does not count."""
    one = Judged("what", "4 B", "1 µs", "2 µs", Ratio(1, 1, 1), 8.0, binding=False)
    assert one.verdict == "misses, for information"
    assert missed([one]) == []


def test_two_ranks_are_judged_against_both_peers() -> None:
    """One peer behind the other; the row for near cores only where shm is as fast as there."""
    rows = [
        row(4, 1e-6, gloo=1e-4, mpi=0.9e-6),
        row(MIB, 1e-4, gloo=6e-4, mpi=2e-4),
        row(4 * MIB, 1e-3, gloo=5e-3, mpi=2e-3),
    ]
    found = judged("two", rows)
    assert [(one.what, one.size, one.verdict) for one in found] == [
        ("shm against Gloo", "4 B", "holds"),
        ("shm against Gloo", "1 MiB", "holds"),
        ("shm against Gloo", "4 MiB", "holds"),
        ("… while the cores are near", "1 MiB", "misses, for information"),
        ("shm against MPI", "4 B", "MISSES"),
        ("shm against MPI", "1 MiB", "holds"),
        ("shm against MPI", "4 MiB", "holds"),
    ]


def test_the_other_parts() -> None:
    """Four ranks have one target throughout, MPI without threads none."""
    assert [one.target for one in judged("four", [row(4, 1.0, gloo=6.0), row(MIB, 1.0, gloo=4.0)])] == [5, 5]
    assert [one.target for one in judged("single", [row(4, 1.0, mpi=0.5)])] == [None]
    assert {part.ranks for part in PARTS.values()} == {2, 4}


def test_the_whole_call_is_judged_in_microseconds() -> None:
    """At most 60 back to back, at most 120 after idling."""
    back, idle, bare = judged_whole({"back": [50e-6] * 9, "idle": [130e-6] * 9, "bare": [70e-6] * 9})
    assert (back.target, back.verdict) == (60.0, "holds")
    assert (idle.target, idle.verdict) == (120.0, "MISSES")
    assert (bare.target, bare.verdict) == (None, "")
    _, idle, _ = judged_whole({"back": [50e-6] * 9, "idle": [130e-6] * 9, "bare": [100e-6] * 9})
    assert idle.verdict == "misses, at its bound"


def test_four_ranks_to_whom_memory_alone_leaves_little_room_are_at_their_bound() -> None:
    slow, bounded = (row(MIB, 1.0, gloo=4.0, passes=passes) for passes in (0.5, 0.7))
    verdicts = {one.measured.middle: one.verdict for one in judged("four", [slow]) if one.target}
    assert verdicts == {4.0: "MISSES"}
    verdicts = {one.measured.middle: one.verdict for one in judged("four", [bounded]) if one.target}
    assert verdicts == {4.0: "misses, at its bound"}


def test_the_passes_move_what_an_allreduce_moves() -> None:
    peer = MemoryPasses()
    peer.open(Context(0, tuple(Member(rank, 0) for rank in range(4)), None, None, {}, 1.0))  # type: ignore[arg-type]  # not used
    tensor = np.arange(CHUNK_BYTES // 4 + 8, dtype=np.float32)
    before = tensor.copy()
    peer.operation(Kind.ALLREDUCE, tensor, tensor)()
    for chunk, old in ((tensor[:-8], before[:-8]), (tensor[-8:], before[-8:])):
        own = chunk.size // 4
        assert (chunk[:own] == 1 + old[:own] + old[2 * own : 3 * own] + old[3 * own :]).all()
        assert (chunk[own:] == 1).all()  # what others would have left there


ROWS = [
    Judged("shm against Gloo", "4 B", "1.5 µs", "300.0 µs", Ratio(200, 190, 210), 50.0),
    Judged("the whole call", "64 MiB", "70.0 µs", "–", Ratio(70, 65, 80), 60.0, "µs", at_least=False),
]


def test_table_and_markdown_say_the_same() -> None:
    """Aligned for the screen, with bars for the documents."""
    lines = table(ROWS)
    assert lines[0].split() == ["what", "size", "ddl", "peer", "measured", "target", "verdict"]
    starts = {text.index(word) for text, word in zip(lines, ("target", "≥ 50 ×", "≤ 60 µs"))}
    assert len(starts) == 1
    cells = [[cell.strip() for cell in text.strip("|").split("|")] for text in markdown(ROWS)]
    assert cells[2] == ["shm against Gloo", "4 B", "1.5 µs", "300.0 µs", "200 [190, 210]", "≥ 50 ×", "holds"]
    assert {len(row) for row in cells} == {7}


def test_put_replaces_what_stands_between_the_marks(tmp_path: Path) -> None:
    """The document around it stays; a second time gives the same."""
    path = tmp_path / "doc.md"
    path.write_text("before\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nafter\n")
    for _ in range(2):
        put(path, ["| new |"])
        assert path.read_text() == ("before\n<!-- measured: begin -->\n\n| new |\n\n<!-- measured: end -->\nafter\n")
    other = tmp_path / "other.md"
    put(other, ["| new |"])
    assert other.read_text() == "| new |\n"


def test_mpiexec_gives_each_rank_its_environment() -> None:
    """One program a rank, with what differs from mpiexec's own environment and nothing else."""
    environments = [{"PATH": "/bin", "DDL_RANK": str(rank)} for rank in range(2)]
    assert mpi_words("mpiexec", ["python", "x.py"], {"PATH": "/bin"}, environments) == [
        *("mpiexec", "-n", "1", "-env", "DDL_RANK", "0", "python", "x.py"),
        *(":", "-n", "1", "-env", "DDL_RANK", "1", "python", "x.py"),
    ]


def test_the_machine_in_one_line() -> None:
    """Cores and versions; neither its name nor a path."""
    words = machine_words()
    assert "\n" not in words and socket.gethostname() not in words and "/" not in words
    assert f"numpy {np.__version__}" in words
