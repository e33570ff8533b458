"""Decides under which name a compressor sees a tensor, and tells the compressor whether a bucket was valid.

The names include the process set, so that tensors of the same name in two sets never share state. A tensor without a
name gets another name in each step. So it is encoded under the empty name, and no state is kept for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ddlcore.contracts.compressor import Compressor
from ddlcore.runtime.request import Entry
from ddlcore.types import Buffer


def state_name(set_id: int, name: str) -> str:
    """Return the name under which a compressor keeps state for a tensor; empty for an unnamed call, without state."""
    if name.startswith("noname."):
        return ""
    return name if set_id == 0 else f"set{set_id}:{name}"


def encode(compressor: Compressor, entry: Entry, source: Buffer, target: Buffer, scale: float) -> None:
    """Encode the values of ``entry``, multiplied by ``scale``, from ``source`` to ``target``.

    Call ``settle`` later to tell the compressor whether the bucket was valid.
    """
    name = entry.name if compressor.casts else state_name(entry.set_id, entry.name)
    if name:
        compressor.encode(name, source, target, scale)
    else:
        encode_once(compressor, source, target, scale)


def encode_once(compressor: Compressor, source: Buffer, target: Buffer, scale: float) -> None:
    """Encode the values of ``source``, multiplied by ``scale``, into ``target``.

    The compressor keeps no state for these values.
    """
    compressor.encode("", source, target, scale)
    compressor.commit("", False)


def settle(compressor: Compressor, entries: Iterable[Entry | None], valid: bool) -> None:
    """Tell the compressor whether the bucket of ``entries`` was valid."""
    if compressor.casts:
        return
    for entry in entries:
        name = state_name(entry.set_id, entry.name) if entry is not None else ""
        if name:
            compressor.commit(name, valid)
