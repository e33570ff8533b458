"""Tracebacks on the screen: one for all ranks that wrote the same, one line for a rank that only lost a peer."""

from __future__ import annotations

import pytest

from ddlcore.launch.output.screen import LineSplitter, Piece
from ddlcore.launch.output.tracebacks import GATHER_S, LONGEST_S, QUIET_S, Tracebacks, error_of, in_short

PLAIN = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
ValueError: too long
and it goes on
"""
LOST = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
ddlcore.errors.PeerLost: rank 1 lost during 'allreduce.x'
"""
CHAINED = f"""{LOST}
During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 9, in save
    raise OSError("disk full")
OSError: disk full
"""
INTERRUPTED = """Traceback (most recent call last):
  File "/home/a/train.py", line 7, in <module>
    loader()
  File "/usr/lib/python3.11/threading.py", line 2, in wait
    lock.acquire()
KeyboardInterrupt
"""


def pieces(text: str) -> list[Piece]:
    return LineSplitter().feed(text.encode())


def shown(tracebacks: Tracebacks, now_s: float, over: bool = False) -> list[tuple[list[int], str]]:
    return [(ranks, "".join(f"{text.decode()}\n" for text, _ in held)) for ranks, held in tracebacks.due(now_s, over)]


def test_ranks_with_the_same_traceback_are_shown_once() -> None:
    """As soon as all have written it; each may write it in other pieces."""
    tracebacks = Tracebacks(3)
    assert tracebacks.take(2, pieces("before\n" + PLAIN), 0.0) == [(b"before", b"\n")]
    lines = LineSplitter()
    for part in (PLAIN[:50], PLAIN[50:51], PLAIN[51:]):
        assert tracebacks.take(0, lines.feed(part.encode()) + lines.rest(), 0.01) == []
    tracebacks.take(1, pieces(PLAIN), 0.02)
    assert shown(tracebacks, 0.1) == []  # they may not be complete
    assert shown(tracebacks, 0.02 + QUIET_S) == [([0, 1, 2], PLAIN)]
    assert tracebacks.patience_s(9.0) is None


def test_a_traceback_of_one_rank_waits_only_for_a_moment() -> None:
    """Other ranks may hang, and then write nothing."""
    tracebacks = Tracebacks(2)
    tracebacks.take(1, pieces(PLAIN), 0.0)
    assert tracebacks.patience_s(0.0) == pytest.approx(QUIET_S)
    assert shown(tracebacks, QUIET_S) == []
    assert tracebacks.patience_s(QUIET_S) == pytest.approx(GATHER_S)
    assert shown(tracebacks, QUIET_S + GATHER_S) == [([1], PLAIN)]


def test_what_follows_a_traceback_stays_behind_it() -> None:
    """And a rank that never stops writing is not held back for ever."""
    tracebacks = Tracebacks(2)
    tracebacks.take(0, pieces(PLAIN), 0.0)
    now_s = 0.0
    while now_s < LONGEST_S:
        now_s += QUIET_S / 2
        assert tracebacks.take(0, pieces("more\n"), now_s) == []
        assert shown(tracebacks, now_s) == []
    (((ranks, text),)) = shown(tracebacks, now_s + GATHER_S + 0.01)
    assert ranks == [0]
    assert text.startswith(PLAIN + "more\n")
    assert tracebacks.take(0, pieces("free\n"), now_s + 1) == [(b"free", b"\n")]


def test_different_tracebacks_stay_apart() -> None:
    """At the end, everything is shown."""
    tracebacks = Tracebacks(3)
    for rank, text in enumerate((PLAIN, PLAIN.replace("long", "short"), PLAIN)):
        tracebacks.take(rank, pieces(text), 0.0)
    assert shown(tracebacks, 0.0, over=True) == [([0, 2], PLAIN), ([1], PLAIN.replace("long", "short"))]


def test_a_lost_peer_is_one_line() -> None:
    """Unless the rank has an error of its own, or --verbose asks for all."""
    (line, _) = in_short(pieces(LOST))[0]
    assert line.startswith(b"ddlcore.errors.PeerLost: rank 1 lost during 'allreduce.x'")
    assert b"--verbose" in line
    for other in (CHAINED, PLAIN, LOST + "RuntimeError: in a thread\n", "Traceback (most recent call last):\n  File\n"):
        assert in_short(pieces(other)) == pieces(other)
    tracebacks = Tracebacks(1, verbose=True)
    tracebacks.take(0, pieces(LOST), 0.0)
    assert shown(tracebacks, 1.0, over=True) == [([0], LOST)]


def test_what_belongs_to_no_traceback_is_kept() -> None:
    """Also behind the one line of a lost peer."""
    assert [text for text, _ in in_short(pieces(LOST + "saved to last.pt\n"))][1:] == [b"saved to last.pt"]


