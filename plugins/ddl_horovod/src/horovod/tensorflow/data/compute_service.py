"""TensorFlow's data service for a training: other processes prepare the batches.

`horovodrun -np 4 python -m horovod.tensorflow.data.compute_worker compute.json` starts the processes, which write how they are
reached to the file. A training reads it: ``TfDataServiceConfig.read("compute.json", wait_for_file_creation=True)``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import tensorflow as tf
from ddl_horovod.compute import ComputeClient

import horovod.tensorflow as hvd
from ddlcore.api import current_job, is_initialized

__all__ = ["ComputeClient", "TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]

_LOOK_S = 0.2  # how often a file that is not there yet is looked for


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """How a training reaches the processes that prepare its data.

    ``dispatcher_side``: whether the dispatchers run beside the workers ("compute") or the training ("training").
    ``addresses`` and ``key``: of the service where they meet. ``timeout``: seconds to wait for each other.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, Sequence[tuple[str, int]]]
    key: bytes
    timeout: int = 60

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Return a connection to the service."""
        return ComputeClient(self.addresses, self.key, verbose)

    def to_dict(self) -> Mapping[str, Any]:
        """Return the configuration as plain data, with the key in hexadecimal."""
        return {**vars(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """Return the configuration that ``to_dict`` has made into ``config``."""
        addresses = {name: [(host, port) for host, port in found] for name, found in config["addresses"].items()}
        return TfDataServiceConfig(**{**config, "key": bytes.fromhex(config["key"]), "addresses": addresses})

    def write(self, filename: str) -> None:
        """Write the configuration to a file that only this user can read. It is there as a whole or not at all."""
        path = Path(filename)
        with NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(json.dumps(self.to_dict()))
        os.replace(file.name, path)

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Return the configuration in a file. ``wait_for_file_creation``: wait until the file is there, without a limit."""
        while wait_for_file_creation and not os.path.exists(filename):
            time.sleep(_LOOK_S)
        return TfDataServiceConfig.from_dict(json.loads(Path(filename).read_text("utf-8")))


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Return a context manager whose value is the address of the dispatcher for the training's rank ``rank``.

    With ``dispatcher_side="training"``, the dispatcher runs in this process, until the end of the ``with`` block. Raises
    TimeoutError if the workers are not ready within the configuration's time.
    """
    compute = compute_config.compute_client()
    several = compute_config.dispatchers > 1
    server = None
    if compute_config.dispatcher_side == "training" and (several or rank == 0):
        server = _dispatcher(compute, rank if several else 0)
    try:
        number = rank if several else 0
        address = compute.wait_for_dispatcher_registration(number, compute_config.timeout)
        compute.wait_for_dispatcher_worker_registration(number, compute_config.timeout)
        yield address
    finally:
        _stop(server)


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """Return a data set with the elements of ``dataset``, which the workers compute. It is also a method of data sets.

    ``reuse_dataset``: all ranks share the elements, in turn if ``round_robin``. Raises RuntimeError if the dispatchers run
    beside the training: then use ``tf_data_service``.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError("training side dispatcher not supported, use tf_data_service context manager instead")
    in_turn = reuse_dataset and round_robin
    with tf_data_service(compute_config, rank) as address:
        service = tf.data.experimental.service.distribute(
            processing_mode=processing_mode,
            service=address,
            job_name="job" if reuse_dataset else None,
            consumer_index=rank if in_turn else None,
            num_consumers=size if in_turn else None,
        )
        return dataset.apply(service)


def _add_to_data_sets() -> None:
    tf.data.Dataset.send_to_data_service = send_to_data_service


_add_to_data_sets()


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Be a worker, and perhaps a dispatcher, until somebody tells the service to end. Every rank of a job calls this."""
    hvd.init()
    number, is_first = divmod(hvd.rank(), compute_config.workers_per_dispatcher)
    compute = compute_config.compute_client()
    beside = compute_config.dispatcher_side == "compute" and is_first == 0
    dispatcher = _dispatcher(compute, number) if beside else None
    worker = None
    try:
        address = compute.wait_for_dispatcher_registration(number, compute_config.timeout)
        config = tf.data.experimental.service.WorkerConfig(
            dispatcher_address=address.partition("://")[2],
            worker_address=f"{_host()}:%port%",
            heartbeat_interval_ms=1000,
            dispatcher_timeout_ms=compute_config.timeout * 1000,
        )
        worker = tf.data.experimental.service.WorkerServer(config)
        compute.register_worker_for_dispatcher(number, hvd.rank())
        compute.wait_for_shutdown()
    finally:
        _stop(worker)
        _stop(dispatcher)


def _host() -> str:
    """Return the address at which other hosts reach this one, or "localhost" if there are none."""
    return (current_job().address if is_initialized() else "") or "localhost"


def _dispatcher(compute: ComputeClient, number: int) -> Any:
    """Start the dispatcher with this number in this process, register it, and return it."""
    server = tf.data.experimental.service.DispatchServer()
    compute.register_dispatcher(number, server.target.replace("localhost", _host()))
    return server


def _stop(server: Any) -> None:
    if server is not None:
        server._stop()  # TensorFlow has no public way
        server.join()
