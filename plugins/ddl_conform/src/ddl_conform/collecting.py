"""A pytest plugin that deselects the standard tests for which a transport lacks a capability.

Without this plugin, such tests are collected and skipped. Use ``pytest -p ddl_conform.collecting``. The plugin
affects only suites that set ``offers``, the capabilities of their transport.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["pytest_collection_modifyitems", "ruled_out"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the tests for which ``ruled_out`` returns true from ``items``, and report them to pytest as deselected."""
    gone = [item for item in items if ruled_out(item)]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in set(gone)]


def ruled_out(item: pytest.Item) -> bool:
    """Return whether the standard test ``item`` needs a capability that is false in the ``offers`` of its suite.

    If ``offers`` is None, the result is always False: the test runs, and skips itself if the transport lacks the
    capability.
    """
    offers = getattr(getattr(item, "cls", None), "offers", None)
    return offers is not None and not all(getattr(offers, one) for one in _needed(item))


def _needed(item: Any) -> Iterator[str]:
    """Yield the names of the capabilities that the test ``item`` needs.

    The names are in the attribute ``only_where`` of the test's function and of the parameters of the test.
    """
    called_with = item.callspec.params.values() if hasattr(item, "callspec") else ()
    for one in (item.function, *called_with):
        yield from getattr(one, "only_where", ())
