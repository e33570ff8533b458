"""The plugin declares itself without torch, and is chosen in the right cases."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ddl_gloo.plugin import ddl_transports

from ddlcore.plug.settings import settings_of
from ddlcore.runtime.routes import choose_route
from ddlcore.types import Member


def test_introduction_imports_no_torch() -> None:
    """Listing plugins does not import a framework: the plugin's module works without the rest of its package."""
    code = (
        "import sys; from ddlcore.plug.finding import run_alone; "
        "(one,) = run_alone('ddl_gloo.plugin').ddl_transports(); print(one.target, 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert shown.stdout.split() == ["ddl_gloo.transport:GlooTransport", "False"]


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory and this plugin are for Linux")
@pytest.mark.parametrize(
    ("backend", "hosts", "name"),
    [
        ("auto", (0, 0), "shm"),
        ("auto", (0, 0, 1), "shm+gloo"),
        ("auto", (0, 1), "gloo"),
        ("gloo", (0, 0), "gloo"),
        ("gloo", (0, 0, 1), "gloo"),
        ("shm+gloo", (0, 0), "shm"),
    ],
)
def test_where_it_is_chosen(backend: str, hosts: tuple[int, ...], name: str) -> None:
    """By default, Gloo is chosen between hosts, with shared memory within them.

    On one host, or without shared memory, it is used only if it is requested by name.
    """
    _, registry = settings_of({})
    assert registry.transports["gloo"].target == ddl_transports()[0].target
    members = [Member(rank, host) for rank, host in enumerate(hosts)]
    assert choose_route(backend, members, registry).name == name
