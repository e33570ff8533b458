"""Runs of the model of successions that break a promise, and that random runs seldom find.

The last move of each is the one that breaks it.
"""

from __future__ import annotations

from tests.models.succession_state import Budget, Config


def _moves(text: str) -> list[str]:
    return [one.strip() for one in text.strip().split(";")]


# By name of the mutant: the configuration, and the moves.
TRACES = {
    # 1 is to leave, and registers in time; its vote opens a world for 0 alone. It is cut off before it is told, and has a
    # second vote with 2.
    "counts the dismissed": (
        Config((0, 1, 2), Budget(splits=1, dismissals=1)),
        _moves(
            """
            0 wants 1 to leave; 1 registers at 0; 0 registers at 0; the network splits: 11; 0 gives up agent 2;
            0 opens (2, 0) with (0,); 0 receives (2, 0); agent 1 loses 0 and starts 2; agent 2 loses 0 and goes to 2;
            agent 1 comes to 2; agent 2 comes to 2; 2 has gathered its agents; 1 registers at 2; 2 registers at 2;
            2 opens (2, 2) with (1, 2); agent 2 hears that (2, 2) opens; 1 receives (2, 2); 2 receives (2, 2)
            """
        ),
    ),
    # The same, where 1 is dismissed before the world opens. It never hears of that, so it does not end.
    "takes the dismissed for dead": (
        Config((0, 1, 2), Budget(splits=1, dismissals=1)),
        _moves(
            """
            0 wants 1 to leave; 1 registers at 0; 0 registers at 0; the network splits: 11; 0 gives up agent 2;
            0 dismisses (1,) first; 0 opens (2, 0) with (0,); 0 receives (2, 0); agent 1 loses 0 and starts 2;
            agent 2 loses 0 and goes to 2; agent 1 comes to 2; agent 2 comes to 2; 2 has gathered its agents;
            1 registers at 2; 2 registers at 2; 2 opens (2, 2) with (1, 2); agent 2 hears that (2, 2) opens;
            1 receives (2, 2); 2 receives (2, 2)
            """
        ),
    ),
    # 1 has received (2, 0), which has begun, and its agent has not heard of it. So 1 and 2 open another world.
    "members first": (
        Config((0, 1, 2), Budget(splits=1, suspicions=1)),
        _moves(
            """
            0 gives up agent 2; 0 registers at 0; 1 registers at 0; 0 opens (2, 0) with (0, 1); 1 receives (2, 0);
            0 receives (2, 0); the network splits: 11; agent 1 loses 0 and starts 2; agent 2 loses 0 and goes to 2;
            agent 1 comes to 2; agent 2 comes to 2; 2 has gathered its agents; 1 registers at 2; 2 registers at 2;
            2 opens (2, 2) with (1, 2); agent 2 hears that (2, 2) opens; 1 receives (2, 2); 2 receives (2, 2)
            """
        ),
    ),
    # 3 has died. The only one that could tell agent 2 is the successor, which it has not reached. It takes 1 and 2 for two
    # of four, and ends; they are two of three.
    "looks at hosts alone": (
        Config((0, 1, 2, 3), Budget(deaths=1, hosts=2)),
        _moves(
            """
            host 0 is lost; 3 dies; agent 3 loses 0 and goes to 2; agent 1 loses 0 and starts 2; agent 3 comes to 2;
            host 3 is lost; agent 2 loses 0 and ends
            """
        ),
    ),
    # 1 is dismissed and never hears of it. Of the members of (2, 0), 0 dies before 3, which is new, has taken over its state. So
    # only 1 has the state. It runs, but it registers later than 3.
    "waits for no state": (
        Config((1, 2, 3), Budget(deaths=2, hosts=1, restarts=1, dismissals=1)),
        _moves(
            """
            2 dies; 0 learns that 2 has died; 0 starts 3 at place 2 on host 3; 0 wants 1 to leave; 3 registers at 0;
            0 registers at 0; 1 registers at 0; 0 opens (2, 0) with (0, 3); agent 1 hears that (2, 0) opens;
            agent 3 hears that (2, 0) opens; agent 2 hears that (2, 0) opens; 0 receives (2, 0); 3 receives (2, 0);
            0 sees that (2, 0) has begun; agent 1 hears that (2, 0) has begun; host 0 is lost;
            agent 1 loses 0 and starts 2; agent 2 loses 0 and goes to 2; agent 3 loses 0 and goes to 2;
            agent 1 comes to 2; agent 2 comes to 2; agent 3 comes to 2; 2 has gathered its agents; 0 dies;
            2 learns that 0 has died; 3 registers at 2; 2 ends the job
            """
        ),
    ),
}
