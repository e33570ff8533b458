"""Connects hosts on one machine to a network, and runs commands on them, for tests and tools."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tools.test_cluster import holding, ssh
from tools.test_cluster.network import SWITCH, Network, address
from tools.test_cluster.possible import as_root, in_sbin, why_no_cluster

__all__ = ["Host", "TestCluster"]

_NOT_ON_A_BED = ("SSH_AUTH_SOCK", "SSH_CONNECTION", "SSH_CLIENT", "DISPLAY", "XDG_RUNTIME_DIR")
# A host has no shell start-up files: what a shell starts from them may hold a lock of this machine when the host is
# killed.
_OF_SHELLS = (".bashrc", ".bash_profile", ".bash_login", ".profile", ".zshenv", ".zshrc", ".zprofile")
Stream = int | IO[Any] | None


@dataclass(frozen=True)
class Host:
    """How one host of a test cluster differs from the others."""

    ssh_port: int = ssh.SSH_PORT
    sshd: bool = True  # False: nothing listens there
    accepts_key: bool = True  # False: sshd refuses the test cluster's key
    # Path -> file that is seen there on this host alone; a relative file is in the test cluster's directory.
    binds: Mapping[str, str] = field(default_factory=dict)


class TestCluster:
    """Hosts server1, server2, … on a network of their own, which exist inside the ``with`` block.

    A host has its own hostname, network, processes (pids from 1), /dev/shm, /run and sshd. It shares all other files,
    the user and the boot id with this machine. ``rate_mbit`` limits what each host sends and what it receives.
    ``ssh_config`` goes before the test cluster's own client configuration; with ``offer_key=False`` ssh must be given
    the key in ``identity``. ``files`` are written into the cluster's ``directory``. A host has ``networks`` interfaces
    (eth0, …), each on a network of its own; names resolve to the first. Raises ``RuntimeError`` if ``why_no_cluster()``
    has a reason. Only one thread may use it.
    """

    __test__ = False  # not a class of tests, although its name begins with Test

    def __init__(
        self,
        hosts: int | Sequence[Host] = 2,
        *,
        rate_mbit: float | None = None,
        families: Sequence[int] = (4, 6),
        networks: int = 1,
        ssh_config: str = "",
        offer_key: bool = True,
        files: Mapping[str, str] | None = None,
    ) -> None:
        self._hosts = [Host()] * hosts if isinstance(hosts, int) else list(hosts)
        self.names = [f"server{i + 1}" for i in range(len(self._hosts))]
        self._rate_mbit = rate_mbit
        self._families = tuple(families)
        self._networks = networks
        self._ssh_config = ssh_config
        self._offer_key = offer_key
        self._files = files or {}
        self._disregarded: dict[str, set[int]] = {}
        self._holders: dict[str, subprocess.Popen[str]] = {}
        self._pids: dict[str, int] = {}  # of the process that holds a host's namespaces, in this machine's numbering
        self._started: list[subprocess.Popen[str]] = []

    # -- up and down --------------------------------------------------------------------------------------------------

    def __enter__(self) -> TestCluster:
        if self._holders:  # a fixture has already entered it
            return self
        why = why_no_cluster()
        if why:
            raise RuntimeError(why)
        holding.remove_stale()
        self._root = as_root() or []
        self.directory, self._lock = holding.locked_directory()
        self.identity = self.directory / "key"
        try:
            self._write_files()
            self._start_holders()
            self._network = Network(self._root, self._pids, self._networks)
            self._network.connect(self.names, self._families)
            if self._rate_mbit is not None:
                for network in range(self._networks):
                    self.rate(self._rate_mbit, network=network)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of every host, and remove the network and all files. May be called twice."""
        hosts = [holder for name, holder in self._holders.items() if name != SWITCH]
        for ending in (hosts, [self._holders[SWITCH]] if SWITCH in self._holders else []):  # it removes the directory
            holding.end(ending)
        self._await_ends(self._started)
        self._holders.clear()
        self._pids.clear()
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _await_ends(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        for process in processes:
            process.wait(holding.ENDING_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def _write_files(self) -> None:
        authorized = self.directory / "authorized_keys"
        ssh.authorize(authorized, ssh.new_key(self.identity))
        keys = [ssh.new_key(self.directory / f"{name}.host_key") for name in self.names]
        for name, host in zip(self.names, self._hosts):
            accepted = authorized if host.accepts_key else None
            host_key = self.directory / f"{name}.host_key"
            ssh.server_config(self.directory / f"{name}.sshd_config", host.ssh_port, host_key, accepted)
            (self.directory / f"{name}.hostname").write_text(f"{name}\n")
        known = [
            ([name, *self._addresses(name)], host.ssh_port, key)
            for name, host, key in zip(self.names, self._hosts, keys)
        ]
        ssh.known_hosts(self.directory / "known_hosts", known)
        identity = self.identity if self._offer_key else None
        ssh.client_config(self.directory / "ssh_config", self.directory / "known_hosts", identity, self._ssh_config)
        for path, content in self._files.items():
            (self.directory / path).parent.mkdir(parents=True, exist_ok=True)
            (self.directory / path).write_text(content)
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for name in self.names:
            lines += [f"{self.address(name, family)} {name}" for family in self._families]
        (self.directory / "hosts").write_text("\n".join(lines) + "\n")

    def _start_holders(self) -> None:
        self._holders[SWITCH] = holding.hold(self._command("switch", {"directory": str(self.directory)}))
        for name, host in zip(self.names, self._hosts):
            self._holders[name] = holding.hold(self._command("hold", self._spec(name, host)))
        deadline_s = time.monotonic() + holding.STARTING_S
        for name, holder in self._holders.items():
            self._pids[name] = holding.pid_when_ready(name, holder, deadline_s)

    def _command(self, verb: str, spec: Mapping[str, Any]) -> list[str]:
        return holding.command(self._root, self.directory, verb, spec)

    def _spec(self, name: str, host: Host) -> dict[str, Any]:
        (self.directory / "dot_ssh").mkdir(mode=0o700, exist_ok=True)
        ours = {
            "/etc/hosts": self.directory / "hosts",
            "/etc/hostname": self.directory / f"{name}.hostname",
            "/etc/ssh/ssh_config": self.directory / "ssh_config",
            str(Path("~/.ssh").expanduser()): self.directory
            / "dot_ssh",  # its content must not affect the test cluster
            **{str(Path("~", name).expanduser()): Path("/dev/null") for name in _OF_SHELLS},
        }
        binds = {target: str(source) for target, source in ours.items() if Path(target).exists()}
        sshd = [in_sbin("sshd"), "-D", "-f", str(self.directory / f"{name}.sshd_config")]
        sshd += ["-E", str(self.directory / f"{name}.sshd_log")]
        return {
            "name": name,
            "binds": {**binds, **{target: str(self.directory / source) for target, source in host.binds.items()}},
            "scratch": str(self.directory / f"{name}.groups"),
            "sshd": sshd if host.sshd else [],
            "port": host.ssh_port,
        }

    # -- what the network does ----------------------------------------------------------------------------------------

    def address(self, name: str, family: int = 0, network: int = 0) -> str:
        """Return the address of a host: IPv4 or IPv6 (``family`` 4 or 6; 0: the test cluster's first family)."""
        return address(self.names.index(name) + 1, family or self._families[0], network)

    def _addresses(self, name: str) -> list[str]:
        return [self.address(name, family, network) for family in self._families for network in range(self._networks)]

    def rate(self, mbit: float | None, hosts: Sequence[str] = (), network: int = 0) -> None:
        """Limit what these hosts (default: all) send and receive, to ``mbit`` Mbit/s each; None: no limit."""
        for name in hosts or self.names:
            self._network.limit(name, mbit, network)

    def link(self, name: str, *, up: bool, network: int = 0) -> None:
        """Connect a host's cable to the switch or disconnect it.

        While it is disconnected, nothing that the host sends arrives, and the host is not told.
        """
        self._network.link(name, up, network)

    def mute(self, name: str, muted: bool = True, network: int = 0) -> None:
        """Break a host's cable in one direction, or mend it: what the host sends does not arrive, but it hears the others."""
        self._network.mute(name, muted, network)

    def kill_host(self, name: str) -> None:
        """Simulate a power failure of a host: disconnect its cables, then kill every process on it.

        The cables go first, so that no other host sees the connections close.
        """
        for network in range(self._networks):
            self.link(name, up=False, network=network)
        subprocess.run([*self._root, "kill", "-KILL", str(self._pids[name])], check=True)
        self._holders[name].wait(holding.ENDING_S)

    # -- what runs on the hosts ---------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Return our environment, with this Python's programs first on PATH.

        Variables that would lead out of the test cluster are left out.
        """
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_ON_A_BED}
        programs = os.path.dirname(sys.executable)
        return {**inherited, "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])}

    def popen(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        as_root: bool = False,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.PIPE,
        start_new_session: bool = False,
    ) -> subprocess.Popen[str]:
        """Start a command on a host, as our user; ``env`` is added to ``environment()``.

        The returned process runs on this machine and is the parent of the command: it passes signals on, a SIGKILL
        kills the command, too, and the exit status is the command's. ``close`` ends what still runs.
        """
        spec = {
            "pid": self._pids[name],
            "argv": [str(part) for part in argv],
            "env": {**self.environment(), **(env or {})},
            "cwd": os.path.abspath(cwd or os.getcwd()),
            "uid": 0 if as_root else os.getuid(),
        }
        process = subprocess.Popen(
            self._command("enter", spec),
            text=True,
            errors="surrogateescape",
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=start_new_session,
        )
        self._started.append(process)
        return process

    def run(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout_s: float = 50.0,
        told: str | None = None,
        check: bool = False,
        as_root: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end, with ``told`` as its standard input.

        Raises ``subprocess.TimeoutExpired`` after killing it, if it takes longer than ``timeout_s``. With ``check``,
        raises ``RuntimeError``, with its output, if it does not end with 0.
        """
        stdin = subprocess.DEVNULL if told is None else subprocess.PIPE
        process = self.popen(name, argv, env=env, cwd=cwd, as_root=as_root, stdin=stdin)
        try:
            stdout, stderr = process.communicate(told, timeout_s)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        if check and process.returncode:
            command = " ".join(str(part) for part in argv)
            raise RuntimeError(f"{command} on {name} ended with {process.returncode}: {stdout}{stderr}")
        return subprocess.CompletedProcess([str(part) for part in argv], process.returncode, stdout, stderr)

    def processes(self, name: str) -> dict[int, str]:
        """Return the command of each process on a host, by its pid there.

        Processes of the test cluster itself are left out.
        """
        listed = self.run(name, [sys.executable, "-I", "-S", "-c", _LIST_PROCESSES], check=True).stdout
        found = {int(pid): command for pid, command in json.loads(listed).items()}
        return {pid: command for pid, command in found.items() if pid not in self._disregarded.get(name, ())}

    def disregard(self, name: str) -> None:
        """Treat what runs on a host now as part of the test cluster.

        ``processes`` and ``leftovers`` no longer list it.
        """
        self._disregarded[name] = {*self.processes(name), *self._disregarded.get(name, ())}

    def segments(self, name: str) -> list[str]:
        """Return the names of the files in a host's /dev/shm."""
        return self.run(name, ["ls", "-A", "/dev/shm"], check=True).stdout.split()

    def leftovers(self, name: str, patience_s: float = 2.0) -> list[str]:
        """Return the processes and shared memory that are still on a host after ``patience_s``.

        Returns an empty list as soon as there are none.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            left = [f"process {pid} ({command})" for pid, command in self.processes(name).items()]
            left += [f"/dev/shm/{segment}" for segment in self.segments(name)]
            if not left or time.monotonic() > deadline_s:
                return left
            time.sleep(0.05)

    def kill(self, name: str, pid: int, signal: int) -> None:
        """Send a signal to a process of a host, by its pid there."""
        self.run(name, ["kill", f"-{int(signal)}", str(pid)], check=True)


# Seen from within the host: all but pid 1, which holds the host, its child, the listening sshd, and this process.
_LIST_PROCESSES = """
import json, os
found = {}
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        state, parent = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[:2]
        command = open(f"/proc/{pid}/cmdline", "rb").read().replace(b"\\0", b" ").decode(errors="replace").strip()
    except OSError:
        continue
    ours = pid == "1" or int(pid) == os.getpid() or (parent == "1" and command.startswith("sshd: ") and "[listener]" in command)
    if state != "Z" and not ours:
        found[pid] = command
print(json.dumps(found))
"""
