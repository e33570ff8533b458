"""What runs in `make test`, and what only in `make test-long`."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["long"]


def long(*values: Any) -> list[Any]:
    """Return ``values`` as parameters whose tests run only in `make test-long`.

    If a test has several parameters, each value is a tuple with one value for each of them.
    """
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.long) for one in values]
