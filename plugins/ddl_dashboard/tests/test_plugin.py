"""What the core learns of the package before a job asks for a live page or a table."""

from __future__ import annotations

import subprocess
import sys


def test_introducing_it_imports_nothing() -> None:
    """Every launch asks for the list of watches, and few want one."""
    check = (
        "import sys; from ddl_dashboard import plugin; "
        "assert [one.name for one in plugin.ddl_watches()] == ['top', 'dashboard']; "
        "assert not {'starlette', 'uvicorn', 'plotly', 'rich', 'ddl_dashboard.job_page'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
