"""A variable that resembles a setting but is none has no effect, and the user is told."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ddlcore.config.file import read_toml
from ddlcore.config.setting import Setting
from ddlcore.config.table import NOT_SETTINGS, SETTINGS
from ddlcore.plug.settings import misspelt_variables, settings_of

if TYPE_CHECKING:
    from tests.plug.conftest import Site


def test_what_was_meant_is_told() -> None:
    """With the variable that has an effect."""
    assert misspelt_variables({"DDL_FUSION_BITES": "1", "DDL_STALL_WARNINGS_S": "2"}, SETTINGS) == [
        "DDL_FUSION_BITES is no setting and has no effect; did you mean DDL_FUSION_BYTES?",
        "DDL_STALL_WARNINGS_S is no setting and has no effect; did you mean DDL_STALL_WARNING_S?",
    ]


def test_what_is_right_or_somebody_elses_is_not() -> None:
    """Settings, what the launcher sets, settings of plugins that are not here, other names."""
    fine = [
        *(row.env for row in SETTINGS),
        *NOT_SETTINGS,
        "DDL_NCCL_TIMEOUT_S",
        "DDL_MY_OWN",
        "DDLFUSION_BITES",
        "ddl_fusion_bites",
    ]
    assert misspelt_variables(dict.fromkeys(fine, "1"), SETTINGS) == []


def test_settings_of_a_loaded_plugin_count() -> None:
    """Then its variables can be misspelt, too."""
    rows = [*SETTINGS, Setting("nccl_timeout_s", float, 1.0, "")]
    assert misspelt_variables({"DDL_NCCL_TIMEOUT_S": "1"}, rows) == []
    (line,) = misspelt_variables({"DDL_NCCL_TIMEOUTS": "1"}, rows)
    assert "did you mean DDL_NCCL_TIMEOUT_S?" in line


def test_a_rank_does_not_repeat_what_its_launcher_has_told() -> None:
    """A process without a launcher of ddl is told itself."""
    with pytest.warns(UserWarning, match="did you mean DDL_FUSION_BYTES"):
        settings_of({"DDL_FUSION_BITES": "1"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings_of({"DDL_FUSION_BITES": "1", "DDL_JOB_FILE": "/x"})


def test_a_command_says_it_in_one_line() -> None:
    """Once, without a line of source."""
    done = subprocess.run(
        [sys.executable, "-m", "ddlcore", "run", "-np", "2", "true"],
        env={"DDL_FUSION_BITES": "1", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    told = [line for line in done.stderr.splitlines() if "BITES" in line]
    assert told == ["ddl: DDL_FUSION_BITES is no setting and has no effect; did you mean DDL_FUSION_BYTES?"]


def test_a_process_without_a_launcher_is_told_once() -> None:
    """Although init reads the settings twice."""
    done = subprocess.run(
        [sys.executable, "-c", "import ddlcore; ddlcore.init()"],
        env={"DDL_FUSION_BITES": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("did you mean DDL_FUSION_BYTES?") == 1


PLUGIN = """
    from ddlcore.config.setting import Setting

    @hookimpl
    def ddl_transports():
        return [TransportProvider("pigeon", "coop:Pigeon", settings=(Setting("pigeon_speed", int, 3, "speed"),))]
"""


@pytest.mark.parametrize("source", ["flags", "file"])
def test_a_setting_of_a_plugin_that_is_off(site: Site, source: str) -> None:
    """It is refused, with the plugin that is off; a flag was ignored once."""
    site.install("ddl-pigeon", PLUGIN)
    flags: dict[str, object] = {"pigeon_speed": 5} if source == "flags" else {}
    file: dict[str, object] = {"pigeon_speed": 5} if source == "file" else {}
    with pytest.raises(
        ValueError, match=r"no setting is called pigeon_speed; .*ddl-pigeon 1\.0 is off: DDL_PLUGINS_OFF"
    ):
        settings_of({}, {**flags, "plugins_off": "ddl-pigeon"}, file)
    assert settings_of({}, flags, file)[0]["pigeon_speed"] == 5


def test_a_wrong_value_in_a_file_has_its_line(tmp_path: Path) -> None:
    """As a wrong key has."""
    path = tmp_path / "job.toml"
    path.write_text('backend = "shm"\nfusion_bytes = "x"\n')
    with pytest.raises(ValueError, match=r"job\.toml:2: 'x' is not of type int"):
        settings_of({}, {}, read_toml(path))
