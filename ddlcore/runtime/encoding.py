"""Decides under which name a compressor sees a tensor, and tells the compressor whether a bucket was valid.

The names include the process set, so that tensors of the same name in two sets never share state. A tensor without a
name never comes again under the same name, so it is encoded under the empty name and no state is kept for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ddlcore.contracts.compressor import Compressor
from ddlcore.runtime.request import Entry
from ddlcore.types import Buffer


def state_name(set_id: int, name: str) -> str:
    """Return the name under which state is kept; empty if none is kept."""
    if name.startswith("noname."):
        return ""
    return name if set_id == 0 else f"set{set_id}:{name}"


def encode(compressor: Compressor, entry: Entry, source: Buffer, target: Buffer, scale: float) -> None:
    """Encode an entry's values. Call ``settle`` later to say whether the bucket was valid."""
    name = entry.name if compressor.casts else state_name(entry.set_id, entry.name)
    if name:
        compressor.encode(name, source, target, scale)
    else:
        encode_once(compressor, source, target, scale)


def encode_once(compressor: Compressor, source: Buffer, target: Buffer, scale: float) -> None:
    """Encode values for which no state is kept."""
    compressor.encode("", source, target, scale)
    compressor.commit("", False)


def settle(compressor: Compressor, entries: Iterable[Entry | None], valid: bool) -> None:
    """Tell the compressor whether a bucket was valid."""
    if compressor.casts:
        return
    for entry in entries:
        name = state_name(entry.set_id, entry.name) if entry is not None else ""
        if name:
            compressor.commit(name, valid)
