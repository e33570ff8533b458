"""The state of an elastic training with Gluon: parameters, a trainer, other objects with a state, and plain values."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Mapping
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon.parameter import ParameterDict

from ddl_mxnet.trainer import DistributedTrainer
from ddlcore.api import broadcast_object, rank
from ddlcore.api.elastic import StepState
from ddlcore.errors import InvalidArgument

# Attributes of an optimizer that are not copied between ranks: ``param_dict`` belongs to this process, and
# Trainer.step computes ``rescale_grad`` each time.
OWN = ("param_dict", "rescale_grad")


class MXNetState(StepState):
    """The state of an elastic training with Gluon: parameters, a DistributedTrainer, samplers, and plain values.

    ``net`` is a Block, or the ParameterDict that ``collect_params()`` returns. ``net``, ``trainer`` and each keyword
    become attributes of the state. If the value of a keyword has the methods ``state_dict`` and ``load_state_dict``, as
    an ``ElasticSampler`` has, the object stays the same, and only its state is copied to all ranks. All other keywords
    are plain values, which are treated as in ``ObjectState``. The state of ``trainer`` consists of the arrays of its
    optimizer (such as momentum), the update counts, the settings and the learning rate scheduler.

    With ``rollback="step"``, all ranks continue after a failure: at the last step that any surviving rank has applied.
    ``steps`` counts the calls of ``trainer.step()``. ``commit()`` saves only the plain values, and makes no copy of the
    parameters. So the state is exact only if the training loop calls ``commit()`` once for each ``trainer.step()``.

    With ``rollback="commit"``, and for a state without a trainer, ``commit()`` copies the whole state. After a failure,
    all ranks go back to the newest copy. ``steps`` counts the calls of ``commit()``.

    After a failure, the running statistics and the random generators of numpy and of ``random`` go back to the last
    step that was applied. MXNet's own random generator does not go back, because MXNet cannot return its state.

    Raises ValueError for invalid arguments. When ``elastic.run`` begins, also raises ValueError if a parameter has no
    values on the rank whose state is copied to the other ranks.
    """

    _handles_objects = True

    def __init__(self, net: Any = None, trainer: Any = None, *, rollback: str = "step", **kwargs: Any) -> None:
        by_step = self._is_by_step(rollback, "MXNetState")
        params = net.collect_params() if isinstance(net, mx.gluon.Block) else net
        if params is not None and not isinstance(params, Mapping | ParameterDict):
            raise InvalidArgument(
                f"MXNetState: net is a {type(net).__name__}; pass a Block, or its collect_params(). "
                "Plain values are passed as keywords"
            )
        if trainer is not None and not isinstance(trainer, DistributedTrainer):
            raise InvalidArgument(
                f"MXNetState: trainer is a {type(trainer).__name__}; make a ddl_mxnet.DistributedTrainer. "
                "Other trainers and a DistributedOptimizer may update some parameters before a peer is lost"
            )
        for name, value in kwargs.items():
            if isinstance(value, mx.gluon.Block | mx.gluon.Trainer | mx.optimizer.Optimizer | ParameterDict):
                raise InvalidArgument(f"MXNetState: {name}= is a {type(value).__name__}; pass it as net or as trainer")
        self._params: list[Any] = [] if params is None else list(params.values())
        self.net: Any = net
        self.trainer: Any = trainer
        super().__init__(**kwargs)
        self._statistics: dict[int, Any] = {}  # by the place of a parameter: its running statistics at the last step
        if by_step and trainer is not None:
            self._by_step = True
            trainer.after_update.append(self._stepped)
        self._keep_all()

    # --- steps

    def _stepped(self) -> None:
        """Count a step, and save the values that a later step could change on this rank before it fails.

        ``trainer.step()`` calls this method after it has updated the parameters.
        """
        self.steps += 1
        self._keep_local()

    def _keep_local(self) -> None:
        """Save the values that a forward pass and a data loader change: running statistics and random generators.

        MXNet's engine copies the running statistics in the background. This thread does not wait for the copies.
        """
        for place, param in enumerate(self._params):
            if not param._differentiable and param._data is not None:
                array = param.list_data()[0]
                kept = self._statistics.get(place)
                if kept is None:
                    self._statistics[place] = array.copy()
                else:
                    array.copyto(kept)
        self._generators = random.getstate(), np.random.get_state()

    def _keep_all(self) -> None:
        self._keep_local()
        self._kept = None if self._by_step else self._whole()

    def restore(self) -> None:
        super().restore()
        if self._kept is not None:
            self._take(*copy.deepcopy(self._kept))
        for place, kept in self._statistics.items():
            kept.copyto(self._params[place].list_data()[0])
        for param in self._params:  # gradients of the void step, of which some may be reduced
            if param.grad_req != "null" and param._data is not None:
                param.zero_grad()
                for array in param.list_data():
                    array._fresh_grad = False
        random.setstate(self._generators[0])
        np.random.set_state(self._generators[1])

    # --- all of the state

    def _whole(self) -> tuple[list[Any], bytes | None, dict[str, Any]]:
        """Return copies of the whole state: (values of the parameters, state of the trainer, states of other objects).

        The value of a parameter is None as long as the parameter has no values. The state of the trainer is None if
        there is no trainer. The states of other objects are a dict from keyword to state.
        """
        values = [None if param._data is None else param.list_data()[0].asnumpy() for param in self._params]
        return values, self._trainer_state(), {name: value.state_dict() for name, value in self._handled.items()}

    def _trainer_state(self) -> bytes | None:
        if self.trainer is None:
            return None
        optimizer = self.trainer._optimizer
        settings = {key: value for key, value in optimizer.__dict__.items() if key not in OWN}
        return pickle.dumps((self.trainer._updaters[0].get_states(), settings))

    def _take(self, values: list[Any] | None, trainer_state: bytes | None, others: dict[str, Any]) -> None:
        """Replace the state by copies that ``_whole`` has returned. If ``values`` is None, keep the parameters.

        If ``trainer_state`` is None, keep the state of the trainer. This method waits for no other rank. Before the
        first change, the method checks the shapes and unpickles the trainer's state. So if that fails, nothing changes.
        """
        if values is not None:
            self._check_shapes(values)
        states, settings = (None, {}) if trainer_state is None else pickle.loads(trainer_state)
        for param, value in zip(self._params, values or ()):
            if value is None:
                continue
            if param._data is None:
                param.shape = value.shape
                param._finish_deferred_init()
            for array in param.list_data():
                array[:] = value
        if states is not None:
            self.trainer._updaters[0].set_states(states)
            _update_settings(self.trainer._optimizer, settings)
        for name, state in others.items():
            self._handled[name].load_state_dict(state)

    def _check_shapes(self, values: list[Any]) -> None:
        if len(values) != len(self._params):
            raise InvalidArgument(f"MXNetState: {len(self._params)} parameters here, {len(values)} on rank {self.root}")
        for param, value in zip(self._params, values):
            if value is not None and param._data is not None and param.shape != value.shape:
                raise InvalidArgument(
                    f"MXNetState: {param.name} has shape {param.shape} here and {value.shape} on rank {self.root}"
                )

    def _head(self) -> tuple[dict[str, Any], list[str]]:
        unready = [param.name for param in self._params if param._data is None]
        return {name: value.state_dict() for name, value in self._handled.items()}, unready

    def _take_root(self, head: tuple[dict[str, Any], list[str]], is_behind: bool) -> None:
        others, unready = head
        if unready:
            raise InvalidArgument(
                f"MXNetState: {', '.join(unready)} has no values yet; call initialize() and run one forward pass before "
                "the function that elastic.run decorates, or give its input size (in_units, in_channels)"
            )
        is_root = rank() == self.root
        large: tuple[Any, Any] = (None, None)
        if is_behind:
            large = broadcast_object(self._whole()[:2] if is_root else None, self.root)
        # From here on, this rank waits for no other rank. So if another rank fails, this rank gets the whole state of
        # the root or no part of it.
        if not is_root:
            self._take(*large, others)


def _update_settings(optimizer: Any, settings: dict[str, Any]) -> None:
    """Set the attributes of ``optimizer`` to ``settings``, a dict from attribute to value.

    If the old and the new learning rate scheduler have the same type, the optimizer keeps the old scheduler object,
    because the user may have a reference to this object. Only the attributes of the scheduler are set.
    """
    mine, theirs = optimizer.lr_scheduler, settings.get("lr_scheduler")
    optimizer.__dict__.update(settings)
    if mine is not None and type(mine) is type(theirs):
        mine.__dict__.update(theirs.__dict__)
        optimizer.lr_scheduler = mine
