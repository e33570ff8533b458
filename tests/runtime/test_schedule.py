"""How a period is laid out: behind which buckets hosts tell each other what stands on their devices."""

from __future__ import annotations

from ddlcore.builtin.fusion import ThresholdFusion
from ddlcore.messages.coding import decode_spec, encode
from ddlcore.messages.spec import Spec
from ddlcore.runtime.arranging import arrange
from ddlcore.runtime.periods import Occurrence, TensorKey
from ddlcore.types import CPU, DType, Kind, ReduceOp


def tensor(name: str, bucket: int, stamp: int = -1, device: str = "gpu", set_id: int = 0) -> Occurrence:
    """One that was decided in ``bucket``, by ranks of which one had seen ``stamp`` end."""
    spec = encode(Spec(Kind.ALLREDUCE, DType.F32, (4,), ReduceOp.Sum, device=device))
    return Occurrence(TensorKey(set_id, name, spec), bucket, stamp)


def commits(*period: Occurrence) -> list[tuple[str, bool]]:
    """The buckets' names and marks, each tensor in a bucket of its own."""
    arranged = arrange(0, period, decode_spec, ThresholdFusion(), {"fusion_bytes": 0, "first_bucket_bytes": 0})
    assert arranged is not None
    return [(planned.names[0], planned.commit) for planned in arranged.buckets]


def test_one_commit_a_period_where_nothing_depends() -> None:
    """Behind the last bucket on a device; what lies in host memory needs none."""
    period = [tensor("a", 0), tensor("b", 1), tensor("host", 2, device=CPU.kind)]
    assert commits(*period) == [("a", False), ("b", True), ("host", False)]


def test_what_goes_by_way_of_the_host_carries_no_commit() -> None:
    """A sparse gradient that the user sends so is often a step's last; the dense ones on the device need theirs."""
    period = [tensor("a", 0), tensor("b", 1), tensor("sparse", 2, device="gpu@host")]
    assert commits(*period) == [("a", False), ("b", True), ("sparse", False)]


def test_what_was_waited_for_is_committed_before_what_depends_on_it() -> None:
    """A layer whose result the next one reads: nobody is to wait for a device in between."""
    period = [tensor("a", 0), tensor("b", 1), tensor("c", 2, stamp=1), tensor("d", 3, stamp=1)]
    assert commits(*period) == [("a", False), ("b", True), ("c", False), ("d", True)]


def test_each_process_set_has_its_own() -> None:
    """Its members alone know what they have launched; several devices of a rank are told of together."""
    period = [tensor("a", 0), tensor("b", 1, set_id=1), tensor("c", 2, device="gpu+1"), tensor("d", 3, set_id=1)]
    assert commits(*period) == [("a", False), ("b", False), ("c", True), ("d", True)]


def test_a_period_in_host_memory_has_none() -> None:
    """As every period of a job without devices."""
    assert commits(tensor("a", 0, device=CPU.kind)) == [("a", False)]
