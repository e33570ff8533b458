"""Introduces ddl_torch to the core by data alone: it imports neither torch nor anything that does."""

from __future__ import annotations

from ddlcore.hooks import AdapterProvider, BenchPeerProvider, hookimpl

__all__ = ["ddl_adapters", "ddl_bench_peers"]


@hookimpl
def ddl_adapters() -> list[AdapterProvider]:
    """PyTorch's tensors."""
    return [
        AdapterProvider(
            name="torch",
            target="ddl_torch.adapter:TorchAdapter",
            requires=("torch",),
            install="pip install torch",
            doc="PyTorch tensors",
            module="ddl_torch",
            framework="torch",
            loaders=("torch.utils.data",),
            suite="ddl_torch.conformance:TorchSuite",
        )
    ]


@hookimpl
def ddl_bench_peers() -> list[BenchPeerProvider]:
    """torch's Gloo."""
    return [
        BenchPeerProvider(
            name="gloo",
            target="ddl_torch.gloo_peer:GlooPeer",
            requires=("torch",),
            install="pip install torch",
            doc="torch's Gloo, over TCP",
        )
    ]
