"""Words a stall: which tensors wait, for how long, and for which ranks."""

from __future__ import annotations

from ddlcore.runtime.checks import describe
from ddlcore.runtime.coordinator import Coordinator
from ddlcore.runtime.pending import Pending

__all__ = ["stall_reports"]


def stall_reports(coordinator: Coordinator, now_s: float, warning_s: float) -> list[str]:
    """One text for all that has just passed ``warning_s``; nothing is reported twice. 0 turns it off."""
    if warning_s <= 0:
        return []
    late: dict[tuple[int, ...], list[Pending]] = {}
    for pending in coordinator.table.all():
        if pending.first_seen_s is None:
            pending.first_seen_s = now_s
        elif 0 <= pending.first_seen_s <= now_s - warning_s:
            late.setdefault(tuple(coordinator.table.missing(pending)), []).append(pending)
            pending.first_seen_s = float("inf")  # said
    lines = []
    for ranks, tensors in late.items():
        names = describe([pending.name for pending in tensors], tensors[0].set_id)
        who = ", ".join(map(str, ranks))
        lines.append(
            f"stalled for more than {warning_s:g} s: {names} is ready on some ranks, but not on rank {who}; "
            "the ranks may run different code, or one of them is slow"
        )
    return lines
