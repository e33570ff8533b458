"""The setting ``compression`` is for what leaves it to the setting, as gradients do: in every step alike, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.api import arrays, gradient_compression
from ddlcore.errors import MismatchError
from ddlcore.messages.spec import BY_SETTING, Spec
from ddlcore.process.job import Job
from ddlcore.testing import World
from ddlcore.types import Average, DType, Kind, Max, ReduceOp, Sum
from tests.runtime.rounding import Rounding

pytestmark = pytest.mark.timeout(60)

STEPS = 8
LARGE = 7e4  # float16 ends at 65504
THIRD = float(np.float16(1 / 3))  # not that of float32


@pytest.fixture(params=["threads", "shm"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def full(value: float, dtype: Any = np.float32) -> Any:
    return np.full(40, value, dtype)


@pytest.mark.parametrize("replay", [False, True])
def test_gradients_and_nothing_else(backend: str, replay: bool) -> None:
    """Verbs without a compression are as they are; what asks for the setting, or a compressor, has it in each step."""

    def program(rank: int, job: Job) -> None:
        request = arrays._ops.persistent_allreduce(full(0), name="request", op=Sum, compression=BY_SETTING)
        for _ in range(STEPS):
            assert (ddl.allreduce(full(LARGE), name="metric", op=Sum) == 2 * LARGE).all()
            assert (ddl.allreduce_(full(LARGE), name="in place", op=Sum) == 2 * LARGE).all()
            assert (ddl.allreduce(full(1 / 3), op=Sum) == np.float32(2 / 3)).all()
            assert (ddl.grouped_allreduce([full(LARGE)] * 2, name="group", op=Sum)[1] == 2 * LARGE).all()
            assert (ddl.reducescatter(full(LARGE), name="part", op=Sum) == 2 * LARGE).all()
            by: dict[str, Any] = {"op": Sum, "compression": BY_SETTING}
            gradient = full(1 / 3)
            job.start_request(request, gradient.ctypes.data, gradient)
            request.wait()
            assert (gradient == 2 * THIRD).all()
            assert (ddl.allreduce(full(1 / 3), name="gradient", **by) == 2 * THIRD).all()
            assert (
                ddl.grouped_allreduce_([full(1 / 3)] * 1 + [full(2 / 3)], name="gradients", **by)[0] == 2 * THIRD
            ).all()
            whole = ddl.allreduce(full(1 / 3, np.float64), name="double", **by)
            assert (whole == 2 / 3).all(), "of float32 alone"
            assert (ddl.allreduce(full(LARGE), name="most", op=Max, compression=BY_SETTING) == np.float32(LARGE)).all()
            assert (ddl.allreduce(full(1 / 3), name="asked", op=Sum, compression="bf16") != 2 * THIRD).all()
        assert (job.stats()["buckets_replayed"] > 0) is replay

    with World(2, backend=backend, settings={"compression": "fp16", "replay": replay}) as world:
        world.run(program)


def test_without_the_setting_nothing_is_compressed(backend: str) -> None:
    """And gradients share their buckets with what was given no compression."""

    def program(rank: int, job: Job) -> None:
        for _ in range(STEPS):
            handles = [
                ddl.allreduce_async(full(1 / 3), name="a", op=Sum, compression=BY_SETTING),
                ddl.allreduce_async(full(LARGE), name="b", op=Sum),
            ]
            assert [handle.wait()[0] for handle in handles] == [np.float32(2 / 3), 2 * LARGE]

    with World(2, backend=backend) as world:
        world.run(program)


def test_a_compressor_with_state_by_the_setting() -> None:
    """One that is not summable is used from the first step on, and told of each bucket."""
    from ddl_conform.pretend_world import pretend_registry

    from ddlcore.hooks import CompressorProvider
    from ddlcore.plug.registry import Distribution

    registry = pretend_registry()
    registry.offer(CompressorProvider("rounding", "tests.runtime.rounding:Rounding"), Distribution("test", "1"))

    def program(rank: int, job: Job) -> int:
        for step in range(STEPS):
            assert (ddl.allreduce(full(2), name="g", op=Sum, compression=BY_SETTING) == 4).all()
            assert job.stats()["encoded_bytes"] > 0, step
        compressor = job.compressor("rounding")
        assert isinstance(compressor, Rounding)
        assert compressor.staged == {}
        return int(job.stats()["encoded_bytes"])

    with World(2, settings={"compression": "rounding"}, registry=registry) as world:
        world.run(program)


def test_a_rank_that_has_joined_takes_part() -> None:
    """It brings zeros in the type that the others' values travel as."""

    def program(rank: int, job: Job) -> None:
        if rank == 0:
            found = ddl.allreduce(full(1 / 3), name="g", op=Sum, compression=BY_SETTING)
            assert (found == THIRD).all()
        ddl.join()

    with World(2, settings={"compression": "fp16"}) as world:
        world.run(program)


def test_ranks_must_agree_who_decides() -> None:
    """One that names a compressor and one that leaves it to the setting: both are told."""

    def program(rank: int, job: Job) -> None:
        how = BY_SETTING if rank else "none"
        with pytest.raises(MismatchError, match=r"compression"):
            ddl.allreduce(full(1), name="g", compression=how)

    with World(2) as world:
        world.run(program)


@pytest.mark.parametrize(
    ("given", "kind", "op", "dtype", "expected"),
    [
        (BY_SETTING, Kind.ALLREDUCE, Sum, DType.F32, "fp16"),
        (BY_SETTING, Kind.ALLREDUCE, Average, DType.F32, "fp16"),
        (BY_SETTING, Kind.ALLREDUCE, Max, DType.F32, "none"),
        (BY_SETTING, Kind.ALLREDUCE, Sum, DType.BF16, "none"),
        ("none", Kind.ALLREDUCE, Sum, DType.F32, "none"),
        ("bf16", Kind.ALLREDUCE, Sum, DType.F32, "bf16"),
        ("none", Kind.BROADCAST, Sum, DType.F32, "none"),
    ],
)
def test_what_the_setting_decides(given: str, kind: Kind, op: ReduceOp, dtype: DType, expected: str) -> None:
    """Of gradients, sums and averages of float32."""
    assert Spec(kind, dtype, (3,), op, compressor=given).compressor_by("fp16") == expected


def test_what_is_a_gradient() -> None:
    """An optimizer that was given no compression leaves it to the setting; "none" is none."""
    assert gradient_compression(None) == (BY_SETTING, None)
    assert gradient_compression("none") == ("none", None)
