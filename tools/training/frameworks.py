"""The frameworks that the training benchmark knows: names, peers and targets; imports none of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FRAMEWORKS", "PASSES", "Framework"]

PASSES = "passes"  # the contender that is a lower bound, see tools/training/passes.py


@dataclass(frozen=True)
class Framework:
    """The facts about a framework that are needed before it is imported. Targets are ratios of step times, by model.

    ``tools.training.on_NAME`` provides ``trainings(model, meet)``: a context manager that yields the ``Trainings``
    (tools/training/contenders.py) of one rank, and removes at its end what it has set up.
    """

    name: str
    distributions: tuple[str, ...]  # one of them is installed; its version is shown
    models: tuple[str, ...]
    peer: str  # the contender that ddl is compared with; "" if all the framework's own ways need servers
    peer_label: str  # in the chart
    over_none: Mapping[str, float]  # a model that is not in it is only compared with the peer
    over_peer: Mapping[str, float]
    over_barrier: float | None = None  # may hold instead of over_none: the cost of waiting for other ranks is not ddl's
    floor: bool = False  # whether the memory passes of an allreduce are measured, too
    messages: float | None = None  # target of ddl's control messages for each replayed step
    environment: Mapping[str, str] = field(default_factory=dict)  # of the ranks, beside one OpenMP thread
    pairs: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)  # further contenders, compared
    settling: int = 1  # steps at least of a contender's block that are not timed

    def sides(self) -> Any:
        """Return the module with ``trainings``."""
        return importlib.import_module(f"tools.training.on_{self.name}")

    @property
    def contenders(self) -> tuple[str, ...]:
        """The contenders, in the order of the tables."""
        others = [name for pair in self.pairs for name in pair]
        named = ("none", "barrier", PASSES * self.floor, self.peer, "ddl", *others)
        return tuple(dict.fromkeys(name for name in named if name))

    @property
    def marks(self) -> tuple[str, str]:
        """The marks in a document between which the tables are put."""
        name = "training" if self.name == "torch" else f"training-{self.name}"
        return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework(
            "torch",
            ("torch",),
            ("wide", "deep", "gpt", "resnet", "embedding"),
            "ddp",
            "DDP on Gloo",
            over_none={"wide": 1.25, "deep": 1.30, "gpt": 1.12, "resnet": 1.08},
            over_peer={"wide": 0.65, "deep": 0.75, "gpt": 0.90, "resnet": 1.00, "embedding": 0.40},
            over_barrier=1.10,
        ),
        Framework(
            "c10d",
            ("torch",),
            ("wide", "deep", "gpt"),
            "ddp",
            "DDP on Gloo",
            over_none={},
            over_peer={"wide": 0.70, "deep": 0.70, "gpt": 0.90},
            messages=0.0,
            pairs={
                ("ddp without communication", "none"): {},  # what is left of a step if the backend costs nothing
                ("ddl", "optimizer"): {"wide": 1.10, "deep": 1.10, "gpt": 1.10},
                ("fsdp2 on ddl", "fsdp2 on gloo"): {"wide": 0.60, "gpt": 0.85},
            },
            environment={"DDL_VERIFY_FIRST_STEP": "0"},  # some contenders do not communicate
            settling=6,  # calls without names are replayed when their sequence has been repeated
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
