"""ddl's standard tests of an adapter, on this one; and what is peculiar to JAX."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="JAX is an extra of this example")

from ddl_jax.adapter import JaxAdapter  # noqa: E402  # after the skip where JAX is missing
from ddl_jax.conformance import JaxSuite  # noqa: E402  # after the skip where JAX is missing


class TestJax(JaxSuite):
    """As `ddl conform jax` runs it."""


def test_traced_arrays_are_refused() -> None:
    """Within jit there is no memory to show."""

    def traced(x: Any) -> Any:
        JaxAdapter().buffer(x, elementwise=True)

    with pytest.raises(ValueError, match=r"outside of jax\.jit"):
        jax.jit(traced)(jax.numpy.ones(3))
