"""Who left in anger, and who only because of another."""

from __future__ import annotations

import pytest

from ddlcore.launch.network import Witness
from ddlcore.messages import Bye
from tests.control.echo import EchoBrain


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("raised RuntimeError: boo", True),
        ("ended its script without shutdown()", True),  # sys.exit(3): it counts only if its exit code does
        ("init failed: no transport", True),
        ("init failed: rank 1 lost during init: killed", False),
        ("raised PeerLost: rank 1 lost", False),
        ("called shutdown()", False),
    ],
)
def test_a_cause_is_noted(reason: str, cause: bool) -> None:
    """Once a rank, in the order in which they left; all is handed on."""
    brain = EchoBrain()
    witness = Witness(brain)
    for rank in (1, 0, 1):
        witness.handle(rank, Bye(reason))
    assert witness.raised == ([1, 0] if cause else [])
    assert len(brain.heard) == 3
