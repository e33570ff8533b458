"""Keeps torch.compile away from the methods of process groups."""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

_Class = TypeVar("_Class", bound=type)


def uncompiled(cls: _Class) -> _Class:
    """Keep torch.compile from compiling the methods of ``cls``, and what these call. A decorator of classes.

    Below a compiled function, torch compiles every Python function that runs, also one that C++ calls: in the module
    DistributedDataParallel and in the operators of collectives. The groups of other backends are C++ altogether. Costs
    nothing when a method is called. In a torch that has other names for this, a compiled function that uses a group
    raises an error of torch's compiler.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        return cls
    as_it_is = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            set_code_exec_strategy(method.__code__, as_it_is)
    return cls
