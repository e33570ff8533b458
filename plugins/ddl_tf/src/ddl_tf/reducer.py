"""Reduces a list of gradients over the ranks, eagerly and in graphs. This module knows no optimizer and no tape.

In a graph, at most 16 operations per device send gradients. The gradients of the late layers are sent first, and none
of these operations blocks. One more operation, which uses none of TensorFlow's threads, waits for all results.
Therefore a thread pool of any size is large enough, and no execution order of the operations can make two ranks wait
for each other. See docs/design/tensorflow.md.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import tensorflow as tf

from ddl_tf import present
from ddl_tf.adapter import brought
from ddl_tf.autograd import ADAPTER, OPERATIONS
from ddl_tf.averages import average_of_slices
from ddl_tf.buckets import GradientLook, cut, pack
from ddl_tf.crossing import arrive, depart, join, lift, look, split
from ddl_tf.devices import HOST, is_host
from ddl_tf.exchange import Exchange, Pools, give_up
from ddl_tf.gradients import checked, dense_and_sparse, describe, key_of, signature
from ddl_tf.graph import keep, refuse_xla
from ddl_tf.placing import apart, places
from ddl_tf.positions import position
from ddl_tf.reduction import Reduction
from ddl_tf.replicas import Checks
from ddl_tf.weights import share_of, weighed
from ddlcore.api import current_job, gradient_compression, membership
from ddlcore.api.world import elastic_member
from ddlcore.contracts import JobService
from ddlcore.types import CPU, Average

EXCHANGES_LIMIT = 64  # exchanges that one reducer keeps
F = TypeVar("F", bound=Callable[..., Any])


def verbatim(function: F) -> F:
    """Exclude ``function`` from AutoGraph, so that a ``tf.function`` traces it as it is written."""
    return cast("F", tf.autograph.experimental.do_not_convert(function))


# The names given to the optimizers of each job. No two are equal, and every rank has the same.
_names: weakref.WeakKeyDictionary[JobService, set[str]] = weakref.WeakKeyDictionary()
_names_lock = threading.Lock()


def _unique(job: JobService, name: str) -> str:
    """Return ``name``, followed by a number if ``job`` already has that name.

    All ranks must call this function in the same order.
    """
    with _names_lock:
        taken = _names.setdefault(job, set())
        found = next(one for n in itertools.count() if (one := f"{name}_{n}" if n else name) not in taken)
        taken.add(found)
    return found


class Reducer:
    """An object that reduces the gradients of one optimizer or tape.

    ``name`` identifies the reducer in messages between ranks, and is the same on every rank. If ``unique`` is true and
    other reducers of the job have asked for the same name, a number is added to the name. A reducer belongs to the job
    that is current when the reducer is made. After ``shutdown()`` and another ``init()``, the reducer and the graphs
    that contain it change to the new job.
    """

    def __init__(self, reduction: Reduction, name: str, unique: bool = False, weight: Any = None) -> None:
        self.reduction = reduction
        self.weight = weight  # of this rank's gradients in an average, see ``share_of``; None: it has none
        self._weighing = False  # whether the reduction of the weights has begun and not ended
        self.name = self._asked = name
        self._unique = unique
        self._exchanges: OrderedDict[Any, Exchange] = OrderedDict()
        self._going: Exchange | None = None  # the latest eager exchange
        self._sent = False  # whether all tensors of that exchange have been sent
        self.launches = 0  # number of eager reductions so far
        self._bind()

    def _bind(self) -> None:
        self.job: JobService = current_job()
        if self._unique:
            self.name = _unique(self.job, self._asked)
        self._checks = Checks(self.name)
        process_set = self.reduction.process_set
        ranks, self.active = membership(self.job, process_set)
        # A graph that is traced in an elastic world of one rank may run in a world of several.
        self.active = self.active or (elastic_member() is not None and self.job.rank in ranks)
        self.ranks: tuple[int, ...] = process_set.resolve(self.job)[1] if self.job.rank in ranks else ()
        self._exchanges.clear()
        self._going = None

    @property
    def unfinished(self) -> bool:
        """Whether an eager reduction has begun and has not finished."""
        return self._going is not None and self._going.begun

    @verbatim
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients, in the order of ``gradients``; None stays None.

        Every member of the process set must call this method with gradients of the same types and shapes. If the
        gradients differ, or a gradient is None on some members only, all members raise MismatchError, which shows the
        gradients of each member. For tf.IndexedSlices, the result is the slices of all members, joined in rank order.
        For an average, the slices are divided by the number of members. Integer slices of the same index are added
        before, so each index occurs once. With ``sparse_as_dense`` the result is dense. Ranks outside the process set,
        and a job of one rank, get their own gradients back.

        In eager mode, a signal handler's exception may interrupt a call. The next call then finishes the interrupted
        reduction and returns its results, because the other ranks have got the same results. That call ignores its own
        arguments. If the next call cannot finish that reduction, it ends the job.
        """
        if self.job.closed:
            self._bind()
        given = checked(gradients, variables, self.reduction)
        if not self.active:
            return given
        if not tf.executing_eagerly():
            refuse_xla("the reduction of gradients")
        if self.weight is not None and not self.unfinished:  # otherwise the gradients are not used
            given = self._weighed(given)
        compressor = gradient_compression(self.reduction.compression)[1]
        contexts: dict[int, Any] = {}
        if compressor is not None:
            for i, gradient in enumerate(given):
                if gradient is not None and not isinstance(gradient, tf.IndexedSlices):
                    given[i], contexts[i] = compressor.compress(gradient)
        results = self._eagerly(given, variables) if tf.executing_eagerly() else self._in_graph(given, variables)
        for i, context in contexts.items():
            assert compressor is not None
            results[i] = compressor.decompress(results[i], context)
        return results

    def _weighed(self, given: Sequence[Any]) -> list[Any]:
        """Return the gradients, each multiplied by this rank's share of the average. All members must call it."""
        eager = tf.executing_eagerly()
        if self._weighing and eager:  # an interrupt has ended the last call, and nobody knows whether peers went on
            self._weighing = False
            give_up(self.job)
        name = f"weight.{self.name}"
        self._weighing = eager
        share = share_of(
            self.weight, self.job, self.reduction.process_set, name if eager else f"{name}.call{position(name)}"
        )
        self._weighing = False
        return [None if gradient is None else weighed(gradient, share) for gradient in given]

    # --- eager

    def _eagerly(self, given: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        dense, sparse = dense_and_sparse(given)
        key = ("eager", tuple(signature(gradient) for gradient in given))
        exchange = self._exchanges.get(key)
        if exchange is None:
            part_of = describe(given, variables)
            exchange = self._keep(key, self._exchange(self._named(), max(len(dense), 1), part_of, None))
        exchange.check = self._check(variables)  # the key does not identify the variables
        going = self._going
        if going is not None and going.begun and (going is not exchange or not self._sent):
            give_up(self.job)
        # A signal's handler may have interrupted the previous call. If that call had sent all of its tensors, the peers
        # complete that step, so this call must take its results and send nothing: otherwise this rank would miss the
        # update of that step, and differ from its peers. If that call had sent only some of its tensors, or if the
        # gradients have other shapes or types now, the job has ended above.
        if going is None or not going.begun:
            self._going, self._sent = exchange, False
            self.launches += 1
            stage_on_host = is_host(self.reduction.device_dense)
            leaving = [self._brought(given[i], stage_on_host) for i in reversed(dense)] or [_nothing()]
            stage_on_host = is_host(self.reduction.device_sparse)
            parts = [self._brought(part, stage_on_host) for i in sparse for part in (given[i].values, given[i].indices)]
            exchange.send(0, *leaving)
            exchange.gather(max(len(dense), 1), *parts)
            self._sent = True
        arrived = exchange.take()
        results: list[Any] = [None] * len(given)
        for i, tensor in zip(reversed(dense), arrived[: len(dense)], strict=True):
            results[i] = tensor
        self._place_slices(results, given, sparse, arrived[max(len(dense), 1) :])
        return results

    def _brought(self, tensor: Any, stage_on_host: bool) -> Any:
        return brought(ADAPTER, self.job, [tensor], stage_on_host)[0]

    def _keep(self, key: Any, exchange: Exchange) -> Exchange:
        self._exchanges[key] = exchange
        if len(self._exchanges) > EXCHANGES_LIMIT:
            self._exchanges.popitem(last=False)
        return exchange

    # --- graphs

    def _in_graph(self, given: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        dense, sparse = dense_and_sparse(given)
        gpus = self._gpus(given, variables)
        looks = [look(gradient) for gradient in given]
        runs = [part for run in self._runs(looks, dense, variables) for part in apart(run, gpus)]
        loads = [(gpu, pack(looks, run)) for gpu, run in runs] or [("", [])]
        buckets = [(gpu, bucket) for gpu, load in loads for bucket in load]
        tensors = []
        for gpu, bucket in buckets:
            with _on(gpu):
                tensors.append(join([given[i] for i in bucket.members], bucket))
        tensors = tensors or [_nothing()]
        part_of = describe(given, variables, gpus)
        name = self._named(position(self.name))
        pools = Pools()
        keep(pools)
        exchange = self._exchange(name, len(tensors), part_of, pools)
        exchange.check = self._check(variables)
        tokens, lifted, first = [], [], 0
        for gpu, load in loads:
            leaving = tensors[first : first + (len(load) or 1)]
            if gpu:
                lifted.append(lift(exchange.lift, first, leaving, gpu))
            else:
                tokens.append(depart(exchange.send, first, leaving))
            first += len(leaving)
        slices = [part for i in sparse for part in (given[i].values, given[i].indices)]
        if slices:
            tokens.append(depart(exchange.gather, first, slices))
        shapes = [*(tensor.shape for tensor in tensors), *(tf.TensorShape([None, *s.shape[1:]]) for s in slices)]
        dtypes = [tensor.dtype for tensor in [*tensors, *slices]]
        where = [gpu for gpu, _ in buckets]
        where += [""] * (len(dtypes) - len(where))
        arrived = arrive(exchange.take, tokens, lifted, dtypes, shapes, where)
        results: list[Any] = [None] * len(given)
        for (gpu, bucket), whole in zip(buckets, arrived, strict=False):
            with _on(gpu):
                parts = split(whole, bucket, [given[i] for i in bucket.members])
            for i, one in zip(bucket.members, parts, strict=True):
                results[i] = one
        self._place_slices(results, given, sparse, arrived[len(tensors) :])
        return results

    def _gpus(self, given: Sequence[Any], variables: Sequence[Any]) -> list[str]:
        """Return, for each gradient, the GPU on which it stays, or '' if it is staged on the host."""
        if is_host(self.reduction.device_dense):
            return [""] * len(given)
        return places(given, variables, ADAPTER.gpu.types, self._serves)

    def _serves(self, gpu: str) -> bool:
        """Return whether the job's transports reach tensors on ``gpu``, which is TensorFlow's name of a device."""
        with tf.init_scope(), tf.device(gpu):
            place = ADAPTER.gpu.place(tf.raw_ops.Empty(shape=[1], dtype=tf.float32))
        return place is not CPU and ADAPTER.serves(self.job, place)

    def _runs(self, looks: Sequence[GradientLook], dense: Sequence[int], variables: Sequence[Any]) -> list[list[int]]:
        """Return lists of the gradients that are sent together, late layers first.

        The lists are the user's groups. Without groups, all gradients are one list, or ``cut`` divides them by size if
        the job reduces gradients while the step still computes. A gradient is given by its index. ``dense`` are the
        indices of the dense gradients.
        """
        late_first = list(reversed(dense))
        groups = self.reduction.groups
        if isinstance(groups, int) and groups > 0:
            each = -(-len(late_first) // groups) or 1
            return [late_first[at : at + each] for at in range(0, len(late_first), each)]
        if isinstance(groups, (list, tuple)):
            place = {key_of(variables[i]): i for i in late_first}
            runs = [[place.pop(key_of(v)) for v in group if key_of(v) in place] for group in groups]
            return [run for run in runs if run] + [[i] for i in place.values()]
        if not late_first:
            return []
        if not self.job.overlaps:
            return [late_first]
        settings = self.job.settings
        return cut(looks, late_first, settings.whole("first_bucket_bytes"), settings.whole("fusion_bytes"))

    # --- both

    def _exchange(self, name: str, count: int, part_of: str, pools: Pools | None) -> Exchange:
        factor = self.reduction.gradient_predivide_factor
        options = {
            "op": self.reduction.op,
            "prescale_factor": 1.0 / factor,
            "postscale_factor": factor,
            "compression": gradient_compression(self.reduction.compression)[0],
            "process_set": self.reduction.process_set,
        }
        return Exchange(OPERATIONS, self.job, name, count, options, part_of, pools)

    def _check(self, variables: Sequence[Any]) -> Callable[[JobService], None] | None:
        return self._checks.of(variables, self.reduction.process_set.process_set_id or 0)

    def _named(self, place: str = "") -> str:
        return f"gradient.{self.name}" + (f".call{place}" if place else "")

    def _place_slices(self, results: list[Any], given: Sequence[Any], sparse: Sequence[int], arrived: Any) -> None:
        for at, i in enumerate(sparse):
            values, indices = arrived[2 * at : 2 * at + 2]
            if self.reduction.op is Average:
                values, indices = average_of_slices(
                    values, indices, present.count_of_members(self.reduction.process_set, values)
                )
            results[i] = tf.IndexedSlices(values, indices, given[i].dense_shape)


def _on(gpu: str) -> AbstractContextManager[object]:
    """Return a context manager that places operations on ``gpu``, or where TensorFlow chooses if ``gpu`` is ''."""
    return tf.device(gpu) if gpu else nullcontext()


def _nothing() -> Any:
    """Return the tensor that is sent if all gradients of this rank are None.

    A rank that has gradients then detects the difference.
    """
    with tf.device(HOST):
        return tf.zeros((0,), tf.float32)
