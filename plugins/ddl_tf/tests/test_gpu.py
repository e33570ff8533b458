"""TensorFlow's tensors on a GPU: with a pretended device whose queue runs late, and with fakes of the CUDA driver."""

from __future__ import annotations

import ctypes
import gc
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import ddl_tf as ddl
import pytest
import tensorflow as tf
from ddl_conform.pretend import KIND
from ddl_tf import adapter, gpu
from ddl_tf.adapter import TfAdapter
from ddl_tf.autograd import ADAPTER
from ddl_tf.devices import check_device, is_host

from ddlcore.api import current_job, gpus
from ddlcore.contracts.dlpack import ON_CPU
from ddlcore.contracts.transport import Memory
from ddlcore.errors import DeviceError
from ddlcore.testing import run_world
from ddlcore.types import Device, DType
from plugins.ddl_tf.tests.late import CPU_0, LateGpu, late_gpu, on_ranks

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def late() -> Iterator[LateGpu]:
    with late_gpu() as device:
        yield device


@pytest.mark.parametrize("route", [KIND, "cpu"])
def test_verbs(late: LateGpu, route: str) -> None:
    """Results are ready when a collective returns, although the device is late; integers are staged on the host."""

    def play(rank: int) -> None:
        for _ in range(4):
            x = tf.fill((2, 3), rank + 1.0)
            assert ddl.allreduce(x, op=ddl.Sum, name="x").numpy().tolist() == [[3.0] * 3] * 2
            assert ddl.broadcast(x, 1, name="b").numpy().tolist() == [[2.0] * 3] * 2
            assert ddl.allgather(x[: rank + 1], name="g").numpy()[:, 0].tolist() == [1.0, 2.0, 2.0]
            assert ddl.reducescatter(x, op=ddl.Sum, name="s").numpy().tolist() == [[3.0] * 3]
            assert ddl.alltoall(x, name="a").numpy()[:, 0].tolist() == [1.0, 2.0]
            one, two = ddl.grouped_allreduce([x, x + 1], op=ddl.Sum, name="two")
            assert (one.numpy()[0, 0], two.numpy()[0, 0]) == (3.0, 5.0)
            assert ddl.allreduce(tf.constant([rank]), op=ddl.Sum, name="i").numpy().tolist() == [1]

    on_ranks(late, play, route=route)
    assert late.waited > 0


def test_gradients(late: LateGpu) -> None:
    """A tape's gradients are reduced on their device, and replayed from the third step on."""

    def play(rank: int) -> list[float]:
        weight = tf.Variable([1.0, 2.0])
        for _ in range(8):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * weight) * (rank + 1.0)
            (gradient,) = ddl.DistributedGradientTape(tape).gradient(loss, [weight])
            weight.assign_sub(0.1 * gradient)
        assert ddl.stats()["buckets_replayed"] > 0
        return list(weight.numpy().tolist())

    one, other = on_ranks(late, play)
    assert one == other
    assert one == pytest.approx([0.7**8, 2 * 0.7**8], rel=1e-5)  # the mean gradient is 3 times the weight


