"""Keras callbacks for training on many ranks: equal variables at the start, averaged metrics, scaled learning rates.

The same classes work with Keras 3 and with tf_keras; ``tf.keras`` may be either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from zlib import crc32

import numpy as np
import tensorflow as tf

from ddl_tf.broadcast import broadcast_variables
from ddl_tf.keras.families import KerasFamily, family_of, the_keras
from ddl_tf.keras.values import broadcast_global_variables
from ddl_tf.local import identity, listed
from ddlcore.api import arrays, rank, should_stop, size
from ddlcore.types import Average, Min

_keras: Any = the_keras()
_Base: Any = _keras.callbacks.Callback
_ModelCheckpoint: Any = _keras.callbacks.ModelCheckpoint

NOTHING, WEIGHTS, EVERYTHING = range(3)  # what a rank can broadcast before its first step


class Callback(_Base):  # type: ignore[misc]  # Keras has no types
    """The base class of callbacks that models of both Keras 3 and tf_keras accept.

    tf_keras calls methods of each callback to find out which hooks the callback implements. The base class of Keras 3
    has no such methods, so this class adds them.
    """

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class BroadcastGlobalVariablesCallback(Callback):
    """A callback that gives every rank the values of the model's and the optimizer's variables on ``root_rank``.

    The broadcast happens before the first step if the models of all ranks are built by then. Otherwise, and for
    variables that do not exist yet, it happens after the first step. ``local_variables`` (a variable, or several) are
    not changed. ``device`` is accepted for compatibility with Horovod.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local = [] if local_variables is None else listed(local_variables)
        if not all(hasattr(variable, "assign") for variable in self._local):
            raise ValueError("All local variables must be of tf.Variable type.")

    def register_local_var(self, variable: Any) -> None:
        """Exclude ``variable`` from the broadcast, in addition to ``local_variables``."""
        self._local.append(variable)

    def on_train_begin(self, logs: Any = None) -> None:
        if self.broadcast_done or not tf.executing_eagerly():
            return
        ready = int(arrays.allreduce(np.array(self._ready()), "broadcast_callback.ready", Min))
        if ready == NOTHING:
            return
        self._broadcast(optimizer=ready == EVERYTHING)
        self.broadcast_done = ready == EVERYTHING

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.broadcast_done:
            return
        if tf.executing_eagerly():
            self._broadcast(optimizer=True)
        else:
            broadcast_global_variables(self.root_rank)
        self.broadcast_done = True

    def _ready(self) -> int:
        """Return which variables this rank can broadcast now: NOTHING, WEIGHTS or EVERYTHING.

        The result is NOTHING if the model is not built. It is WEIGHTS if the optimizer is one of tf_keras' older
        optimizers (``tf.keras.optimizers.legacy``), because these are not built before the first step. Otherwise the
        result is EVERYTHING, and this method builds the optimizer if it is not built yet.
        """
        if not self.model.built:
            return NOTHING
        optimizer = self.model.optimizer
        if family_of(optimizer) is KerasFamily.TF_KERAS_OLDER:
            return WEIGHTS
        if optimizer is not None and not getattr(optimizer, "built", False):
            optimizer.build(self.model.trainable_variables)
        return EVERYTHING

    def _broadcast(self, optimizer: bool) -> None:
        local = {identity(variable) for variable in self._local}
        variables = [v for v in self.model.weights if identity(v) not in local]
        broadcast_variables(variables, self.root_rank)
        if optimizer and self.model.optimizer is not None:
            state = self.model.optimizer.variables
            state = state() if callable(state) and not isinstance(state, list) else state
            broadcast_variables([v for v in state if identity(v) not in local], self.root_rank)


