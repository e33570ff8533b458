"""Answers questions about the present world for graphs, because a traced graph may run in a later world.

In an elastic job, ranks and their number change, but a traced graph does not change. So such a graph asks again each
time it runs. Without an elastic job, and in eager mode, the answers are constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ddlcore.api import ProcessSet, current_job
from ddlcore.api.world import elastic_member


def changes() -> bool:
    """Return whether the current graph may run in a world other than the present one."""
    return elastic_member() is not None and not tf.executing_eagerly()


def count_of_members(process_set: ProcessSet, arrived: Any) -> Any:
    """Return the number of ranks of ``process_set`` in the world in which the graph runs.

    In an elastic graph, the number is read after the tensor ``arrived`` has been computed.
    """
    return _answered(lambda: len(process_set.resolve(current_job())[1]), arrived)


def set_rank(process_set: ProcessSet, arrived: Any) -> Any:
    """Return this rank's position within ``process_set`` in the world in which the graph runs.

    In an elastic graph, the position is read after the tensor ``arrived`` has been computed.
    """

    def position() -> int:
        job = current_job()
        return process_set.resolve(job)[1].index(job.rank)

    return _answered(position, arrived)


def world_rank(arrived: Any) -> Any:
    """Return this rank's number in the world in which the graph runs.

    In an elastic graph, the number is read after the tensor ``arrived`` has been computed.
    """
    return _answered(lambda: current_job().rank, arrived)


def _answered(question: Callable[[], int], arrived: Any) -> Any:
    if not changes():
        return question()
    with tf.control_dependencies([arrived]):
        answer = tf.numpy_function(lambda: np.int64(question()), [], tf.int64)
    answer.set_shape([])
    return answer