def test_what_goes_by_way_of_the_host(late: LateGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are staged on the host if the user requests it, and if those of one group are on different devices."""
    monkeypatch.setattr(adapter, "on_host", lambda tensor: "brought")
    here, whole = tf.zeros(2), tf.zeros(2, tf.int32)

    def play(rank: int) -> None:
        job = current_job()
        assert adapter.brought(ADAPTER, job, [here, here]) == [here, here]
        assert adapter.brought(ADAPTER, job, [whole]) == [whole]
        assert adapter.brought(ADAPTER, job, [here], stage_on_host=True) == ["brought"]
        assert adapter.brought(ADAPTER, job, [here, whole]) == ["brought", "brought"]

    on_ranks(late, play)


@pytest.mark.parametrize("name", ["", "/cpu:0", "CPU", "/job:localhost/device:CPU:0"])
def test_names_of_the_host(name: str) -> None:
    """'' means the device on which a tensor is."""
    check_device(name, "device_dense")
    assert is_host(name) == (name != "")


def test_a_gpu_that_nothing_serves(late: LateGpu, caplog: pytest.LogCaptureFixture) -> None:
    """Tensors on a GPU without a transport are staged on the host, and a log line says what would change that."""

    def play(rank: int, job: Any) -> None:
        place = Device("cuda", 0)
        assert not ADAPTER.serves(job, place)
        assert not ADAPTER.serves(job, place)

    with caplog.at_level(logging.INFO, "ddl"):
        run_world(1, play, settings={"log_level": "INFO"})
    (line,) = [text for text in caplog.messages if "are staged on the host" in text]
    assert line.startswith(
        "rank 0: TensorFlow's tensors on cuda:0 are staged on the host: memory of cuda cannot be used"
    )


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32, DType.F64], ids=lambda dtype: dtype.label)
def test_memory_becomes_a_tensor(dtype: DType) -> None:
    """Memory becomes a tensor without a copy, and lives exactly as long as the tensor."""
    memory = Memory(64)
    ctypes.memset(memory.address, 0, 64)
    gone = weakref.ref(memory)
    tensor = gpu.tensor_at(memory, (2, 2), dtype, ON_CPU, 0)
    address = memory.address
    del memory
    gc.collect()
    assert gone() is not None
    assert (tensor.dtype.name, tuple(tensor.shape)) == (dtype.label, (2, 2))
    assert TfAdapter().buffer(tensor, elementwise=True).address == address
    del tensor
    gc.collect()
    assert gone() is None


class Driver:
    """The part of the CUDA driver that the test calls."""

    def __init__(self, codes: Sequence[int]) -> None:
        self.codes = list(codes)
        self.asked: list[int] = []

    def cuEventQuery(self, event: Any) -> int:
        self.asked.append(event.value)
        return self.codes.pop(0)


def test_waiting_for_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting ends when the event has occurred; an error of the GPU becomes one of ddl's errors."""
    driver = Driver([600, 600, 0])
    monkeypatch.setattr(gpu, "_driver", lambda: driver)
    gpu.GpuFunctions().wait(0xAB)
    assert driver.asked == [0xAB] * 3
    driver.codes = [600, 700]
    with pytest.raises(DeviceError, match="CUDA error 700"):
        gpu.GpuFunctions().wait(0xAB)


class Elsewhere:
    """A stand-in for a tensor that TensorFlow reports to be on a GPU."""

    def __init__(self, name: str, dtype: Any = tf.float32) -> None:
        self.backing_device = name
        self.dtype = dtype


def test_where_a_tensor_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device number is CUDA's, which the driver knows; TensorFlow numbers only visible devices.

    Types that TensorFlow keeps on the host have no GPU device.
    """
    asked = []

    def device(name: str, tensor: Any) -> Device:
        asked.append(name)
        return Device("cuda", 3)

    monkeypatch.setattr(gpu, "_cuda_device", device)
    name = "/job:localhost/replica:0/task:0/device:GPU:0"
    assert gpu.GpuFunctions().place(Elsewhere(name)) == Device("cuda", 3)
    assert gpu.GpuFunctions().place(Elsewhere(name, tf.int32)) is None
    assert gpu.GpuFunctions().place(Elsewhere("/job:localhost/replica:0/task:0/device:TPU:0")) is None
    assert asked == [name]


class Pointers:
    """The part of the CUDA driver that finds the device of an address.

    It knows no device for address 0 and for the address ``nowhere``.
    """

    def __init__(self, nowhere: int) -> None:
        self.nowhere = nowhere

    def cuPointerGetAttribute(self, ordinal: Any, attribute: int, address: Any) -> int:
        if address.value in (0, self.nowhere):
            return 1
        ordinal._obj.value = 3
        return 0


def test_where_a_tensor_without_elements_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor without elements is on its GPU, also in the first call.

    On another rank the same tensor may have elements, and both ranks must find the same device.
    """
    empty = tf.zeros((0, 4))
    address = TfAdapter().buffer(empty, elementwise=True).address
    monkeypatch.setattr(gpu, "_driver", lambda: Pointers(address))
    monkeypatch.setattr(gpu, "_ordinals", {})
    assert gpu._cuda_device(CPU_0, empty) == Device("cuda", 3)
    assert gpu._cuda_device(CPU_0, tf.zeros(1)) == Device("cuda", 3)


def test_threads_run_while_tensorflow_computes(late: LateGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a tensor is sent, an operation waits for the GPU, and only then is the address requested.

    Requesting the address first would block all Python threads.
    """
    synced: list[str] = []
    sync = tf.raw_ops.SyncDevice

    def noted() -> None:
        sync()
        synced.append("stream")

    monkeypatch.setattr(tf.raw_ops, "SyncDevice", noted)

    def play(rank: int) -> None:
        weights = [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(weight * weight) for weight in weights])
        gradients = ddl.DistributedGradientTape(tape).gradient(loss, weights)
        assert [gradient.numpy().tolist() for gradient in gradients] == [[2.0, 4.0], [6.0]]

    on_ranks(late, play)
    assert len(synced) == 2  # once on each rank, for both tensors


def test_another_makers_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of another vendor has no CUDA driver, and ddl does not use it."""

    def missing() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(gpu, "_driver", missing)
    assert gpu.GpuFunctions().place(Elsewhere("/job:localhost/replica:0/task:0/device:GPU:7")) is None


def test_graphs_tell_of_the_host(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Staging tensors of graphs on the host is logged once, if there is a GPU."""
    gpus._log.cache_clear()
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind])

    def play(rank: int, job: Any) -> list[float]:
        reduce = tf.function(lambda x: ddl.allreduce(x, op=ddl.Sum, name="x"))
        return list(reduce(tf.ones(2)).numpy().tolist())

    with caplog.at_level(logging.INFO, "ddl"):
        assert run_world(2, play, settings={"log_level": "INFO"}) == [[2.0, 2.0]] * 2
    gpus._log.cache_clear()
    assert len([text for text in caplog.messages if "in graphs" in text]) == 1
