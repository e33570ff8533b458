"""ddl's standard tests of adapters for the JAX adapter, and tests of what only JAX has."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="JAX is an extra of this example")

from ddl_jax.adapter import JaxAdapter  # noqa: E402  # after the skip where JAX is missing
from ddl_jax.conformance import JaxSuite  # noqa: E402  # after the skip where JAX is missing


class TestJax(JaxSuite):
    """The same suite that `ddl conform jax` runs."""


def test_traced_arrays_are_refused() -> None:
    """An array that is traced by jit is refused, because it has no memory."""

    def traced(x: Any) -> Any:
        JaxAdapter().buffer(x, elementwise=True)

    with pytest.raises(ValueError, match=r"outside of jax\.jit"):
        jax.jit(traced)(jax.numpy.ones(3))
