"""How many ranks an elastic job begins with, and to how many it may grow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ddlcore.config.loading import load_settings
from ddlcore.contracts.discovery import HostDiscovery
from ddlcore.contracts.launcher import HostSlots
from ddlcore.launch.job.placement import place_ranks
from ddlcore.plug import load_plugins


class Found(HostDiscovery):
    """Always finds two slots on this host."""

    def hosts(self) -> Sequence[HostSlots]:
        return (HostSlots("localhost", 2),)


@pytest.mark.parametrize(
    ("ranks", "max_np", "size", "most"),
    [
        (4, "0", 2, 4),  # as soon as more hosts are found
        (4, "8", 2, 8),
        (4, "1", 1, 1),
        (1, "0", 1, 1),
        (None, "8", 2, 8),
        (None, "0", 2, 0),  # as many as there are at the beginning
    ],
)
def test_a_job_begins_with_the_slots_that_are_found_and_grows_to_what_was_asked_for(
    ranks: int | None, max_np: str, size: int, most: int
) -> None:
    settings = load_settings({}, flags={"min_np": "1", "max_np": max_np})
    placed = place_ranks(ranks, None, None, settings, load_plugins(settings), {}, Found())
    assert (placed.layout.size, placed.most) == (size, most)
