"""How a run ended follows from how its ranks ended."""

from __future__ import annotations

import pytest

from ddlcore.launch.ranks.exit_status import STOPPED, End, exit_code, first_failure, summary
from ddlcore.text.ranks import ranks_text

OK, LATE_OK = End(0, 0, 1.0), End(1, 0, 9.0)


@pytest.mark.parametrize(
    ("ends", "raised", "rank", "code"),
    [
        pytest.param([OK, LATE_OK], [], None, 0, id="all well"),
        pytest.param([OK, End(1, 3, 2.0)], [], 1, 3, id="one failed"),
        pytest.param([End(0, 1, 3.0), End(1, -9, 2.0)], [], 1, 137, id="first in time"),
        pytest.param([End(0, 1, 2.0), End(1, 7, 2.5)], [1], 1, 7, id="said first that it raised"),
        pytest.param([End(0, 1, 2.0), End(1, 0, 2.5)], [1], 0, 1, id="raised, and yet left with 0"),
        pytest.param([End(0, -15, 5.0, stopped=True), End(1, 4, 2.0)], [], 1, 4, id="stopped ones are no cause"),
        pytest.param(
            [End(0, 1, 2.0), End(1, -9, 2.5, silent="rank 1 is")], [0], 1, 137, id="silent: why others raised"
        ),
        pytest.param([End(0, 0, 5.0, stopped=True), End(1, -11, 2.0)], [], 1, 139, id="segmentation fault"),
    ],
)
def test_first_failure_and_exit_code(ends: list[End], raised: list[int], rank: int | None, code: int) -> None:
    """The exit code is that of the first rank that failed by itself."""
    first = first_failure(ends, raised)
    assert (first.rank if first else None) == rank
    assert exit_code(ends, raised) == code


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        pytest.param([OK, LATE_OK], STOPPED, id="all ended well"),
        pytest.param([End(0, 7, 1.0), End(1, 0, 1.0)], 7, id="a script failed after the stop"),
        pytest.param([OK, End(1, -9, 2.0)], 137, id="a rank was killed after the stop"),
        pytest.param([OK, End(1, -15, 9.0, stopped=True)], 1, id="the launcher had to end a rank"),
    ],
)
def test_a_stop_is_told_by_85_only_if_all_ranks_ended_well(ends: list[End], code: int) -> None:
    """Otherwise a checkpoint may be missing, and a batch script must not ask for another turn."""
    assert STOPPED == 85
    assert exit_code(ends, stopped=True) == code


def test_a_second_ctrl_c_is_130() -> None:
    """Ranks that were killed on request have not failed."""
    assert exit_code([End(0, -9, 1.0, stopped=True)], killed=True) == 130


def test_summary_names_rank_host_end_lines_and_the_others() -> None:
    """It is all a user needs to go on."""
    ends = [End(1, -9, 3.5), End(0, 1, 4.0), End(3, 1, 4.0), End(4, 1, 4.1), End(2, -15, 9.0, stopped=True)]
    text = summary(ends, ends[0], "node7", ["a", "b"], 2.5)
    assert text.splitlines() == [
        "rank 1 on node7 failed first: it was killed by signal 9 (SIGKILL) after 2.5 s",
        "  its last lines:",
        "  | a",
        "  | b",
        "  ranks 0, 3-4: exited with code 1",
        "  rank 2: was ended by the launcher",
    ]


def test_summary_says_when_a_host_was_lost() -> None:
    """The time does not follow the reason, which may contain a time of its own."""
    lost = End(1, 255, 3.5, lost="its host node7 is gone (no message from it for 3 s)")
    text = summary([lost], lost, "node7", ["a"], 10.0)
    assert text.splitlines()[0] == (
        "rank 1 on node7 failed first: it was lost after 10.0 s: its host node7 is gone (no message from it for 3 s)"
    )


def test_summary_says_of_a_silent_rank_why_it_was_killed() -> None:
    """By whom, and what is known of it."""
    silent = End(1, -9, 3.5, silent="rank 1 does not answer at all: …")
    text = summary([silent, End(0, 1, 4.0)], silent, "node7", [], 2.5)
    assert "it was killed by signal 9 (SIGKILL) by the launcher after 2.5 s: rank 1 does not answer at all: …" in text


@pytest.mark.parametrize(
    ("wrote", "lost", "text"),
    [
        (True, "", []),  # a progress bar, or only empty lines
        (False, "", ["  it wrote nothing"]),
        (False, "its host is gone", ["  none of its output has arrived"]),
    ],
)
def test_wrote_nothing_is_said_where_it_is_true(wrote: bool, lost: str, text: list[str]) -> None:
    """What a lost host has sent is not known."""
    end = End(0, 255, 3.5, lost=lost)
    assert summary([end], end, "node7", [], 2.0, wrote).splitlines()[1:] == text


def test_several_ranks_were() -> None:
    """One was."""
    ends = [End(0, 1, 1.0), *(End(rank, -9, 1.5, stopped=True) for rank in (1, 2)), End(3, -11, 1.6)]
    assert summary(ends, ends[0], "node7", ["a"], 2.0).splitlines()[3:] == [
        "  ranks 1-2: were ended by the launcher",
        "  rank 3: was killed by signal 11 (SIGSEGV)",
    ]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([1, 3], "ranks 1, 3"), ([0, 1], "ranks 0-1")],
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    """Runs of ranks are one range."""
    assert ranks_text(ranks) == text
