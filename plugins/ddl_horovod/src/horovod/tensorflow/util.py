"""References to variables, which are hashable."""

from __future__ import annotations

__all__ = [
    "refs_to_vars",
    "vars_to_refs",
]

from collections.abc import Iterable
from typing import Any


def vars_to_refs(vars: Any) -> Any:
    """Return a reference to each variable in ``vars``, which may be a list of lists: a tuple, nested in the same way."""
    if isinstance(vars, Iterable) and not hasattr(vars, "ref"):
        return tuple(vars_to_refs(one) for one in vars)
    return vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """Return the variables to which ``refs``, a result of ``vars_to_refs``, refers: a list, nested in the same way."""
    if isinstance(refs, tuple):
        return [refs_to_vars(one) for one in refs]
    return refs.deref()
