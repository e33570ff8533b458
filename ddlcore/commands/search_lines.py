"""Report the progress and the result of a search for better settings to the user, in plain lines of text."""

from __future__ import annotations

from collections.abc import Callable

from ddlcore.commands.search_bar import gain_text, progress
from ddlcore.tune.session import Phase, Session, TimedSteps, values_text

EVERY = 5  # samples between two lines if no bar is shown


class SearchLines:
    """A SearchWatcher (see tune/driver.py) that reports each event of a search to the user in one line of text."""

    def __init__(self, say: Callable[[str], None], samples: bool) -> None:
        """Report each event by calling ``say``. If ``samples`` is true, also report the progress every 5 samples."""
        self._say = say
        self._samples = samples
        self._phase = Phase.SEARCH

    def began(self, session: Session, nbytes: int) -> None:
        knobs = ", ".join(knob.name for knob in session.knobs)
        self._say(f"searching {knobs} in {session.trials} trials; a step moves {nbytes / (1 << 20):.2f} MiB")

    def sampled(self, session: Session, sample: TimedSteps, nbytes: int) -> None:
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
    """Return one line of text about the result of a finished search."""
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
