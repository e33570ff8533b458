"""What follows from matrices between ranks and from clocks; and the measuring itself in a world of threads."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ddl_conform.threads import ThreadsTransport
from ddl_conform.world import World
from ddl_doctor.doctor import pairs as measuring
from ddl_doctor.doctor.drawn import print_report
from ddl_doctor.doctor.links import (
    Clock,
    MeasuredLinks,
    Pair,
    chosen_ranks,
    judge_clocks,
    judge_links,
    matrices,
    step_cost_s,
)
from ddl_doctor.doctor.pairs import measure_links
from ddl_doctor.doctor.report import DoctorReport, text_lines

from ddlcore.api.objects import allgather_object
from ddlcore.contracts.check import Matrix
from ddlcore.contracts.transport import Work
from ddlcore.errors import TransportError
from ddlcore.hooks import TransportProvider
from ddlcore.process.job import Job
from ddlcore.types import Buffer

HOSTS = {0: "node1", 1: "node1", 2: "node2", 3: "node3"}


def both(a: int, b: int, there: float, back: float) -> list[Pair]:
    return [Pair(a, b, 10.0, there), Pair(b, a, 12.0, back)]


def test_a_slow_link_and_what_it_costs() -> None:
    """100 Mbit/s one way is enough; ranks of one host are no link; the best transport and pair of ranks count."""
    links = MeasuredLinks(
        (0, 1, 2, 3),
        {
            "gloo": [*both(0, 1, 0.01, 0.01), *both(0, 2, 0.0125, 2.0), *both(1, 2, 0.004, 0.004), *both(0, 3, 2, 2)],
            "pigeon": both(0, 2, 0.001, 0.001),
        },
    )
    (found,) = judge_links(links, HOSTS, 100.0, {"node1": "eth0 100 Mbit/s, ib0"})
    assert found.what == "0.1 Gbit/s between node1 and node2 by gloo, below 10 Gbit/s"
    assert "100 MB of gradients spends 10.7 s on that link, 107 ms at 10 Gbit/s" in found.means
    assert "--network-interface (node1 has eth0 100 Mbit/s, ib0)" in found.fix


def test_ten_gigabits_are_enough() -> None:
    """And a single host has no link to judge."""
    assert list(judge_links(MeasuredLinks((0, 2), {"gloo": both(0, 2, 1.25, 1.3)}), HOSTS, 100.0)) == []
    assert list(judge_links(MeasuredLinks((0, 1), {"shm": both(0, 1, 0.1, 0.1)}), HOSTS, 100.0)) == []


def test_what_a_step_costs() -> None:
    """2 (n - 1) / n of the bytes, whatever the number of hosts."""
    assert step_cost_s(100e6, 2, 1.25) == pytest.approx(0.08)
    assert step_cost_s(100e6, 4, 1.25) == pytest.approx(0.12)


def test_a_transport_that_does_not_open() -> None:
    """Named with the pair and the reason."""
    links = MeasuredLinks((0, 2), {}, errors={"gloo": (0, 2, "DeadlineExceeded: no answer")})
    (found,) = judge_links(links, HOSTS, 100.0)
    assert found.what == "gloo does not work between rank 0 (node1) and rank 2 (node2): DeadlineExceeded: no answer"
    assert "--network-interface" in found.fix


def test_clocks() -> None:
    """A tenth of a second beyond doubt; a round trip that took longer proves nothing."""
    clocks = [Clock(2, -3.5, 0.001), Clock(3, 0.09, 0.001)]
    (found,) = judge_clocks(clocks, HOSTS, "node1")
    assert found.what == "the clock of node2 is 3.5 s behind that of node1 (± 1 ms)"
    assert "set-ntp true" in found.fix
    assert list(judge_clocks([Clock(2, 0.4, 0.35)], HOSTS, "node1")) == []


def test_who_is_measured() -> None:
    """Some of each host before more of any."""
    assert chosen_ranks((0, 0, 0, 1, 1, 2), most=4) == (0, 1, 3, 5)
    assert chosen_ranks((0, 0)) == (0, 1)
    assert len(chosen_ranks((0,) * 40 + (1,) * 40)) == 16


# --- measuring


class SlowTransport(ThreadsTransport):
    """As if a link of 1 MB/s and 1 ms stood between the two; and rank 0's way out took twice as long."""

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        time.sleep((0.001 + buffer.nbytes / 1e6) * (2 - root))
        return super().broadcast(buffer, root)


