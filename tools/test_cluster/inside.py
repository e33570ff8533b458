"""Runs as root inside a test cluster: holds a host's namespaces, or enters them to run a command.

Run: python -I -S inside.py hold|switch|enter|probe FILE (a JSON file that tools/test_cluster/cluster.py writes)

It uses the standard library only, and Python 3.10, whose ``os`` has neither ``unshare`` nor ``setns``. A holder lives
until its standard input ends, which also happens when the test cluster's owner dies. Then the kernel ends all processes
of its pid namespace, and removes the network namespace with its links.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = (  # linux/sched.h
    0x20000,
    0x4000000,
    0x8000000,
    0x20000000,
    0x40000000,
)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18  # linux/mount.h
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
SI_KERNEL = 128  # of a signal that a terminal sent to the whole foreground group
TCP_LISTEN = "0A"  # in /proc/net/tcp
SSHD_PATIENCE_S = 10.0
TIDY_PATIENCE_S = 2.0
NAMESPACES = {
    "net": CLONE_NEWNET,
    "uts": CLONE_NEWUTS,
    "ipc": CLONE_NEWIPC,
    "pid": CLONE_NEWPID,
    "mnt": CLONE_NEWNS,
}  # mnt hides the others

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def _mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    texts = [text.encode() or None for text in (source, target, kind)]
    _checked(_libc.mount(*texts, ctypes.c_ulong(flags), data.encode() or None), f"mounting {source} on {target}")


def _die_with_parent() -> None:
    _checked(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def _tell(line: str) -> None:
    print(line, flush=True)


# -- a host -----------------------------------------------------------------------------------------------------------


def hold(spec: dict[str, Any]) -> None:
    """Become a host: pid 1 of its own processes, with its own hostname, mounts and network."""
    _unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET)
    child = os.fork()
    if child:
        _tell(f"pid {child}")
        os.close(0)
        os.waitpid(child, 0)
        return
    _die_with_parent()
    _lay_out(spec)
    _network_defaults()
    if spec["sshd"]:
        _start_sshd(spec["sshd"], spec["port"])
    _tell("ready")
    _reap_until_orphaned()


def _lay_out(spec: dict[str, Any]) -> None:
    """Give the host its own /proc, /dev/shm, /run and /sys/class/net, its names, and the files in ``binds``."""
    socket.sethostname(spec["name"])
    _mount("", "/", flags=MS_REC | MS_PRIVATE)
    careful = MS_NOSUID | MS_NODEV
    _mount("proc", "/proc", "proc", careful | MS_NOEXEC)
    _mount("tmpfs", "/dev/shm", "tmpfs", careful, "mode=1777")
    _mount("tmpfs", "/run", "tmpfs", careful, "mode=755")
    os.mkdir("/run/sshd", 0o755)
    _unlock_accounts()
    _own_sysfs(spec["scratch"])
    for target, source in spec["binds"].items():
        _mount(source, target, flags=MS_BIND)


def _unlock_accounts() -> None:
    """Let sshd accept accounts without a password.

    sshd treats a password "!…" as a locked account, which nobody may enter even with a key, and "*" as one without a
    password.
    """
    shadow, own = Path("/etc/shadow"), Path("/run/shadow")
    if shadow.exists():
        own.touch(0o600)
        own.write_text("".join(f"{line.replace(':!', ':*', 1)}\n" for line in shadow.read_text().splitlines()))
        _mount(str(own), str(shadow), flags=MS_BIND)


def _own_sysfs(scratch: str) -> None:
    """Mount a sysfs, which shows the network of its mounter; control groups stay where they were mounted."""
    groups = "/sys/fs/cgroup"
    has_groups = os.path.ismount(groups)
    if has_groups:
        os.mkdir(scratch)
        _mount(groups, scratch, flags=MS_BIND | MS_REC)
    _mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if has_groups:
        _mount(scratch, groups, flags=MS_BIND | MS_REC)
        _checked(_libc.umount2(scratch.encode(), MNT_DETACH), f"unmounting {scratch}")


def _network_defaults() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for scope in ("all", "default"):  # otherwise an IPv6 address is not usable for one or two seconds
        knob = Path(f"/proc/sys/net/ipv6/conf/{scope}/accept_dad")
        if knob.exists():
            knob.write_text("0")


def _start_sshd(command: list[str], port: int) -> None:
    """Start sshd and wait until it listens."""
    pid = os.posix_spawn(command[0], command, {"PATH": os.defpath})
    deadline_s = time.monotonic() + SSHD_PATIENCE_S
    while not _listens(port):
        if os.waitpid(pid, os.WNOHANG)[0] or time.monotonic() > deadline_s:
            raise OSError(f"sshd does not listen on port {port}")
        time.sleep(0.005)


def _listens(port: int) -> bool:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == TCP_LISTEN for row in rows)


def _reap_until_orphaned() -> None:
    """Reap orphaned processes, as pid 1 must, until the owner closes the standard input or dies."""

    def reap(*_: object) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    signal.signal(signal.SIGCHLD, reap)
    reap()
    while os.read(0, 1):
        pass


# -- the switch -------------------------------------------------------------------------------------------------------


def switch(spec: dict[str, Any]) -> None:
    """Hold the network namespace of the bridges. The switch ends last, and removes the test cluster's directory."""
    _unshare(CLONE_NEWNET)
    _tell(f"pid {os.getpid()}")
    _tell("ready")
    while os.read(0, 1):
        pass
    deadline_s = time.monotonic() + TIDY_PATIENCE_S
    while os.path.exists(spec["directory"]) and time.monotonic() < deadline_s:  # a dying process may still write there
        shutil.rmtree(spec["directory"], ignore_errors=True)


