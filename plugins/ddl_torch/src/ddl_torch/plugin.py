"""Registers ddl_torch with the core as plain data. Imports neither torch nor any module that imports torch."""

from __future__ import annotations

from ddlcore.hooks import AdapterProvider, BenchPeerProvider, ReleaseRange, Setting, hookimpl


@hookimpl
def ddl_adapters() -> list[AdapterProvider]:
    """Register the adapter for PyTorch tensors."""
    return [
        AdapterProvider(
            name="torch",
            target="ddl_torch.adapter:TorchAdapter",
            requires=("torch",),
            install="pip install torch",
            doc="PyTorch tensors",
            probe="ddl_torch.library:objection",
            library="ddl_torch.library:library",
            module="ddl_torch",
            framework="torch",
            tested=(ReleaseRange("torch", "2.10", "2.15"),),
            loaders=("torch.utils.data",),
            suite="ddl_torch.conformance:TorchSuite",
            settings=(
                Setting(
                    "torch_backend",
                    str,
                    "",
                    "ddl: scripts that call init_process_group with Gloo or MPI, or without a backend, use the backend ddl",
                    choices=("", "ddl"),
                ),
            ),
        )
    ]


@hookimpl
def ddl_bench_peers() -> list[BenchPeerProvider]:
    """Register torch's Gloo as a library that `ddl bench` compares with ddl."""
    return [
        BenchPeerProvider(
            name="gloo",
            target="ddl_torch.gloo_peer:GlooPeer",
            requires=("torch",),
            install="pip install torch",
            doc="torch's Gloo, over TCP",
        )
    ]
