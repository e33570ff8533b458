"""Config files of horovodrun, which are YAML."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddl_horovod.command import horovodrun
from ddl_horovod.config_file import flags_in
from ddl_horovod.tables import read_config

from ddlcore.commands.cli import run_program
from ddlcore.commands.run import command as run_module
from ddlcore.launch.job.launcher import JobDescription

WHOLE = """
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 10
  hierarchical_allreduce: true
autotune:
  enabled: true
  log_file: 'log.csv'
  steps_per_sample: 20
timeline:
  filename: 'timeline.json'
  mark_cycles: true
stall_check:
  enabled: true
  warning_time_seconds: 120
  shutdown_time_seconds: 240
library_options:
  mpi_threads_disable: false
  gloo_timeout_seconds: 60
logging:
  level: INFO
  hide_timestamp: true
"""


def test_a_whole_file(tmp_path: Path) -> None:
    """A file with every section becomes these settings and variables."""
    (tmp_path / "c.yaml").write_text(WHOLE)
    answers = read_config(flags_in(str(tmp_path / "c.yaml")))
    assert answers.settings == {
        "backend": "gloo",
        "fusion_bytes": 32 << 20,
        "autotune": True,
        "autotune_log": "log.csv",
        "autotune_steps": 20,
        "timeline": "timeline.json",
        "timeline_mark_cycles": True,
        "stall_warning_s": 120.0,
        "stall_shutdown_s": 240.0,
        "open_timeout_s": 60.0,
        "log_level": "INFO",
    }
    named = [line.partition(":")[0] for line in answers.notes]
    assert named == ["--cycle-time-ms", "--hierarchical-allreduce", "--no-mpi-threads-disable", "--log-hide-timestamp"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("params: [1, 2]", "params must have lines of the form NAME: VALUE"),
        ("- 1", "the file must have lines"),
        ("a: b: c", "c.yaml: "),
        ("controller: nccl", "controller: nccl is none of gloo, mpi"),
        ("autotune:\n  enabled: soon", "autotune: enabled: 'soon' is neither true nor false"),
        ("params:\n  fusion_threshold_mb: much", "--fusion-threshold-mb much: must be a number"),
    ],
)
def test_bad_files(text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error is one line that names the file or the flag, and nothing is started."""
    (tmp_path / "c.yaml").write_text(text)
    assert run_program(horovodrun, "horovodrun", ["-np", "2", "--config-file", str(tmp_path / "c.yaml"), "true"]) == 2
    err = capsys.readouterr().err
    assert complaint in err and err.count("\n") == 1


def test_a_missing_file_and_unknown_keys(tmp_path: Path) -> None:
    """A missing file is an error. Unknown keys are named in a warning."""
    with pytest.raises(ValueError, match="No such file"):
        flags_in(str(tmp_path / "none.yaml"))
    (tmp_path / "c.yaml").write_text("params:\n  speed: 3\n  torus_allreduce:\n")
    assert read_config(flags_in(str(tmp_path / "c.yaml"))).notes == [
        "--speed: horovodrun has no such flag; that line of the config file is ignored"
    ]


def test_flags_count_more_than_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A flag counts more than the file, and the file more than variables."""
    seen: list[JobDescription] = []

    def note(launch: JobDescription) -> int:
        seen.append(launch)
        return 0

    monkeypatch.setattr(run_module, "run_job", note)
    monkeypatch.setattr(run_module, "check_route", lambda *_: None)
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "2")
    (tmp_path / "c.yml").write_text(WHOLE)
    words = [
        "-np",
        "2",
        "--config-file",
        str(tmp_path / "c.yml"),
        "--fusion-threshold-mb",
        "4",
        "--no-autotune",
        "true",
    ]
    assert run_program(horovodrun, "horovodrun", words) == 0
    settings = seen[0].settings
    assert (settings["fusion_bytes"], settings["stall_shutdown_s"], settings["autotune"]) == (4 << 20, 240.0, False)
