"""The checks of ``ddl doctor`` for NCCL: they find libraries that do not fit together, on one host or between hosts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddlcore.contracts import pip_install
from ddlcore.contracts.check import Check, Finding, HostView, Seen
from ddlcore.contracts.known_bad import KnownBad, KnownBadCheck

WHEEL = re.compile(r"nvidia-nccl-cu(\d+)")


class NcclCheck(Check):
    """The check that all hosts have the same NCCL, built for the same CUDA version as cuda-bindings."""

    name = "nccl"

    def look(self, host: HostView) -> Any:
        found = {name: version for name, version in host.distributions.items() if WHEEL.fullmatch(name)}
        bindings = host.distributions.get("cuda-bindings", "")
        return {"wheels": found, "bindings": bindings} if found else {}

    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        """Yield a finding for each mismatch.

        Two NCCL wheels in one environment are reported by ``KnownBadNccl``, not here.
        """
        for one in seen:
            wheels, bindings = one.facts.get("wheels", {}), one.facts.get("bindings", "")
            if len(wheels) == 1 and bindings:
                yield from self._beside(one.host, wheels, bindings)
        versions: dict[str, list[str]] = {}
        for one in seen:
            for version in set(one.facts.get("wheels", {}).values()):
                versions.setdefault(_release(version), []).append(one.host)
        if len(versions) > 1:
            yield Finding(
                self.name,
                "NCCL differs: " + "; ".join(f"{version} on {', '.join(on)}" for version, on in versions.items()),
                "ranks with different NCCLs cannot form a communicator: NCCL fails as it opens, or hangs",
                "install one NCCL on all hosts: "
                f"pip install 'nvidia-nccl-cu13=={max(versions, key=_number)}.*' (or nvidia-nccl-cu12)",
            )

    def _beside(self, host: str, wheels: Mapping[str, str], bindings: str) -> Iterable[Finding]:
        ((name, version),) = wheels.items()
        major = (WHEEL.fullmatch(name) or [""])[1]
        if bindings.partition(".")[0] != major:
            yield Finding(
                self.name,
                f"{name} {version} beside cuda-bindings {bindings} on {host}",
                "NCCL and the kernels are for different CUDAs: one of them may want a newer driver than the other",
                f"{pip_install(f'ddl-nccl[cu{major}]', absolute=True)}, which brings cuda-bindings {major}",
                host,
            )

    def line(self, seen: Sequence[Seen]) -> str:
        wheels = seen[0].facts.get("wheels", {}) if seen else {}
        return ", ".join(f"{name} {version}" for name, version in wheels.items()) or "no wheel of NCCL"


def _two_cuda_majors(host: HostView) -> str:
    wheels = [f"{name} {version}" for name, version in sorted(host.distributions.items()) if WHEEL.fullmatch(name)]
    return " beside ".join(wheels) if len(wheels) > 1 else ""


class KnownBadNccl(KnownBadCheck):
    """The check that finds combinations of installed distributions that are known not to work."""

    name = "known-bad-nccl"
    completes = "known-bad"
    rows = (
        KnownBad(
            "two-nccl-wheels",
            _two_cuda_majors,
            "both wheels put libnccl.so.2 into the same directory, and the later overwrites the earlier: torch then "
            "fails with an undefined symbol such as ncclCommResume, or runs with a library for another CUDA",
            "keep the one of torch's CUDA (python -c 'import torch; print(torch.version.cuda)'), for CUDA 12: "
            "pip uninstall -y nvidia-nccl-cu13 && pip install --force-reinstall --no-deps nvidia-nccl-cu12",
        ),
    )


def _release(version: str) -> str:
    """Return the first three numbers of a wheel's version, which are the numbers that NCCL compares between ranks."""
    return ".".join(version.split(".")[:3])


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
