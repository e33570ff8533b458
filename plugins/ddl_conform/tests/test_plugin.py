"""What the core learns of the package before a command is called, and how the core forwards to it."""

from __future__ import annotations

import subprocess
import sys

import ddl_conform
import pytest

import ddlcore.testing


def test_introducing_it_imports_nothing() -> None:
    """Every command of ddl reads the list of commands, and most need none of these."""
    check = (
        "import sys; from ddl_conform import plugin; "
        "assert [one.name for one in plugin.ddl_cli()] == ['conform', 'plugins new']; "
        "assert [name for name in sys.modules if name.startswith('ddl_conform')] == ['ddl_conform', 'ddl_conform.plugin']; "
        "assert not {'pytest', 'hypothesis'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ddl_conform.__all__)
def test_the_core_forwards_all_names_of_the_kit(name: str) -> None:
    assert getattr(ddlcore.testing, name) is getattr(ddl_conform, name)


def test_a_name_that_the_kit_lacks() -> None:
    with pytest.raises(AttributeError, match="pigeon"):
        ddlcore.testing.pigeon  # noqa: B018


def test_a_kit_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to install it."""
    monkeypatch.setattr("ddlcore.contracts.forwarding.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"a package of its own; pip install .*ddl_conform"):
        ddlcore.testing.run_world  # noqa: B018


def test_all_of_the_kit_may_be_imported() -> None:
    names: dict[str, object] = {}
    exec("from ddlcore.testing import *", names)
    assert {"TransportSuite", "World"} <= set(names)
