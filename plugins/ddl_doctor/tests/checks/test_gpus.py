"""GPUs: what the driver's library tells, whom a rank sees, and which islands follow from who reaches whom."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
from ddl_doctor import gpu_driver
from ddl_doctor.checks.gpus import GpuLinksCheck, GpuSharingCheck
from ddl_doctor.checks.islands import islands, median_between, median_within
from ddl_doctor.gpu_driver import GpuDriver, visible

from ddlcore.contracts.check import Gpu, HostView, Links, Seen

GPUS = [Gpu(i, "H100", f"GPU-{letter}1-{i}", f"0000:{i}b:00.0", 80 << 30) for i, letter in enumerate("aabc")]


@pytest.mark.parametrize(
    ("wanted", "indexes"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3, 0", [3, 0]),
        ("1,9,0", [1]),  # what stands behind a wrong one does not count
        ("GPU-b1-2,GPU-c", [2, 3]),
        ("GPU-a", []),  # two begin so
        ("-1", []),
        ("1,1", []),  # named twice: all is void
        ("MIG-1", []),  # a part of one
    ],
)
def test_whom_a_rank_sees(wanted: str | None, indexes: list[int]) -> None:
    """As the driver reads CUDA_VISIBLE_DEVICES."""
    assert [gpu.index for gpu in visible(GPUS, wanted)] == indexes


@pytest.mark.parametrize(
    ("rows", "groups"),
    [
        (["NYNN", "YNNN", "NNNY", "NNYN"], [(0, 1), (2, 3)]),
        (["NYYY", "YNYY", "YYNY", "YYYN"], [(0, 1, 2, 3)]),
        (["NN", "NN"], [(0,), (1,)]),
        (["NYN", "YNY", "NYN"], [(0, 1, 2)]),  # through the one in the middle
        (["NYN", "NNN", "NNN"], [(0,), (1,), (2,)]),  # one way is none
    ],
)
def test_islands(rows: Sequence[str], groups: list[tuple[int, ...]]) -> None:
    """From the Y/N matrix alone."""
    assert islands([[letter == "Y" for letter in row] for row in rows]) == groups


def test_medians() -> None:
    """Of the pairs within groups and between them; the diagonal, a GPU's own memory, is neither."""
    values: list[list[float | None]] = [[100.0, 1.0, 9.0], [3.0, 100.0, None], [7.0, 8.0, 100.0]]
    assert median_within(values, [(0, 1), (2,)]) == 2.0
    assert median_between(values, [(0, 1), (2,)]) == 8.0
    assert median_between(values, [(0, 1, 2)]) is None


class Driver:
    """A host's GPUs, given."""

    def __init__(self, gpus: Sequence[Gpu], peers: Sequence[Sequence[bool]], links: Links | None = None) -> None:
        self._all = (gpus, peers, links)

    def gpus(self) -> Sequence[Gpu]:
        return self._all[0]

    def peers(self) -> Sequence[Sequence[bool]]:
        return self._all[1]

    def links(self) -> Links | None:
        return self._all[2]


def test_peer_access_that_brings_nothing() -> None:
    """The driver says Y, and a copy takes as long as without."""
    peers = [[False, True], [True, False]]
    links = Links({"on": [[1.0, 11.0], [10.5, 1.0]], "off": [[1.0, 11.5], [11.0, 1.0]]}, {})
    check = GpuLinksCheck()
    facts = check.look(HostView("node1", gpus=Driver(GPUS[:2], peers, links)))
    (found,) = check.judge([Seen("node1", 0, 0, facts)])
    assert "brings nothing between GPUs 0-1, 1-0" in found.what
    assert "ACS" in found.fix


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"stuck": [0, 1]}, "from GPU 0 to GPU 1 never ends"),
        ({"wrong": [[1, 0]]}, "from GPU 1 to GPU 0 brings other data"),
    ],
)
def test_copies_that_a_plugin_found_bad(more: dict[str, Any], words: str) -> None:
    """What completes the facts is judged with them."""
    check = GpuLinksCheck()
    facts = check.look(HostView("node1", gpus=Driver(GPUS[:2], [[False, True], [True, False]])))
    (found,) = check.judge([Seen("node1", 0, 0, {**facts, **more})])
    assert words in found.what and "IOMMU" in found.fix and "hangs in its first collective" in found.means


