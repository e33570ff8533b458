"""Planted faults on recorded hosts: each is named with its fix, and the exit code is 1; a healthy host has none."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ddl_doctor.checks.gpus import GpuLinksCheck
from ddl_doctor.doctor.looking import look, put_together, recorded_view
from ddl_doctor.doctor.report import DoctorReport, judge

from ddlcore.commands.cli import main
from ddlcore.contracts.check import Check, Finding, HostView, Seen

RECORDED = Path(__file__).parent / "recorded"


def examine(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--root", str(root), "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


FAULTS = {  # host: (check, words of what, words of the fix)
    "iommu-on": [
        ("iommu", "an IOMMU is on (booted with intel_iommu=on), and translates for 4 GPUs", "intel_iommu=off")
    ],
    "islands": [
        ("gpu-links", "2 islands of GPUs (island A: GPUs 0, 1; island B: GPUs 2, 3)", "CUDA_VISIBLE_DEVICES=0,1")
    ],
    "one-gpu": [("gpu-sharing", "ranks 0 and 1 take the same GPU 0 (GeForce GTX 1080 Ti)", "-H one-gpu:1")],
    "container": [
        ("dev-shm", "/dev/shm holds 64 MiB", "--shm-size=8g"),
        ("limits", "a process may open 2048 files at most", "nofile 65536"),
        ("limits", "may lock 8 MiB of memory (memlock), and mlx5_0 reads", "memlock unlimited"),
    ],
    "healthy": [],
}


@pytest.mark.parametrize("host", FAULTS)
def test_a_recorded_host(capsys: pytest.CaptureFixture[str], host: str) -> None:
    """Nothing but what was planted."""
    code, report = examine(capsys, RECORDED / host, "-np", "2")
    found = report["findings"]
    assert [one["check"] for one in found] == [check for check, _, _ in FAULTS[host]]
    for one, (_, what, fix) in zip(found, FAULTS[host]):
        assert what in one["what"] and fix in one["fix"] and one["means"] and one["where"] == host
    assert code == (1 if FAULTS[host] else 0)


def test_the_matrices_of_islands(capsys: pytest.CaptureFixture[str]) -> None:
    """Peers as Y and N, latency and bandwidth with P2P on and off; and what leaving an island costs."""
    _, report = examine(capsys, RECORDED / "islands", "-np", "4")
    titles = {one["title"].partition(": ")[2]: one for one in report["matrices"]}
    assert list(titles) == [
        "GPU peers",
        "GPU latency, P2P on",
        "GPU latency, P2P off",
        "GPU bandwidth, P2P on",
        "GPU bandwidth, P2P off",
    ]
    assert titles["GPU peers"]["values"][0] == [None, 1.0, 0.0, 0.0]
    assert titles["GPU latency, P2P on"]["values"][2] == [12.39, 12.33, 1.28, 1.07]
    assert "11.8 µs instead of 1.02 µs" in report["findings"][0]["means"]
    assert main(["doctor", "--root", str(RECORDED / "islands")]) == 1
    text = capsys.readouterr().out
    assert "  0      –      Y      N      N\n" in text
    assert "  0   1.25   0.99   12.8   13.4\n" in text
    assert "\x1b" not in text


def test_amd_s_iommu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its own option; and one whose groups pass addresses through as they are stands in nobody's way."""
    host = tmp_path / "iommu-on"
    shutil.copytree(RECORDED / "iommu-on", host)
    for unit in ("dmar0", "dmar1"):
        (host / "sys/class/iommu" / unit).rename(host / "sys/class/iommu" / unit.replace("dmar", "ivhd"))
    _, report = examine(capsys, host, "-np", "2")
    assert "amd_iommu=off" in report["findings"][0]["fix"]
    for kind in host.glob("sys/kernel/iommu_groups/*/type"):
        kind.write_text("identity\n")
    assert examine(capsys, host, "-np", "2")[0] == 0


