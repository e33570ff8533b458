"""``make demo`` fails where its claim does not hold."""

from __future__ import annotations

import pytest

from tools.demo import objection

GOOD = """[0] epoch 8: loss 0.0100
[0] test accuracy 97.6 %
[0] rank 0 of 2: parameters 0123456789ab
[1] rank 1 of 2: parameters 0123456789ab
"""


def test_a_good_run_passes() -> None:
    """Accuracy and equal digests: nothing to object to."""
    assert objection(GOOD) == ""


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("97.6 %", "94.9 %", "accuracy is 94.9 %"),
        ("test accuracy 97.6 %", "", "accuracy is not printed"),
        ("rank 1 of 2: parameters 0123456789ab", "rank 1 of 2: parameters ba9876543210", "digests are"),
        ("[1] rank 1 of 2: parameters 0123456789ab", "", "digests are"),
    ],
)
def test_a_bad_run_is_named(old: str, new: str, wrong: str) -> None:
    """Too low an accuracy, different parameters, or a rank that printed none."""
    assert wrong in objection(GOOD.replace(old, new))
