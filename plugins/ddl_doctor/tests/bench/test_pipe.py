"""What ranks tell through the pipe arrives, in order and before the block ends."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from typing import Any

import pytest
from ddl_doctor.bench.pipe import told


def test_lines_arrive_before_the_end() -> None:
    """More than a pipe holds at once."""
    came: list[Mapping[str, Any]] = []
    with told(came.append) as path:
        assert stat.S_ISFIFO(os.stat(path).st_mode) and stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with open(path, "w", encoding="utf-8", buffering=1) as pipe:
            for number in range(3000):
                print(json.dumps({"row": [number] * 20}), file=pipe)
    assert [message["row"][0] for message in came] == list(range(3000))
    assert not os.path.exists(path)


def test_nobody_needs_to_write() -> None:
    """Ranks that die before they open it leave nothing waiting."""
    with told(lambda message: None) as path:
        pass
    assert not os.path.exists(path)


def test_what_show_raises_is_raised() -> None:
    """And the writer is not left with a full pipe meanwhile."""

    def show(message: Mapping[str, Any]) -> None:
        raise KeyError(message["row"])

    def tell() -> None:
        with told(show) as path, open(path, "w", encoding="utf-8") as pipe:
            print(json.dumps({"row": "first"}), file=pipe)
            pipe.write((json.dumps({"row": "x" * 100}) + "\n") * 3000)

    with pytest.raises(KeyError, match="first"):
        tell()
