"""Under which name a compressor meets a tensor, and who tells it whether a bucket was valid.

Names are a process set's own, so that two sets' tensors of one name never share state. What has no name of its own
comes once under the one it has: it is encoded under the empty name, and no state of it is kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from ddlcore.contracts.compressor import Compressor
from ddlcore.runtime.request import Entry
from ddlcore.types import Buffer

__all__ = ["encode", "encode_once", "settle", "state_name"]


def state_name(set_id: int, name: str) -> str:
    """The name that state is kept under; empty: none is kept."""
    if name.startswith("noname."):
        return ""
    return name if set_id == 0 else f"set{set_id}:{name}"


def encode(compressor: Compressor, entry: Entry, source: Buffer, target: Buffer, scale: float) -> None:
    """``settle`` tells what became of it."""
    name = entry.name if compressor.casts else state_name(entry.set_id, entry.name)
    if name:
        compressor.encode(name, source, target, scale)
    else:
        encode_once(compressor, source, target, scale)


def encode_once(compressor: Compressor, source: Buffer, target: Buffer, scale: float) -> None:
    """For what leaves no state."""
    compressor.encode("", source, target, scale)
    compressor.commit("", False)


def settle(compressor: Compressor, entries: Iterable[Entry | None], valid: bool) -> None:
    """Whether a bucket is valid."""
    if compressor.casts:
        return
    for entry in entries:
        name = state_name(entry.set_id, entry.name) if entry is not None else ""
        if name:
            compressor.commit(name, valid)
