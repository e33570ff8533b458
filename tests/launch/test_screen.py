"""Lines of many streams share a screen: whole, prefixed, none lost."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlcore.launch.output.screen import LineSplitter, Screen, coloured

Pieces = list[tuple[bytes, bytes]]


def shown(events: list[tuple[int, Pieces]], *, is_terminal: bool = False, colour: bool = False) -> bytes:
    out = bytearray()
    screen = Screen(out.extend, is_terminal=is_terminal, colour=colour)
    for rank, pieces in events:
        screen.show(rank, pieces, screen.prefix(str(rank)))
    screen.end_line()
    return bytes(out)


@given(st.binary(max_size=60).map(lambda data: re.sub(rb"[^\r\n]", b"x", data, count=40)), st.lists(st.integers(0, 60)))
def test_cutting_does_not_depend_on_how_bytes_arrive(data: bytes, cuts: list[int]) -> None:
    r"""However a stream is chunked, also between \r and \n, its lines are the same, and no byte is lost."""
    at = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    lines, whole = LineSplitter(), LineSplitter()
    pieces = [piece for begin, end in pairwise(at) for piece in lines.feed(data[begin:end])]
    assert pieces + lines.rest() == whole.feed(data) + whole.rest()
    assert data.translate(None, b"\r\n").startswith(b"".join(text for text, _ in pieces))


def test_a_line_without_end_is_given_out_in_pieces() -> None:
    """Memory stays bounded."""
    lines = LineSplitter()
    assert lines.feed(b"x" * 100_000) == [(b"x" * 100_000, b"")]
    assert lines.feed(b"y\n") == [(b"y", b"\n")]


@pytest.mark.parametrize(
    ("events", "plain", "terminal"),
    [
        pytest.param([(0, [(b"a", b"\n")]), (1, [(b"b", b"\n")])], "[0] a\n[1] b\n", "[0] a\n[1] b\n", id="lines"),
        pytest.param([(0, [(b"a", b"")]), (0, [(b"b", b"\n")])], "[0] ab\n", "[0] ab\n", id="goes on"),
        pytest.param(
            [(0, [(b"a", b"")]), (1, [(b"b", b"\n")]), (0, [(b"c", b"\n")])],
            "[0] a\n[1] b\n[0] c\n",
            "[0] a\n[1] b\n[0] c\n",
            id="another in between",
        ),
        pytest.param(
            [(0, [(b"", b"\r"), (b"1%", b"")]), (0, [(b"", b"\r"), (b"2%", b"\n")])],
            "[0] 1%\n[0] 2%\n",
            "[0] 1%\r[0] 2%\n",
            id="bar",
        ),
        pytest.param(
            [(0, [(b"1%", b"\r")]), (1, [(b"b", b"\n")]), (0, [(b"2%", b"\r")])],
            "[0] 1%\n[1] b\n[0] 2%\n",
            "[0] 1%\r\n[1] b\n[0] 2%\r\n",
            id="bar and another",
        ),
        pytest.param([(0, [(b"", b"\n")])], "[0] \n", "[0] \n", id="empty line"),
        pytest.param([(0, [(b"no end", b"")])], "[0] no end\n", "[0] no end\n", id="no end"),
    ],
)
def test_screens(events: list[tuple[int, Pieces]], plain: str, terminal: str) -> None:
    """A line that has begun is ended before another rank's; bars overwrite themselves on a terminal only."""
    assert shown(events).decode() == plain
    assert shown(events, is_terminal=True).decode() == terminal


@given(st.lists(st.tuples(st.integers(0, 2), st.text("ab", max_size=3), st.sampled_from(["\n", ""])), max_size=30))
def test_nothing_is_mixed_or_lost(events: list[tuple[int, str, str]]) -> None:
    """Of any order of pieces, every shown line is of one rank, and each rank's text comes out whole."""
    out = shown([(rank, [(text.encode(), end.encode())]) for rank, text, end in events]).decode()
    got = dict.fromkeys(range(3), "")
    for line in out.splitlines():
        match = re.fullmatch(r"\[([012])\] ([ab]*)", line)
        assert match, line
        got[int(match[1])] += match[2]
    assert got == {rank: "".join(text for owner, text, _ in events if owner == rank) for rank in range(3)}


def test_bytes_that_are_no_text_pass_through() -> None:
    """The screen decodes nothing."""
    assert shown([(0, [(b"\xff\xfe", b"\n")])]) == b"[0] \xff\xfe\n"


def test_colour_is_for_terminals_that_want_it() -> None:
    """NO_COLOR, TERM=dumb and anything that is no terminal get none; ranks differ."""
    assert coloured({}, True)
    assert not coloured({}, False)
    assert not coloured({"NO_COLOR": "1"}, True)
    assert not coloured({"TERM": "dumb"}, True)
    assert shown([(1, [(b"a", b"\n")])], colour=True) == b"\x1b[33m[1]\x1b[0m a\n"


def test_a_reader_that_has_gone_ends_nothing() -> None:
    """After a broken pipe the screen is silent, and its users go on."""

    def broken(data: bytes) -> None:
        raise BrokenPipeError

    screen = Screen(broken)
    screen.show(0, [(b"a", b"\n")])
    screen.show(0, [(b"b", b"\n")])
    assert screen.broken
