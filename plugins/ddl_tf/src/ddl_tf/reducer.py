"""Reduces a list of gradients over the ranks, eagerly and in graphs. This module knows no optimizer and no tape.

In a graph, at most 16 operations per device send gradients. The gradients of the late layers are sent first, and none
of these operations blocks. One more operation, which uses none of TensorFlow's threads, waits for all results.
Therefore a thread pool of any size is large enough, and no execution order of the operations can make two ranks wait
for each other. See docs/design/tensorflow.md.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import tensorflow as tf

from ddl_tf import present
from ddl_tf.adapter import brought
from ddl_tf.autograd import ADAPTER, OPERATIONS
from ddl_tf.averages import average_of_slices
from ddl_tf.buckets import Look, cut, pack
from ddl_tf.crossing import arrive, depart, join, lift, look, split
from ddl_tf.devices import HOST, check_device, is_host
from ddl_tf.exchange import Exchange, Pools, give_up
from ddl_tf.graph import keep, refuse_xla
from ddl_tf.placing import apart, places
from ddl_tf.replicas import Checks
from ddl_tf.weights import check_given, share_of, weighed
from ddlcore.api import (
    ProcessSet,
    check_predivide,
    check_weighted,
    current_job,
    global_process_set,
    gradient_compression,
    membership,
    resolve_op,
)
from ddlcore.api.world import elastic_member
from ddlcore.contracts import JobService
from ddlcore.types import CPU, Average, DType, ReduceOp, Sum

EXCHANGES_LIMIT = 64  # exchanges that one reducer keeps
Groups = int | Sequence[Sequence[Any]] | None
F = TypeVar("F", bound=Callable[..., Any])


def verbatim(function: F) -> F:
    """Exclude ``function`` from AutoGraph, so that a ``tf.function`` traces it as it is written."""
    return cast("F", tf.autograph.experimental.do_not_convert(function))


@dataclass(frozen=True)
class Reduction:
    """The options with which every gradient is reduced. Raises ValueError for invalid options.

    * ``gradient_predivide_factor`` f: gradients are divided by f before the sum and by size / f after it.
    * ``compression``: a class of ``Compression``, the name of a compressor, or a class with the methods ``compress``
      and ``decompress``. None: the setting ``compression`` decides.
    * ``groups``: the number of groups of gradients that are sent together, or a list of lists of variables.
    * ``device_dense``, ``device_sparse``: where dense and sparse gradients are reduced. '' means the device where the
      gradients are; the name of the host, such as '/cpu:0', means the host.
    """

    op: ReduceOp = Average
    gradient_predivide_factor: float = 1.0
    compression: Any = None
    sparse_as_dense: bool = False
    device_dense: str = ""
    device_sparse: str = ""
    groups: Groups = None
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        op, factor = resolve_op(self.op), self.gradient_predivide_factor
        object.__setattr__(self, "op", op)
        check_predivide(factor, op)
        gradient_compression(self.compression)
        check_device(self.device_dense, "device_dense")
        check_device(self.device_sparse, "device_sparse")
        if isinstance(self.groups, int) and not isinstance(self.groups, bool):
            if self.groups < 0:
                raise ValueError(f"groups must be 0 or more, not {self.groups}")
        elif self.groups is not None and not isinstance(self.groups, (list, tuple)):
            raise ValueError("groups should be a positive integer or a list of lists of tf.Variable")


def summing(reduction: Reduction, weight: Any) -> Reduction:
    """Return the reduction for gradients that have a ``weight``: a sum of those that each rank has multiplied.

    Raises InvalidArgument if it is no plain average, or if ``weight`` cannot be a weight. Without a weight (None),
    returns ``reduction``.
    """
    if weight is None:
        return reduction
    factor = reduction.gradient_predivide_factor
    check_weighted(reduction.op, 1.0 / factor, factor)
    check_given(weight, reduction.process_set)
    return replace(reduction, op=Sum)


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
        given = [self._checked(i, g, variables) for i, g in enumerate(_all_of(gradients, variables))]
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
            self.weight, self.job, self.reduction.process_set, name if eager else f"{name}.call{_place(name)}"
        )
        self._weighing = False
        return [None if gradient is None else weighed(gradient, share) for gradient in given]

    def _checked(self, index: int, gradient: Any, variables: Sequence[Any]) -> Any:
        """Return ``gradient`` in the form in which it is reduced: a dense tensor, slices, or None.

        ``index`` is the position of the gradient's variable in ``variables``. Error messages contain it.
        """
        if gradient is None or (isinstance(gradient, tf.IndexedSlices) and not self.reduction.sparse_as_dense):
            if gradient is not None and self.reduction.op not in (Average, Sum):
                raise NotImplementedError(
                    f"the gradient of {_called(index, variables[index])} is sparse, and op={self.reduction.op.name} "
                    "needs dense ones; pass sparse_as_dense=True"
                )
            return gradient
        called = f"the gradient of {_called(index, variables[index])}"
        try:
            dense = tf.convert_to_tensor(gradient)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{called} is no tensor: {error}") from None
        try:
            DType.of(dense.dtype.name)
        except ValueError as error:
            raise ValueError(f"{called}: {error}") from None
        return dense

    # --- eager

    def _eagerly(self, given: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        dense, sparse = _kinds(given)
        key = ("eager", tuple(_sign(gradient) for gradient in given))
        exchange = self._exchanges.get(key)
        if exchange is None:
            part_of = self._describe(given, variables)
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
        dense, sparse = _kinds(given)
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
        part_of = self._describe(given, variables, gpus)
        name = self._named(_place(self.name))
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

    def _runs(self, looks: Sequence[Look], dense: Sequence[int], variables: Sequence[Any]) -> list[list[int]]:
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
            place = {_key(variables[i]): i for i in late_first}
            runs = [[place.pop(_key(v)) for v in group if _key(v) in place] for group in groups]
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
        kinds = {
            "op": self.reduction.op,
            "prescale_factor": 1.0 / factor,
            "postscale_factor": factor,
            "compression": gradient_compression(self.reduction.compression)[0],
            "process_set": self.reduction.process_set,
        }
        return Exchange(OPERATIONS, self.job, name, count, kinds, part_of, pools)

    def _check(self, variables: Sequence[Any]) -> Callable[[JobService], None] | None:
        return self._checks.of(variables, self.reduction.process_set.process_set_id or 0)

    def _named(self, place: str = "") -> str:
        return f"gradient.{self.name}" + (f".call{place}" if place else "")

    def _describe(self, given: Sequence[Any], variables: Sequence[Any], gpus: Sequence[str] = ()) -> str:
        """Return a text about those properties of the gradients that must be equal on all ranks.

        The text contains readable counts and a digest of all these properties. ``gpus``: the GPU of each gradient, or
        ''.
        """
        signs = [_sign(gradient) for gradient in given]
        if any(gpus):  # the buckets depend on the GPUs
            order = list(dict.fromkeys(gpus))
            signs.append(tuple(order.index(gpu) if gpu else -1 for gpu in gpus))
        digest = hashlib.blake2b(repr(signs).encode(), digest_size=4).hexdigest()
        lacking = [_called(i, variables[i]) for i, gradient in enumerate(given) if gradient is None]
        what = f"{len(given) - len(lacking)} gradients"
        if lacking:
            more = f" and {len(lacking) - 4} more" if len(lacking) > 4 else ""
            what += f", none for {', '.join(lacking[:4])}{more}"
        if any(gpus):
            what += f", {sum(map(bool, gpus))} on a GPU"
        return f"{what} [{digest}]"

    def _place_slices(self, results: list[Any], given: Sequence[Any], sparse: Sequence[int], arrived: Any) -> None:
        for at, i in enumerate(sparse):
            values, indices = arrived[2 * at : 2 * at + 2]
            if self.reduction.op is Average:
                values, indices = average_of_slices(
                    values, indices, present.count_of_members(self.reduction.process_set, values)
                )
            results[i] = tf.IndexedSlices(values, indices, given[i].dense_shape)


# --- graphs


def _on(gpu: str) -> AbstractContextManager[object]:
    """Return a context manager that places operations on ``gpu``, or where TensorFlow chooses if ``gpu`` is ''."""
    return tf.device(gpu) if gpu else nullcontext()


def _graph() -> Any:
    return tf.compat.v1.get_default_graph()


_places: weakref.WeakKeyDictionary[Any, dict[str, dict[Any, int]]] = weakref.WeakKeyDictionary()
_places_lock = threading.Lock()
_BRANCH = re.compile(r"_(true|false|branch\d+|body|cond)_\d+$")


def _place(name: str) -> str:
    """Return the position of the next reduction called ``name`` within the function whose graph is current.

    Several reductions of one name may be in flight at once; their positions distinguish them. Positions are counted
    while the graph is traced, so they are equal on ranks that trace the same code. All branches of one condition share
    a position, because different ranks may take different branches.
    """
    path: list[int] = []
    graph = _graph()
    construct: Any = None  # the condition or loop whose branch or body the inner graph is
    # From the current graph outwards, each level adds the position of its reduction or construct. The names of branch
    # functions end with the branch and with numbers that differ between ranks, so the key is the name without that end.
    with _places_lock:
        while graph is not None:
            places = _places.setdefault(graph, {}).setdefault(name, {})
            key = len(places) if construct is None else construct
            path.insert(0, places.setdefault(key, len(places)))
            graph_name = getattr(graph, "name", "")
            construct = _BRANCH.sub("", graph_name)
            graph = graph.outer_graph if construct != graph_name else None
    while path and path[-1] == 0:  # no two paths become equal: a position has one reduction or construct
        path.pop()
    return ".".join(map(str, path))


# --- arguments


def _all_of(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    gradients = list(gradients)
    if len(gradients) != len(variables):
        raise ValueError(f"{len(gradients)} gradients are given for {len(variables)} variables; give one for each")
    if not gradients:
        raise ValueError(
            "there is no variable to reduce a gradient for; is the model not built yet? Call it on a batch first"
        )
    return gradients


def _kinds(given: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return two lists: the indices of the dense gradients, and the indices of the sparse gradients.

    Gradients that are None are in neither list.
    """
    sparse = [i for i, gradient in enumerate(given) if isinstance(gradient, tf.IndexedSlices)]
    return [i for i, gradient in enumerate(given) if gradient is not None and i not in set(sparse)], sparse


def _sign(gradient: Any) -> Any:
    """Return those properties of ``gradient`` that must be the same on all ranks."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return "sparse", gradient.values.dtype.name, _extents(gradient.values.shape)[1:]
    return gradient.dtype.name, _extents(gradient.shape)


def _extents(shape: Any) -> tuple[Any, ...]:
    return ("any",) if shape.rank is None else tuple(shape.as_list())


def _called(index: int, variable: Any) -> str:
    name = getattr(variable, "path", None) or getattr(variable, "name", None)
    return f"{index} {name!r}" if name else str(index)


def _key(variable: Any) -> Any:
    """Return a key that identifies ``variable``.

    The variable itself cannot be the key, because some variables compare by value.
    """
    inner = getattr(variable, "value", None)
    return id(variable) if not isinstance(inner, tf.Variable) else id(inner)


def _nothing() -> Any:
    """Return the tensor that is sent if all gradients of this rank are None.

    A rank that has gradients then detects the difference.
    """
    with tf.device(HOST):
        return tf.zeros((0,), tf.float32)
