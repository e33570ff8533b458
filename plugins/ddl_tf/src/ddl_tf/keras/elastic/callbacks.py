"""Keras callbacks that keep an elastic state up to date during ``fit``, for Keras 3 and tf_keras."""

from __future__ import annotations

from typing import Any

from ddl_tf.keras.callbacks import Callback
from ddl_tf.keras.elastic.state import TensorFlowKerasState


class UpdateBatchStateCallback(Callback):
    """A callback that sets ``state.batch`` to the number of completed batches of the current epoch.

    ``state.batch`` is 0 after the last batch of an epoch. If an epoch begins again in another world, the callback
    continues to count from ``state.batch``. So give ``fit`` only the remaining batches.
    """

    def __init__(self, state: TensorFlowKerasState) -> None:
        super().__init__()
        self.state = state
        state.positions.append(self)
        self._done = 0  # batches of the present epoch that were done when ``fit`` began

    def on_train_begin(self, logs: Any = None) -> None:
        _take_part(self)
        self._done = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.move(batch=0 if _is_last(self, batch) else self._done + batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._done = 0
        self.state.move(batch=0)


class UpdateEpochStateCallback(Callback):
    """A callback that sets ``state.epoch`` to the number of epochs that are done, after the last batch of each epoch.

    Give ``fit`` ``initial_epoch=state.epoch``, or give it only the number of remaining epochs as ``epochs``, as with
    Horovod.
    """

    def __init__(self, state: TensorFlowKerasState) -> None:
        super().__init__()
        self.state = state
        state.positions.append(self)
        self._epoch = 0
        self._offset: int | None = None  # from Keras' numbers of epochs to those of the training

    def on_train_begin(self, logs: Any = None) -> None:
        _take_part(self)
        self._offset = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._offset is None:
            self._offset = self.state.epoch - epoch

        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Before the end of the epoch, so that a failure there, in a validation for example, repeats no batch.
        if _is_last(self, batch):
            self.on_epoch_end(self._epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.move(epoch=epoch + 1 + (self._offset or 0))


class CommitStateCallback(Callback):
    """A callback that commits ``state`` after every ``batches_per_commit`` batches, and at the end of an epoch.

    In the list of callbacks, this callback may be before or after the callbacks that update the state. Raises
    ValueError unless ``batches_per_commit`` is 1 or more.
    """

    def __init__(self, state: TensorFlowKerasState, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit must be 1 or more, not {batches_per_commit}")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self._left = self.batches_per_commit  # so that ranks that have joined commit after the same batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            for position in self._positions():
                position.on_train_batch_end(batch, logs)
            self._left = self.batches_per_commit
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for position in self._positions():
            position.on_epoch_end(epoch, logs)
        self.commit()

    def commit(self) -> None:
        """Commit the state. A subclass may do more, before or after it."""
        self.state.commit()

    def _positions(self) -> list[Any]:
        """Return the callbacks that update the state in this call of ``fit``.

        Some of them may come after this callback in the list of callbacks.
        """
        return [one for one in self.state.positions if getattr(one, "params", None) is self.params]


def _take_part(callback: Any) -> None:
    """Record that ``callback`` updates its state in the call of ``fit`` that begins, and forget those of earlier calls.

    A callback of an earlier call, such as one that a failure has ended, would count from where that call began. ``fit``
    gives all its callbacks the same object of parameters.
    """
    others = [one for one in callback.state.positions if one is not callback]
    now = [one for one in others if getattr(one, "params", None) is None or one.params is callback.params]
    callback.state.positions = [*now, callback]


def _is_last(callback: Any, batch: int) -> bool:
    """Return whether ``batch`` is the last batch of its epoch.

    Returns False if Keras does not know the number of batches, which may be so in a first epoch.
    """
    return bool((callback.params or {}).get("steps") == batch + 1)
