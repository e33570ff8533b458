"""A variable that resembles a setting but is none has no effect, and the user is told."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from ddlcore.config import NOT_SETTINGS, SETTINGS, Setting
from ddlcore.plug.settings import misspelt_variables, settings_of


def test_what_was_meant_is_told() -> None:
    """With the variable that has an effect."""
    assert misspelt_variables({"DDL_FUSION_BITES": "1", "DDL_STALL_WARNINGS_S": "2"}, SETTINGS) == [
        "DDL_FUSION_BITES is no setting and has no effect; did you mean DDL_FUSION_BYTES?",
        "DDL_STALL_WARNINGS_S is no setting and has no effect; did you mean DDL_STALL_WARNING_S?",
    ]


def test_what_is_right_or_somebody_elses_is_not() -> None:
    """Settings, their former names, what the launcher sets, settings of plugins that are not here, other names."""
    fine = [
        *(row.env for row in SETTINGS),
        *NOT_SETTINGS,
        "DDL_FIRST_BATCH_BYTES",
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
