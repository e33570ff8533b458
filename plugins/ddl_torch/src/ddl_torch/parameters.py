"""Keeps the slots, the groups and autograd's hooks of the parameters of one optimizer. Sends nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddl_torch.autograd import ADAPTER
from ddl_torch.passes import BackwardPasses
from ddl_torch.sending import Sender
from ddl_torch.sharded import refuse_sharded
from ddl_torch.slots import GradientGroup, Slot
from ddlcore.types import CPU


class HookedParameters:
    """The parameters whose gradients ``sender`` sends. Their hooks tell ``passes`` of each gradient."""

    def __init__(self, sender: Sender, passes: BackwardPasses) -> None:
        self.slots, self.groups = sender.slots, sender.groups
        self._sender = sender
        self._passes = passes

    def add(self, named: Sequence[tuple[str, torch.Tensor]], sparse: bool = False) -> list[Slot]:
        """From now on, also reduce the gradients of the parameters in ``named``. Return one slot for each parameter.

        ``named`` are (name, parameter) pairs. ``sparse`` is true if the optimizer of these parameters accepts only
        sparse gradients. A slot is the record of one parameter's gradient. Raises InvalidArgument, before anything changes, if
        a parameter is sharded.
        """
        refuse_sharded("gradients cannot be reduced", named)
        added = [Slot(param, name, self._passes) for name, param in named]
        for slot in added:
            slot.sparse_dims = int(sparse)
            slot.turn = self._sender.round.turn
            self._prepare(slot)
        self._name_devices(added)
        for slot in added:
            self._watch(slot)
        self.slots += added
        return added

    def add_group(self, slots: Sequence[Slot]) -> None:
        """Make the gradients of ``slots`` a group: from now on, they are sent together."""
        group = GradientGroup(slots)
        for slot in slots:
            slot.group = group
            self._prepare(slot)
        self.groups.append(group)
        self._name_groups()

    def remove(self, slot: Slot) -> None:
        """Stop reducing the gradient of ``slot``. No gradient may be under way."""
        if slot.hook is not None:
            _unhook(slot)
        self.slots[:] = [one for one in self.slots if one is not slot]
        if slot.group is not None:
            rest = [one for one in slot.group.slots if one is not slot]
            self.groups.remove(slot.group)
            if rest:
                self.add_group(rest)

    def bind_anew(self) -> None:
        """Reduce the gradients in the job to which the sender has changed.

        This method chooses their names in that job, and watches the parameters if this rank takes part there.
        """
        for slot in self.slots:
            slot.forget_look()
            slot.turn = 0
            self._prepare(slot)
        self._name_groups()
        if self._sender.binding.active:
            self._name_devices(self.slots)
            for slot in self.slots:
                self._watch(slot)
        else:
            self.release()

    def choose_ways(self) -> None:
        """Choose anew which gradients are sent while backward runs, because the job's setting has changed."""
        for slot in self.slots:
            slot.submit = self._sender.way_out(slot, slot.param)

    def _prepare(self, slot: Slot) -> None:
        """Choose the name under which the gradients of ``slot`` are reduced, and the function that sends them."""
        slot.name = self._sender.binding.prefix + slot.label
        slot.submit = self._sender.way_out(slot, slot.param)

    def _name_groups(self) -> None:
        for group in self.groups:
            group.name = "group." + group.slots[0].name

    def _name_devices(self, slots: Sequence[Slot]) -> None:
        """Register the devices of the parameters of ``slots`` with the job.

        The job numbers the devices in the order of their registration, so this method registers them in the order of
        the parameters. The hooks cannot register the devices: the hooks of each device run on a separate thread, so the
        order of these hooks is not fixed.
        """
        binding = self._sender.binding
        for where in dict.fromkeys(ADAPTER.streams.place(slot.param) for slot in slots):
            if binding.active and where is not None and where is not CPU:
                binding.job.device_label(where)

    def _watch(self, slot: Slot) -> None:
        param, binding = slot.param, self._sender.binding
        if not binding.active or slot.hook is not None or not param.is_leaf:
            return
        if not (param.is_floating_point() or param.is_complex()):
            return  # never has a gradient
        for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
            other = getattr(hook, "__self__", None)
            if not isinstance(other, Slot) or not isinstance(other.passes, BackwardPasses):
                continue
            owner = other.passes.owner
            # Where ranks are threads of one process, the other reducer may belong to another rank. Then it keeps its
            # hooks.
            if owner.job is binding.job or owner.job.closed:
                owner.give_up(other)
        required = param.requires_grad
        if not required:  # torch refuses hooks on a frozen parameter, but the user may unfreeze it later
            param.requires_grad_(True)
        slot.first_hook = param.register_post_accumulate_grad_hook(self._passes.seen.append)
        slot.hook = param.register_post_accumulate_grad_hook(slot.on_gradient)
        if self._sender.apart:
            slot.tensor_hook = param.register_hook(slot.before_gradient)
        if not required:
            param.requires_grad_(False)

    def hook_passes(self) -> None:
        """Add the hooks by which each pass computes its gradients apart from earlier results and sums."""
        for slot in self.slots:
            slot.holds_result = slot.round == self._sender.round.number
            if slot.hook is not None and slot.tensor_hook is None:
                required = slot.param.requires_grad
                slot.param.requires_grad_(True)
                slot.tensor_hook = slot.param.register_hook(slot.before_gradient)
                slot.param.requires_grad_(required)

    def release(self) -> None:
        """Remove all hooks from the parameters.

        Otherwise, parameters, hooks and slots (the records of gradients) would keep each other alive.
        """
        for slot in self.slots:
            if slot.hook is not None:
                _unhook(slot)


def _unhook(slot: Slot) -> None:
    for hook in (slot.first_hook, slot.hook, slot.tensor_hook):
        if hook is not None:
            hook.remove()
    slot.first_hook = slot.hook = slot.tensor_hook = None
