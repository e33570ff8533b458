"""Checks how much shared memory, how many open files and how much locked memory the system allows a process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ddlcore.contracts.check import Check, Finding, HostView, Seen
from ddlcore.text.numbers import memory_size

LEAST_SHM_BYTES = 512 << 20
LEAST_FILES = 4096
_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_UNLIMITED = -1


class SharedMemoryCheck(Check):
    """A check that /dev/shm is large enough for the workers of data loaders, and for other libraries that use it."""

    name = "dev-shm"

    def look(self, host: HostView) -> Any:
        """Return ``{"bytes": N}``, where N is the size of /dev/shm.

        The dict is empty if /dev/shm is not a separate file system.
        """
        for line in host.read("/proc/self/mounts").splitlines()[::-1]:  # of several mounts, the last one is visible
            words = line.split()
            if len(words) > 3 and words[1] == "/dev/shm":
                size = re.search(r"(?:^|,)size=(\d+)([kmg%]?)", words[3])
                if size is None or size[2] == "%":
                    share = int(size[1]) if size is not None else 50  # percent; the kernel's default
                    return {"bytes": _memory_bytes(host) * share // 100}
                return {"bytes": int(size[1]) * _SUFFIXES[size[2]]}
        return {}

    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        for one in seen:
            size = one.facts.get("bytes", 0)
            if 0 < size < LEAST_SHM_BYTES:
                yield Finding(
                    self.name,
                    f"/dev/shm holds {memory_size(size)}",
                    "ddl's own transport needs none of it; but workers of data loaders hand batches over through it, and "
                    "so do libraries that reduce on GPUs or by messages. A process that writes past its end is killed by "
                    'SIGBUS ("Bus error")',
                    "docker run --shm-size=8g … (or --ipc=host); in Kubernetes mount an emptyDir with medium: Memory at "
                    "/dev/shm; elsewhere: sudo mount -o remount,size=8G /dev/shm",
                    one.host,
                )

    def line(self, seen: Sequence[Seen]) -> str:
        sizes = [one.facts["bytes"] for one in seen if "bytes" in one.facts]
        if not sizes:
            return ""
        return memory_size(min(sizes)) + (" at least" if len(sizes) > 1 else "")


def _memory_bytes(host: HostView) -> int:
    total = re.search(r"^MemTotal:\s+(\d+) kB", host.read("/proc/meminfo"), re.MULTILINE)
    return int(total[1]) << 10 if total is not None else 0


class LimitsCheck(Check):
    """A check that a process may open enough files, and may lock as much memory as network cards need."""

    name = "limits"

    def look(self, host: HostView) -> Any:
        """Return a dict with the limits of this process, and with the network cards that need locked memory.

        The keys are ``nofile`` (the limit of open files), ``memlock`` (the limit of locked memory in bytes), and
        ``rdma`` (the names of the network cards). A limit is a list [soft, hard]; -1 means unlimited.
        """
        facts: dict[str, Any] = {"rdma": host.names("/sys/class/infiniband")}
        for name, words in (("nofile", "Max open files"), ("memlock", "Max locked memory")):
            found = re.search(rf"^{words}\s+(\w+)\s+(\w+)", host.read("/proc/self/limits"), re.MULTILINE)
            if found is not None:
                facts[name] = [_UNLIMITED if word == "unlimited" else int(word) for word in found.groups()]
        return facts

    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        for one in seen:
            files, locked = one.facts.get("nofile"), one.facts.get("memlock")
            if files and 0 <= files[1] < LEAST_FILES:
                yield Finding(
                    self.name,
                    f"a process may open {files[1]} files at most (nofile)",
                    "`ddl run` needs some for every rank, and workers of data loaders one for each tensor that they hand "
                    'over: "Too many open files"',
                    f"add '* hard nofile 65536' and '* soft nofile 65536' to /etc/security/limits.conf on {one.host} and "
                    "log in anew; for sshd and containers: LimitNOFILE=65536, docker run --ulimit nofile=65536",
                    one.host,
                )
            if one.facts["rdma"] and locked and locked[0] != _UNLIMITED:
                yield Finding(
                    self.name,
                    f"a process may lock {locked[0] / 2**20:.3g} MiB of memory (memlock), and {one.facts['rdma'][0]} "
                    "reads locked memory alone",
                    "memory cannot be registered with the card: transports fail, or go over TCP at a tenth of the speed",
                    f"add '* soft memlock unlimited' and '* hard memlock unlimited' to /etc/security/limits.conf on "
                    f"{one.host} and log in anew; in containers: docker run --ulimit memlock=-1",
                    one.host,
                )

    def line(self, seen: Sequence[Seen]) -> str:
        words = []
        for name in ("nofile", "memlock"):
            softs = [one.facts[name][0] for one in seen if name in one.facts]
            if softs:
                least = min((soft for soft in softs if soft != _UNLIMITED), default=_UNLIMITED)
                bound = f"{least / 2**20:.3g} MiB" if name == "memlock" else str(least)
                words.append(f"{name} {'unlimited' if least == _UNLIMITED else bound}")
        return ", ".join(words)
