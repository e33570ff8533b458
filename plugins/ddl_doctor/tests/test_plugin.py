"""What the core learns of the package before a command is called."""

from __future__ import annotations

import subprocess
import sys


def test_introducing_it_imports_nothing() -> None:
    """Every command of ddl reads the list of commands, and most need none of these."""
    check = (
        "import sys; from ddl_doctor import plugin; "
        "assert [one.name for one in plugin.ddl_cli()] == ['doctor', 'bench', 'timeline']; "
        "assert len(plugin.ddl_checks()) == 9; "
        "assert [name for name in sys.modules if name.startswith('ddl_doctor')] == ['ddl_doctor', 'ddl_doctor.plugin']"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
