"""Checks the ranks' requests, and shows in a table where the requests of several ranks for one name differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ddlcore.messages.ranks import AnyRank
from ddlcore.messages.spec import Ask, Spec
from ddlcore.runtime.device_labels import describe_device, kind_of
from ddlcore.text.columns import aligned, indented
from ddlcore.text.ranks import span
from ddlcore.types import Kind


def _tuple(values: Sequence[int] | None) -> str:
    return "row-major" if values is None else str(tuple(values)).replace(" ", "")


def _ragged(spec: Spec) -> str:
    """Return the shape of a tensor of a ragged kind. An alltoall's first dimension is shown as a sum: (2+2,3)."""
    rows = "any" if spec.rows is None else "+".join(map(str, spec.rows))
    return f"({rows}" + "".join(f",{n}" for n in spec.extents) + ")"


_COLUMNS: tuple[tuple[str, Callable[[Spec], str]], ...] = (
    ("kind", lambda spec: spec.kind.name.lower()),
    ("dtype", lambda spec: spec.label),
    ("shape", lambda spec: _ragged(spec) if spec.kind.is_ragged else _tuple(spec.extents)),
    ("op", lambda spec: spec.op.name.lower()),
    ("root", lambda spec: str(spec.root)),
    ("prescale", lambda spec: f"{spec.prescale:g}"),
    ("postscale", lambda spec: f"{spec.postscale:g}"),
    ("device", lambda spec: describe_device(spec.device)),
    ("layout", lambda spec: _tuple(spec.strides)),
    ("compression", lambda spec: spec.compressor),
    ("group", lambda spec: f"{spec.group} tensors" if spec.group else "none"),
    ("ranks", lambda spec: "-" if spec.ranks is None else _tuple(spec.ranks)),
    ("part of", lambda spec: spec.part_of or "-"),
    ("content", lambda spec: "an object" if spec.is_object else "a tensor"),
    ("digest", lambda spec: "announced" if spec.is_announced else "-"),
)


def flaw(ask: Ask, spec: Spec, members: Sequence[int], size: int) -> str:
    """Return a text that says why a request for one tensor is invalid, or "" if the request is valid.

    Only those flaws are found that do not depend on the rank that sent the request. ``ask`` is the request, and
    ``spec`` is the decoded ``ask.spec``. ``members`` are the ranks of the request's process set, and ``size`` is the
    size of the world. A correct ddl never sends an invalid request.
    """
    kind, ranks = spec.kind, spec.ranks or ()
    if kind in (Kind.JOIN, Kind.ADD_SET, Kind.REMOVE_SET) and ask.set_id != 0:
        return "it is asked of the global process set only"
    ordered = ranks if not spec.of_members else sorted(ranks)  # only the members themselves may choose an order
    if kind is Kind.ADD_SET and not (ranks and set(ranks) <= set(range(size)) and list(ordered) == sorted(set(ranks))):
        return f"there is no process set of ranks {list(ranks)}"
    if kind is Kind.REMOVE_SET and (len(ranks) != 1 or ranks[0] <= 0):
        return f"process set {list(ranks)} cannot be removed"
    if kind is Kind.BROADCAST and spec.root not in members:
        return f"its root, rank {spec.root}, is not a member"
    columns = len(members) if kind is Kind.ALLTOALL else 1
    if kind.is_ragged and (len(ask.rows) != columns or min(ask.rows) < 0):
        return f"it announces rows {list(ask.rows)}"
    if spec.rows is not None and ask.rows != spec.rows:
        return f"it announces rows {list(ask.rows)}, and says that all ranks announce {list(spec.rows)}"
    return "a dimension is negative" if min(spec.shape, default=0) < 0 else ""


def called(kind: Kind, name: str) -> str:
    """Return the text by which messages name one operation, such as ``allreduce 'x'``.

    ``name`` is the name in the request. If ``name`` begins with the kind (``allreduce.x``), the kind is not repeated.
    """
    verb = kind.name.lower()
    plain = name.removeprefix(f"{verb}.")
    return (
        f"{verb} (call {name.rpartition('.')[2]} without a name)" if name.startswith("noname.") else f"{verb} {plain!r}"
    )


def describe(names: Sequence[str], set_id: int) -> str:
    """Return the text by which messages name tensors: the first four names, and the process set if it is not 0."""
    shown = ", ".join(repr(name) for name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return shown if set_id == 0 else f"{shown} in process set {set_id}"


def mismatch_table(name: str, set_id: int, asked: Mapping[AnyRank, Spec]) -> str:
    """Return a message with a table that shows how the ranks' requests for ``name`` in process set ``set_id`` differ.

    ``asked`` contains the request of each rank. The table has only those columns in which the requests differ. Ranks
    with equal requests share a row. The last line, below the table, is advice for the user.
    """
    kinds = {spec.kind for spec in asked.values()}
    rows: dict[tuple[str, ...], list[AnyRank]] = {}
    texts = {rank: tuple(text(spec) for _, text in _COLUMNS) for rank, spec in asked.items()}
    differing = [i for i in range(len(_COLUMNS)) if len({cells[i] for cells in texts.values()}) > 1]
    for rank in sorted(texts):
        rows.setdefault(tuple(texts[rank][i] for i in differing), []).append(rank)
    header = ("ranks", *(_COLUMNS[i][0] for i in differing))
    lines = [header, *((span(ranks), *cells) for cells, ranks in rows.items())]
    table = "\n".join(indented(aligned(lines)))
    what = "/".join(sorted(kind.name.lower() for kind in kinds))
    advice = "give the calls different names" if len(kinds) > 1 else "ask for the same on every rank"
    if kinds == {Kind.ALLREDUCE, Kind.ALLGATHER}:
        advice += ", or, for a gradient that is sparse on some ranks alone, set sparse_as_dense=True"
    if len({kind_of(spec.device) for spec in asked.values()}) > 1:
        advice += ", on one kind of device"
    if Kind.ADD_SET in kinds:
        advice = "add the same process sets in the same order on every rank"
    where = "" if set_id == 0 else f" in process set {set_id}"
    title = called(next(iter(kinds)), name) if len(kinds) == 1 else f"{what} {name!r}"
    return f"{title}{where}: the ranks disagree\n{table}\n  what next: {advice}; the job can go on"
