"""Where a reduction is scaled: an average in float16 is right up to float16's end, on every route."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ddl_conform.threads import ThreadsTransport

import ddlcore as ddl
from ddlcore.contracts.transport import Capabilities
from ddlcore.messages.spec import Spec
from ddlcore.process.job import Job
from ddlcore.runtime.scaling import Scaling, scaling
from ddlcore.testing import World
from ddlcore.types import DType, Kind, ReduceOp

pytestmark = pytest.mark.timeout(240)
LARGE = 40000.0  # two of them are more than float16 holds


@pytest.fixture(params=["threads", "shm", "threads that do not scale"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, _, plain = request.param.partition(" ")
    if plain:
        without = replace(ThreadsTransport.capabilities, scales=False, vectored=False)
        monkeypatch.setattr(ThreadsTransport, "capabilities", without)
    return str(name)


@pytest.mark.parametrize("replay", [False, True])
def test_an_average_does_not_overflow_on_the_way(backend: str, replay: bool) -> None:
    """Of float16, and of float32 that travels as such; a sum that is too large is infinite, as it has to be."""
    size = 3

    def program(rank: int, job: Job) -> None:
        halves, wholes = np.full(50, LARGE, np.float16), np.full(50, LARGE, np.float32)
        for _ in range(20):
            found = {
                "average": ddl.allreduce(halves, name="average"),
                "compressed": ddl.allreduce(wholes, name="compressed", compression="fp16"),
                "scaled": ddl.allreduce(halves, name="scaled", prescale_factor=0.5, postscale_factor=2.0),
                "scattered": ddl.reducescatter(halves, name="scattered", op=ddl.Average),
            }
            for name, values in found.items():
                np.testing.assert_allclose(values, LARGE, rtol=2e-3, err_msg=name)
            assert np.isinf(ddl.allreduce(halves, name="sum", op=ddl.Sum)).all()
        assert (ddl.stats()["buckets_replayed"] > 0) is replay

    with World(size, backend=backend, settings={"replay": replay}) as world:
        world.run(program)


def test_an_average_with_a_rank_that_has_joined(backend: str) -> None:
    """It brings zeros, and does not count; by the setting it counts."""

    def program(rank: int, job: Job) -> float:
        mean = 0.0
        if rank == 0:
            mean = float(ddl.allreduce(np.full(5, 60000, np.float16), name="x")[4])
        ddl.join()
        return mean

    for setting, wanted in (("contributors", 60000), ("size", 30000)):
        with World(2, backend=backend, settings={"join_average": setting}) as world:
            assert world.run(program)[0] == pytest.approx(wanted, rel=2e-3)


SCALES, PLAIN = Capabilities(vectored=True, scales=True), Capabilities()


@pytest.mark.parametrize(
    ("capabilities", "dtype", "wire", "joined", "expected"),
    [
        (SCALES, DType.F32, DType.F32, False, Scaling(1.0, 1.0, (3.0, 0.5))),
        (SCALES, DType.F32, DType.F32, True, Scaling(3.0, 1.0, (1.0, 0.5))),
        (SCALES, DType.F32, DType.F16, False, Scaling(3.0, 1.0, (1.0, 0.5))),
        (PLAIN, DType.F32, DType.F32, False, Scaling(3.0, 0.5)),
        (PLAIN, DType.F16, DType.F16, False, Scaling(0.75, 2.0)),
        (PLAIN, DType.F32, DType.F16, False, Scaling(0.75, 2.0)),
        (PLAIN, DType.F32, DType.BF16, False, Scaling(3.0, 0.5)),  # float32's range
        (PLAIN, DType.I32, DType.I32, False, Scaling(3.0, 0.5)),  # which would be cut to 0
        (None, DType.F16, DType.F16, False, Scaling(0.75, 2.0)),
    ],
)
def test_where_it_is_scaled(
    capabilities: Capabilities | None, dtype: DType, wire: DType, joined: bool, expected: Scaling
) -> None:
    """An average of four, times three before and two after."""
    spec = Spec(Kind.ALLREDUCE, dtype, (1,), ReduceOp.Average, prescale=3.0, postscale=2.0)
    assert scaling(capabilities, spec, wire, 4, joined) == expected
    assert scaling(PLAIN, replace_op(spec), DType.F16, 4) == Scaling(3.0, 2.0), "a sum is nobody's to divide"


def replace_op(spec: Spec) -> Spec:
    return Spec(spec.kind, spec.dtype, spec.shape, ReduceOp.Sum, prescale=spec.prescale, postscale=spec.postscale)