class MetricAverageCallback(Callback):
    """A callback that averages the metrics of an epoch over all ranks.

    The callback changes the metrics in place, so the callbacks that follow in the list get the averages. Raises
    ValueError if the ranks have different metrics. ``device`` is accepted for compatibility with Horovod.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None or size() == 1:
            return
        names = sorted(logs)
        parts = [np.asarray(logs[name], dtype=np.float64) for name in names]
        digest = float(crc32(repr([(name, part.shape) for name, part in zip(names, parts)]).encode()))
        lengths = _gathered(float(sum(part.size for part in parts)), digest)
        if any(pair != lengths[0] for pair in lengths):
            raise ValueError(
                f"MetricAverageCallback: rank {rank()} has the metrics {', '.join(names) or '(none)'} after epoch "
                f"{epoch + 1}, another rank has others; compile and validate on all ranks alike"
            )
        if not names:
            return
        flat = np.concatenate([part.ravel() for part in parts])
        averaged = arrays.allreduce(flat, "metric_average_callback.values", Average)
        place = 0
        for name, part in zip(names, parts):
            values = averaged[place : place + part.size].reshape(part.shape)
            logs[name] = float(values) if values.ndim == 0 else values
            place += part.size


class LearningRateScheduleCallback(Callback):
    """A callback that sets the learning rate to ``initial_lr * multiplier`` in some epochs.

    The first of these epochs is ``start_epoch``, and the last one is the epoch before ``end_epoch`` (None: the end of
    training). Epochs are counted from 0. ``multiplier`` is a number, or a function of the epoch. With ``staircase``,
    the function is called at the start of each epoch. Without ``staircase``, it is called before each batch, with epoch
    + batch / steps_per_epoch. If ``steps_per_epoch`` is None, the number of steps that Keras knows is used. If
    ``momentum_correction`` is true, the accumulated momentum is scaled when the learning rate changes (Goyal et al.
    2017, arXiv:1706.02677), for SGD and RMSprop.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda epoch: multiplier
        self._scaling: tuple[Any, ...] = ()  # of a graph: what it is for, its factor, and the operation; see ``_scale``

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__} could not find out the number of steps per epoch; "
                    "give it as steps_per_epoch=..."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if self.staircase and batch == 0:
            self._adjust(self.current_epoch)
        elif not self.staircase:
            self._adjust(self.current_epoch + batch / (self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = _learning_rate(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, after = _learning_rate(optimizer), self.initial_lr * self.multiplier(epoch)
        if before == after:
            return
        _set_learning_rate(optimizer, after)
        velocities = list(_velocities(optimizer, self.model)) if self.momentum_correction and before else []
        if velocities:
            self._scale(velocities, after / before)

    def _scale(self, variables: list[Any], factor: float) -> None:
        """Multiply ``variables`` by ``factor``.

        In a graph, one operation does it, which is made once, because TensorFlow prepares the whole graph anew when it
        has grown.
        """
        if tf.executing_eagerly():
            for variable in variables:
                variable.assign(variable * factor)
            return
        key = (tf.compat.v1.get_default_graph(), *map(identity, variables))
        if not self._scaling or self._scaling[0] != key:
            by = tf.compat.v1.placeholder(tf.float64, ())
            self._scaling = key, by, tf.group(*[one.assign(one * tf.cast(by, one.dtype)) for one in variables])
        _, by, scaled = self._scaling
        session = tf.compat.v1.get_default_session() or tf.compat.v1.keras.backend.get_session()
        session.run(scaled, {by: factor})


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """A callback that raises the learning rate batch by batch from ``initial_lr / size()`` to ``initial_lr``.

    The warmup takes ``warmup_epochs`` epochs. It prevents a learning rate that was scaled by the number of ranks from
    doing harm at the start (Goyal et al. 2017, arXiv:1706.02677). If ``verbose`` is true, rank 0 prints a line when the
    warmup has finished.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            reached = epoch + 1.0 / (self.steps_per_epoch or 1)  # so that epochs end on round numbers
            return (reached * (size() - 1) / warmup_epochs + 1) / size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and self.end_epoch is not None and epoch + 1 == int(np.ceil(self.end_epoch)) and rank() == 0:
            reached = _learning_rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {reached:g}.")


class BestModelCheckpoint(_ModelCheckpoint):  # type: ignore[misc]  # Keras has no types
    """A callback that saves the model to ``filepath`` whenever the metric ``monitor`` is better than ever before.

    Only rank 0 saves. ``filepath`` may also be set later. Put this callback after MetricAverageCallback, so that it
    monitors the average of all ranks.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: Any = None,
    ) -> None:
        super().__init__(
            filepath=filepath or ("best.weights.h5" if save_weights_only else "best.keras"),
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: Any = self.filepath if filepath is not None else None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint has no file to save to; give filepath=..., or set callback.filepath")
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if rank() == 0:
            super().on_epoch_end(epoch, logs)


# --- optimizers


class StopOnSignalCallback(Callback):
    """A callback that ends ``fit`` on all ranks after the same batch, once ``ddl.should_stop`` is true.

    ``ddl.should_stop`` becomes true after SIGTERM or SIGUSR1 to any rank or to the launcher, or after
    ``ddl.request_stop``. Then ``stopped`` is also true, so the script knows that it should save and end. All ranks need
    this callback, and the same number of batches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stopped = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.stopped = should_stop()
        if self.stopped:
            self.model.stop_training = True


def _unscaled(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _learning_rate(optimizer: Any) -> float:
    value = _unscaled(optimizer).learning_rate
    if callable(value):  # a schedule
        value = value(optimizer.iterations)
    if isinstance(value, tf.Variable) and not tf.executing_eagerly():
        value = _keras.backend.get_value(value)
    return float(np.asarray(value))


def _set_learning_rate(optimizer: Any, value: float) -> None:
    optimizer = _unscaled(optimizer)
    try:
        optimizer.learning_rate = value
    except TypeError as error:
        raise ValueError(
            "the optimizer's learning rate is a schedule, which cannot be set; give it a number to use this callback"
        ) from error


def _velocities(optimizer: Any, model: Any) -> Iterable[Any]:
    """Return the optimizer's momentum variables, whose values are in units of the learning rate.

    The result is empty before the first step. Only SGD and RMSprop have such variables.
    """
    optimizer = _unscaled(optimizer)
    if not any(cls.__name__ in ("SGD", "RMSprop") for cls in type(optimizer).__mro__):
        return []
    if family_of(optimizer) is KerasFamily.TF_KERAS_OLDER:
        if "momentum" not in optimizer.get_slot_names():
            return []
        return [optimizer.get_slot(variable, "momentum") for variable in model.trainable_variables]
    return [v for v in getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", []) if v is not None]


def _gathered(*numbers: float) -> list[tuple[float, ...]]:
    """Return a list of tuples: the ``numbers`` of every rank, in rank order."""
    return [tuple(row) for row in arrays.allgather(np.array([numbers]), "metric_average_callback.names")]
