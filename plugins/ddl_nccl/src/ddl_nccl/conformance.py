"""The conformance suite for the NCCL transport, which uses a stand-in for NCCL.

Each rank is a thread with a pretend device. The stand-in moves the bytes. So everything except NCCL itself is tested
without a GPU: which functions of NCCL are called, in which order, on which queue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from ddl_conform.pretend import KIND, PretendQueue, PretendRuntime
from ddl_conform.transports import TransportSuite

from ddl_nccl.standin import StandIn
from ddl_nccl.transport import NcclTransport
from ddlcore.contracts.transport import ALL_OPS, Context, Transport, Work
from ddlcore.errors import DeviceError
from ddlcore.types import Buffer, Device


class HostedTransport(NcclTransport):
    """The NCCL transport with a stand-in for NCCL, and with host memory in place of device memory.

    The collectives of this transport wait on the host, so any test of transports can use it.
    """

    capabilities = replace(
        NcclTransport.capabilities, devices=frozenset({"cpu"}), ops=ALL_OPS, stream_ordered=False
    )  # fmt: skip

    def __init__(self, standin: StandIn, device: int | None = None) -> None:
        super().__init__(standin)
        self.standin = standin
        self.device = device  # None: the device with the number of the rank
        self.deaf = False  # whether the device never executes what is queued
        self.anonymous = False  # whether the device has no identity
        self.runtime = PretendRuntime()
        self.queue: PretendQueue

    def open(self, context: Context) -> None:
        self.runtime.open(Device(KIND, context.rank if self.device is None else self.device))
        if self.anonymous:
            self.runtime.identity = ""
        self.queue = self.runtime.queue()
        self.standin.know(self.queue)
        self.standin.deaf |= {self.queue.handle} if self.deaf else set()
        super().open(replace(context, queue=self.queue))

    def _begin(self, what: str, call: Callable[[], object], *buffers: Buffer) -> Work:
        """Begin a call, and keep its buffers alive until the queue has executed the call.

        After an abort, the waiting caller returns, but the work that is queued for the call still runs and uses the
        memory.
        """
        try:
            return super()._begin(what, call, *buffers)
        finally:
            with contextlib.suppress(DeviceError):  # the queue is closed
                self.queue.call(partial(_let_go, buffers))

    def close(self) -> None:
        super().close()
        if hasattr(self, "queue"):
            self.queue.close(5.0)
            self.runtime.close()


def _let_go(_: tuple[Buffer, ...]) -> None:
    """Do nothing.

    The queue calls this function after the calls that use the buffers, and so keeps the buffers alive until then.
    """


class NcclSuite(TransportSuite):
    """The suite that ``ddl conform nccl`` runs.

    If a test uses NCCL in a way that NCCL does not allow, the test fails.
    """

    sizes = (1, 2, 3, 4)
    offers = HostedTransport.capabilities
    standins: ClassVar[list[StandIn]] = []

    def make(self, size: int) -> Sequence[Transport]:
        standin = StandIn()
        self.standins.append(standin)
        return [HostedTransport(standin) for _ in range(size)]

    def teardown_method(self) -> None:
        super().teardown_method()
        assert [fault for standin in self.standins for fault in standin.faults] == []

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        assert not any(standin.alive() for standin in cls.standins), "communicators were neither destroyed nor aborted"
        cls.standins.clear()
