"""The program of the processes that prepare data: `horovodrun -np 4 python -m horovod.tensorflow.data.compute_worker FILE`."""

from __future__ import annotations

import argparse

from ddl_horovod.compute import ComputeService, make_key

import horovod.tensorflow as hvd
from ddlcore.api import current_job
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn

__all__ = ["ComputeService", "TfDataServiceConfig", "compute_worker_fn", "main"]


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """Prepare data until a training tells the service to end. Every rank calls this; rank 0 writes ``configfile``.

    Raises ValueError if the number of ranks is not a multiple of ``dispatchers``.
    """
    hvd.init()
    if dispatchers < 1 or hvd.size() % dispatchers:
        raise ValueError(
            f"Number of processes ({hvd.size()}) must be a multiple of number of dispatchers ({dispatchers})."
        )
    if dispatcher_side not in ("compute", "training"):
        raise ValueError(f"dispatcher_side={dispatcher_side!r} is none of compute, training")
    service = None
    config = None
    try:
        if hvd.rank() == 0:
            key = make_key()
            each = hvd.size() // dispatchers
            service = ComputeService(dispatchers, each, key, current_job().address)
            config = TfDataServiceConfig(dispatchers, each, dispatcher_side, service.addresses(), key, timeout)
            config.write(configfile)
        compute_worker_fn(hvd.broadcast_object(config, name="TfDataServiceConfig"))
    finally:
        if service is not None:
            service.shutdown()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configfile", help="where to write how a training reaches these processes")
    parser.add_argument("--dispatchers", default=1, type=int, help="number of dispatchers (default: 1)")
    parser.add_argument("--dispatcher-side", default="compute", help="where they run: compute (default) or training")
    parser.add_argument("--timeout", default=60, type=int, help="seconds to wait for each other (default: 60)")
    return parser.parse_args()


if __name__ == "__main__":
    main(**vars(_arguments()))
