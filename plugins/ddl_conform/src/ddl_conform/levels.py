"""Lists the standard tests that each level of conformance requires, and computes the level that a plugin reaches.

The levels are none, basic, full and fault-tolerant, in ascending order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["BASIC", "FAULT_TOLERANT", "FULL", "LEVELS", "NONE", "LevelResult", "highest", "level_of", "reached"]

NONE, BASIC, FULL, FAULT_TOLERANT = "none", "basic", "full", "fault-tolerant"

# Kind -> level -> standard tests. All other tests of a suite belong to `full`, also the tests that a plugin adds.
LEVELS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "transport": {
        BASIC: (
            "test_every_standard_test_stands",
            "test_allreduce",
            "test_allgatherv",
            "test_broadcast",
            "test_barrier",
            "test_close_waits_for_nobody",
        ),
        FAULT_TOLERANT: (
            "test_open_without_a_peer_ends_at_its_deadline",
            "test_a_wait_keeps_its_deadline",
            "test_a_late_rank_is_waited_for",
            "test_abort_ends_a_pending_call",
            "test_abort_ends_a_pending_open",
            "test_a_new_group_works_after_abort",
            "test_nothing_stays",
            "test_memory_with_gaps_is_refused",
            "test_survivors_of_a_killed_rank_are_released",
        ),
    },
    "adapter": {
        BASIC: (
            "test_every_standard_test_stands",
            "test_a_tensor_is_described",
            "test_no_copy_is_made",
            "test_allocate",
            "test_adopt",
            "test_copy",
        ),
        FAULT_TOLERANT: (
            "test_a_buffer_keeps_its_memory",
            "test_adopted_memory_lives_with_its_tensor",
            "test_foreign_types_are_refused",
            "test_bad_tensors_are_refused_at_the_call",
            "test_a_failed_request_can_be_started_again",
            "test_a_request_in_flight_is_not_started_again",
            "test_a_closed_job_starts_nothing",
        ),
    },
    "fusion": {
        BASIC: (
            "test_every_standard_test_stands",
            "test_every_tensor_is_placed_once",
            "test_keys_never_share_a_bucket",
        ),
    },
    "compressor": {
        BASIC: (
            "test_every_standard_test_stands",
            "test_it_has_a_name",
            "test_nothing_travels_wider",
            "test_there_and_back",
        ),
        FAULT_TOLERANT: ("test_a_void_bucket_leaves_no_trace", "test_names_do_not_meet"),
    },
    "launcher": {
        BASIC: (
            "test_every_standard_test_stands",
            "test_every_agent_is_started_once",
            "test_commands_carry_the_program",
            "test_nothing_secret_stands_in_arguments",
        ),
        FAULT_TOLERANT: (
            "test_a_failure_is_explained_in_one_line",
            "test_an_allocation_that_is_not_there_is_refused",
        ),
    },
    "tuner": {
        BASIC: (
            "test_every_standard_test_stands",
            "test_what_it_proposes_lies_within_the_knobs",
            "test_the_same_seed_proposes_the_same",
        ),
    },
}


@dataclass(frozen=True)
class LevelResult:
    """The result of one test with one set of parameters."""

    name: str  # with its parameters: test_allreduce[sum-float32]
    outcome: str  # passed, failed, skipped or not run
    reason: str = ""  # why it failed, was skipped or did not run, in one line
    seconds: float = 0.0
    detail: str = ""  # the whole text of a failure
    unwritten: str = ""  # the method that raised NotImplementedError

    @property
    def test(self) -> str:
        """Return the name of the test without its parameters, such as test_allreduce."""
        return self.name.partition("[")[0]


def level_of(kind: str, test: str) -> str:
    """Return the level of conformance that a plugin of the kind ``kind`` can reach only if it passes the test ``test``."""
    for level, tests in LEVELS.get(kind, {}).items():
        if test in tests:
            return level
    return FULL


def highest(kind: str) -> str:
    """Return the highest level that plugins of the kind ``kind`` can reach.

    The level is `fault-tolerant` if the kind has tests of this level, and `full` if it has none.
    """
    return FAULT_TOLERANT if FAULT_TOLERANT in LEVELS.get(kind, {}) else FULL


def reached(kind: str, results: Sequence[LevelResult]) -> tuple[str, str]:
    """Return (the level that a plugin has reached, the reason why it has not reached the next level).

    The reason is "" at the highest level. ``results`` are the results of all tests.

    A plugin reaches a level if two conditions hold for this level and for all lower levels. First, no test of the level
    has failed, and none was left out because earlier tests had hung. Second, at the levels basic and fault-tolerant,
    each required test has passed with at least one set of parameters, because a test that was only skipped proves
    nothing.
    """
    now = NONE
    for level in (BASIC, FULL, FAULT_TOLERANT):
        if level == FAULT_TOLERANT and highest(kind) == FULL:
            break
        here = [result for result in results if level_of(kind, result.test) == level]
        failed = _names(result.test for result in here if result.outcome == "failed")
        if failed:
            return now, f"{', '.join(failed)} failed"
        left = _names(result.test for result in here if result.outcome == "not run")
        if left:
            return now, f"{', '.join(left)} did not run"
        proved = {result.test for result in here if result.outcome == "passed"}
        open_ = [test for test in LEVELS.get(kind, {}).get(level, ()) if test not in proved]
        if open_:
            why = _names(result.reason for result in here if result.test in open_ and result.reason)
            return now, f"{', '.join(open_)} did not run" + (f" ({'; '.join(why)})" if why else "")
        now = level
    return now, ""


def _names(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
