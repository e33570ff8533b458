"""``ddl plugins``: what is installed, in which state and why."""

from __future__ import annotations

import json
import re

import pytest

from ddlcore.commands.cli import main
from tests.plug.conftest import Site, site

__all__ = ["site"]

GOOD = "@hookimpl\ndef ddl_transports(): return [TransportProvider('pigeon', 'coop:Pigeon'{more})]"
FAULTS = {  # distribution -> its code, what its row says
    "ddl-elsewhen": (
        "@hookimpl\ndef ddl_compressors(): return [CompressorProvider('old', 'a:B', api_version=(3, 0))]",
        "refused",
        "built for plugin contract 3.0, this ddlcore has 2.0",
    ),
    "ddl-second": (GOOD.format(more=""), "refused", "ddl-first 1.0 offers that name already"),
    "ddl-absent": ("import surely_not_there", "refused", "No module named 'surely_not_there'"),
    "ddl-argument": ("@hookimpl\ndef ddl_transports(job): return []", "refused", "hook 'ddl_transports'"),
    "ddl-misspelt": ("@hookimpl\ndef ddl_transprots(): return []", "refused", "unknown hook 'ddl_transprots'"),
    "ddl-setting": (
        "@hookimpl\ndef ddl_adapters():"
        " return [AdapterProvider('greedy', 'a:B', settings=(Setting('fusion_bytes', int, 1, 'mine'),))]",
        "refused",
        "its setting 'fusion_bytes' is one of ddlcore already",
    ),
    "ddl-needs": (
        "@hookimpl\ndef ddl_tuners(): return [TunerProvider('wise', 'a:B', requires=('oracle',), install='pip install oracle')]",
        "not usable",
        "oracle not installed; pip install oracle",
    ),
}


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, str]]:
    capsys.readouterr()
    main(["plugins", "--json", *arguments])
    rows: list[dict[str, str]] = json.loads(capsys.readouterr().out)["plugins"]
    return rows


def test_every_fault_is_told_with_its_distribution(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """All at once, and the rest goes on working."""
    site.install("ddl-first", GOOD.format(more=""))
    for name, (code, _, _) in FAULTS.items():
        site.install(name, code, version="0.7")
    rows = listed(capsys)
    for name, (_, state, reason) in FAULTS.items():
        (row,) = [row for row in rows if row["distribution"] == name]
        assert (row["state"], row["version"]) == (state, "0.7"), row
        assert reason in row["reason"], row
    ready = {row["name"] for row in rows if row["state"] == "ready"}
    assert {"pigeon", "shm", "numpy", "threshold"} <= ready
    assert main(["plugins"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^name +distribution +version +kind +state +reason$", text, re.MULTILINE)
    assert all(reason in text for _, _, reason in FAULTS.values())


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("DDL_PLUGINS_OFF", "ddl-first", "DDL_PLUGINS_OFF names it"),
        ("DDL_PLUGINS", "ddl-torch", "DDL_PLUGINS does not name it"),
    ],
)
def test_what_the_lists_leave_out_is_off(
    variable: str,
    value: str,
    reason: str,
    site: Site,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the list that does it; no code of it runs."""
    site.install("ddl-first", "raise RuntimeError")
    monkeypatch.setenv(variable, value)
    (row,) = [row for row in listed(capsys) if row["distribution"] == "ddl-first"]
    assert (row["state"], row["reason"]) == ("off", reason)