class BrokenTransport(ThreadsTransport):
    """Does not open."""

    def open(self, context: Any) -> None:
        raise TransportError("no way")


def measured(monkeypatch: pytest.MonkeyPatch, *kinds: type[ThreadsTransport]) -> list[MeasuredLinks]:
    """Among three ranks on two hosts."""
    made = {kind.__name__: kind for kind in kinds}
    monkeypatch.setattr(measuring, "build_transport", lambda registry, route: made[route.provider.name]())
    monkeypatch.setattr(measuring, "_FIRST_BYTES", 1 << 12)
    monkeypatch.setattr(measuring, "_COPY_S", 0.05)
    providers = [TransportProvider(name, "nowhere:Nothing", in_process=True) for name in made]

    def body(rank: int, job: Job) -> MeasuredLinks:
        return measure_links(job, providers, (0, 1, 2), partial(allgather_object, job=job))

    with World(3, hosts=(0, 0, 1)) as world:
        return world.run(body, last=True)


@pytest.mark.alone
def test_pairs_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair both ways, at the speed that the transport has; every rank knows all of it."""
    everyone = measured(monkeypatch, SlowTransport)
    assert everyone[0] == everyone[1] == everyone[2]
    links = everyone[0]
    found = {(pair.a, pair.b): pair for pair in links.pairs["SlowTransport"]}
    assert set(found) == {(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)}
    for pair in found.values():
        assert pair.latency_us is not None and 1400 < pair.latency_us < 60000  # (2 + 1) ms / 2
        assert pair.gbytes_per_s is not None
    slow, quick = found[0, 1].gbytes_per_s, found[1, 0].gbytes_per_s
    assert slow is not None and quick is not None and quick > 1.3 * slow
    assert 0.00004 < slow < 0.0006
    (clock,) = links.clocks
    assert clock.rank == 2 and abs(clock.offset_s) <= clock.error_s < 2.0


def test_a_broken_transport_spoils_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told between whom it broke, and the next is measured."""
    links = measured(monkeypatch, BrokenTransport, SlowTransport)[1]
    assert links.errors == {"BrokenTransport": (0, 1, "TransportError: no way")}
    assert len(links.pairs["SlowTransport"]) == 6


# --- showing


def report() -> DoctorReport:
    links = MeasuredLinks((0, 2, 3), {"gloo": [*both(0, 2, 0.0125, 0.012), *both(0, 3, 3.5, 3.25)]})
    made = DoctorReport("ddl doctor: 3 ranks on 3 hosts")
    made.add("links", judge_links(links, HOSTS, 100.0), "gloo 2 pairs", matrices(links))
    made.left_out("gpu-links", "no GPU")
    return made


def test_as_text() -> None:
    """Aligned, a dash where nothing was measured, and no line longer than a screen."""
    lines = text_lines(report())
    assert "  0      –   10.0   10.0" in lines and "  2   12.0      –      –" in lines
    assert max(map(len, lines)) <= 110
    assert any(line.startswith("   fix:   ") for line in lines)
    assert lines[-1] == "1 finding"


def test_on_a_terminal() -> None:
    """The same by rich, in colours."""
    from rich.console import Console

    console = Console(force_terminal=True, width=100, color_system="standard")
    with console.capture() as captured:
        print_report(report(), console)
    text = captured.get()
    assert "\x1b[" in text and "gloo: latency between ranks (µs" in text and "1 finding" in text


def test_heat_maps(tmp_path: Path) -> None:
    """A file comes out, of many rows and of none that was measured too."""
    pytest.importorskip("matplotlib", reason="matplotlib draws the heat maps")
    from ddl_doctor.doctor.heatmap import draw

    names = tuple(map(str, range(32)))
    large = Matrix(
        "large", "us", names, tuple(tuple(None if a == b else a + b + 1.0 for b in range(32)) for a in range(32))
    )
    yes_no = Matrix("peers", "Y/N", ("0", "1"), ((None, 1.0), (0.0, None)))
    nothing = Matrix("nothing", "GB/s", ("0", "1"), ((None, None), (None, None)))
    path = tmp_path / "maps.svg"
    draw(path, [*report().matrices, large, yes_no, nothing], "a title")
    assert "</svg>" in path.read_text()


