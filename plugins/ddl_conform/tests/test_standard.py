"""A suite from which a standard test was removed, or in which one was replaced without a reason, fails."""

from __future__ import annotations

from typing import Any

import pytest

from ddlcore.testing import FusionSuite, TransportSuite


def test_an_override_without_a_reason_fails() -> None:
    """The message names class and test, and says how to give a reason."""

    class Lax(TransportSuite):
        def test_barrier(self) -> None:
            pass

    with pytest.raises(AssertionError, match=r"Lax overrides test_barrier; mark it @pytest.mark.xfail\(reason="):
        Lax().test_every_standard_test_stands()


def test_a_removed_test_fails() -> None:
    """Set to None it would not be collected; so does a whole base's, further down."""

    class Holes(FusionSuite):
        test_the_limit_is_kept: Any = None

    class Below(Holes):
        pass

    with pytest.raises(AssertionError, match="Below removes test_the_limit_is_kept"):
        Below().test_every_standard_test_stands()


@pytest.mark.parametrize(
    ("mark", "stands"),
    [
        (pytest.mark.xfail(reason="the library cannot"), True),
        (pytest.mark.skip(reason="the library cannot"), True),
        (pytest.mark.skip("the library cannot"), True),
        (pytest.mark.skipif(True, reason="the library cannot"), True),
        (pytest.mark.xfail, False),
        (pytest.mark.skip(reason=" "), False),
        (pytest.mark.slow, False),
    ],
    ids=str,
)
def test_a_reason_makes_an_override_honest(mark: Any, stands: bool) -> None:
    """xfail, skip and skipif count where they say why."""

    class Honest(TransportSuite):
        @mark  # type: ignore[untyped-decorator, unused-ignore]
        def test_barrier(self) -> None:
            super().test_barrier()

    if stands:
        Honest().test_every_standard_test_stands()
    else:
        with pytest.raises(AssertionError, match="Honest overrides test_barrier"):
            Honest().test_every_standard_test_stands()


def test_the_guard_itself_cannot_be_replaced() -> None:
    """Such a class does not come into being."""
    with pytest.raises(TypeError, match="remove that"):
        type("Sly", (FusionSuite,), {"test_every_standard_test_stands": lambda self: None})
