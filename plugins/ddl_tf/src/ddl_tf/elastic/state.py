"""The elastic state of a TensorFlow training. The state knows the variables, but not the optimizer.

After a failure, the state goes back to the last commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from ddl_tf.broadcast import broadcast_variables
from ddlcore.api.elastic import StepState
from ddlcore.errors import InvalidArgument


class TensorFlowState(StepState):
    """The elastic state of a TensorFlow training: variables and plain values.

    ``commit()`` keeps a copy of ``variables`` and of the values, and after a failure all ranks go back to the newest
    copy. ``steps`` counts the calls of ``commit()``. The list ``variables`` must also contain the optimizer's
    variables. ``TensorFlowKerasState`` is an alternative that knows the optimizer's steps and copies nothing at a
    commit.

    ``session`` is the TensorFlow 1 session that contains the variables. With a session, ``variables`` defaults to the
    global variables of its graph, which must be initialized. Raises ValueError if there are no variables, and for a
    keyword that is the name of an attribute or method of the state itself.
    """

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if variables is None and session is not None:
            with session.graph.as_default():
                variables = tf.compat.v1.global_variables()
        self.variables = list(variables or ())
        self.session = session
        if not self.variables:
            raise InvalidArgument(
                "TensorFlowState: there are no variables; pass variables=[…] (eagerly there are no global ones)"
            )
        if session is None and not tf.executing_eagerly():
            raise InvalidArgument("TensorFlowState: in a graph, pass the session in which the variables are")
        super().__init__(**kwargs)
        self._keep_all()

    def _values(self) -> list[Any]:
        if self.session is not None:
            return list(self.session.run(self.variables))
        # A tensor shares the variable's memory until the variable is written.
        return [tf.identity(tf.convert_to_tensor(variable)) for variable in self.variables]

    def _assign(self, values: Iterable[Any]) -> None:
        for variable, value in zip(self.variables, values, strict=True):
            if self.session is None:
                variable.assign(value)
            else:
                variable.load(value, self.session)

    def _keep_all(self) -> None:
        self._kept = self._values()

    def restore(self) -> None:
        super().restore()
        self._assign(self._kept)

    def _head(self) -> list[Any] | None:
        return None if self.session is None else self._values()

    def _take_root(self, head: list[Any] | None, is_behind: bool) -> None:
        if head is not None:
            self._assign(head)
        elif is_behind:
            broadcast_variables(self.variables, self.root)  # it assigns when all values have arrived, and not before
