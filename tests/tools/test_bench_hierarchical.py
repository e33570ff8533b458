"""What becomes of the times of `tools/bench_hierarchical.py`, and how its ranks meet."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from ddl_doctor.bench.results import MeasuredRow

from ddlcore.errors import DeadlineExceeded
from tools.bench_hierarchical import BF16, BOTH, FLAT, LEADER, PARTS, judged, main
from tools.crossing.rank import Contender, Spec
from tools.crossing.store import FileStore


def test_parts_have_what_their_targets_compare() -> None:
    """Each contender once, the one that is asked about first."""
    assert PARTS["two"].contenders == [BOTH, FLAT, LEADER, BF16]
    assert PARTS["rate"].contenders == [BOTH]


def test_verdicts() -> None:
    """Ratios round by round; what the links carried against what they can."""
    part = PARTS["two"]
    row = MeasuredRow(
        "allreduce", part.nbytes, {BOTH: [0.15] * 6, FLAT: [0.2] * 6, LEADER: [0.16] * 6, BF16: [0.12] * 6}
    )
    rows = judged(part, row, 1000.0)
    assert [one.measured.middle for one in rows] == pytest.approx([0.75, 0.8, 0.8])
    assert [one.verdict for one in rows] == ["holds", "", "MISSES"]
    part = PARTS["rate"]
    ideal_s = part.nbytes * 8 / 1e9  # of two hosts each sends as many bytes as the tensor has
    (used,) = judged(part, MeasuredRow("allreduce", part.nbytes, {BOTH: [ideal_s / 0.9] * 6}), 1000.0)
    assert used.measured.middle == pytest.approx(0.9)
    assert used.verdict == "holds"
    (used,) = judged(part, MeasuredRow("allreduce", part.nbytes, {BOTH: [ideal_s / 0.8] * 6}), 1000.0)
    assert used.verdict == "MISSES"


def test_what_cannot_be_measured_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line."""
    assert main(["--only", "two,seven"]) == 2
    assert "no part is called seven; there are four, two" in capsys.readouterr().err


def test_a_spec_comes_back() -> None:
    """The ranks read what was written for them."""
    contenders = {"a": Contender("shm+x", {"hierarchical_shares": 1}), "b": Contender("x", None, True)}
    spec = Spec((0, 1), ("10.0.0.1", "10.0.0.2"), (4, 8), contenders, 3, "/nowhere")
    assert Spec.from_json(spec.to_json()) == spec


def test_the_store_of_files(tmp_path: Path) -> None:
    """Values appear whole, are waited for, added up and forgotten by prefix."""
    store = FileStore(tmp_path)
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(store.get("a/b", 10.0)))
    waiting.start()
    store.set("a/b", b"value")
    waiting.join()
    assert got == [b"value"]
    assert [store.add("a/n", 2), store.add("a/n", 3)] == [2, 5]
    store.delete("a/")
    with pytest.raises(DeadlineExceeded, match="nobody has put a/b"):
        store.get("a/b", 0.01)
