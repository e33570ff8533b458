"""Shows buckets by name in a framework's own profiler, while the user wants that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from ddlcore.contracts.adapter import Adapter
from ddlcore.messages import Bucket, Planned
from ddlcore.types import Kind

Ranges = Callable[[str], AbstractContextManager[object]]


def in_use(adapters: Iterable[tuple[str, Callable[[], Adapter]]]) -> list[Adapter]:
    """Return those adapters whose module this process has imported. Each is given with the name of its module."""
    return [build() for module, build in adapters if module in sys.modules]


def ranges_of(adapters: Sequence[Adapter]) -> Ranges:
    """Return a function that opens a range in every profiler that may be running.

    A framework that cannot tell whether its own profiler runs must not hide another framework's profiler.
    """

    def ranges(name: str) -> AbstractContextManager[object]:
        found = [one for adapter in adapters if (one := adapter.range(name)) is not None]
        if len(found) > 1:
            return _all(found)
        return found[0] if found else nullcontext()

    return ranges


@contextmanager
def _all(ranges: Sequence[AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in ranges:
            stack.enter_context(one)
        yield


def title(what: Bucket | Planned) -> str:
    """Return the name of a bucket in a profiler, such as "ddl ALLREDUCE gradient.0.weight +7"."""
    kind, names = Kind(what.kind).name, what.names
    return f"ddl {kind} {names[0] if names else ''}{f' +{len(names) - 1}' if len(names) > 1 else ''}".rstrip()
