"""Draws how much of the speed of independent trainings each contender keeps; knows nothing of targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.training.contenders import Measured
from tools.training.frameworks import FRAMEWORKS
from tools.training.report import efficiency

__all__ = ["draw"]


def draw(runs: Sequence[Measured], path: Path) -> None:
    """Write ``path`` (.svg or .png): bars of medians with their intervals, and a panel for each number of ranks.

    All ``runs`` are of one framework.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "training"  # the same numbers give the same file
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    framework = FRAMEWORKS[runs[0].framework]
    contenders = {
        "barrier": ("a barrier a step", "0.75"),
        framework.peer: (framework.peer_label, "tab:orange"),
        "ddl": ("ddl", "tab:blue"),
    }
    contenders.pop("", None)
    sizes = list(dict.fromkeys(run.ranks for run in runs))
    figure, panels = pyplot.subplots(
        1, len(sizes), figsize=(1.5 + 5 * len(sizes), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, ranks in zip(panels[0], sizes):
        of_ranks = [run for run in runs if run.ranks == ranks]
        for shift, (contender, (label, colour)) in enumerate(contenders.items(), start=-1):
            kept = [efficiency(run, contender) for run in of_ranks]
            heights = [each.median for each in kept]
            errors = [[e.median - e.low for e in kept], [e.high - e.median for e in kept]]
            places = [i + 0.27 * shift for i in range(len(of_ranks))]
            bars = panel.bar(places, heights, 0.25, label=label, color=colour, yerr=errors, capsize=2)
            panel.bar_label(bars, [f"{height:.0%}" for height in heights], label_type="center", fontsize=8)
        panel.set_xticks(range(len(of_ranks)), [run.model for run in of_ranks])
        panel.set_title(f"{ranks} rank{'s' * (ranks > 1)}", fontsize=10)
        panel.set_xlabel("model")
        panel.axhline(1.0, color="0.3", linewidth=0.8, linestyle="--")
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("speed, relative to ranks\nthat do not communicate")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