def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *matrices: Matrix) -> Any:
    """Return the figure that is drawn of these matrices."""
    pytest.importorskip("matplotlib", reason="matplotlib draws the heat maps")
    from ddl_doctor.doctor.heatmap import draw
    from matplotlib.figure import Figure

    kept: list[Figure] = []
    save = Figure.savefig

    def savefig(figure: Figure, *given: Any, **more: Any) -> None:
        save(figure, *given, **more)  # before anything is read: only a layout that was drawn has labels
        kept.append(figure)

    monkeypatch.setattr(Figure, "savefig", savefig)
    draw(tmp_path / "maps.png", matrices, "a $title$")
    return kept[0]


def of_hosts(count: int, hosts: int, within: float, between: float, unit: str = "us") -> Matrix:
    """Return a matrix of so many ranks in blocks on so many hosts."""
    names = tuple(f"node{rank * hosts // count}" for rank in range(count))
    values = tuple(
        tuple(None if a == b else within if names[a] == names[b] else between for b in range(count))
        for a in range(count)
    )
    return Matrix("gloo: latency between ranks", unit, tuple(map(str, range(count))), values, names)


def test_two_ranks_are_bars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two links that differ by a factor of 25 have bars of these lengths, names with hosts, a unit and several ticks."""
    matrix = Matrix("shm", "us", ("0", "1"), ((None, 2.0), (50.0, None)), ("node0", "node1"))
    (panel,) = drawn(monkeypatch, tmp_path, matrix).axes
    assert [bar.get_width() for bar in panel.patches] == [2.0, 50.0]
    assert [label.get_text() for label in panel.get_yticklabels()] == [
        "rank 0 on node0\n→ rank 1 on node1",
        "rank 1 on node1\n→ rank 0 on node0",
    ]
    assert panel.get_xlabel() == "latency (µs), less is better"
    low, high = panel.get_xlim()
    assert len([tick for tick in panel.get_xticks() if low <= tick <= high]) >= 3
    assert {"2.00", "50.0"} <= {text.get_text() for text in panel.texts}


def test_a_heat_map_names_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Outside of the numbers of the ranks; its scale has several labels, even if all links are nearly equal."""
    panel, bar = drawn(monkeypatch, tmp_path, of_hosts(6, 3, 70.0, 75.0)).axes
    assert [label.get_text() for label in panel.get_xticklabels(minor=True)] == ["node0", "node1", "node2"]
    assert [label.get_text() for label in panel.get_yticklabels(minor=True)] == ["node0", "node1", "node2"]
    assert [label.get_text() for label in panel.get_xticklabels()] == list("012345")
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("to rank", "from rank")
    assert bar.get_ylabel() == "latency (µs), less is better"
    low, high = bar.get_ylim()
    assert len([tick for tick in bar.get_yticks() if low <= tick <= high]) >= 3


@pytest.mark.parametrize("unit", ["us", "GB/s"])
def test_equally_good_links_are_light(unit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only a link that is far worse than the best is dark: noise of a tenth is no reason to look worried."""
    from ddl_doctor.doctor.heatmap import colour_range

    panel, _ = drawn(monkeypatch, tmp_path, of_hosts(4, 2, 10.0, 11.0, unit)).axes
    (image,) = panel.images
    shades = [sum(image.cmap(image.norm(value))[:3]) / 3 for value in (10.0, 11.0)]
    assert min(shades) > 0.8
    worst = 500.0 if unit == "us" else 0.2
    low, high = colour_range([10.0, 11.0, worst], small_is_good=unit == "us")
    assert worst in (low, high)


def test_hosts_stand_in_the_rows_of_a_table() -> None:
    """If there are several; and every member needs one."""
    from ddl_doctor.doctor.report import matrix_lines

    lines = matrix_lines(of_hosts(4, 2, 1.0, 50.0))
    assert lines[1:3] == ["              0      1      2      3", "0  node0      –   1.00   50.0   50.0"]
    assert "node" not in "".join(matrix_lines(of_hosts(2, 1, 1.0, 1.0)))
    with pytest.raises(ValueError, match="2 names need 2 hosts"):
        Matrix("x", "us", ("0", "1"), ((None, 1.0), (1.0, None)), ("a",))
