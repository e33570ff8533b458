"""A reader can follow one gradient: few functions lie between autograd's hook, the transport, and ``.grad``."""

from __future__ import annotations

import re

import pytest

from plugins.ddl_torch.tests.launching import PROGRAMS, launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
MOST = 20


@pytest.mark.slow("two ranks import torch")
def test_the_path_of_a_gradient() -> None:
    """On a thread that runs the bucket itself, at most 20 functions of ddl call each other on the way there and back."""
    text = launch(2, PROGRAMS / "path.py", env={"DDL_OVERLAP": "off"})
    assert re.search(r"reached Slot.on_gradient .* Landing.complete place", text), text
    path = re.findall(r"through (\S+: \S+)", text)
    assert 5 < len(path) <= MOST, "\n".join(path)
