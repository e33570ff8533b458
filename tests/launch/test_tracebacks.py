"""Tracebacks on the screen: one for all ranks that wrote the same, one line for a rank that only lost a peer."""

from __future__ import annotations

import pytest

from ddlcore.launch.output.screen import Lines, Piece
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
    return Lines().feed(text.encode())


def shown(tracebacks: Tracebacks, now_s: float, over: bool = False) -> list[tuple[list[int], str]]:
    return [(ranks, "".join(f"{text.decode()}\n" for text, _ in held)) for ranks, held in tracebacks.due(now_s, over)]


def test_ranks_with_the_same_traceback_are_shown_once() -> None:
    """As soon as all have written it; each may write it in other pieces."""
    tracebacks = Tracebacks(3)
    assert tracebacks.take(2, pieces("before\n" + PLAIN), 0.0) == [(b"before", b"\n")]
    lines = Lines()
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
