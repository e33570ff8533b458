"""Finds the hosts that a batch system has granted to a job, and the number of ranks for each host.

This module reads the batch system's environment variables and host lists. The launchers of ddl and of plugins use this
module if the user has named no hosts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from ddlcore.contracts.launcher import HostSlots

__all__ = ["granted_hosts", "in_step", "node_names", "slurm_nodes", "tasks_per_node"]

_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm gives batch, extern and interactive steps the largest ids
_SCONTROL_S = 10.0
_MOST = 1 << 17  # names; a list that expands to more must be a mistake
_PART = re.compile(r"\[([^][]*)\]|([^][,]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def granted_hosts(environ: Mapping[str, str]) -> Sequence[HostSlots]:
    """Return the hosts of the present batch job in the job's order. Return an empty sequence if there is no batch job.

    ``environ``: the environment variables that describe the batch job. Each host has a number of slots; a slot is room
    for one rank. With Slurm, a host gets one slot for each requested task, or one for each core if no tasks were
    requested. With other batch systems, the number of slots is in the system's own list of hosts.

    Raises ValueError if a list of hosts is missing or malformed, or if srun has started this process as one of several.
    The message is one line that names the variable.
    """
    if "SLURM_JOB_ID" in environ:
        return _slurm_hosts(environ)
    slots: dict[str, int] = {}
    for host, count in _listed(environ):
        slots[host] = slots.get(host, 0) + count
    return [HostSlots(host, count) for host, count in slots.items()]


# --- Slurm


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether ``environ`` is the environment of a task that Slurm's srun has started.

    The result is False for a batch script and for an interactive shell.
    """
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID", "")
    if step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP:
        return False
    return bool(step) and "SLURM_PTY_PORT" not in environ


def slurm_nodes(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the nodes of the Slurm job, in Slurm's order.

    srun numbers its tasks in Slurm's order, even if the user gives it the nodes in another order. Raises ValueError,
    with a message of one line, if there is no node list, if there is no srun, or if srun has started this process as
    one of several.
    """
    import shutil  # imported late: every rank calls in_step(), and no rank needs these two modules
    import subprocess

    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "")
    if in_step(environ) and tasks.isdecimal() and int(tasks) > 1:
        raise ValueError(
            f"srun has started `ddl run` itself, {tasks} times; call it once, from the batch script without srun, "
            "or start the ranks by `srun python …` without it"
        )
    if shutil.which("srun", path=environ.get("PATH")) is None:
        raise ValueError(
            "SLURM_JOB_ID is set but no srun is on PATH; unset it where there is no allocation, or add --launcher ssh"
        )
    text = _node_list(environ)
    if not text:
        raise ValueError("SLURM_JOB_ID is set but SLURM_JOB_NODELIST is not; unset it where there is no allocation")
    try:
        return node_names(text)
    except ValueError:
        scontrol = shutil.which("scontrol", path=environ.get("PATH"))
        if scontrol is None:
            raise
        shown: list[str] = []
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [scontrol, "show", "hostnames", text]
            shown = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_S).stdout.split()
        if not shown:
            raise
        return shown


def _node_list(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")


def _slurm_hosts(environ: Mapping[str, str]) -> list[HostSlots]:
    nodes = slurm_nodes(environ)
    by_tasks = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    names = ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")
    name = next((name for name in (names if by_tasks else names[::-1]) if name in environ), "")
    counts = tasks_per_node(environ[name]) if name else [1] * len(nodes)
    if len(counts) != len(nodes):
        raise ValueError(
            f"{name}={environ[name]} does not fit the {len(nodes)} nodes of SLURM_JOB_NODELIST="
            f"{_node_list(environ)}; unset the variables that are not of this job, or name the hosts with -H"
        )
    return [HostSlots(node, count) for node, count in zip(nodes, counts)]


def node_names(text: str) -> list[str]:
    """Return the host names in a node list such as ``rack[1-2]n[01-03,7],login``.

    The order is that of ``scontrol show hostnames``. Raises ValueError if ``text`` is not such a list.
    """
    names: list[str] = []
    for item in _items(text):
        parts: list[list[str]] = []
        at = 0
        for found in _PART.finditer(item):
            if found.start() != at:
                break
            at = found.end()
            parts.append([found[2]] if found[1] is None else _unfold(found[1], text))
        if at != len(item) or not item:
            raise ValueError(f"'{text}' is no list of nodes such as node[01-04,7],login")
        size = 1
        for part in parts:
            size *= len(part)
        if len(names) + size > _MOST:
            raise ValueError(f"'{text}' names more than {_MOST} nodes")
        names += ["".join(chosen) for chosen in product(*parts)]
    return names


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node from a list in Slurm's form, such as ``2(x3),1``.

    The result for this example is [2, 2, 2, 1]. Raises ValueError if ``text`` is not such a list.
    """
    counts: list[int] = []
    for item in text.split(","):
        found = _COUNT.fullmatch(item.strip())
        if found is None or int(found[2] or 1) > _MOST:
            raise ValueError(f"'{text}' is no list of tasks per node such as 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _items(text: str) -> list[str]:
    """Return the parts of ``text`` between commas. Commas within brackets do not separate parts."""
    items, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            items.append(text[start:at].strip())
            start = at + 1
    return [*items, text[start:].strip()]


def _unfold(ranges: str, text: str) -> list[str]:
    unfolded: list[str] = []
    for one in ranges.split(","):
        found = _RANGE.fullmatch(one.strip())
        if found is None or int(found[2] or found[1]) < int(found[1]) or int(found[2] or 0) - int(found[1]) > _MOST:
            raise ValueError(f"'{text}' is no list of nodes: [{ranges}] holds no ranges such as 01-04,7")
        width = len(found[1])  # leading zeros are part of the names
        unfolded += [f"{number:0{width}d}" for number in range(int(found[1]), int(found[2] or found[1]) + 1)]
    return unfolded


# --- others


def _listed(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return pairs (host, slots) from the variables and host files of LSF, PBS, Cobalt or Grid Engine.

    A host may occur in several pairs, for example in one pair for each of its slots.
    """
    for name in ("LSB_DJOB_HOSTFILE", "PBS_NODEFILE", "COBALT_NODEFILE"):  # these files have one line per slot
        if name in environ:
            return [(fields[0], 1) for fields in _lines(environ, name)]
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if len(words) % 2 or not all(word.isdecimal() for word in words[1::2]):
        raise ValueError(f"LSB_MCPU_HOSTS={' '.join(words)} is no list of hosts and slots such as a 4 b 4")
    if words or "PE_HOSTFILE" not in environ:
        return [(host, int(count)) for host, count in zip(words[::2], words[1::2])]
    listed = []
    for fields in _lines(environ, "PE_HOSTFILE"):  # HOST SLOTS QUEUE CORES
        if len(fields) < 2 or not fields[1].isdecimal():
            raise ValueError(f"PE_HOSTFILE={environ['PE_HOSTFILE']}: '{' '.join(fields)}' is not HOST SLOTS …")
        listed.append((fields[0], int(fields[1])))
    return listed


def _lines(environ: Mapping[str, str], name: str) -> list[list[str]]:
    """Return the words of each line of a file. Empty lines are skipped.

    ``name``: the environment variable that contains the path of the file. Raises ValueError if the file cannot be read.
    """
    path = environ[name]
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{name}={path}: {getattr(error, 'strerror', None) or error}; unset it where there is no such job"
        ) from None
    return [line.split() for line in text.splitlines() if line.strip()]
