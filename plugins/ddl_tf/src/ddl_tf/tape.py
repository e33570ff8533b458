"""A gradient tape whose gradients are reduced over the ranks; what is recorded is TensorFlow's business."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from ddl_tf.errors import translating
from ddl_tf.local import LocalVariables
from ddl_tf.reducer import Groups, Reducer, Reduction, verbatim
from ddlcore.api import Job, ProcessSet, current_job, global_process_set, resolve_op
from ddlcore.types import Average

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]

REDUCERS_LIMIT = 64  # of one job that are remembered: a tape lives for a step, what it has learned longer

_reducers: dict[Any, Reducer] = {}


class DistributedGradientTape(tf.GradientTape):  # type: ignore[misc]  # TensorFlow has no types
    """``gradtape``, whose ``gradient`` gives gradients that are reduced over ``process_set``.

    Every rank wraps its tape, with the same arguments, after ``init()``; it may be wrapped before or after it has
    recorded. All else is as the tape does it.

    * ``compression``: ``Compression.none``, ``.fp16``, ``.bf16``, a compressor's name, or a class of your own; without it,
      the setting ``compression`` decides.
    * ``sparse_as_dense``: IndexedSlices are made dense; else they are gathered.
    * ``gradient_predivide_factor`` f: gradients are divided by f before and by size / f after the sum.
    * ``groups`` (``num_groups``): how many groups of gradients go off together, or a list of lists of variables.
    * ``scale_local_gradients``: those of local sources are divided by the size, as an average would.

    Raises ValueError for arguments that do not fit, NotInitialized before ``init()``.
    """

    def __init__(
        self,
        gradtape: Any,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = None,
        sparse_as_dense: bool = False,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Groups = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        if not isinstance(gradtape, tf.GradientTape):
            raise ValueError(f"DistributedGradientTape takes a tf.GradientTape, not {type(gradtape).__name__}")
        if isinstance(gradtape, DistributedGradientTape):
            raise ValueError("this tape is a DistributedGradientTape already; wrap each tape once")
        self._gradtape = gradtape
        self._reduction = Reduction(
            resolve_op(op),
            gradient_predivide_factor,
            compression,
            sparse_as_dense,
            device_dense,
            device_sparse,
            groups if groups is not None else num_groups or None,
            process_set,
        )
        self._local = LocalVariables(scale_local_gradients)
        current_job()

    def __getattr__(self, name: str) -> Any:
        if name == "_gradtape":  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self._gradtape, name)

    def __enter__(self) -> DistributedGradientTape:
        self._gradtape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._gradtape.__exit__(*error)

    def watch(self, tensor: Any) -> None:
        """As the tape's."""
        self._gradtape.watch(tensor)

    def stop_recording(self) -> Any:
        """As the tape's."""
        return self._gradtape.stop_recording()

    def reset(self) -> None:
        """As the tape's."""
        self._gradtape.reset()

    def watched_variables(self) -> Any:
        """As the tape's."""
        return self._gradtape.watched_variables()

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """As the tape's: this rank's own."""
        return self._gradtape.jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """As the tape's: this rank's own."""
        return self._gradtape.batch_jacobian(*args, **kwargs)

    def register_local_source(self, source: Any) -> None:
        """The gradient of this variable stays this rank's own. On every rank, before ``gradient``."""
        self._local.register(source)

    @verbatim
    @translating
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The gradients of ``target``, reduced, in the structure of ``sources``; those of local sources are scaled.

        Every member calls it with the same sources. ``use_generic_names`` is accepted for Horovod's sake: gradients
        go by their places, never by their variables' names. Raises MismatchError where the ranks' gradients differ.
        """
        flat, gradients = self._own(target, sources, output_gradients, unconnected_gradients)
        return tf.nest.pack_sequence_as(sources, self._reduced(gradients, flat))

    @verbatim
    @translating
    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> tuple[list[Any], list[Any]]:
        """(gradients of the local sources, reduced gradients of the others): two lists of as many as there are
        sources, with None at the other's places. All of them are as ``gradient`` gives them."""
        flat, gradients = self._own(target, sources, output_gradients, unconnected_gradients)
        reduced = self._reduced(gradients, flat)
        local = [self._local.holds(source) for source in flat]
        return (
            [gradient if here else None for gradient, here in zip(reduced, local, strict=True)],
            [None if here else gradient for gradient, here in zip(reduced, local, strict=True)],
        )

    def _own(self, target: Any, sources: Any, output_gradients: Any, unconnected: Any) -> tuple[list[Any], list[Any]]:
        flat = tf.nest.flatten(sources)
        gradients = self._gradtape.gradient(target, flat, output_gradients, unconnected_gradients=unconnected)
        return flat, gradients

    def _reduced(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        return self._local.reduce(_reducer(self._reduction, sources), gradients, sources)


def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> DistributedGradientTape:
    """As ``DistributedGradientTape``, but the variables of ``local_layers`` (a layer, or several) stay this rank's own."""
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    tape._local.register_layers(_listed(local_layers))
    return tape


def _listed(layers: Any) -> Iterable[Any]:
    if layers is None:
        return []
    return list(layers) if isinstance(layers, (list, tuple, set, frozenset)) else [layers]


def _reducer(reduction: Reduction, sources: Sequence[Any]) -> Reducer:
    """The one that an earlier tape over variables like these has used, if there is any."""
    job: Job = current_job()
    alike = repr([(str(source.dtype), str(source.shape)) for source in sources])
    groups = reduction.groups if isinstance(reduction.groups, (int, type(None))) else id(reduction.groups)
    facts = (reduction.op, reduction.gradient_predivide_factor, reduction.sparse_as_dense)
    where = (reduction.device_dense, reduction.device_sparse)
    key = (id(job), *facts, *where, reduction.compression, groups, reduction.process_set.process_set_id, alike)
    found = _reducers.get(key)
    if found is None or found.job is not job:
        while len(_reducers) >= REDUCERS_LIMIT:
            _reducers.pop(next(iter(_reducers)))
        name = "tape." + hashlib.blake2b(alike.encode(), digest_size=3).hexdigest()
        found = _reducers[key] = Reducer(reduction, name)
    return found
