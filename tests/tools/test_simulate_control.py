"""The simulated job goes through all its stretches, and a replayed step of it costs nothing."""

from __future__ import annotations

import re

import pytest

from ddlcore.messages.ranks import LaunchedRank
from tools.elastic.members import DEATH, HOST, Members, play, simulate_worlds
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


def test_the_worlds_of_an_elastic_job() -> None:
    """A rank of 64 dies and comes back. The messages grow with the members, not with their square."""
    size, victim = 64, 32
    members = Members(size)
    seen = []
    for _, cost in play(members, size):
        told = {place: [type(message).__name__ for message in messages] for place, messages in members.told.items()}
        seen.append((cost.up, cost.down, told, dict(members.worlds)))
        assert cost.cpu_s > 0 and cost.up_bytes > 0 and cost.down_bytes > 0
    everyone, survivors = set(range(size)), set(range(size)) - {victim}
    assert [(up, down) for up, down, *_ in seen[:6]] == [
        (size, size), (size, size),
        (size - 1, 2 * (size - 1)), (size - 1, size - 1),  # a survivor is told of the loss, and of the new world
        # CountCalls, AgreedCall and Farewell to the survivors, and the world to all
        (1 + 4 * (size - 1), 3 * (size - 1) + size), (size, size),
    ]  # fmt: skip
    for number, present in enumerate((everyone, survivors, everyone)):
        told, worlds = seen[2 * number][2:]
        assert told == {place: ["NextWorld"] for place in present}
        assert set(worlds) == present and len(set(worlds.values())) == 1
        world = worlds[LaunchedRank(0)]
        assert (world.generation, world.members) == (number + 1, tuple(sorted(present)))
        assert seen[2 * number + 1][2] == {place: ["Welcome"] for place in present}
    assert seen[2][3][LaunchedRank(0)].root == 1, "the lowest of those with the most steps"
    left = size - size // members.hosts
    others = size // members.hosts - 1  # on the lost host: they are told of the first one, in vain
    assert [(up, down) for up, down, *_ in seen[6:8]] == [(left, 2 * left + others), (left, left)]
    left -= size // members.hosts
    assert seen[8][:2] == (left, left) and {world.ballot for world in members.worlds.values()} == {(5, 2)}
    assert [re.sub(r"[0-9.]+ s", "T", text) for text in members.said[:2]] == [
        "world 2: rank 32 died (SIGKILL); 63 ranks go on; step 102 is computed again; they stood still for T",
        "world 3: rank 32 is back T after the loss; 64 ranks go on after step 200; they stood still for T",
    ]


def test_the_table_of_worlds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which targets are met."""
    monkeypatch.setattr("tools.elastic.members.LIMITS_S", {DEATH: 1e3, HOST: 1e3})
    monkeypatch.setattr("tools.elastic.members.MEMORY_BYTES", 1 << 50)
    assert simulate_worlds(32)
    shown = capsys.readouterr().out
    assert shown.count(": ok") == 3 and "MISSED" not in shown
    monkeypatch.setattr("tools.elastic.members.LIMITS_S", {DEATH: 1e3, HOST: 0.0})
    assert not simulate_worlds(32)
    assert capsys.readouterr().out.count("MISSED") == 1


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