def test_a_copy_that_fails() -> None:
    """With the driver's error."""
    check = GpuLinksCheck()
    facts = check.look(HostView("node1", gpus=Driver(GPUS[:2], [[False, True], [True, False]])))
    (found,) = check.judge([Seen("node1", 0, 0, {**facts, "failed": [1, 0, "CUDA's error 719"]})])
    assert found.what == "a copy from GPU 1 to GPU 0 fails: CUDA's error 719" and "xid" in found.fix


@pytest.mark.parametrize(("wanted", "shared"), [(["0", "0"], True), (["0", "1"], False), ([None, None], False)])
def test_ranks_on_one_gpu(wanted: list[str | None], shared: bool) -> None:
    """By their own environment, where each sees one; else each takes that of its local rank."""
    check = GpuSharingCheck()
    seen = []
    for rank, value in enumerate(wanted):
        environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        view = HostView("node1", environ, gpus=Driver(GPUS, []), rank=rank, local_rank=rank)
        seen.append(Seen("node1", rank, rank, check.look(view)))
    found = list(check.judge(seen))
    assert [one.what for one in found] == (
        ["ranks 0 and 1 take the same GPU 0 (H100), by CUDA_VISIBLE_DEVICES=0"] if shared else []
    )
    assert all("unset CUDA_VISIBLE_DEVICES" in one.fix for one in found)


def test_the_same_index_on_two_hosts_is_no_sharing() -> None:
    """GPUs are known by their UUID and host."""
    check = GpuSharingCheck()
    facts = check.look(HostView("x", gpus=Driver(GPUS, [])))
    assert list(check.judge([Seen("node1", 0, 0, facts), Seen("node2", 1, 0, facts)])) == []


class StandIn:
    """The driver's library: two GPUs, of which the first writes into the second, but reads nothing."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0 if index.value < 2 else 6

    def nvmlDeviceGetName(self, handle: Any, text: Any, length: Any) -> int:
        text.value = f"H100 number {handle.value}".encode()
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, length: Any) -> int:
        text.value = f"GPU-{handle.value}".encode()
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, pci: Any) -> int:
        pci._obj.busId = b"00000000:3B:00.0"
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.used = 80 << 30, 60 << 30
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        rates._obj.gpu = 77
        return 0 if handle.value == 1 else 3  # not supported

    def nvmlDeviceGetP2PStatus(self, a: Any, b: Any, way: ctypes.c_uint, status: Any) -> int:
        status._obj.value = 0 if (a.value, way.value) == (1, 1) or a.value == 2 else 4
        return 0


def test_the_driver_s_library() -> None:
    """Names, addresses as /sys writes them, use, and peers only where reading and writing both go."""
    driver = GpuDriver(StandIn())
    assert driver.gpus()[1] == Gpu(1, "H100 number 2", "GPU-2", "0000:3b:00.0", 80 << 30)
    assert driver.peers() == [[False, False], [True, False]]
    use = driver.use(0)
    assert use is not None and (use.share, use.used_bytes, use.total_bytes) == (0.77, 60 << 30, 80 << 30)
    assert driver.use(1) is None and driver.use(2) is None


def test_the_use_of_a_rank_s_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the one of its local rank among those that it sees; none where it sees none, or there is no driver."""
    monkeypatch.setattr(gpu_driver, "open_driver", lambda: GpuDriver(StandIn()))
    assert gpu_driver.use_of({}, 0)() == (0.77, 60 << 30, 80 << 30)
    assert gpu_driver.use_of({}, 1)() is None  # its driver does not tell
    assert gpu_driver.use_of({"CUDA_VISIBLE_DEVICES": "1,0"}, 1)() == (0.77, 60 << 30, 80 << 30)
    assert gpu_driver.use_of({"CUDA_VISIBLE_DEVICES": ""}, 0)() is None
    monkeypatch.setattr(gpu_driver, "open_driver", lambda: None)
    assert gpu_driver.use_of({}, 0)() is None
