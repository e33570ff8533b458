"""Converts errors of NCCL and of NCCL's loader into ddl errors that say what to do.

Only this file parses the texts of these errors.
"""

from __future__ import annotations

import re

from ddl_nccl.codes import REMOTE_ERROR, RESULTS
from ddlcore.errors import DdlInternalError, TransportError

DEBUG = "run it again with NCCL_DEBUG=INFO, which says where"
WHEEL = "pip install nvidia-nccl-cu13 (or nvidia-nccl-cu12: as the framework's CUDA)"
ONE_WHEEL = (
    "the libnccl that is loaded lacks it: it is too old, or one of two that overwrite each other; "
    "pip uninstall nvidia-nccl-cu12 nvidia-nccl-cu13, then install the one of the framework's CUDA"
)

# The fix is that of the first pattern found in NCCL's text.
FIXES = (
    (
        r"duplicate gpu|multiple ranks are using the same gpu",  # NCCL's text until 2.29, and its text since then
        "two ranks are on one GPU, which NCCL refuses; start at most as many ranks on a host as it has GPUs, "
        "or leave --backend to auto, which goes by host memory then",
    ),
    (r"undefined symbol|(function|symbol) \S+ (is )?not found", ONE_WHEEL),
    (
        r"libnccl\S* (not found|cannot open)|failure finding .?libnccl|no such file: libnccl",
        f"no libnccl.so.2; {WHEEL}",
    ),
    (
        r"peer access|ipc|p2p|invalid resource handle",
        "GPUs of one host cannot reach each other's memory (ranks that see different devices, or an IOMMU): "
        "set NCCL_P2P_DISABLE=1, or let every rank see all of its host's GPUs",
    ),
    (r"no space left|/dev/shm|shared memory segment", "give the container more shared memory: --shm-size=1g"),
    (r"out of memory", "the GPU's memory is full; make buckets smaller, or set NCCL_BUFFSIZE lower"),
    (
        r"libcuda|driver version is insufficient|unsupported toolkit|no cuda-capable device|initialization error",
        "the NVIDIA driver is missing or older than this NCCL's CUDA; nvidia-smi says which it serves",
    ),
    (
        r"no socket interface found|no interface found",
        "--network-interface (DDL_NETWORK_INTERFACE) or NCCL_SOCKET_IFNAME names no interface of this host",
    ),
    (r"mismatch|different version", "the ranks run different NCCLs; install the same one on every host"),
)
BY_RESULT = {
    1: f"CUDA failed within NCCL; {DEBUG} (NCCL_P2P_DISABLE=1 where GPUs cannot reach each other)",
    2: f"a call to the system failed; {DEBUG}",
    3: f"NCCL contradicts itself, or memory was overwritten; {DEBUG}",
    REMOTE_ERROR: "a peer, or the network to it, is gone",
}


def explained(what: str, error: BaseException, last_error: str = "") -> DdlInternalError:
    """Return a ddl error of one line, with a fix, for ``error``, which was raised during the action ``what``.

    ``last_error`` is NCCL's own description of the error. If ``error`` is a ddl error already, it is returned
    unchanged.
    """
    if isinstance(error, DdlInternalError):
        return error
    text = _one_line(error)
    status = getattr(error, "status", None)
    account = "" if last_error in text else last_error
    return _told(what, text, status if isinstance(status, int) else 0, account)


def meaning(what: str, result: int, last_error: str = "") -> TransportError:
    """Return the ddl error for the code ``result``, which NCCL reports some time after a call has returned.

    ``what`` names the action or communicator that has failed. ``last_error`` is NCCL's own description of the error.
    """
    name = RESULTS[result] if 0 <= result < len(RESULTS) else f"result {result}"
    return _told(what, name, result, last_error)


def _told(what: str, text: str, status: int, account: str) -> TransportError:
    account = _one_line(account) if account else ""
    said = f"{text} ({account})" if account else text
    fix = next((fix for pattern, fix in FIXES if re.search(pattern, said, re.IGNORECASE)), "")
    fix = fix or BY_RESULT.get(status, DEBUG)
    return TransportError(f"nccl: {what} failed: {said}; {fix}")


def _one_line(said: object) -> str:
    text = " ".join(str(said).split()) or type(said).__name__
    text = re.sub(r" ?\(run with NCCL_DEBUG=\w+ for details\)", "", text)
    return text if len(text) <= 300 else text[:297] + "…"
