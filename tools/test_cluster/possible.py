"""Decides whether this machine can have a test cluster, and how to run commands as root for it."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["INSIDE", "as_root", "in_sbin", "why_no_cluster"]

INSIDE = [sys.executable, "-I", "-S", str(Path(__file__).with_name("inside.py"))]
_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "nsenter": "util-linux",
}
_PATIENCE_S = 20.0


def in_sbin(name: str) -> str | None:
    """Return the path of the program; also looks in root's folders, which a user's PATH often lacks."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


@functools.cache
def as_root() -> list[str] | None:
    """Return the words before a command that root must run; None if we are not root and sudo is missing or asks."""
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    if sudo is None or subprocess.run([sudo, "-n", "true"], capture_output=True).returncode:
        return None
    return [sudo, "-n"]


@functools.cache
def why_no_cluster() -> str:
    """Return in one line why there can be no test cluster here, or ""."""
    if not sys.platform.startswith("linux"):
        return "a test cluster is made of Linux network namespaces"
    lacking = sorted({package for tool, package in _TOOLS.items() if in_sbin(tool) is None})
    if lacking:
        return f"a test cluster needs {', '.join(lacking)}: apt-get install {' '.join(lacking)}"
    root = as_root()
    if root is None:
        return "a test cluster needs root, and there is no sudo that works without a password"
    with tempfile.TemporaryDirectory(prefix="ddl-probe-") as directory:
        spec = Path(directory, "probe.json")
        spec.write_text(json.dumps({"name": "probe", "binds": {}, "scratch": f"{directory}/groups"}))
        command = [*root, *INSIDE, "probe", str(spec)]
        probed = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    if probed.returncode:
        return f"a test cluster is not permitted here: {(probed.stderr.strip().splitlines() or ['?'])[-1]}"
    return ""
