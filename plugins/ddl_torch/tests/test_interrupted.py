"""A training that signals interrupt within ddl comes to the same as one that they do not."""

from __future__ import annotations

import re

import pytest

from plugins.ddl_torch.tests.launching import PROGRAMS, launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_an_interrupted_step_goes_on_or_is_computed_again(overlap: str) -> None:
    """Wherever the handler raises: what had been sent is not sent again, and what is missing is said on every rank."""
    text = launch(2, PROGRAMS / "interrupted.py", "60", "1", timeout_s=300.0, env={"DDL_OVERLAP": overlap})
    struck = [int(number) for number in re.findall(r"struck (\d+)", text)]
    assert len(struck) == 2
    assert sum(struck) > 0, text
