"""A clock that is set forward or back changes no decision: only monotonic clocks are read where something is decided."""

from __future__ import annotations

import ast

from tests.architecture.source import every

SHOWN_ONLY = {  # modules that show the time of day to people, or write it into a report
    "ddl_dashboard.history",
    "ddl_dashboard.serving",
    "ddl_dashboard.job_page",
    "ddlcore.observe.flight",
    "ddlcore.launch.job.handover",  # the name of a directory
}
BETWEEN_HOSTS = {"ddl_doctor.doctor.pairs"}  # compares the clocks of two hosts, on purpose
WALL = {"time", "time_ns", "localtime", "strftime"}


def test_no_decision_rests_on_the_time_of_day() -> None:
    found = {
        f"{source.module}: time.{node.attr}"
        for source in every()
        if source.module not in SHOWN_ONLY | BETWEEN_HOSTS
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr in WALL
        if isinstance(node.value, ast.Name) and node.value.id == "time"
    }
    assert found == set()
