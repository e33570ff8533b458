"""The plugin registers without importing torch, and its package offers Horovod's names and argument order."""

from __future__ import annotations

import inspect
import subprocess
import sys

import ddl_torch as ddl
import pytest

SIGNATURES = {  # weight, device_dense and device_sparse are arguments of ddl
    "allreduce": "tensor average name compression op prescale_factor postscale_factor process_set weight",
    "allreduce_async": "tensor average name op prescale_factor postscale_factor process_set weight",
    "allreduce_": "tensor average name op prescale_factor postscale_factor process_set weight",
    "allreduce_async_": "tensor average name op prescale_factor postscale_factor process_set weight",
    "grouped_allreduce": "tensors average name compression op prescale_factor postscale_factor process_set weight",
    "grouped_allreduce_async": "tensors average name op prescale_factor postscale_factor process_set weight",
    "grouped_allreduce_": "tensors average name op prescale_factor postscale_factor process_set weight",
    "grouped_allreduce_async_": "tensors average name op prescale_factor postscale_factor process_set weight",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "grouped_allgather_async": "tensors name process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_async_": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "alltoall_async": "tensor splits name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "reducescatter_async": "tensor name op process_set prescale_factor postscale_factor",
    "grouped_reducescatter": "tensors name compression op process_set prescale_factor postscale_factor",
    "grouped_reducescatter_async": "tensors name op process_set prescale_factor postscale_factor",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name process_set",
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op "
    "gradient_predivide_factor num_groups groups sparse_as_dense process_set device_dense device_sparse weight",
    "SyncBatchNorm": "num_features eps momentum affine track_running_stats",
}
BASICS = """
    init shutdown is_initialized size rank local_size local_rank cross_size cross_rank is_homogeneous
    ProcessSet global_process_set add_process_set remove_process_set poll synchronize join barrier
    Average Sum Adasum Min Max Product HorovodInternalError DdlInternalError PeerLost Compression
"""


@pytest.mark.parametrize("name", SIGNATURES)
def test_argument_order(name: str) -> None:
    """Positional arguments mean the same as in Horovod."""
    assert list(inspect.signature(getattr(ddl, name)).parameters) == SIGNATURES[name].split()


def test_exports() -> None:
    """All of Horovod's names are in ``__all__``, and every name of ``__all__`` is defined."""
    assert set(SIGNATURES) | set(BASICS.split()) <= set(ddl.__all__)
    assert not [name for name in ddl.__all__ if not hasattr(ddl, name)]


def test_horovods_integers() -> None:
    """The reduction operations have the same numbers as in Horovod."""
    assert [ddl.Average, ddl.Sum, ddl.Adasum, ddl.Min, ddl.Max, ddl.Product] == [0, 1, 2, 3, 4, 5]


def test_introduction_imports_no_torch() -> None:
    """The plugin's module imports no torch and runs without its package, so listing plugins imports no framework."""
    code = (
        "import sys; from ddlcore.plug.finding import run_alone; "
        "(one,) = run_alone('ddl_torch.plugin').ddl_adapters(); print(one.target, 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert shown.stdout.split() == ["ddl_torch.adapter:TorchAdapter", "False"]
