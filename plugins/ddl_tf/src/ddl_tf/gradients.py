"""Checks the gradients of a step, sorts them by kind, and describes what must be equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ddl_tf.adapter import is_carried
from ddl_tf.reduction import Reduction
from ddlcore.types import Average, Sum, known_types


def checked(gradients: Sequence[Any], variables: Sequence[Any], reduction: Reduction) -> list[Any]:
    """Return each gradient in the form in which it is reduced: a dense tensor, slices, or None.

    Raises ValueError unless there is one gradient for each of ``variables`` and each of them is a tensor of a type that
    ddl reduces, and NotImplementedError for a sparse gradient that ``reduction`` does not reduce.
    """
    gradients = list(gradients)
    if len(gradients) != len(variables):
        raise ValueError(f"{len(gradients)} gradients are given for {len(variables)} variables; give one for each")
    if not gradients:
        raise ValueError(
            "there is no variable to reduce a gradient for; is the model not built yet? Call it on a batch first"
        )
    return [_checked(i, gradient, variables, reduction) for i, gradient in enumerate(gradients)]


def _checked(index: int, gradient: Any, variables: Sequence[Any], reduction: Reduction) -> Any:
    """Return ``gradient`` in the form in which it is reduced: a dense tensor, slices, or None.

    ``index`` is the position of the gradient's variable in ``variables``. Error messages contain it.
    """
    if gradient is None or (isinstance(gradient, tf.IndexedSlices) and not reduction.sparse_as_dense):
        if gradient is not None and reduction.op not in (Average, Sum):
            raise NotImplementedError(
                f"the gradient of {called(index, variables[index])} is sparse, and op={reduction.op.name} "
                "needs dense ones; pass sparse_as_dense=True"
            )
        return gradient
    which = f"the gradient of {called(index, variables[index])}"
    try:
        dense = tf.convert_to_tensor(gradient)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{which} is no tensor: {error}") from None
    if not is_carried(dense.dtype):
        raise ValueError(f"{which}: tensor type {dense.dtype.name} is not supported; ddl carries {known_types()}")
    return dense


def dense_and_sparse(given: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return two lists: the indices of the dense gradients, and the indices of the sparse gradients.

    Gradients that are None are in neither list.
    """
    sparse = [i for i, gradient in enumerate(given) if isinstance(gradient, tf.IndexedSlices)]
    return [i for i, gradient in enumerate(given) if gradient is not None and i not in set(sparse)], sparse


def signature(gradient: Any) -> Any:
    """Return those properties of ``gradient`` that must be the same on all ranks."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return "sparse", gradient.values.dtype.name, _extents(gradient.values.shape)[1:]
    return gradient.dtype.name, _extents(gradient.shape)


def _extents(shape: Any) -> tuple[Any, ...]:
    return ("any",) if shape.rank is None else tuple(shape.as_list())


def called(index: int, variable: Any) -> str:
    """Return how messages call ``variable``, which has the position ``index``."""
    name = getattr(variable, "path", None) or getattr(variable, "name", None)
    return f"{index} {name!r}" if name else str(index)


def key_of(variable: Any) -> Any:
    """Return a key that identifies ``variable``.

    The variable itself cannot be the key, because some variables compare by value.
    """
    inner = getattr(variable, "value", None)
    return id(variable) if not isinstance(inner, tf.Variable) else id(inner)


def describe(given: Sequence[Any], variables: Sequence[Any], gpus: Sequence[str] = ()) -> str:
    """Return a text about those properties of the gradients that must be equal on all ranks.

    The text contains readable counts and a digest of all these properties. ``gpus``: the GPU of each gradient, or ''.
    """
    signs = [signature(gradient) for gradient in given]
    if any(gpus):  # the buckets depend on the GPUs
        order = list(dict.fromkeys(gpus))
        signs.append(tuple(order.index(gpu) if gpu else -1 for gpu in gpus))
    digest = hashlib.blake2b(repr(signs).encode(), digest_size=4).hexdigest()
    lacking = [called(i, variables[i]) for i, gradient in enumerate(given) if gradient is None]
    what = f"{len(given) - len(lacking)} gradients"
    if lacking:
        more = f" and {len(lacking) - 4} more" if len(lacking) > 4 else ""
        what += f", none for {', '.join(lacking[:4])}{more}"
    if any(gpus):
        what += f", {sum(map(bool, gpus))} on a GPU"
    return f"{what} [{digest}]"
