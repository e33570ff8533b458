"""Who was silent for too long, and whose silence was only our own pause."""

from __future__ import annotations

from ddlcore.control.beats import Beats


def test_silence_is_told_once() -> None:
    """After ``silence_s`` without anything; who speaks in time is not."""
    beats: Beats[str] = Beats(3.0)
    beats.heard("quiet", 0.0)
    for second in range(6):
        beats.heard("there", float(second))
        assert beats.silent(float(second)) == (["quiet"] if second == 3 else [])


def test_a_pause_of_our_own_is_nobodys_silence() -> None:
    """This process was stopped, maybe with all others: they get their time anew, and no more than that."""
    beats: Beats[str] = Beats(3.0)
    beats.heard("other", 0.0)
    assert [beats.silent(second) for second in (0.0, 1.0, 2.0)] == [[], [], []]
    assert beats.silent(3600.0) == [], "nobody looked for an hour"
    assert beats.silent(3600.9) == []
    assert beats.silent(3601.8) == ["other"], "2 s before the pause and 1 s behind it"
