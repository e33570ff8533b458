"""Runs that break a promise if one rule of elastic worlds is left out, where random runs seldom find such a run.

Each was found by a random run, and then shortened as far as it still breaks the promise.
"""

from __future__ import annotations

from tests.models.elastic_state import Budget, Config


def _moves(text: str) -> list[str]:
    return [one.strip() for one in text.strip().split(";")]


# By name of the mutant: the configuration, and the moves.
TRACES = {
    # 0 comes too late for world (1, 0) and is left out. Then 2, which had received that world, dies, and 1 is lost, so 3
    # may still train in it. 0 alone looks like half of (0, 0) with its lowest member, and opens another world.
    "forgets the dead": (
        Config(3, 2, 1, Budget(deaths=1, hosts=1, suspicions=1)),
        _moves(
            """
            1 launches 3; 2 launches 3; 3 registers at 0; coordinator 0 freezes; 1 answers the freeze;
            2 answers the freeze; 0 answers the freeze; coordinator 0 sets the point; 1 learns the point;
            0 learns the point; 0 launches 3; 1 completes 3; 2 learns the point; 1 launches 4; 0 completes 3;
            0 launches 4; 2 completes 3; 2 launches 4; 2 completes 4; 2 leaves at the point; 1 completes 4;
            1 leaves at the point; 1 registers at 0; 0 completes 4; 0 leaves at the point; 2 registers at 0;
            coordinator 0 opens (1, 0) with (1, 2, 3); 0 registers at 0; 3 receives (1, 0); 2 receives (1, 0);
            3 launches 0; 2 launches 0; 1 receives (1, 0); 1 launches 0; 3 completes 0; 2 dies;
            the host of 1 is lost; coordinator 0 opens (2, 0) with (0,); 0 receives (2, 0); 0 launches 0
            """
        ),
    ),
    # 0 received (1, 0) and later (2, 0). It tells (2, 0) alone when it registers again; but (1, 0) is the one that lives.
    "forgets older": (
        Config(4, 2, 1, Budget(deaths=1, hosts=1, splits=1, suspicions=1)),
        _moves(
            """
            4 registers at 0; 2 dies; 0 notices a failure; 0 registers at 0; 3 notices a failure; 3 registers at 0;
            coordinator 0 opens (1, 0) with (0, 3, 4); 0 receives (1, 0); 4 receives (1, 0); 1 notices a failure;
            1 registers at 0; 3 receives (1, 0); 4 launches 0; 0 launches 0; 3 launches 0; the network splits: 01100;
            3 completes 0; 4 notices a failure; 0 notices a failure; 4 registers at 0; 0 registers at 0;
            coordinator 0 opens (2, 0) with (0, 1, 4); 1 receives (2, 0); 0 receives (2, 0); the host of 4 is lost;
            0 notices a failure; 1 notices a failure; 1 registers at 0; 0 registers at 0;
            coordinator 0 opens (3, 0) with (0, 1); 1 receives (3, 0); 0 receives (3, 0); 1 launches 0; 0 launches 0
            """
        ),
    ),
    # 2 and 4 have stopped for the freeze. The coordinator is lost; none of the world's members is. They wait for ever.
    "waits without a coordinator": (
        Config(3, 2, 2, Budget(deaths=2, hosts=1, suspicions=1)),
        _moves(
            """
            0 dies; 2 notices a failure; 2 registers at 0; 1 notices a failure; 1 registers at 0; 4 registers at 0;
            coordinator 0 opens (1, 0) with (1, 2, 4); 2 receives (1, 0); 2 launches 0; 4 receives (1, 0);
            4 launches 0; 3 registers at 0; coordinator 0 freezes; 4 answers the freeze; 1 receives (1, 0);
            2 answers the freeze; 1 launches 0; 1 completes 0; the host of 0 is lost; 4 completes 0; 1 launches 1;
            2 completes 0; 3 registers at 1 instead
            """
        ),
    ),
}

# Runs that keep all promises although they look as if one were broken.
FINE = (
    # 3 sees that (1, 0) has begun when 0 has left it and has begun (2, 0); 0 knew that (1, 0) may be effective.
    (
        Config(3, 2, 1, Budget(deaths=1, hosts=1, suspicions=1)),
        _moves(
            """
            the host of 2 is lost; 3 registers at 0; coordinator 0 freezes; 1 launches 3; 1 answers the freeze;
            1 notices a failure; 1 registers at 0; 0 launches 3; 0 answers the freeze; 0 notices a failure;
            0 registers at 0; coordinator 0 opens (1, 0) with (0, 1, 3); 3 receives (1, 0); 3 launches 0;
            1 receives (1, 0); 1 launches 0; 1 dies; 0 receives (1, 0); 0 launches 0; 0 notices a failure;
            0 registers at 0; coordinator 0 opens (2, 0) with (0,); 0 receives (2, 0); 0 launches 0; 0 completes 0;
            3 completes 0
            """
        ),
    ),
    # 3 has told the coordinator of (1, 0) before it is lost. 1 alone cannot know whether 2 trains there.
    (
        Config(2, 3, 2, Budget(deaths=1, hosts=1, splits=1, suspicions=1)),
        _moves(
            """
            0 launches 3; 3 registers at 0; coordinator 0 freezes; 2 registers at 0; 1 answers the freeze;
            0 answers the freeze; coordinator 0 sets the point; the network splits: 0100; 1 learns the point;
            2 registers at 2 instead; 0 learns the point; 1 launches 3; 0 completes 3; 0 launches 4; 1 completes 3;
            1 launches 4; 1 completes 4; 0 completes 4; 0 leaves at the point; 0 registers at 0;
            coordinator 0 opens (1, 0) with (0, 2, 3); 3 receives (1, 0); 1 leaves at the point; 1 registers at 0;
            3 notices a failure; 0 dies; 3 registers at 0; coordinator 0 freezes; the host of 3 is lost
            """
        ),
    ),
)
