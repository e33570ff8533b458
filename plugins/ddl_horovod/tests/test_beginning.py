"""What a program meets that imports horovod: settings by variables, the original beside it, and packages that are missing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from ddl_horovod import original
from ddl_horovod.beginning import init
from ddl_horovod.variables import RANK_VARIABLES, rank_variables, with_ddl_variables

from ddlcore.api import current_job, is_initialized, shutdown


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is in no job before and after the test."""
    assert not is_initialized()
    yield
    shutdown()


def test_variables_are_settings_of_a_world_of_one(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    """HOROVOD_* variables count without a launcher, too. A variable of ddl's own counts more."""
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "4096")
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "7")
    monkeypatch.setenv("DDL_STALL_WARNING_S", "8")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    with pytest.warns(UserWarning, match="HOROVOD_CYCLE_TIME: "):
        init()
    settings = current_job().settings
    assert (settings["fusion_bytes"], settings["stall_warning_s"], settings["join_average"]) == (4096, 8.0, "size")
    init()  # has no effect, and warns of nothing


def test_a_malformed_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable, and nothing is started."""
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "much")
    with pytest.raises(ValueError, match="HOROVOD_FUSION_THRESHOLD much: must be a number"):
        init()
    assert not is_initialized()


def test_variables_that_tell_a_rank_its_place_are_not_mentioned() -> None:
    """horovodrun sets these variables, so a rank says nothing about them. A user may name further ones."""
    environ, notes = with_ddl_variables(dict.fromkeys(RANK_VARIABLES, "0"))
    assert notes == [] and environ.keys() == RANK_VARIABLES.keys()
    assert rank_variables({"DDL_RANK_VARIABLES": "MY_RANK=rank"}).startswith("MY_RANK=rank,HOROVOD_RANK=rank,")
    assert rank_variables({}).startswith("HOROVOD_RANK=rank,")


def test_the_original_beside_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ImportError has one line, which says what to do."""
    monkeypatch.setattr(original, "version", lambda name: {"horovod": "0.28.1"}[name])
    with pytest.raises(ImportError, match=r"horovod 0\.28\.1 and ddl-horovod .*pip uninstall") as caught:
        original.refuse_original()
    assert "\n" not in str(caught.value)
    with pytest.raises(ImportError, match="keep one"):
        importlib.reload(importlib.import_module("horovod"))


def test_a_framework_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ImportError has one line, with the command that installs the package."""
    monkeypatch.setattr(original, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"horovod\.torch needs ddl-torch: pip install"):
        original.needs("ddl_torch", "horovod.torch")


def test_one_framework_is_loaded_alone() -> None:
    """`import horovod` loads none, and `import horovod.torch` no other."""
    code = (
        "import sys, horovod; frameworks = {'torch', 'tensorflow', 'mxnet', 'keras'}\n"
        "assert not frameworks & set(sys.modules)\n"
        "import horovod.torch; assert frameworks & set(sys.modules) == {'torch'}\n"
        "import horovod.common.util as util; assert util.gpu_available('torch') in (False, True)\n"
        "assert not {'tensorflow', 'mxnet', 'keras'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
