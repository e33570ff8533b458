"""A training that signals interrupt within ddl gives the same parameters as one without interrupts."""

from __future__ import annotations

import re

import pytest

from plugins.ddl_torch.tests.launching import PROGRAMS, launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.mark.long
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_an_interrupted_step_goes_on_or_is_computed_again(overlap: str) -> None:
    """Wherever the handler raises, nothing is sent twice, and every rank is told of gradients that will not come."""
    text = launch(2, PROGRAMS / "interrupted.py", "60", "1", timeout_s=300.0, env={"DDL_OVERLAP": overlap})
    struck = [int(number) for number in re.findall(r"struck (\d+)", text)]
    assert len(struck) == 2
    assert sum(struck) > 0, text