# -- the door ---------------------------------------------------------------------------------------------------------


def enter(spec: dict[str, Any]) -> NoReturn:
    """Run a command on a host, pass signals on to it, and end with its exit status."""
    doors = [(os.open(f"/proc/{spec['pid']}/ns/{name}", os.O_RDONLY), flag) for name, flag in NAMESPACES.items()]
    for door, flag in doors:
        _checked(_libc.setns(door, flag), f"entering process {spec['pid']}")
        os.close(door)
    everything = signal.valid_signals()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, everything)
    of_terminal = os.isatty(0)
    child = os.fork()
    if child == 0:
        if not of_terminal:  # otherwise a signal to our group would reach the command twice
            os.setpgid(0, 0)
        _become(spec, before)
    while True:
        news = signal.sigwaitinfo(everything)
        if news.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                _end_as(os.waitstatus_to_exitcode(status))
        elif not (of_terminal and news.si_code == SI_KERNEL):
            os.kill(child, news.si_signo)


def _become(spec: dict[str, Any], mask: Any) -> NoReturn:
    try:
        if os.getuid() != spec["uid"]:
            user = pwd.getpwuid(spec["uid"])
            os.initgroups(user.pw_name, user.pw_gid)
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
        _die_with_parent()  # after setuid, which clears it
        os.chdir(spec["cwd"])
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # the defaults, because Python changes them
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except OSError as error:
        print(f"test cluster: {spec['argv'][0]} on {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
    os._exit(127)


def _end_as(exit_code: int) -> NoReturn:
    if exit_code < 0:
        signal.signal(-exit_code, signal.SIG_DFL) if -exit_code != signal.SIGKILL else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-exit_code})
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code & 0xFF)


# -- checking whether there can be a test cluster -----------------------------------------------------------------


def probe(spec: dict[str, Any]) -> None:
    """Try everything that a test cluster needs of the kernel; the last line of the output names what failed."""
    _unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET)
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    _lay_out(spec)
    for command in (
        "ip link add bridge0 type bridge",
        "ip link add veth0 type veth peer name veth1",
        "tc qdisc add dev veth0 root tbf rate 1gbit burst 125kb limit 1mb",
    ):
        done = subprocess.run(command.split(), capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{command}: {done.stderr.strip()}")


VERBS = {"hold": hold, "switch": switch, "enter": enter, "probe": probe}


def main() -> None:
    """Run one verb with its JSON file, and remove the file, because a command's environment is confidential."""
    verb, path = sys.argv[1:]
    spec = json.loads(Path(path).read_text())
    os.unlink(path)
    try:
        VERBS[verb](spec)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"test cluster: {error}", file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    main()