def test_a_check_that_raises_and_one_that_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on, and the report says that these did not look."""
    from ddl_doctor.checks import gpus, system

    def fail(*arguments: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(gpus.IommuCheck, "look", fail)
    monkeypatch.setattr(system.LimitsCheck, "judge", fail)
    code, report = examine(capsys, RECORDED / "one-gpu", "-np", "2")
    states = {one["check"]: (one["state"], one["words"]) for one in report["checks"]}
    assert states["iommu"] == ("not looked at", "RuntimeError: no luck")
    assert states["limits"] == ("not looked at", "it failed (RuntimeError: no luck)")
    assert code == 1 and states["gpu-sharing"][0] == "found"


def test_a_picture_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The report is shown; then one line says why there is none, and the exit code is that of wrong usage."""
    pytest.importorskip("matplotlib", reason="matplotlib draws the heat maps")
    path = tmp_path / "maps.png"
    path.mkdir()
    assert main(["doctor", "--root", str(RECORDED / "islands"), "--plot", str(path)]) == 2
    shown = capsys.readouterr()
    assert "2 islands of GPUs" in shown.out
    assert shown.err == f"ddl doctor: --plot {path}: Is a directory; choose another FILE\n"


def test_a_check_that_hangs() -> None:
    """It is named with its rank, and those behind it look."""
    over = threading.Event()

    class Hangs(GpuLinksCheck):
        def look(self, host: HostView) -> Any:
            assert over.wait(80)

    checks: dict[str, Check] = {"hangs": Hangs(), "gpu-links": GpuLinksCheck()}
    looks = look(checks, recorded_view(str(RECORDED / "healthy"), {}, 0, 0), patience_s=0.5)
    over.set()
    assert looks.problems == {"hangs": "rank 0: it did not end within 0.5 s"}
    assert list(looks.facts) == ["gpu-links"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--root", "nowhere"], "--root nowhere: there is no such directory"),
        (["--root", str(RECORDED / "healthy"), "-H", "a:1"], "takes no -H"),
        (["--root", str(RECORDED / "healthy"), "--", "true"], "takes no -H, no --hostfile and no command"),
        (["--model-mb", "0"], "--model-mb"),
        (["--plot", "x.doc"], "the name must end in one of"),
        (["--plot", "nowhere/x.png"], "there is no directory nowhere"),
        (["-np", "0"], "-np 0: at least one rank is needed"),
        (["-H", "a:1,a:1"], "a stands there twice"),
        (["--", "nowhere.py"], "nowhere.py: no such file"),
        (["--steps", "2", "--", "true"], "--steps"),
        (["--backend", "pigeon"], "no transport is called 'pigeon'"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    """One line, and exit code 2."""
    assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert words in err and out == ""
    assert len(err.splitlines()) == 1


def test_a_record_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Named, in one line."""
    for text in ("[1]", "{", '{"gpus": [{"index": 0}]}', '{"gpus": [], "peers": [[1]]}'):
        (tmp_path / "gpus.json").write_text(text)
        assert main(["doctor", "--root", str(tmp_path)]) == 2
        err = capsys.readouterr().err
        assert "gpus.json: " in err and len(err.splitlines()) == 1


class Sums(Check):
    """A plugin's, that completes the one on GPUs."""

    completes = "gpu-links"

    def look(self, host: HostView) -> Any:
        return {"latency_us": {"on": [[1.0] * 4] * 4}}

    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        raise AssertionError("it judges nothing")


def test_a_check_that_completes_another() -> None:
    """What it saw is with the other's facts, host by host; it has no line of its own."""
    checks: dict[str, Check] = {"gpu-links": GpuLinksCheck(), "sums": Sums()}
    looks = [look(checks, recorded_view(str(RECORDED / "iommu-on"), {}, rank, rank)) for rank in range(2)]
    seen = put_together(checks, looks, lambda rank: "node1")
    assert list(seen) == ["gpu-links"] and len(seen["gpu-links"]) == 1
    assert seen["gpu-links"][0].facts["latency_us"]["on"][3] == [1.0] * 4
    report = DoctorReport("")
    judge(report, checks, seen, {})
    assert [line.check for line in report.lines] == ["gpu-links"]
    assert "iommu" not in str(report.matrices) and len(report.matrices) == 2
