"""The plugin declares itself without compilers, and the core says how to install it where it is absent."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from ddl_shm.plugin import ddl_transports

from ddlcore.contracts.machine_code.code import MachineCode
from ddlcore.errors import PluginError, TransportError
from ddlcore.launch.ranks.warmup import machine_code_of
from ddlcore.plug.registry import Registry
from ddlcore.plug.settings import settings_of
from ddlcore.runtime.routes import choose_route
from ddlcore.text.installing import pip_install
from ddlcore.types import Member

linux = pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux")
ABSENT = {"DDL_PLUGINS_OFF": "ddl-shm"}


def test_introduction_imports_no_compiler() -> None:
    """Neither listing plugins nor naming the machine code does, which the launcher does in its own process."""
    code = (
        "import sys; from ddlcore.plug.finding import run_alone; import ddl_shm.machine_code; "
        "print(*(one.target for one in run_alone('ddl_shm.plugin').ddl_transports()), "
        "bool({'numba', 'llvmlite'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert shown.stdout.split() == [*(one.target for one in ddl_transports()), "False"]


@linux
def test_the_launcher_compiles_its_machine_code() -> None:
    """With that of the core, and only where the plugin is used."""
    core, *others = machine_code_of(settings_of({})[1])
    assert set(others) >= {"ddl_shm.machine_code:SHM"}
    assert [MachineCode.named(one).functions.keys() & {"ddl_reduce", "ddl_allreduce"} for one in (core, *others)] == [
        {"ddl_reduce"},
        {"ddl_allreduce"},
    ]
    assert machine_code_of(settings_of(ABSENT)[1]) == (core,)


@linux
@pytest.mark.parametrize(("environ", "name"), [({}, "shm+gloo"), (ABSENT, "gloo")])
def test_across_hosts_it_may_be_absent(environ: dict[str, str], name: str) -> None:
    """One transport then serves all ranks alike."""
    members = [Member(rank, host) for rank, host in enumerate((0, 0, 1))]
    assert choose_route("auto", members, settings_of(environ)[1]).name == name


def test_what_is_absent_says_how_to_install_it() -> None:
    """By the name of a transport, by a setting, and where nothing else serves; a plugin that is off is not to be installed."""
    with pytest.warns(UserWarning, match="DDL_SHM_CHUNK_BYTES has no effect here; ddl-shm.* is off"):
        _, registry = settings_of({**ABSENT, "DDL_SHM_CHUNK_BYTES": "65536"})
    for name in ("shm", "hierarchical"):
        with pytest.raises(PluginError, match=f"no transport is called '{name}'; ddl-shm.* is off: DDL_PLUGINS_OFF"):
            registry.transport(name)
        line = re.escape(pip_install("ddl-shm"))
        with pytest.raises(PluginError, match=f"no transport is called '{name}'; install it: {line}$"):
            Registry().transport(name)
    _, registry = settings_of({"DDL_PLUGINS": "ddl-doctor"})
    with pytest.raises(TransportError, match=r"no installed transport serves.*; ddl-shm \S+ is off: DDL_PLUGINS "):
        choose_route("auto", [Member(0, 0), Member(1, 0)], registry)
