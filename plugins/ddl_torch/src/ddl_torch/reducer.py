"""Replaces every ``.grad`` with the reduced gradient by the end of ``backward()``.

This module knows no optimizer. The path of one gradient: autograd calls ``Slot.on_gradient`` when the gradient is
complete. At the end of the backward pass, ``BackwardPasses`` calls ``Reducer.pass_ended``. That method calls
``Sender.send_all`` (sending.py), which sends every gradient, and zeros for the gradients that this rank has not
computed. Then results.py waits for the results and puts them into ``.grad``. If gradients are reduced while backward
runs (with ``job.overlaps``, and always on devices), ``Slot.on_gradient`` sends each gradient as it arrives. The host
never waits for a device, neither in a hook nor at the end of the pass: the current streams wait instead.

A gradient is reduced in place if nothing else uses its memory (memory.py), and into separate memory otherwise.

One reduction of all gradients is called a *round* (rounds.py). An interrupt (an exception that a signal handler raises)
leaves a round open, and the next call continues the round.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ddl_torch.memory import mark_written
from ddl_torch.parameters import HookedParameters
from ddl_torch.passes import INCOMPLETE, BackwardPasses, at_end_of_backward
from ddl_torch.results import place, wait
from ddl_torch.rounds import Round
from ddl_torch.sending import Sender
from ddl_torch.slots import Reduction, Slot
from ddl_torch.weight_sum import WeightSum
from ddlcore.errors import IncompleteGradients, MismatchError, NotInitialized

LOST = (
    "ddl was shut down while the gradients of this step were reduced, so they are lost; "
    "call optimizer.zero_grad() and compute them again"
)
UNFINISHED = (
    "the last backward() was interrupted after some of its gradients had been sent to the other ranks, which wait for "
    "the rest; call optimizer.synchronize() to complete or to end that step before the next backward()"
)
SPOILED = (
    "backward() was called while the gradients of an interrupted backward() were still being reduced. It has added to "
    "gradients that other ranks may be reading, so their results may be wrong: this rank has left the job. After an "
    "interrupt, call optimizer.synchronize() before the next backward()"
)


class UnfinishedBackward(AssertionError, RuntimeError):
    """Raised if a call is not allowed because a backward pass, or the reduction of its gradients, was interrupted.

    Other ranks wait for the gradients of that pass. ``synchronize`` must complete or end the reduction of these
    gradients first.
    """


class Reducer:
    """An object that reduces all gradients of one optimizer.

    Only the thread that trains may call it, but its hooks may run on autograd's threads. A reducer belongs to the job
    that was current when the reducer was created. After ``shutdown()`` and another ``init()``, the reducer's next step
    uses the new job. If the gradients were being reduced at ``shutdown()``, the next call raises NotInitialized
    instead.
    """

    def __init__(self, reduction: Reduction, passes_per_round: int, weight: Any = None) -> None:
        """Create a reducer without parameters. ``weight`` is that of an average with weights, see ``Weights``."""
        self.reduction = reduction
        self.passes_per_round = passes_per_round
        self.touched = False  # whether a backward pass has computed gradients since the last round
        self.reduced = False  # whether a round has succeeded since the last step or zero_grad
        self.failed: Exception | None = None  # why the last round failed; None: it did not
        self.round = Round()
        self.passes = BackwardPasses(self)
        self._passes_left = passes_per_round  # how many backward passes are left until one ends with a round
        self._local = 0  # how many ``no_sync`` contexts are open
        self._sender = Sender(reduction, self.round, weight)
        self.parameters = HookedParameters(self._sender, self.passes)
        self.slots = self.parameters.slots
        self._weight_sum = self._sender.weight_sum
        self.weights = None if self._weight_sum is None else self._weight_sum.weights
        self._sums_passes = self.weights is not None and passes_per_round > 1  # see ``_sum_passes``
        self._follow_binding()

    @property
    def open(self) -> bool:
        """Whether a round (one reduction of all gradients) has begun and has not ended."""
        self.passes.settle()
        return self.round.open

    def _follow_binding(self) -> None:
        """Copy the job, and other values that depend on the job, from the sender into attributes of the reducer."""
        binding = self._sender.binding
        self.job = binding.job
        self.active = binding.active
        self._sender.apart = not binding.repeatable or self._sums_passes
        self._overlaps = self.job.overlaps

    def give_up(self, slot: Slot) -> None:
        """Stop reducing the gradient of ``slot``, because its parameter was given to a newer DistributedOptimizer.

        Only one of the two optimizers may reduce this gradient. Raises UnfinishedBackward if gradients are still being
        reduced.
        """
        if self.open:
            raise UnfinishedBackward(UNFINISHED)
        self.parameters.remove(slot)

    # --- backward

    def _sum_passes(self) -> None:
        """Prepare for passes that only accumulate gradients: each of them may have another weight.

        So each pass must compute its gradients apart from those of earlier passes, for which each parameter gets one
        more hook. An average whose passes are all reduced needs no such hook.
        """
        if self.weights is None or self._sums_passes:
            return
        self._sums_passes = True
        if not self._sender.apart:
            self._sender.apart = True
            self.parameters.hook_passes()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context manager inside which backward passes accumulate gradients on this rank and reduce nothing.

        Raises UnfinishedBackward if gradients are still being reduced.
        """
        if self.open:
            raise UnfinishedBackward(UNFINISHED)
        self._sum_passes()
        self._local += 1
        try:
            yield
        finally:
            self._local -= 1

    def set_passes_per_round(self, passes: int) -> None:
        """Make every ``passes``-th backward pass end with a round, counted from the next pass on."""
        if passes > 1:
            self._sum_passes()
        self.passes_per_round = self._passes_left = passes

    def pass_begins(self) -> bool:
        """Prepare for a backward pass, and return whether gradients of this pass may be sent as they arrive.

        ``BackwardPasses`` calls this method when the first gradient of the pass is complete. Raises UnfinishedBackward
        if the gradients of an earlier pass are still being reduced.
        """
        if self.job.closed:
            self._rebind()
        if self.round.open or self.passes.unsent:
            self._refuse()
        self.passes.expect_end()
        if self.weights is not None:
            self.weights.begin_pass()
        self.failed = None
        sends = self.active and self._local == 0 and self._passes_left == 1
        if sends and self._sender.eager:
            self._sender.begin_round()
        self.touched = True
        return sends

    def _refuse(self) -> NoReturn:
        """Raise UnfinishedBackward, and prevent all ranks from using wrong gradients of the last backward pass.

        A new pass has begun before the gradients of the last pass were reduced, and autograd has already added to at
        least one of these gradients. This cannot be prevented: any hook that runs before autograd adds to ``.grad``
        would cost time in the usual case too.
        """
        passes, round = self.passes, self.round
        if round.open and not self._sender.has_unsent():
            # The other ranks have everything that they wait for, so they would go on with what they read.
            self._forget()
            self.job.shutdown(SPOILED)
            raise UnfinishedBackward(SPOILED)
        passes.refuse()  # so ``synchronize`` tells the other ranks, or they wait for the gradients of another pass
        raise UnfinishedBackward(UNFINISHED)

    def pass_ended(self) -> None:
        """Send the gradients of the backward pass that has ended, unless this pass only accumulates gradients.

        A pass only accumulates gradients within ``no_sync``, or if fewer than ``passes_per_round`` passes have run
        since the last reduction. ``BackwardPasses`` calls this method, and ``backward()`` raises the errors of this
        method. This method queues a callback that waits for the results.
        """
        if self.passes.sends:
            self._send()
            # One backward() may compute gradients for several optimizers, and each of them has a callback like this one
            # at the end of the pass. Which optimizers take part, and in which order, may differ between ranks. If this
            # callback waited for its results now, it would keep back the gradients of the other optimizers, for which
            # another rank may be waiting first: a deadlock. So the wait is a second callback, which the engine runs
            # after the callbacks that are queued already have sent everything.
            at_end_of_backward(self._complete)
            return
        if self.weights is not None and self.active:
            self.weights.keep_pass(self.passes.finished)
        if self._local == 0:
            self._passes_left -= 1
        self.passes.finished = []

    def pass_failed(self) -> None:
        """Close the round of a backward pass that has ended with an exception, if no gradient of the pass was sent.

        A round is one reduction of all gradients. ``BackwardPasses`` calls this method. When the round is closed, the
        program may skip the step or compute it again. If some gradients were sent, other ranks wait for the remaining
        gradients. Then the round stays open, and ``synchronize`` ends it with an error on all ranks.
        """
        round = self.round
        if round.open and not round.has_sent(self.slots):
            round.open = False
        round.entered = round.open

    # --- rounds

    def wants_round(self) -> bool:
        """Return whether gradients must still be reduced before the optimizer may step."""
        return self.open or self.touched or not self.reduced

    def synchronize(self) -> None:
        """Reduce the gradients that have not been reduced. Do nothing if every ``.grad`` is reduced already.

        This method waits until all operations have ended, and then raises the first error of any gradient, if there was
        one. Later calls raise the same error again, until the gradients are cleared or computed again.
        """
        self.passes.settle()
        if self.failed is not None:
            raise self.failed.with_traceback(None)
        if self.passes.seen:  # an interrupt hit the first hook of a pass, so ``begin`` did not run to its end
            self.passes.incomplete = True
        if self.passes.incomplete and not self.open:
            raise IncompleteGradients(INCOMPLETE)
        if self.wants_round():
            self.reduce()

    def reduce(self) -> None:
        """Reduce all gradients, or continue a reduction that was interrupted.

        Every member of the process set must take part.
        """
        self._send()
        self._complete()

    def _send(self) -> None:
        if self.job.closed:
            self._rebind()
        if not self.active:
            return
        if not self.round.open:
            self._sender.begin_round()
        # An interrupt may leave a settled round half closed: a part of its records is deleted. ``send_all`` would then
        # take gradients that were reduced into private memory for gradients that it has not sent yet.
        if self.round.settled:
            return
        self._sender.send_all(self.passes.finished, self.passes.incomplete)

    def _complete(self) -> None:
        """Wait for the results of all gradients, put them into ``.grad``, and close the round (the reduction)."""
        wait(self._sender.unusual)
        if self._weight_sum is None:
            place(self.round, self.slots, self._sender.apart)
        else:
            self._place_averages(self._weight_sum)
        self.round.settled = True
        self._end_round()

    def _place_averages(self, weight_sum: WeightSum) -> None:
        """Put the results of an average with weights into ``.grad``, and divide them: they are sums over the ranks."""
        weights, scale = weight_sum.weights, weight_sum.scale(self.active)
        place(self.round, self.slots, self._sender.apart, 1.0 if scale is None else scale)
        if scale is None:
            weights.restore_earlier()
        elif scale != 1.0:
            reduced = [slot for slot in self.slots if slot.round == self.round.number]
            grads = [slot.param.grad for slot in reduced if slot not in self.round.divided]
            weights.divide([grad for grad in grads if grad is not None], scale)
        weights.fill_originals()

    def _end_round(self) -> None:
        round, passes, weights = self.round, self.passes, self.weights
        # A pass may be incomplete while ``round.ended`` is false: it was interrupted after it had sent all gradients.
        # Then nothing is missing, and this rank must succeed, because the other ranks go on with these gradients.
        failure = round.failure
        if round.ended and (
            failure is None or isinstance(failure, MismatchError)
        ):  # this rank made the others raise it
            failure = IncompleteGradients(INCOMPLETE)
        if round.written:
            mark_written(round.written)
            round.written.clear()
        if self._sender.apart:
            for slot in self.slots:
                slot.holds_result = slot.round == round.number
                slot.holds_sum = False
        round.clear(self.parameters.groups)
        passes.round_ended()
        exponent = 0
        if self._weight_sum is not None and weights is not None:
            exponent = weights.exponent
            weights.drop_lists()
            if failure is None:
                exponent = self._weight_sum.next_exponent(self.active)
        if self.job.overlaps is not self._overlaps:  # a search has changed the setting
            self._overlaps = self.job.overlaps
            self.parameters.choose_ways()
        # Python runs signal handlers, which may raise, at calls and at backward jumps only. An interrupt above this
        # comment leaves the round open, and the next ``synchronize`` runs this method again, so everything above may
        # run twice. The lines below close the round by plain assignments without a call. Hence no interrupt can come
        # between them and leave, for example, a round that is closed but not counted. Keep calls out of these lines.
        passes.current = None
        if weights is not None:
            weights.exponent, weights.turn = exponent, weights.turn + 1
            weights.accumulated, weights.passed, weights.current, weights.computed = False, 0.0, 0.0, False
        round.failure = None
        round.entered = round.open = round.ended = round.settled = self.touched = False
        passes.incomplete = passes.incomplete and failure is not None
        self._passes_left = self.passes_per_round
        round.of_step += 1
        self.reduced = failure is None
        self.failed = failure
        if failure is not None:
            raise failure

    def next_step(self) -> None:
        """Begin the next step, because the optimizer has stepped.

        Gradients computed from now on belong to the next step.
        """
        self.begin_names_anew()
        self.reduced = self.touched = False
        self._passes_left = self.passes_per_round

    def begin_names_anew(self) -> None:
        """Let the next round use the same names of operations as the first round of a step.

        A round is one reduction of all gradients. All ranks must call this method before the same round.
        """
        self.round.of_step = 0

    def discard(self) -> None:
        """Forget the gradients, whether reduced or not, because the user has cleared them (``zero_grad``)."""
        if self.open and self.job.closed:
            self._forget()
        self.reduced = self.touched = False
        self.failed = None
        if not self.open:
            self.passes.forget()
            if self.weights is not None:
                self.weights.forget()
        self._passes_left = self.passes_per_round
        if self._sender.apart:
            for slot in self.slots:
                slot.drop_gradients()

    # --- jobs

    def _rebind(self) -> None:
        """Switch to the job that is current now.

        Raises NotInitialized if gradients were still being reduced when the old job ended.
        """
        if self.open:
            self._forget()
            raise NotInitialized(LOST)
        self._sender.bind_anew()
        if self._weight_sum is not None:
            self._weight_sum.weights.begin_anew(self.slots, self._sender.binding.members)
            self._weight_sum.forget()
        self._follow_binding()
        self.parameters.bind_anew()
        self.round.of_step = self.round.turn = 0

    def _forget(self) -> None:
        """Drop the open round (the current reduction): its job has ended, so its gradients will not be reduced."""
        self.round.forget(self.parameters.groups)
        self.passes.forget()
