"""What is known to be bad: what meets a row, what does not, and whose row it is; and versions that differ."""

from __future__ import annotations

from typing import Any

import pytest
from ddl_doctor.checks.versions import KnownBadVersions, TestedVersions, VersionsCheck
from ddl_doctor.doctor.looking import look, put_together

from ddlcore.contracts.check import Check, HostView, Seen
from ddlcore.contracts.known_bad import KnownBad, KnownBadCheck, installed


class Parrots(KnownBadCheck):
    """A plugin's row."""

    name = "known-bad-parrots"
    completes = "known-bad"
    rows = (
        KnownBad("norwegian-blue", installed("parrot", lambda version: version == (1, 9, 6)), "it rests", "feed it"),
    )


def findings(*hosts: dict[str, str]) -> list[tuple[str, str, str]]:
    """What is told of hosts on which this is installed, in one report with a plugin's row."""
    checks: dict[str, Check] = {"known-bad": KnownBadVersions(), "known-bad-parrots": Parrots()}
    views = [HostView(f"node{rank}", distributions=found, rank=rank) for rank, found in enumerate(hosts)]
    seen = put_together(checks, [look(checks, view) for view in views], lambda rank: f"node{rank}")
    assert list(seen) == ["known-bad"]
    return [(one.what, one.means, one.fix) for one in KnownBadVersions().judge(seen["known-bad"])]


def test_what_is_installed() -> None:
    """The core's own row says what to type; where it is met on several hosts, it is one finding."""
    old = {"scikit-optimize": "0.9.0"}
    ((what, means, fix),) = findings(old, {}, old)
    assert (what, fix) == ("scikit-optimize 0.9.0 on node0, node2", "pip install 'scikit-optimize>=0.10.2'")
    assert "numpy.int" in means


def test_a_plugin_has_rows_of_its_own() -> None:
    """They are told as the core's are; facts are plain data, for they were found on another machine."""
    both = {"parrot": "1.9.6", "scikit-optimize": "0.9.0"}
    assert [one[0] for one in findings(both)] == ["scikit-optimize 0.9.0 on node0", "parrot 1.9.6 on node0"]
    assert findings({"parrot": "1.9.6"}) == [("parrot 1.9.6 on node0", "it rests", "feed it")]
    facts: Any = Parrots().look(HostView("node0", distributions=both))
    assert facts == {"norwegian-blue": ["parrot 1.9.6", "it rests", "feed it"]}


@pytest.mark.parametrize("fine", [{}, {"scikit-optimize": "0.10.2"}, {"scikit-optimize": "0.11+local7", "parrot": "2"}])
def test_what_is_fine(fine: dict[str, str]) -> None:
    """From the version on in which it is repaired."""
    assert findings(fine) == []


def test_two_versions_of_a_framework() -> None:
    """The majority's version is what the other host is told to install."""
    check = VersionsCheck()
    views = [
        HostView(name, frameworks={"numpy": version}, python="3.11.7", ddl="0.1.0")
        for name, version in (("node1", "2.1.0"), ("node2", "1.26.4"), ("node3", "2.1.0"))
    ]
    found = list(check.judge([Seen(view.name, i, 0, check.look(view)) for i, view in enumerate(views)]))
    assert [(one.what, one.fix) for one in found] == [
        ("numpy differs: 2.1.0 on node1, node3; 1.26.4 on node2", "on node2: pip install numpy==2.1.0")
    ]


def test_releases_that_plugins_refuse_or_do_not_know() -> None:
    """A refusal is a finding with the plugin's own command; what is newer than tested is only told."""
    check = TestedVersions()
    refused = {
        "adapter 'tensorflow'": "ddl_tf runs with TensorFlow 2.16 to 2.22; version 2.9.0 is installed: pip install x"
    }
    views = [
        HostView("node1", untested={"torch": "3.0 is newer than tested (2.4 to 2.15)"}),
        HostView("node2", unusable=refused),
        HostView("node3", unusable={"adapter 'mxnet'": "MXNet does not work with numpy 2; run: pip install y"}),
        HostView("node4", unusable={"adapter 'birds'": "they do not fly"}),
    ]
    seen = [Seen(view.name, i, 0, check.look(view)) for i, view in enumerate(views)]
    assert [(one.what, one.fix) for one in check.judge(seen)] == [
        (
            "adapter 'tensorflow' on node2: ddl_tf runs with TensorFlow 2.16 to 2.22; version 2.9.0 is installed",
            "pip install x",
        ),
        ("adapter 'mxnet' on node3: MXNet does not work with numpy 2", "pip install y"),
        ("adapter 'birds' on node4: they do not fly", "install a release that the plugin works with"),
    ]
    assert check.line(seen) == "torch 3.0 is newer than tested (2.4 to 2.15)"