def test_the_mark_of_a_framework_does_not_matter() -> None:
    """torch.distributed puts its rank before each line that is not empty; another number is no mark of this rank."""
    tracebacks = Tracebacks(2)
    for rank in (0, 1):
        marked = "".join(f"[rank{rank}]: {line}\n" if line else "\n" for line in CHAINED.splitlines())
        assert tracebacks.take(rank, pieces(marked), 0.0) == []
    assert shown(tracebacks, QUIET_S) == [([0, 1], CHAINED)]
    tracebacks.take(1, pieces("".join(f"[rank1]: {line}\n" for line in LOST.splitlines())), 1.0)
    (((_, line),)) = shown(tracebacks, 1.0, over=True)
    assert line.startswith("ddlcore.errors.PeerLost: rank 1 lost") and line.count("\n") == 1
    other = pieces(PLAIN.replace("Traceback", "[rank7]: Traceback"))
    assert tracebacks.take(0, other, 2.0) == other


def test_what_differs_after_a_traceback_is_each_ranks_own() -> None:
    """The common lines are shown once, before it."""
    tracebacks = Tracebacks(2)
    for rank in (0, 1):
        tracebacks.take(rank, pieces(f"{CHAINED}rank {rank} ends\n"), 0.0)
    assert shown(tracebacks, QUIET_S) == [([0, 1], CHAINED), ([0], "rank 0 ends\n"), ([1], "rank 1 ends\n")]


def test_what_a_rank_writes_while_its_traceback_waits_is_shown_after_it() -> None:
    """Its lines keep their order, a second traceback included that is complete on all ranks first."""
    tracebacks = Tracebacks(2)
    tracebacks.take(0, pieces(PLAIN), 0.0)
    assert shown(tracebacks, QUIET_S) == []
    assert tracebacks.take(0, pieces("more\n" + CHAINED), QUIET_S) == []
    tracebacks.take(1, pieces(CHAINED), QUIET_S)
    assert shown(tracebacks, 2 * QUIET_S) == [([0], PLAIN + "more\n"), ([0, 1], CHAINED)]


def test_tracebacks_that_follow_each_other_are_folded_each_for_itself() -> None:
    """A chain is one traceback. The order of a rank's tracebacks stays, also if another rank had the second one first."""
    tracebacks = Tracebacks(3)
    tracebacks.take(0, pieces(CHAINED + PLAIN), 0.0)
    tracebacks.take(1, pieces(CHAINED + LOST), 0.0)
    (first, second, (ranks, line)) = shown(tracebacks, 0.0, over=True)
    assert (first, second, ranks) == (([0, 1], CHAINED), ([0], PLAIN), [1])
    assert "PeerLost" in line and line.count("\n") == 1
    tracebacks = Tracebacks(3)
    tracebacks.take(1, pieces(PLAIN), 0.0)
    tracebacks.end(1, 0.0)
    tracebacks.take(0, pieces(CHAINED + PLAIN + CHAINED), 0.0)
    assert [ranks for ranks, _ in shown(tracebacks, 0.0, over=True)] == [[1], [0], [0], [0]]


def test_a_later_rank_refers_to_the_traceback_above() -> None:
    """If that is the same. Its exception is repeated, and what the rank wrote after it."""
    tracebacks = Tracebacks(4)
    for rank in (1, 2):
        tracebacks.take(rank, pieces(CHAINED), 0.0)
    assert shown(tracebacks, 0.0, over=True) == [([1, 2], CHAINED)]
    tracebacks.take(3, pieces(CHAINED + "bye\n"), 5.0)
    assert shown(tracebacks, 5.0, over=True) == [([3], "OSError: disk full  (the same traceback as rank 1's)\nbye\n")]
    other = CHAINED.replace("line 9", "line 10")
    tracebacks.take(0, pieces(other), 5.0)
    assert shown(tracebacks, 5.0, over=True) == [([0], other)]


def test_a_traceback_that_is_far_above_is_shown_again() -> None:
    """After a minute; and whenever one of its own ranks writes it again, since that is another event."""
    tracebacks = Tracebacks(3)
    for rank, now_s in ((0, 0.0), (1, 61.0), (1, 62.0)):
        tracebacks.take(rank, pieces(CHAINED), now_s)
        assert shown(tracebacks, now_s, over=True) == [([rank], CHAINED)]


def test_an_interrupt_says_what_the_script_was_doing() -> None:
    """Its innermost line that is not of a library."""
    (line, _) = in_short(pieces(INTERRUPTED))[0]
    assert line.startswith(b'KeyboardInterrupt in File "/home/a/train.py", line 7')


def test_the_summary_repeats_only_the_error() -> None:
    """With the lines that follow it; the traceback stands above."""
    assert error_of(PLAIN.splitlines()) == ["ValueError: too long", "and it goes on"]
    assert error_of(PLAIN.splitlines()[2:]) == ["ValueError: too long", "and it goes on"]
    assert error_of(CHAINED.splitlines()) == ["OSError: disk full"]
    assert error_of(["a", "b"]) == ["a", "b"]
