"""Gives functions of ddl's packages the operation Adasum, which only Horovod's packages have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ddlcore.errors import InvalidArgument
from ddlcore.types import Adasum

F = TypeVar("F", bound=Callable[..., Any])


def with_adasum(function: F, reduce: Callable[..., Any]) -> F:
    """Return ``function``, but call ``reduce`` where a caller passes op=Adasum: with all arguments, by name.

    ``function`` must have an argument ``op``. The result has the signature of ``function``. It raises InvalidArgument for
    op=Adasum with a ``weight``, which ``reduce`` is not given.
    """
    signature = inspect.signature(function)
    at = list(signature.parameters).index("op")

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        op = kwargs.get("op") if len(args) <= at else args[at]
        if op != Adasum:
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments.pop("weight", None) is not None:
            raise InvalidArgument("op=Adasum has no weights: it is no average")
        return reduce(**bound.arguments)

    return cast("F", chosen)
