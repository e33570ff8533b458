"""Describe what ddl_dashboard adds, as plain data: two watches, and the settings that switch them on."""

from __future__ import annotations

from ddlcore.hooks import Setting, WatchProvider, hookimpl

FORM = r"(?:(?P<host>\[[0-9a-fA-F:.]+(?:%\w+)?\]|[\w.-]+):)?(?P<port>\d{1,6})"  # PORT or HOST:PORT


@hookimpl
def ddl_watches() -> list[WatchProvider]:
    """Return the providers of the live page, and of the table of ``ddl run --top``."""
    dashboard = Setting(
        "dashboard",
        str,
        "",
        "where the launcher serves a live page of the job: PORT, for this host alone; HOST:PORT, for other hosts too, "
        "with a token; auto: the first free port; empty: nowhere",
        group="output",
        brief="Serve a live page of the job.",
        metavar="[HOST:][PORT]",
        bare="auto",
        form=FORM,
    )
    top = Setting(
        "top", bool, False, "1: show a live table of all ranks; without a terminal, lines every 10 s", group="output"
    )
    return [
        WatchProvider(
            "top",
            "ddl_dashboard.top:Top",
            settings=(top,),
            setting="top",
            asks=(("pulse_s", 1.0),),
            draws=True,
            doc="a table of the ranks of a job while they train",
        ),
        WatchProvider(
            "dashboard",
            "ddl_dashboard.job_page:JobPage",
            requires=("starlette", "uvicorn", "plotly"),
            install="pip install ddl-dashboard",
            settings=(dashboard,),
            setting="dashboard",
            asks=(("pulse_s", 1.0), ("activity", True)),
            doc="a web page that shows the ranks of a job while they train",
        ),
    ]
