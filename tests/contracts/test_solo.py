"""A world of one: collectives copy, scale where a plan says so, and need no kernels for the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ddl_conform.store import ThreadStore

from ddlcore.contracts.solo import SoloTransport
from ddlcore.contracts.transport import Context, Plan
from ddlcore.types import DType, Member, ReduceOp
from tests.builtin.worlds import World, buffer, random_collectives


@pytest.mark.parametrize("seed", range(5))
def test_random_collectives(seed: int) -> None:
    """Every collective gives what it gives in a larger world."""
    with World(SoloTransport, 1) as world:
        world.run(random_collectives(seed, 1, 20, 5000))


def test_without_scales_no_kernel_is_touched() -> None:
    """A world of one must not pay for loading machine code."""
    unusable: Any = None
    transport = SoloTransport()
    transport.open(Context(0, (Member(0, 0),), ThreadStore(), unusable, {}, 1.0))
    x, y = np.arange(5.0), np.zeros(5)
    transport.prepare(Plan((5,), DType.F64, ReduceOp.Sum)).start([x.ctypes.data], [y.ctypes.data])
    assert (x == y).all()
    transport.allreduce(buffer(x), buffer(x), ReduceOp.Max)
    assert (x == y).all()
    transport.close()


def test_more_than_one_rank_is_refused() -> None:
    """The message says what to use instead."""
    unusable: Any = None
    context = Context(0, (Member(0, 0), Member(1, 0)), ThreadStore(), unusable, {}, 1.0)
    with pytest.raises(ValueError, match="--backend"):
        SoloTransport().open(context)
