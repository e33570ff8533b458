"""A pytest plugin that does not collect the standard tests which a transport's capabilities rule out, in place of skipping them.

``pytest -p ddlcore.testing.collecting``, for suites that say in ``offers`` what their transport can do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["pytest_collection_modifyitems", "ruled_out"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """They count as deselected."""
    gone = [item for item in items if ruled_out(item)]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in set(gone)]


def ruled_out(item: pytest.Item) -> bool:
    """Whether a standard test needs what its suite's ``offers`` have not; what a suite does not offer is tried, and skipped."""
    offers = getattr(getattr(item, "cls", None), "offers", None)
    return offers is not None and not all(getattr(offers, one) for one in _needed(item))


def _needed(item: Any) -> Iterator[str]:
    """The capabilities that ``only_where`` has noted on the test, and on what it is called with."""
    called_with = item.callspec.params.values() if hasattr(item, "callspec") else ()
    for one in (item.function, *called_with):
        yield from getattr(one, "only_where", ())
