"""Report to the user in plain lines how a search goes, and run a search for ``ddl run --autotune``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ddlcore.launch.launcher import Launch
from ddlcore.launch.tune.bar import Bar, gain_text, progress
from ddlcore.search import build_search_driver
from ddlcore.tune.driver import SearchDriver, Watcher
from ddlcore.tune.session import Phase, Sample, Session, values_text

__all__ = ["Lines", "after_training", "outcome", "while_training"]

EVERY = 5  # samples between two lines if no bar is shown


class Lines:
    """A Watcher that reports each event in one line."""

    def __init__(self, say: Callable[[str], None], samples: bool) -> None:
        """Report by ``say``. With ``samples``, also report the progress every few samples."""
        self._say = say
        self._samples = samples
        self._phase = Phase.SEARCH

    def began(self, session: Session, nbytes: int) -> None:
        knobs = ", ".join(knob.name for knob in session.knobs)
        self._say(f"searching {knobs} in {session.trials} trials; a step moves {nbytes / (1 << 20):.2f} MiB")

    def sampled(self, session: Session, sample: Sample, nbytes: int) -> None:
        turned = session.phase is not self._phase and session.phase is not Phase.DONE
        self._phase = session.phase
        if turned and session.phase is Phase.COMPARE:
            self._say(f"comparing the default with the best so far: {values_text(session.comparisons[-1].after)}")
        elif self._samples and len(session.samples) % EVERY == 0:
            done, total = progress(session)
            self._say(f"{done} of {total} samples ({session.phase.value}): {gain_text(session)}")

    def ended(self, session: Session, why: str) -> None:
        self._say(f"given up: {why}; going on with the default" if why else outcome(session))


def outcome(session: Session) -> str:
    """Return in one line what a finished search has found."""
    assert session.result is not None
    changed = session.changed(session.result)
    if not changed:
        return "nothing beats the default beyond noise; going on with the default"
    final = session.final
    assert final is not None
    gain = final.gain
    values = values_text({name: session.result[name] for name in changed})
    return (
        f"{values}: {gain.mean * 100:.1f} % faster than the default, "
        f"with 99 % certainty at least {gain.lower * 100:.1f} %"
    )


def after_training(launch: Launch) -> None:
    """Remove the bar, and say what is missing if the search was not finished."""
    if launch.bar is not None:
        launch.bar.clear()
    session = launch.driver.session if isinstance(launch.driver, SearchDriver) else None
    if session is None:
        _say("no step was measured: a search needs steps that repeat and allreduce")
    elif session.phase is not Phase.DONE:
        _say(f"the training has ended before the search; still to do: {session.lacks()}")


def _say(text: str, bar: Bar | None = None) -> None:
    (bar or Bar()).say(f"ddl run: autotune: {text}")


def while_training(launch: Launch) -> Launch:
    """Return ``launch`` with a search that runs during the training. Raises what ``build_search_driver`` raises."""
    bar = Bar() if os.isatty(2) and launch.watch is None else None  # the table of --top must have the screen to itself
    watchers: list[Watcher] = [Lines(partial(_say, bar=bar), samples=bar is None), *([bar] if bar is not None else [])]
    driver = build_search_driver(launch.settings, launch.registry, launch.layout.ranks, launch.launched_by, watchers)
    return replace(launch, driver=driver, bar=bar)
