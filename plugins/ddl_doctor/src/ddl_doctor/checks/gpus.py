"""Checks the GPUs of each host: which rank uses which GPU, how GPUs are connected, and whether an IOMMU is active."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ddl_doctor.checks.islands import islands, median_between, median_within, useless_pairs
from ddl_doctor.gpu_driver import visible
from ddlcore.contracts.check import Check, Finding, HostView, Matrix, Seen

_MAKERS = ("0x10de", "0x1002")  # PCI vendors of GPUs that compute: NVIDIA, AMD
_DISPLAY = "0x03"  # class of PCI devices


class IommuCheck(Check):
    """A check that no IOMMU translates the memory addresses that GPUs use to copy data to each other."""

    name = "iommu"

    def look(self, host: HostView) -> Any:
        """Return a dict with facts about the host's GPUs and IOMMUs.

        The dict contains the PCI addresses of the GPUs, the names of the active IOMMUs, the type of the IOMMU group of
        each GPU, and the kernel's boot options for IOMMUs.
        """
        gpus = []
        for bus in host.names("/sys/bus/pci/devices"):
            device = f"/sys/bus/pci/devices/{bus}"
            is_gpu = host.read(f"{device}/class").startswith(_DISPLAY)
            if is_gpu and host.read(f"{device}/vendor").strip() in _MAKERS:
                gpus.append(bus)
        types = {}
        for group in host.names("/sys/kernel/iommu_groups"):
            kind = host.read(f"/sys/kernel/iommu_groups/{group}/type").strip()
            for bus in host.names(f"/sys/kernel/iommu_groups/{group}/devices"):
                types[bus] = kind
        return {
            "gpus": gpus,
            "units": host.names("/sys/class/iommu"),
            "types": {bus: types[bus] for bus in gpus if bus in types},
            "boot": [word for word in host.read("/proc/cmdline").split() if "iommu" in word],
        }

    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        for one in seen:
            facts = one.facts
            # The type "identity" means that addresses are not translated. If the kernel reports no type, assume that
            # addresses are translated.
            translated = [bus for bus in facts["gpus"] if facts["types"].get(bus, "DMA") != "identity"]
            if facts["units"] and translated:
                boot = f" (booted with {' '.join(facts['boot'])})" if facts["boot"] else ""
                yield Finding(
                    self.name,
                    f"an IOMMU is on{boot}, and translates for {_count(translated, 'GPU')}",
                    "copies from GPU to GPU go through it: they are slow, give wrong data, or never end, and a job hangs "
                    "in its first collective with all GPUs at 100 %",
                    _iommu_fix(facts["units"], one.host),
                    one.host,
                )

    def line(self, seen: Sequence[Seen]) -> str:
        hosts = [one.host for one in seen if one.facts["units"]]
        return f"on, not necessarily for GPUs: {', '.join(hosts)}" if hosts else "off"


def _iommu_fix(units: Sequence[str], host: str) -> str:
    option, soft = (
        ("amd_iommu=off", "iommu=pt") if units[0].startswith("ivhd") else ("intel_iommu=off", "intel_iommu=soft")
    )
    return (
        f"on {host} add {option} to GRUB_CMDLINE_LINUX in /etc/default/grub (or {soft}, where virtual machines need it), "
        "sudo update-grub, and reboot; or turn it off in the BIOS (VT-d, AMD-Vi)"
    )


class GpuSharingCheck(Check):
    """A check that no two ranks use the same GPU."""

    name = "gpu-sharing"
    each_rank = True

    def look(self, host: HostView) -> Any:
        """Return a dict that describes the GPU that this rank uses if it chooses its GPU by its local rank.

        The dict is empty if the rank sees no GPU.
        """
        gpus = list(host.gpus.gpus()) if host.gpus is not None else []
        wanted = host.environ.get("CUDA_VISIBLE_DEVICES")
        mine = visible(gpus, wanted)
        if not mine:
            return {}
        taken = mine[host.local_rank % len(mine)]
        return {"uuid": taken.uuid, "index": taken.index, "name": taken.name, "sees": len(mine), "wanted": wanted}

    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        takers: dict[tuple[str, str], list[Seen]] = {}
        for one in seen:
            if one.facts:
                takers.setdefault((one.host, one.facts["uuid"]), []).append(one)
        for (host, _), ranks in takers.items():
            if len(ranks) > 1:
                facts, numbers = ranks[0].facts, " and ".join(str(one.rank) for one in ranks)
                chosen = f", by CUDA_VISIBLE_DEVICES={facts['wanted']}" if facts["wanted"] is not None else ""
                yield Finding(
                    self.name,
                    f"ranks {numbers} take the same GPU {facts['index']} ({facts['name']}){chosen}",
                    "they share its memory and take turns on it: out of memory, or each at half the speed; libraries that "
                    "reduce on GPUs refuse it or hang",
                    _sharing_fix(host, ranks, seen),
                    host,
                )

    def line(self, seen: Sequence[Seen]) -> str:
        return ", ".join(f"rank {one.rank}: GPU {one.facts['index']}" for one in seen if one.facts) or "no GPU"


def _sharing_fix(host: str, ranks: Sequence[Seen], seen: Sequence[Seen]) -> str:
    local = sum(one.host == host for one in seen)
    if ranks[0].facts["sees"] >= local or ranks[0].facts["wanted"] is None:
        return f"start as many ranks there as it has GPUs: -H {host}:{ranks[0].facts['sees']}"
    return (
        "unset CUDA_VISIBLE_DEVICES, or name one GPU for each rank of the host in it, and take the one of local_rank()"
    )


class GpuLinksCheck(Check):
    """A check that the GPUs of a host can access each other's memory directly.

    Plugins that can copy data between GPUs add measurements of such copies to the facts of this check.
    """

    name = "gpu-links"

    def look(self, host: HostView) -> Any:
        """Return a dict with the host's GPUs, the pairs of GPUs with direct access, and the measured copies.

        The dict is empty if the host has no GPU. The copies are left out if ``host.gpus`` has no measurements of them.
        """
        gpus = list(host.gpus.gpus()) if host.gpus is not None else []
        if host.gpus is None or not gpus:
            return {}
        links = host.gpus.links()
        measured = (
            {} if links is None else {"latency_us": dict(links.latency_us), "gbytes_per_s": dict(links.gbytes_per_s)}
        )
        return {"gpus": [asdict(gpu) for gpu in gpus], "peers": [list(row) for row in host.gpus.peers()], **measured}

    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        for one in seen:
            if len(one.facts.get("gpus", ())) > 1:
                yield from self._judge(one.host, one.facts)

    def _judge(self, host: str, facts: Mapping[str, Any]) -> Iterable[Finding]:
        groups = islands(facts["peers"])
        if len(groups) > 1:
            named = "; ".join(f"island {chr(65 + i % 26)}: {_numbers(group)}" for i, group in enumerate(groups))
            alone = all(len(group) == 1 for group in groups)
            what = "no GPU reaches another's memory" if alone else f"{len(groups)} islands of GPUs ({named})"
            yield Finding(
                self.name,
                f"{what}, so not all pairs are peers",
                "what goes from one island to another is copied through the host's memory" + _cost(groups, facts),
                _islands_fix(groups, alone),
                host,
            )
        if facts.get("failed"):
            yield _failed(host, *facts["failed"])
        for pair in [facts["stuck"]] if facts.get("stuck") else facts.get("wrong", ()):
            what = "never ends" if facts.get("stuck") else "brings other data than was sent"
            yield Finding(
                self.name,
                f"a copy from GPU {pair[0]} to GPU {pair[1]} {what}",
                "a job hangs in its first collective, or trains on wrong gradients",
                "turn off what stands between them: the IOMMU (see above, if it is on), ACS of the PCI switch, a virtual "
                "machine; until then start jobs without peer access: NVIDIA's libraries have a switch for it, *_P2P_DISABLE=1",
                host,
            )
        latency = facts.get("latency_us", {})
        if "on" in latency and "off" in latency:
            useless = useless_pairs(facts["peers"], latency["on"], latency["off"])
            if useless:
                yield Finding(
                    self.name,
                    f"peer access is on but brings nothing between GPUs {', '.join(f'{a}-{b}' for a, b in useless)}",
                    "copies between them take a longer way, for example if access control (ACS) of a PCI switch sends them up to the "
                    "processor and back",
                    "sudo lspci -vvv | grep ACSCtl: turn ACS off in the BIOS, or for each switch: setpci -s BUS ECAP_ACS+0x6.w=0000",
                    host,
                )

    def show(self, seen: Sequence[Seen]) -> Iterable[Matrix]:
        for one in seen:
            gpus = one.facts.get("gpus", ())
            if len(gpus) < 2:
                continue
            names = tuple(str(gpu["index"]) for gpu in gpus)
            peers = tuple(
                tuple(None if a == b else float(value) for b, value in enumerate(row))
                for a, row in enumerate(one.facts["peers"])
            )
            yield Matrix(f"{one.host}: GPU peers", "Y/N", names, peers)
            for key, what, unit in (("latency_us", "latency", "us"), ("gbytes_per_s", "bandwidth", "GB/s")):
                for state, values in one.facts.get(key, {}).items():
                    yield Matrix(
                        f"{one.host}: GPU {what}, P2P {state}", unit, names, tuple(tuple(row) for row in values)
                    )

    def line(self, seen: Sequence[Seen]) -> str:
        return (
            ", ".join(f"{one.host}: {_count(one.facts['gpus'], 'GPU')}" for one in seen if one.facts.get("gpus"))
            or "no GPU"
        )


def _failed(host: str, a: int, b: int, why: str) -> Finding:
    return Finding(
        GpuLinksCheck.name,
        f"a copy from GPU {a} to GPU {b} fails: {why}",
        "a job fails in its first collective that goes that way; what comes after this pair was not measured",
        "see the driver's messages (sudo dmesg | grep -i xid): a GPU or a bridge may be broken; until then leave one of "
        "the two out by CUDA_VISIBLE_DEVICES",
        host,
    )


def _cost(groups: Sequence[Sequence[int]], facts: Mapping[str, Any]) -> str:
    words = []
    for key, unit, worse in (("latency_us", "µs", operator.gt), ("gbytes_per_s", "GB/s", operator.lt)):
        values = facts.get(key, {}).get("on")
        if values is not None:
            inside, between = median_within(values, groups), median_between(values, groups)
            if inside is not None and between is not None and worse(between, inside):
                words.append(f"{between:.3g} {unit} instead of {inside:.3g} {unit}")
    return f": {', '.join(words)} (medians)" if words else ""


def _islands_fix(groups: Sequence[Sequence[int]], alone: bool) -> str:
    if alone:
        return (
            "nvidia-smi topo -p2p r says why (chipset, driver, or cards that cannot); an IOMMU, ACS or a virtual machine "
            "between them can be turned off; consumer cards may lack peer access, then use shared memory of the host"
        )
    largest = max(groups, key=len)
    return (
        f"keep a small job within an island: CUDA_VISIBLE_DEVICES={','.join(map(str, largest))} ddl run -np {len(largest)} …; "
        "a large one counts ranks so that neighbours share an island; nvidia-smi topo -m shows the bridges, and cards "
        "under one root reach each other"
    )


def _numbers(group: Sequence[int]) -> str:
    return "GPU " + ", ".join(map(str, group)) if len(group) == 1 else "GPUs " + ", ".join(map(str, group))


def _count(things: Sequence[object], word: str) -> str:
    return f"{len(things)} {word}{'' if len(things) == 1 else 's'}"
