"""Errors of NCCL, CUDA and the loader become one line with a fix."""

from __future__ import annotations

import pytest
from ddl_nccl.errors import explained, meaning
from ddl_nccl.standin import StandInError

from ddlcore.errors import DdlInternalError, PeerLost, TransportError

CASES = [  # (status, the error's text, NCCL's own description, what the line must contain)
    (5, "InvalidUsage (5)", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000", "two ranks are on one GPU"),
    (5, "InvalidUsage (5)", "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable "
     "this configuration.", "two ranks are on one GPU"),
    (1, "UnhandledCudaError (1)", "Cuda failure 217 'peer access is not supported between these two devices'", "NCCL_P2P_DISABLE=1"),
    (1, "UnhandledCudaError (1)", "Cuda failure 'invalid resource handle'", "NCCL_P2P_DISABLE=1"),
    (1, "UnhandledCudaError (1): unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "", "NCCL_DEBUG=INFO"),
    (2, "SystemError (2)", "", "NCCL_DEBUG=INFO"),
    (2, "SystemError (2)", "Call to posix_fallocate failed : No space left on device", "--shm-size"),
    (6, "RemoteError (6)", "", "a peer, or the network to it, is gone"),
    (0, 'Failure finding "libnccl.so.2": No such file: libnccl.so.2', "", "pip install nvidia-nccl-cu13"),
    (0, "libnccl.so.2: cannot open shared object file", "", "pip install nvidia-nccl-cu13"),
    (0, "/x/libtorch_cuda.so: undefined symbol: ncclCommResume", "", "pip uninstall nvidia-nccl-cu12 nvidia-nccl-cu13"),
    (0, "Function ncclCommResume is not found", "", "pip uninstall nvidia-nccl-cu12 nvidia-nccl-cu13"),
    (0, "libcuda.so.1: cannot open shared object file", "", "nvidia-smi"),
    (1, "UnhandledCudaError (1)", "Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'", "nvidia-smi"),
    (1, "UnhandledCudaError (1)", "Cuda failure 2 'out of memory'", "memory is full"),
    (3, "InternalError (3)", "", "NCCL_DEBUG=INFO"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "text", "account", "fix"), CASES, ids=lambda value: str(value)[:24])
def test_one_line_with_the_cure(status: int, text: str, account: str, fix: str) -> None:
    """The line names what was done, what the error says, and what to do."""
    error = explained(
        "opening communicator world",
        StandInError(status, text + "\nand more") if status else RuntimeError(text),
        account,
    )
    line = str(error)
    assert isinstance(error, TransportError)
    assert line.startswith("nccl: opening communicator world failed: ") and "\n" not in line
    assert fix in line and account in line
    assert "for details" not in line


def test_what_ddl_raises_is_left_as_it_is() -> None:
    """An error of ddl's own stays as it is, because a lost peer must not become a transport error."""
    lost: DdlInternalError = PeerLost([3], "killed")
    assert explained("opening", lost) is lost


def test_what_is_told_later() -> None:
    """A late error is described by its number, known or unknown, in a limited length."""
    assert "remote process exited" in str(meaning("communicator world", 6))
    assert "result 77" in str(meaning("communicator world", 77, "x" * 1000))
    assert len(str(meaning("communicator world", 77, "x" * 1000))) < 500
