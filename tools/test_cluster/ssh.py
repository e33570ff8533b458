"""Writes the ssh files of a test cluster: keys, known_hosts, and the configurations of client and servers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

__all__ = ["SSH_PORT", "authorize", "client_config", "known_hosts", "new_key", "server_config"]

SSH_PORT = 22

_SERVER = """\
Port {port}
HostKey {host_key}
AuthorizedKeysFile {authorized}
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PidFile none
PrintMotd no
UseDNS no
MaxStartups 200
MaxSessions 200
LogLevel ERROR
"""

_CLIENT = """\
{extra}
Host *
{identity}    UserKnownHostsFile {known_hosts}
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    LogLevel ERROR
"""


def new_key(path: Path) -> str:
    """Make a key pair at ``path``, and return the public key as a line without its comment."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "cluster", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


def authorize(path: Path, public_key: str) -> None:
    """Write the keys that every host of the test cluster accepts."""
    path.write_text(public_key + "\n")


def server_config(path: Path, port: int, host_key: Path, authorized: Path | None) -> None:
    """Write the configuration of one host's sshd, which refuses every key if ``authorized`` is None."""
    path.write_text(_SERVER.format(port=port, host_key=host_key, authorized=authorized or "none"))


def client_config(path: Path, known_hosts: Path, identity: Path | None, extra: str) -> None:
    """Write the replacement of /etc/ssh/ssh_config for every host; ``extra`` comes first and so takes precedence."""
    offered = f"    IdentityFile {identity}\n" if identity else ""
    path.write_text(_CLIENT.format(extra=extra, known_hosts=known_hosts, identity=offered))


def known_hosts(path: Path, hosts: Iterable[tuple[list[str], int, str]]) -> None:
    """Write known_hosts. ``hosts``: the names and addresses of each host, its port and its public key."""
    lines = []
    for names, port, key in hosts:
        known_as = names if port == SSH_PORT else [f"[{name}]:{port}" for name in names]
        lines.append(f"{','.join(known_as)} {key}\n")
    path.write_text("".join(lines))
