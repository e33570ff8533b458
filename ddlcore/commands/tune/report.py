"""Draw and write the report of a search: convergence, step time against each setting, and the final comparison."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from ddlcore.commands.search_lines import outcome
from ddlcore.commands.tune.results import write_whole
from ddlcore.contracts.tuner import Knob
from ddlcore.text.html import element, escaped, page, table, unbroken
from ddlcore.text.installing import pip_install
from ddlcore.text.numbers import UNKNOWN
from ddlcore.tune.session import Phase, Session, TimedSteps, values_text

NOT_COMPARED = "No comparison was needed: nothing was better than the default when it was measured again."
GREY, BLUE, ORANGE = "0.55", "#0072b2", "#d55e00"
# The background makes a legend readable where the legend covers a line or a point.
_LEGEND: dict[str, Any] = {"frameon": True, "framealpha": 0.85, "edgecolor": "none", "fancybox": False}
_TITLE_WIDTH = 40  # characters above a panel
STEP_MS = "time of a step (ms)"
_STYLE = """
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20em), 1fr)); gap: .8em; margin: 1.5em 0; }
.panels img { width: 100%; background: #ffffff; border-radius: 6px; padding: 6px; }
"""


def write_report(path: Path, session: Session, about: str) -> list[Path]:
    """Write the report as HTML to ``path``. If matplotlib is installed, also write a picture (PNG) in the same folder.

    ``about`` is a line that says which command was tuned. Return the files that were written. Raises ValueError if a
    file cannot be written.
    """
    picture = draw(session, about)
    written = [path]
    try:
        write_whole(path, html_text(session, about, draw_panels(session)).encode())
        if picture is not None:
            png = path.with_suffix(".png")
            write_whole(png, picture)
            written.append(png)
    except OSError as error:
        raise ValueError(f"--report {path}: {error.strerror}") from None
    return written


def draw(session: Session, about: str) -> bytes | None:
    """Return the picture of the report as PNG, or None if matplotlib is not installed."""
    figure_class = _figure_class()
    if figure_class is None:
        return None
    drawings = [draw_one for _, draw_one in _panels(session)]
    columns = min(3, len(drawings))
    rows = -(-len(drawings) // columns)
    figure = figure_class(figsize=(1.0 + 4.2 * columns, 0.8 + 3.4 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for draw_one, panel in zip(drawings, axes):
        draw_one(panel)
    for panel in axes[len(drawings) :]:
        panel.set_axis_off()
    figure.suptitle(f"ddl tune: {about}", fontsize=11, parse_math=False)  # show a $ as it is
    return _png(figure)


def draw_panels(session: Session) -> list[tuple[str, bytes]] | None:
    """Return a list of (description, PNG), one for each panel of the report, or None if matplotlib is not installed.

    The panels are separate pictures, so that a page can arrange as many columns of panels as fit into the window.
    """
    figure_class = _figure_class()
    if figure_class is None:
        return None
    found = []
    for description, draw_one in _panels(session):
        figure = figure_class(figsize=(4.6, 3.5), layout="constrained")
        draw_one(figure.subplots())
        found.append((description, _png(figure)))
    return found


def _figure_class() -> Any:
    try:
        import_module("matplotlib.backends.backend_agg")
        return import_module("matplotlib.figure").Figure
    except ImportError:
        return None


def _png(figure: Any) -> bytes:
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=110)
    return sink.getvalue()


def _panels(session: Session) -> list[tuple[str, Callable[[Any], None]]]:
    """Return a list of (description, function), one for each panel. The function draws the panel on matplotlib axes."""
    found: list[tuple[str, Callable[[Any], None]]] = [
        ("the time of a step in each sample of the search, and the best so far", partial(_draw_convergence, session))
    ]
    for knob in session.knobs:
        found.append((f"the time of a step against {knob.name}", partial(_draw_knob, session, knob)))
    found.append(("default and tuned settings in alternation", partial(_draw_comparison, session)))
    return found


def _searched(session: Session) -> list[TimedSteps]:
    return [sample for sample in session.samples if sample.phase is Phase.SEARCH]


def _draw_convergence(session: Session, panel: Any) -> None:
    samples = _searched(session)
    costs = [sample.cost_s * 1e3 for sample in samples]
    best = [cost * 1e3 for cost in best_so_far(samples)]
    numbers = [sample.number for sample in samples]
    panel.plot(numbers, costs, "o", color=BLUE, markersize=5, label="a sample")
    panel.step(numbers, best, where="post", color=BLUE, linewidth=1.5, label="best setting so far")
    base = session.cost_s(session.default)
    if base is not None:
        panel.axhline(base * 1e3, color=GREY, linestyle="--", linewidth=1.2, label="default")
    panel.set_xlim(0.5, max(numbers, default=1) + 0.5)
    panel.xaxis.set_major_locator(import_module("matplotlib.ticker").MaxNLocator(integer=True, min_n_ticks=1))
    panel.set(title="Convergence", xlabel="number of the sample", ylabel=STEP_MS)
    panel.legend(fontsize=8, **_LEGEND)


def best_so_far(samples: Sequence[TimedSteps]) -> list[float]:
    """Return, for each sample of a search, the step time in seconds of the best settings that were tried until then.

    The step time of settings is the median of all samples with these settings, including later samples. So the returned
    times never increase. If later samples did not count, the times could increase: settings may be the best because of
    one lucky sample, and turn out to be slower when they are measured again.
    """
    costs: dict[tuple[Any, ...], list[float]] = {}
    for sample in samples:
        costs.setdefault(tuple(sample.values.values()), []).append(sample.cost_s)
    return list(accumulate((median(costs[tuple(sample.values.values())]) for sample in samples), min))


def _draw_knob(session: Session, knob: Knob, panel: Any) -> None:
    samples = _searched(session)
    costs = [sample.cost_s * 1e3 for sample in samples]
    chosen = session.result if session.result is not None else session.best
    if knob.choices:
        spots = [knob.choices.index(sample.values[knob.name]) for sample in samples]
        panel.plot(spots, costs, "o", color=BLUE, markersize=5, alpha=0.7)
        for at in sorted(set(spots)):
            middle = median(cost for spot, cost in zip(spots, costs) if spot == at)
            panel.plot([at - 0.25, at + 0.25], [middle, middle], color=BLUE, linewidth=2)
        panel.set_xticks(range(len(knob.choices)), [_label(knob.name, choice) for choice in knob.choices])
        panel.set_xlim(-0.6, len(knob.choices) - 0.4)
        places = [knob.choices.index(values[knob.name]) for values in (session.default, chosen)]
    else:
        panel.plot([sample.values[knob.name] for sample in samples], costs, "o", color=BLUE, markersize=5, alpha=0.7)
        if knob.logarithmic:
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda value, _: _label(knob.name, int(value)))
        places = [values[knob.name] for values in (session.default, chosen)]  # type: ignore[misc]  # they are numbers
    kept = session.result is not None and places[0] == places[1]
    panel.axvline(places[0], color=GREY, linestyle="--", linewidth=1.2, label="default, stays" if kept else "default")
    if session.result is not None and not kept:
        panel.axvline(places[1], color=ORANGE, linewidth=1.5, label="written", alpha=0.8)
    panel.set(title=textwrap.fill(knob.doc or knob.name, _TITLE_WIDTH), xlabel=knob.name, ylabel=STEP_MS)
    panel.tick_params(axis="x", labelsize=8)
    panel.legend(fontsize=8, **_LEGEND)


def _label(name: str, value: Any) -> str:
    return values_text({name: value}).partition("=")[2]


def _draw_comparison(session: Session, panel: Any) -> None:
    final = session.final
    if final is None:
        panel.set_axis_off()
        panel.set_title("Default against tuned")
        lacks = session.lacks()
        text = f"still to do: {lacks}" if lacks else NOT_COMPARED
        panel.text(0.5, 0.5, textwrap.fill(text, _TITLE_WIDTH), ha="center", va="center")
        return
    for before, after in zip(final.before_s, final.after_s):
        panel.plot([0, 1], [before * 1e3, after * 1e3], "o-", color=GREY, linewidth=1, markersize=4)
    middles = [median(final.before_s) * 1e3, median(final.after_s) * 1e3]
    panel.plot([0, 1], middles, "D-", color=ORANGE, linewidth=2, markersize=7, label="median")
    panel.set_xticks([0, 1], ["default", "tuned"])
    panel.set_xlim(-0.4, 1.4)
    gain = final.gain
    panel.set(title=f"In alternation: {gain.mean * 100:+.1f} %, at least {gain.lower * 100:+.1f} %", ylabel=STEP_MS)
    panel.legend(fontsize=8, **_LEGEND)


def html_text(session: Session, about: str, panels: Sequence[tuple[str, bytes]] | None) -> str:
    """Return the report as the text of one HTML file, which needs no other files.

    ``about`` is a line that says which command was tuned, and ``panels`` is the result of ``draw_panels``.
    """
    says = outcome(session) if session.result is not None else f"not finished; still to do: {session.lacks()}"
    parts = [
        element("h1", "ddl tune"),
        element("p", about),
        f"<p>{element('strong', unbroken(says))}</p>",
        _settings_table(session),
        _pictures(panels),
        _comparisons_table(session),
        _samples_table(session),
    ]
    return page("ddl tune", filter(None, parts), _STYLE)


def _pictures(panels: Sequence[tuple[str, bytes]] | None) -> str:
    if panels is None:
        return f"<p>Pictures need matplotlib: {element('code', pip_install('ddlcore[tune]'))}</p>"
    images = (
        f'<img alt="{escaped(description)}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
        for description, picture in panels
    )
    return f'<div class="panels">{"".join(images)}</div>'


def _settings_table(session: Session) -> str:
    chosen = session.result if session.result is not None else session.best
    what = "written" if session.result is not None else "best so far"
    rows = [
        (knob.name, _label(knob.name, session.default[knob.name]), _label(knob.name, chosen[knob.name]))
        for knob in session.knobs
    ]
    return table(("setting", "default", what), rows)


def _comparisons_table(session: Session) -> str:
    rows = []
    for one in session.comparisons:
        if one.next() is not None:
            continue
        what = f"tuned, without and with {one.dropped}" if one.dropped else "default, tuned"
        gain = one.gain
        rows.append(
            (
                what,
                f"{median(one.before_s) * 1e3:.3f}",
                f"{median(one.after_s) * 1e3:.3f}",
                f"{gain.mean * 100:+.2f} %",
                f"{gain.lower * 100:+.2f} %",
                str(gain.pairs),
            )
        )
    head = ("in alternation", "before (ms)", "after (ms)", "gain", "at least (99 %)", "pairs")
    return f"<h2>Comparisons</h2>{table(head, rows)}" if rows else ""


def _samples_table(session: Session) -> str:
    names = [knob.name for knob in session.knobs]
    searched = _searched(session)
    best = {sample.number: cost_s for sample, cost_s in zip(searched, best_so_far(searched))}
    rows = [
        (
            str(sample.number),
            sample.phase.value,
            *(_label(name, sample.values[name]) for name in names),
            str(len(sample.steps_s)),
            f"{sample.cost_s * 1e3:.3f}",
            f"{best[sample.number] * 1e3:.3f}" if sample.number in best else UNKNOWN,
        )
        for sample in session.samples
    ]
    head = ("sample", "for", *names, "steps", "step (ms)", "best so far (ms)")
    note = (
        "“best so far” is the time of the best settings that had been tried. "
        "The time of settings is the median of all their samples in the search."
    )
    return f"<h2>Samples</h2>{element('p', note)}{table(head, rows)}"
