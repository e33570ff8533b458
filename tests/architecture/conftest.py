"""Lets go of the parsed files after the last test of this room: each garbage collection would go through them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.source import every

__all__: list[str] = []


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        for source in every():
            source.forget()
