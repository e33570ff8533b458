"""Shows buckets by name in the profiler of a framework, if the user wants this."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from ddlcore.contracts.adapter import Adapter
from ddlcore.messages.to_rank import Bucket, Planned
from ddlcore.types import Kind

Ranges = Callable[[str], AbstractContextManager[object]]


def in_use(adapters: Iterable[tuple[str, Callable[[], Adapter]]]) -> list[Adapter]:
    """Return the adapters of those modules that this process has imported.

    Each item of ``adapters`` is a pair: the name of a module, and a function that builds the adapter for this module.
    """
    return [build() for module, build in adapters if module in sys.modules]


def ranges_of(adapters: Sequence[Adapter]) -> Ranges:
    """Return a function that opens a range with a given name in the profiler of each adapter's framework.

    The function opens it only in profilers that may be running. Some frameworks do not know whether their own profiler
    runs, so one bucket may get a range in several profilers.
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
    """Return the text by which a profiler shows a bucket, such as "ddl ALLREDUCE gradient.0.weight +7".

    "+7" means that the bucket contains seven more tensors.
    """
    kind, names = Kind(what.kind).name, what.names
    return f"ddl {kind} {names[0] if names else ''}{f' +{len(names) - 1}' if len(names) > 1 else ''}".rstrip()
