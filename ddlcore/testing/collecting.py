"""A pytest plugin that deselects standard tests which a transport's capabilities rule out, so that none is skipped.

``pytest -p ddlcore.testing.collecting``, for suites whose ``offers`` says what their transport can do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["pytest_collection_modifyitems", "ruled_out"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are ruled out, and report them to pytest as deselected."""
    gone = [item for item in items if ruled_out(item)]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in set(gone)]


def ruled_out(item: pytest.Item) -> bool:
    """Return whether a standard test needs a capability that its suite's ``offers`` lacks.

    A test of a suite that leaves ``offers`` at None is never ruled out: it runs, and skips itself if a capability is
    missing.
    """
    offers = getattr(getattr(item, "cls", None), "offers", None)
    return offers is not None and not all(getattr(offers, one) for one in _needed(item))


def _needed(item: Any) -> Iterator[str]:
    """Yield the capabilities that ``only_where`` has recorded on the test and on the parameters it is called with."""
    called_with = item.callspec.params.values() if hasattr(item, "callspec") else ()
    for one in (item.function, *called_with):
        yield from getattr(one, "only_where", ())
