"""The elastic states of a Keras training that go back to the last commit after a failure, as Horovod's do."""

from __future__ import annotations

from typing import Any

from ddl_tf import elastic as _elastic
from ddl_tf.keras import elastic as _keras_elastic

from ddl_horovod.keras_gradients import computed_gradients_of


class TensorFlowKerasState(_elastic.TensorFlowKerasState):
    """The elastic state of ``ddl_tf.elastic`` with another default: ``rollback="commit"``.

    A script for Horovod counts its batches from commit to commit. With ``rollback="step"``, the model would have more batches
    than the counters of the script say.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, *, rollback: str = "commit", **kwargs: Any
    ) -> None:
        super().__init__(model, optimizer, rollback=rollback, **kwargs)  # ``backend`` is not used

    def _take_root(self, head: None, is_behind: bool) -> None:
        super()._take_root(head, is_behind)
        computed = computed_gradients_of(self.optimizer)
        if computed is not None:
            computed.forget_passes()  # ranks that join have none


class KerasState(TensorFlowKerasState, _keras_elastic.KerasState):
    """``TensorFlowKerasState`` without the argument ``backend``."""

    def __init__(self, model: Any, optimizer: Any = None, *, rollback: str = "commit", **kwargs: Any) -> None:
        super().__init__(model, optimizer, rollback=rollback, **kwargs)
