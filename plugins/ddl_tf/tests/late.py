"""A pretended GPU for TensorFlow: each rank's float tensors are on a device of its own, whose queue runs late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import tensorflow as tf
from ddl_conform.pretend import KIND, PretendRuntime
from ddl_conform.pretend_world import PretendWorld
from ddl_tf import gpu, placing
from ddl_tf.autograd import ADAPTER
from ddl_tf.exchange import Exchange

from ddlcore.contracts.dlpack import ON_CPU
from ddlcore.contracts.transport import Memory
from ddlcore.testing import World
from ddlcore.types import Device, DType

__all__ = ["CPU_0", "LateGpu", "late_gpu", "on_ranks"]

CPU_0 = "/job:localhost/replica:0/task:0/device:CPU:0"  # where graph operations run that would otherwise run on the GPU


class LateGpu(gpu.GpuFunctions):
    """A Gpu whose float tensors are on each rank's own pretended device; TensorFlow itself waits for what it computes.

    The threads of TensorFlow's pools belong to no rank: a thread that uses an exchange acts for the exchange's rank.
    """

    def __init__(self) -> None:
        self.own = threading.local()
        self.ranks: dict[int, tuple[Device, Any]] = {}  # device and stream
        self.waited = 0
        self.gone = False  # whether all tensors are on the host from now on
        self.made: list[Any] = []  # functions called with each tensor that ``empty`` makes

    def settle_on(self, rank: int) -> None:
        runtime = PretendRuntime()
        device = Device(KIND, rank)
        runtime.open(device)
        self.ranks[rank] = device, runtime.queue()
        self.turn_to(rank)

    def turn_to(self, rank: int) -> None:
        """Make the calling thread act for that rank from now on."""
        self.own.device, self.own.stream = self.ranks[rank]

    def place(self, tensor: Any) -> Device | None:
        mine: Device = self.own.device
        return mine if tensor.dtype in self.types and not self.gone else super().place(tensor)

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        tensor = tf.fill(shape, tf.cast(-77.0, like.dtype))
        for made in self.made:
            made(tensor)
        return tensor

    def wrap(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> Any:
        return gpu.tensor_at(memory, shape, dtype, ON_CPU, 0)

    def wait(self, event: int) -> None:
        self.waited += 1
        self.own.stream.wait_for(event)
        assert self.own.stream.record().wait(120.0)


@contextmanager
def late_gpu() -> Iterator[LateGpu]:
    """Replace ddl_tf's GPU for the duration of the context.

    In graphs, all variables are on it except those whose names begin with "host".
    """
    device = LateGpu()

    def of_its_rank(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(exchange: Exchange, *args: Any) -> Any:
            device.turn_to(exchange.job.rank)
            return method(exchange, *args)

        return run

    def gpu_of(variable: Any) -> str:
        return "" if variable.name.startswith("host") else CPU_0

    methods: Any = {name: of_its_rank(getattr(Exchange, name)) for name in ("send", "lift", "take")}
    with (
        mock.patch.object(ADAPTER, "gpu", device),
        mock.patch.object(placing, "gpu_of", gpu_of),
        mock.patch.multiple(Exchange, **methods),
    ):
        yield device


def on_ranks(
    late: LateGpu, play: Callable[[int], Any], world: Callable[..., World] = PretendWorld, **options: Any
) -> Any:
    """Run ``play(rank)`` on two ranks with a device each, and return the results by rank.

    A ``world`` other than the default does not serve the devices.
    """

    def on_device(rank: int, job: Any) -> Any:
        late.settle_on(rank)
        try:
            return play(rank)
        finally:
            late.own.stream.close(10.0)

    with world(2, **options) as ranks:
        return ranks.run(on_device, deadline_s=110.0, last=True)  # on a loaded machine, a hundred runs take that long
