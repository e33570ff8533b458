"""Declare to the core what ddl_dashboard adds, as plain data: a watch, and the setting that asks for it."""

from __future__ import annotations

from ddlcore.hooks import Setting, WatchProvider, hookimpl

FORM = r"(?:(?P<host>\[[0-9a-fA-F:.]+(?:%\w+)?\]|[\w.-]+):)?(?P<port>\d{1,6})"  # PORT or HOST:PORT


@hookimpl
def ddl_watches() -> list[WatchProvider]:
    """Return the provider of the live page."""
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
    return [
        WatchProvider(
            "dashboard",
            "ddl_dashboard.job_page:JobPage",
            requires=("starlette", "uvicorn", "plotly"),
            install="pip install ddl-dashboard",
            settings=(dashboard,),
            setting="dashboard",
            activity=True,
            doc="a web page that shows the ranks of a job while they train",
        )
    ]
