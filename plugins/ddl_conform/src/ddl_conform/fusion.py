"""The conformance suite of fusion policies. To test a policy, write a subclass that overrides ``make``."""

from __future__ import annotations

from itertools import chain

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ddl_conform.standard import StandardSuite
from ddlcore.contracts.fusion import FusionPolicy, Ready

__all__ = ["FusionSuite"]

# Lists are short, so that a failing example can be read as it is. To let hypothesis shrink it would take many seconds.
EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
TENSORS = st.lists(
    st.builds(
        Ready,
        name=st.text("abc", max_size=2),
        key=st.one_of(
            st.sampled_from(["float32", "int64"]), st.tuples(st.integers(0, 1), st.sampled_from(["sum", "max"]))
        ),
        nbytes=st.one_of(st.sampled_from([0, 1, 64, 99, 100, 101]), st.integers(0, 1000)),
        time_s=st.floats(0, 1),
        group=st.sampled_from([None, None, "g", "h"]),
    ),
    max_size=12,
)
PARAMS = st.builds(
    lambda limit, edge: {"fusion_bytes": float(limit)} | ({} if edge is None else {"first_bucket_bytes": float(edge)}),
    st.sampled_from([0, 1, 100, 1 << 20]),
    st.sampled_from([None, 0, 1, 90, 1 << 10]),
)


class FusionSuite(StandardSuite):
    """The tests that every fusion policy must pass. A subclass overrides ``make``, which creates the policy."""

    def make(self) -> FusionPolicy:
        """Return a new object of the fusion policy to test."""
        raise NotImplementedError(f"{type(self).__name__}.make() must return the policy to test")

    def test_every_tensor_is_placed_once(self) -> None:
        """Every tensor is in exactly one bucket, and no bucket is empty."""
        policy = self.make()

        @EXAMPLES
        @given(TENSORS, PARAMS)
        def placed(ready: list[Ready], params: dict[str, float]) -> None:
            buckets = policy.arrange(ready, params)
            assert sorted(chain(*buckets)) == list(range(len(ready))), f"positions of {len(ready)} tensors: {buckets}"
            assert all(buckets), f"an empty bucket: {buckets}"

        placed()

    def test_keys_never_share_a_bucket(self) -> None:
        """All tensors of a bucket have the same key, because a collective has one type, one op and one process set."""
        policy = self.make()

        @EXAMPLES
        @given(TENSORS, PARAMS)
        def apart(ready: list[Ready], params: dict[str, float]) -> None:
            for bucket in policy.arrange(ready, params):
                keys = {ready[position].key for position in bucket}
                assert len(keys) == 1, f"bucket {bucket} holds keys {keys}"

        apart()

    def test_the_limit_is_kept(self) -> None:
        """A bucket of several tensors has at most ``fusion_bytes`` bytes.

        If ``fusion_bytes`` is 0, every tensor has its own bucket.
        """
        policy = self.make()

        @EXAMPLES
        @given(TENSORS, PARAMS)
        def limited(ready: list[Ready], params: dict[str, float]) -> None:
            for bucket in policy.arrange(ready, params):
                nbytes = sum(ready[position].nbytes for position in bucket)
                fits = nbytes <= params["fusion_bytes"] and params["fusion_bytes"] > 0
                assert fits or len(bucket) == 1, f"bucket {bucket} has {nbytes} bytes, {params}"

        limited()

    def test_the_same_tensors_give_the_same_buckets(self) -> None:
        """The same arguments of ``arrange`` give the same buckets, also after other calls and from another object.

        ``arrange`` does not change its arguments.
        """
        policy = self.make()

        @EXAMPLES
        @given(TENSORS, PARAMS)
        def pure(ready: list[Ready], params: dict[str, float]) -> None:
            tensors, parameters = list(ready), dict(params)
            first = policy.arrange(ready, params)
            assert (ready, params) == (tensors, parameters), "the arguments were changed"
            assert policy.arrange(ready, params) == first, "asked again, the policy gives other buckets"
            assert self.make().arrange(tuple(ready), params) == first, (
                "another object of the policy gives other buckets"
            )

        pure()
