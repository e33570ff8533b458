"""The elastic state of a PyTorch training: modules, optimizers, other objects with a state, and plain values."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ddl_torch.broadcast import copy_of_root
from ddl_torch.steps import hook_steps, includes, inner_optimizers, is_optimizer, restores_itself, state_of
from ddlcore.api import rank
from ddlcore.api.elastic import StepState
from ddlcore.errors import InvalidArgument

LARGE = (torch.nn.Module, torch.optim.Optimizer)  # their tensors are sent only if a rank needs them


class TorchState(StepState):
    """The elastic state of a PyTorch training: modules, optimizers, samplers, and plain values.

    ``model``, ``optimizer`` and every other keyword argument become attributes. Objects with ``state_dict`` and
    ``load_state_dict`` (modules, optimizers, learning rate schedulers, a GradScaler, an ``ElasticSampler``) keep their
    identity, and their state is copied to all ranks. All other values are kept as in ``ObjectState``.

    With ``rollback="step"``, training continues, after a failure, from the last step that any surviving rank has
    applied. ``steps`` counts the calls of ``step()`` of the optimizers. ``commit()`` keeps the plain values, never a
    copy of the model. The continuation is exact for training loops with one ``optimizer.step()`` for each ``commit()``.

    With ``rollback="commit"``, ``commit()`` copies models and optimizers, and after a failure all ranks go back to the
    newest copy. ``steps`` counts the calls of ``commit()``.

    Raises ValueError for another value of ``rollback``, and for a keyword that is the name of an attribute or method of
    the state itself. Also raises ValueError for an L-BFGS optimizer with ``rollback="step"``, because L-BFGS changes
    parameters several times within a step.
    """

    _handles_objects = True

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        rollback: str = "step",
        **kwargs: Any,
    ) -> None:
        by_step = self._is_by_step(rollback, "TorchState")
        given = {"model": model, "optimizer": optimizer}
        every = {**kwargs, **{name: value for name, value in given.items() if value is not None}}
        for value in every.values():
            if is_optimizer(value):
                hook_steps(value)
        super().__init__(**every)
        inner = {id(one) for optimizer in self._optimizers() for one in inner_optimizers(optimizer)}
        for optimizer in self._optimizers():
            if by_step and includes(optimizer, torch.optim.LBFGS):
                raise InvalidArgument(
                    "TorchState: L-BFGS changes parameters several times within a step, so a rank that is lost may leave a "
                    'part of a step; use rollback="commit"'
                )
            if id(optimizer) not in inner:  # the outer optimizer's step is the step
                optimizer.register_step_post_hook(self._stepped)
        self._by_step = by_step and bool(self._optimizers())
        self._keep_all()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handled", ()):
            self._handled[name] = value
            if is_optimizer(value) and self._by_step:
                hook_steps(value)
                value.register_step_post_hook(self._stepped)
        object.__setattr__(self, name, value)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [one for one in self._handled.values() if isinstance(one, torch.optim.Optimizer)]

    def _modules(self) -> list[torch.nn.Module]:
        return [one for one in self._handled.values() if isinstance(one, torch.nn.Module)]

    # --- steps

    def _stepped(self, _optimizer: object, _args: object, _kwargs: object) -> None:
        """Count a step that an optimizer has applied, and copy the values that a failed next step might change.

        torch calls this method at the end of ``step()`` of an optimizer, with the optimizer and the arguments of
        ``step()``.
        """
        if self._by_step:
            self.steps += 1
            self._keep_local()

    def _keep_local(self) -> None:
        """Copy the values that a forward pass changes.

        These values are the buffers of modules (such as the running statistics of batch norm) and the state of torch's
        random generator.
        """
        if self._buffers:
            torch._foreach_copy_(self._buffer_values, self._buffers)
        self._generator = torch.get_rng_state()

    def _keep_all(self) -> None:
        self._buffers = [buffer.detach() for module in self._modules() for buffer in module.buffers()]
        self._buffer_values = [buffer.clone() for buffer in self._buffers]
        self._keep_local()
        self._kept = {} if self._by_step else self._states()

    def _states(self) -> dict[str, Any]:
        return {name: copy.deepcopy(state_of(value)) for name, value in self._handled.items()}

    def restore(self) -> None:
        super().restore()
        if not self._by_step:
            for name, state in self._kept.items():
                self._handled[name].load_state_dict(copy.deepcopy(state))
        for optimizer in self._optimizers():
            optimizer.zero_grad()  # gradients of the void step, of which some may be reduced
        for value in self._handled.values():
            if isinstance(value, torch.amp.GradScaler):
                _forget_step(value)
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._buffer_values)
        torch.set_rng_state(self._generator)

    def _head(self) -> dict[str, Any]:
        return {name: value.state_dict() for name, value in self._handled.items() if not isinstance(value, LARGE)}

    def _take_root(self, head: dict[str, Any], is_behind: bool) -> None:
        taken: dict[str, Any] = {}
        if is_behind:
            tensors = {name: state_of(value) for name, value in self._handled.items() if isinstance(value, LARGE)}
            taken = copy_of_root(tensors, self.root)
        # From here on nothing waits for another rank, so a failure leaves all of root's state here or nothing of it.
        for name, state in {**taken, **head}.items():
            if rank() != self.root or restores_itself(self._handled[name]):
                self._handled[name].load_state_dict(state)


def _forget_step(scaler: torch.amp.GradScaler) -> None:
    """Make ``scaler`` unscale gradients again, although it has already unscaled those of a step that has failed.

    A scaler remembers until ``update()`` which optimizers' gradients it has unscaled. ``update`` with a new scale makes
    the scaler forget these optimizers, and does not change its count of steps without overflow. So this function passes
    the present scale as the new scale. If the scaler has not scaled anything yet, it has no scale and nothing to
    forget, and this function does nothing.
    """
    if scaler.is_enabled() and scaler._scale is not None:
        scaler.update(scaler.get_scale())
