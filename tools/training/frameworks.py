"""Which frameworks the training benchmark knows: names, peers and targets; imports none of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FRAMEWORKS", "PASSES", "Framework"]

PASSES = "passes"  # the contender that is a floor, see tools/training/passes.py


@dataclass(frozen=True)
class Framework:
    """What is to be known of a framework before it is imported. Targets are ratios of step times, by model.

    ``tools.training.on_NAME`` offers ``trainings(model, meet)``: a context manager that gives the ``Trainings``
    (tools/training/contenders.py) of one rank, and takes down on leaving what it has set up.
    """

    name: str
    distributions: tuple[str, ...]  # one of them is installed; its version is shown
    models: tuple[str, ...]
    peer: str  # the contender that ddl is held to; "" where the framework has no way of its own that needs no servers
    peer_label: str  # in the chart
    over_none: Mapping[str, float]
    over_peer: Mapping[str, float]
    over_barrier: float | None = None  # holds in place of over_none: what waiting for each other costs is not ours
    floor: bool = False  # the passes over memory that an allreduce needs are measured beside it
    messages: float | None = None  # ddl's, to and from the coordinator, a step in replay
    environment: Mapping[str, str] = field(default_factory=dict)  # of the ranks, beside one thread for OpenMP

    def sides(self) -> Any:
        """The module with ``trainings``."""
        return importlib.import_module(f"tools.training.on_{self.name}")

    @property
    def contenders(self) -> tuple[str, ...]:
        """In the order of the tables."""
        return tuple(name for name in ("none", "barrier", PASSES * self.floor, self.peer, "ddl") if name)

    @property
    def marks(self) -> tuple[str, str]:
        """Between which a document has the tables."""
        name = "training" if self.name == "torch" else f"training-{self.name}"
        return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework(
            "torch",
            ("torch",),
            ("wide", "deep", "gpt", "resnet"),
            "ddp",
            "DDP on Gloo",
            over_none={"wide": 1.25, "deep": 1.30, "gpt": 1.12, "resnet": 1.08},
            over_peer={"wide": 0.65, "deep": 0.75, "gpt": 0.90, "resnet": 1.00},
            over_barrier=1.10,
        ),
        Framework(
            "mxnet",
            ("mxnet",),
            ("wide", "deep"),
            "",
            "",
            over_none={"wide": 1.40, "deep": 1.60},
            over_peer={},
            floor=True,
            messages=0.0,
        ),
        Framework(
            "tf",
            ("tensorflow", "tensorflow-cpu"),
            ("wide", "deep"),
            "mwms",
            "MultiWorkerMirroredStrategy",
            over_none={"wide": 1.60, "deep": 2.00},
            over_peer={"wide": 0.35, "deep": 0.60},
            messages=0.0,
            environment={
                "CUDA_VISIBLE_DEVICES": "",
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_NUM_INTEROP_THREADS": "1",
                "TF_NUM_INTRAOP_THREADS": "1",
            },
        ),
    )
}
