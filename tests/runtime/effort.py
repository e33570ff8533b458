"""How many examples a property is tried on: so many as it says, twenty times as many with --hypothesis-profile=long."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

__all__ = ["examples"]

LONG = 20


def examples(count: int) -> settings:
    """Settings for ``count`` examples, without a deadline for each."""
    factor = LONG if settings.get_current_profile_name() == "long" else 1
    return settings(max_examples=count * factor, deadline=None, suppress_health_check=list(HealthCheck))
