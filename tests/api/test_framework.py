"""The parts from which a framework's package is made: questions, compression classes, calls, and reductions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from ddlcore.api import (
    BuildQuestions,
    CollectiveCall,
    FloatCompression,
    NoCompression,
    ProcessSet,
    add_process_set,
    check_predivide,
    find_process_set,
    global_process_set,
    membership,
    wait_for_all,
    wire_compression,
)
from ddlcore.errors import MismatchError
from ddlcore.process.job import Job
from ddlcore.testing import run_world
from ddlcore.types import Average, Max, Min, ReduceOp, Sum

# --- questions


def test_a_question_reads_well() -> None:
    """It has its own name, module, signature and docstring, and answers before ``init``."""
    ask = BuildQuestions("mine.built")
    shm_built = ask.built("shm_built", "shm", "shared memory")
    assert (shm_built.__name__, shm_built.__module__) == ("shm_built", "mine.built")
    assert str(inspect.signature(shm_built)) == "() -> 'bool'"
    assert "Return whether shared memory is installed" in (shm_built.__doc__ or "")
    assert shm_built() is True
    assert ask.built("none_built", "none such", "None", "Nobody has it.")() is False
    version = ask.built_version("none_version", "none such", "None", 23)
    assert version() == 0
    assert "such as 23" in (version.__doc__ or "")


def test_questions_about_the_job_need_one() -> None:
    """They raise what the functions behind them raise."""
    ask = BuildQuestions(__name__)
    enabled = ask.enabled("threads_enabled", "threads", "threads")
    supported = ask.threads_supported("x_threads_supported", "none such", "X")

    def play(rank: int, job: Job) -> None:
        assert enabled()
        with pytest.raises(ValueError, match="does not use none such"):
            supported()

    run_world(2, play)
    for question in (enabled, supported):
        with pytest.raises(ValueError, match="not been initialized"):
            question()


# --- compression


class Floats(FloatCompression):
    """numpy's arrays."""

    @staticmethod
    def is_float(tensor: Any) -> bool:
        return bool(tensor.dtype.kind == "f")

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)


class Fp16(Floats):
    """Sends float16."""

    wire: ClassVar[str] = "fp16"
    narrow: ClassVar[Any] = np.dtype("float16")


def test_floats_go_there_and_back() -> None:
    """Other types are left alone, and only a class that defines ``wire`` itself names a compressor of the core."""

    class Other(Fp16):
        """Compresses in another way."""

    array = np.ones(3)
    packed, own = Fp16.compress(array)
    assert (packed.dtype, own) == (np.dtype("float16"), np.dtype("float64"))
    assert Fp16.decompress(packed, own).dtype == array.dtype
    whole = np.ones(3, np.int32)
    assert Fp16.decompress(*Fp16.compress(whole)) is whole
    assert NoCompression.decompress(*NoCompression.compress(array)) is array
    assert wire_compression(Fp16) == ("fp16", None)
    assert wire_compression(NoCompression) == ("none", None)
    assert wire_compression(Other) == ("none", Other)


# --- calls


@dataclass(frozen=True)
class Call(CollectiveCall):
    """With one more field."""

    priority: int = 0

    advice: ClassVar[str] = "ask somebody"


def test_a_call_tells_forward_and_backward_their_arguments() -> None:
    """Names, members, and what the gradient of a reducescatter is multiplied by."""

    def play(rank: int, job: Job) -> None:
        evens = add_process_set([0, 2])
        call = Call(job, global_process_set, "x", Sum, 2.0, 0.5, "fp16", priority=3)
        assert call.plain() == {"name": "x", "process_set": global_process_set, "job": job}
        scales = {"prescale_factor": 2.0, "postscale_factor": 0.5}
        assert call.reduction() == {**call.plain(), **scales, "op": Sum, "compression": "fp16"}
        assert (call.backward().name, call.more("rows").name, call.backward().priority) == ("x.grad", "x.rows", 3)
        assert call.more("grad", op=Average).op is Average
        assert (call.members(), call.set_rank(), call.gathered_scale()) == ((0, 1, 2), rank, 3.0)
        nameless = Call(job, evens)
        assert nameless.backward().name is None
        assert nameless.gathered_scale() == 1.0
        if rank == 1:
            with pytest.raises(ValueError, match="not a member"):
                nameless.members()
        else:
            assert (nameless.members(), nameless.set_rank()) == ((0, 2), rank // 2)

    run_world(3, play)


@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name)
def test_only_sums_and_averages_have_a_gradient(op: ReduceOp) -> None:
    """The error says what to do in this framework."""

    def play(rank: int, job: Job) -> None:
        call = Call(job, global_process_set, op=op)
        if op in (Sum, Average):
            call.check_differentiable("allreduce")
        else:
            with pytest.raises(NotImplementedError, match=f"allreduce with op={op.name} has no gradient; ask somebody"):
                call.check_differentiable("allreduce")

    run_world(1, play)


# --- reductions


def test_membership() -> None:
    """A rank is active if it is a member and not alone; a set that is not registered is refused."""

    def play(rank: int, job: Job) -> None:
        assert membership(job, global_process_set) == ((0, 1, 2), True)
        pair, alone = add_process_set([0, 2]), add_process_set([1])
        assert membership(job, pair) == ((0, 2), rank != 1)
        assert membership(job, alone) == ((1,), False)
        with pytest.raises(ValueError, match="is not registered; pass it to init"):
            membership(job, ProcessSet([0, 1]))
        found = find_process_set([0, 2])
        assert found is not None
        assert found.process_set_id == pair.process_set_id
        assert find_process_set([0, 1]) is None

    run_world(3, play)


@pytest.mark.parametrize(
    ("check", "match"),
    [
        (lambda: check_predivide(2.0, Sum), r"gradient_predivide_factor=2.0 needs op=Average; it is Sum"),
        (lambda: check_predivide(0.0), "must be greater than 0, not 0.0"),
        (lambda: check_predivide(-1.0, Average), "must be greater than 0"),
    ],
)
def test_a_factor_that_cannot_be_is_refused(check: Callable[[], None], match: str) -> None:
    """Before anything is sent."""
    with pytest.raises(ValueError, match=match):
        check()
    check_predivide(1.0, Max)
    check_predivide(4.0, Average)
    check_predivide(1.0, Min)


class Waiting:
    """A handle with a given end."""

    def __init__(self, end: object) -> None:
        self.end = end
        self.waits = 0

    def poll(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> object:
        """Return the end, or raise it."""
        self.waits += 1
        if isinstance(self.end, BaseException):
            raise self.end
        return self.end


def test_all_are_waited_for_and_the_first_error_is_kept() -> None:
    """Errors of other types, such as an interrupt, are raised at once."""
    first, second = MismatchError("first"), MismatchError("second")
    handles = [Waiting(end) for end in (1, first, 2, second, 3)]
    assert wait_for_all(handles) == ([1, 2, 3], first)
    assert [handle.waits for handle in handles] == [1] * 5
    assert wait_for_all([Waiting(4)]) == ([4], None)
    later = Waiting(5)
    with pytest.raises(KeyboardInterrupt):
        wait_for_all([Waiting(first), Waiting(KeyboardInterrupt()), later])
    assert not later.waits
    with pytest.raises(ValueError, match="bad"):
        wait_for_all([Waiting(ValueError("bad"))])
    assert wait_for_all([Waiting(ValueError("bad")), later], (ValueError,))[0] == [5]
