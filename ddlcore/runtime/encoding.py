"""Passes the tensors of a bucket to a compressor, and tells the compressor later whether the bucket was valid.

A compressor keeps its state under a name for each tensor. This name includes the process set, so tensors with the same
name in two sets never share state. A call without a name gets a new internal name in each step, so the compressor could
not find its state again. Such a tensor is encoded under the empty name, and no state is kept for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ddlcore.contracts.compressor import Compressor
from ddlcore.runtime.request import Entry
from ddlcore.types import Buffer


def state_name(set_id: int, name: str) -> str:
    """Return the name under which a compressor keeps state for the tensor ``name`` of the process set ``set_id``.

    Return "" if the call had no name: no state is kept then.
    """
    if name.startswith("noname."):
        return ""
    return name if set_id == 0 else f"set{set_id}:{name}"


def encode(compressor: Compressor, entry: Entry, source: Buffer, target: Buffer, scale: float) -> None:
    """Encode the values in ``source``, multiplied by ``scale``, into ``target``.

    ``source`` contains the values of the tensor of ``entry``. Call ``settle`` when it is known whether the bucket was
    valid (not void).
    """
    name = entry.name if compressor.casts else state_name(entry.set_id, entry.name)
    if name:
        compressor.encode(name, source, target, scale)
    else:
        encode_once(compressor, source, target, scale)


def encode_once(compressor: Compressor, source: Buffer, target: Buffer, scale: float) -> None:
    """Encode the values in ``source``, multiplied by ``scale``, into ``target``.

    The compressor keeps no state for these values.
    """
    compressor.encode("", source, target, scale)
    compressor.commit("", False)


def settle(compressor: Compressor, entries: Iterable[Entry | None], valid: bool) -> None:
    """Tell the compressor whether the bucket that contains ``entries`` was valid (not void).

    The compressor then keeps or drops the state that it computed for this bucket. A compressor that only casts has no
    state, so it is not called.
    """
    if compressor.casts:
        return
    for entry in entries:
        name = state_name(entry.set_id, entry.name) if entry is not None else ""
        if name:
            compressor.commit(name, valid)
