"""The simulated job goes through all its stretches, and a replayed step of it costs nothing."""

from __future__ import annotations

import pytest

from tools.simulate_control import Cost, World, program, simulate, verdict


def test_a_small_job_from_its_first_word_to_its_last() -> None:
    """Discovery asks for each tensor on each rank and runs it once; replay runs as much and says nothing."""
    ranks, tensors = 8, 30
    costs = list(program(World(ranks, tensors), steps=3))
    by_name: dict[str, list[Cost]] = {}
    for name, cost in costs:
        by_name.setdefault(name, []).append(cost)
    assert [name for name, _ in costs][:4] == ["init", *list(by_name)[1:4]]
    for name, own in by_name.items():
        for cost in own:
            if name == "replayed":
                assert cost == Cost(buckets=cost.buckets)
                assert cost.buckets >= 1
            else:
                assert cost.cpu_s > 0
                assert ranks <= cost.requests + ranks <= cost.up + ranks
                assert cost.down >= ranks
            assert verdict(name, cost) in ("", "ok")
    assert len(by_name["replayed"]) == 4
    assert by_name["init"][0].up == by_name["init"][0].down == ranks
    first = by_name["discovered, the first"][0]
    assert ranks <= first.requests == first.up <= 8 * 20 * ranks
    left = by_name["a rank leaves: freeze, drain"][0]
    assert (left.up, left.down) == (1 + ranks, 2 * ranks)


def test_a_cost_beyond_the_target_is_a_miss(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is one message in a replayed step."""
    assert verdict("discovered, the first", Cost(cpu_s=0.6)) == "MISSED"
    assert verdict("replayed", Cost(up=1, buckets=1)) == "MISSED"
    assert verdict("replayed", Cost()) == "MISSED", "a step in which nothing ran is no replay"
    assert verdict("replayed", Cost(buckets=1)) == "ok"
    assert simulate(4, 10, 1)
    assert "MISSED" not in capsys.readouterr().out
    monkeypatch.setattr("tools.simulate_control.TARGET_S", 0.0)
    assert not simulate(4, 10, 1)
    assert "MISSED" in capsys.readouterr().out
