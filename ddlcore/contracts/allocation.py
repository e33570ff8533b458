"""Which hosts a batch system has granted, and how many ranks each takes, from the variables and lists that it leaves.

For launchers, built in or a plugin's, whose user has named no hosts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from ddlcore.contracts.launcher import HostSlots

__all__ = ["granted_hosts", "in_step", "node_names", "slurm_nodes", "tasks_per_node"]

_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # batch, extern and interactive steps count down from the top
_SCONTROL_S = 10.0
_MOST = 1 << 17  # names; a list that unfolds to more is a mistake
_PART = re.compile(r"\[([^][]*)\]|([^][,]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def granted_hosts(environ: Mapping[str, str]) -> Sequence[HostSlots]:
    """The hosts of the batch job that ``environ`` is of, in its order; () where it is of none.

    With Slurm as many slots as tasks were asked for, or else cores; with others as they list them.
    Raises ValueError in one line, which names the variable, for lists that are not there or make no sense,
    and where srun has started this process as one of several.
    """
    if "SLURM_JOB_ID" in environ:
        return _slurm_hosts(environ)
    slots: dict[str, int] = {}
    for host, count in _listed(environ):
        slots[host] = slots.get(host, 0) + count
    return [HostSlots(host, count) for host, count in slots.items()]


# --- Slurm


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether a process with these variables is a task of a step: not a batch script, nor a shell that somebody types in."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID", "")
    if step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP:
        return False
    return bool(step) and "SLURM_PTY_PORT" not in environ


def slurm_nodes(environ: Mapping[str, str]) -> list[str]:
    """Names of the allocation's nodes, in its order: srun numbers its tasks by it, whatever order it is told.

    Raises ValueError in one line where there is no list of them, no srun, or srun has started this process as one
    of several.
    """
    import shutil  # late, as subprocess: every rank asks whether it is in a step, and none of them needs these
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
            f"{_node_list(environ)}; unset what is not of this job, or say by -H where to run"
        )
    return [HostSlots(node, count) for node, count in zip(nodes, counts)]


def node_names(text: str) -> list[str]:
    """``rack[1-2]n[01-03,7],login`` as single names, in order, as ``scontrol show hostnames`` would give them.

    Raises ValueError for what is no such list.
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
    """``2(x3),1`` as one count a node: [2, 2, 2, 1]. Raises ValueError for what is no such list."""
    counts: list[int] = []
    for item in text.split(","):
        found = _COUNT.fullmatch(item.strip())
        if found is None or int(found[2] or 1) > _MOST:
            raise ValueError(f"'{text}' is no list of tasks per node such as 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _items(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
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
    """Hosts and slots, as LSF, PBS, Cobalt or Grid Engine list them."""
    for name in ("LSB_DJOB_HOSTFILE", "PBS_NODEFILE", "COBALT_NODEFILE"):  # a line a slot
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
    """The fields of each line of the file that ``name`` names."""
    path = environ[name]
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{name}={path}: {getattr(error, 'strerror', None) or error}; unset it where there is no such job"
        ) from None
    return [line.split() for line in text.splitlines() if line.strip()]
