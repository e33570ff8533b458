"""Define the base class of an observer of a job, and pass the events of the job on to every observer.

The progress line of a search and the watches of plugins, such as the live page, are all of this kind. None of them
decides about the job. If a watch raises an exception, it gets no further events, and the job goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddlcore.config.loading import Settings
from ddlcore.errors import PluginError
from ddlcore.hooks import WatchProvider
from ddlcore.launch.output.screen import Screen
from ddlcore.launch.ranks.exit_status import End, NotStarted
from ddlcore.messages.observing import Observation
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_coordinator import ToCoordinator
from ddlcore.messages.to_rank import Outgoing
from ddlcore.plug.finding import raised_at
from ddlcore.plug.registry import Registry
from ddlcore.plug.settings import absent_setting


@dataclass(frozen=True)
class WatchedJob:
    """The job that a watch observes, before any of its ranks is started."""

    settings: Settings
    title: str  # the command of the job, or the call of ``ddlcore.run``
    hosts: tuple[str, ...]  # the host name of each rank


@dataclass(frozen=True)
class RunningRanks:
    """What a watch may ask or do while the ranks run. Any thread may call these functions."""

    stop: Callable[[], None]  # kills all ranks
    host_of: Callable[[int], str]  # the name of the host on which a rank runs now
    status: Callable[[], str]  # one line of text about the present world of an elastic job; "" for another job


class Watch:
    """The base class of an observer of one job. A subclass overrides the methods for those events that it needs.

    The main thread calls ``screens``, ``open``, ``begin``, ``finished``, ``drained``, ``over`` and ``close``, in this
    order. The control server's thread calls ``heard`` and ``passed``, so these two must return quickly. Any thread of the
    launcher may call ``rank_ended`` and ``said``. No method may wait without a limit: the launcher waits for its return.
    """

    timeline_dir: Path | None = None  # where the launcher brings the ranks' parts of a timeline; None: nowhere

    def __init__(self, job: WatchedJob) -> None:
        """Prepare to observe ``job``. Raises ValueError or OSError, with a message of one line, if it cannot."""

    @classmethod
    def check(cls, settings: Settings) -> None:
        """Raise ValueError, with a message of one line, if the job cannot be watched as ``settings`` ask for.

        This is called before anything is started, and also if nothing will be started, as for ``--dry-run``.
        """

    def screens(self, screens: tuple[Screen, Screen]) -> tuple[Screen, Screen]:
        """Return the two screens on which the job's stdout and stderr are shown in place of ``screens``."""
        return screens

    def open(self, say: Callable[[str], None]) -> str:
        """Begin to watch, before any rank is started. Return a line to show to the user, or "".

        From now on, the observer may call ``say(text)`` from any thread to show a line to the user.
        """
        return ""

    def begin(self, ranks: RunningRanks) -> None:
        """Take note that the ranks have been started."""

    def heard(self, rank: LaunchedRank, message: Observation) -> None:
        """Handle a message in which ``rank`` reports its own state."""

    def passed(self, rank: LaunchedRank, message: ToCoordinator, outgoing: Outgoing[LaunchedRank]) -> None:
        """Handle any other message, which ``rank`` has sent to the coordinator.

        ``outgoing`` is the messages that the coordinator sends because of ``message``.
        """

    def rank_ended(self, end: End) -> None:
        """Handle the end of a rank's process."""

    def said(self, text: str) -> None:
        """Handle a line that the launcher has shown to the user, such as the report of a stall."""

    def finished(self, say: Callable[[str], None]) -> None:
        """Take note that all ranks have ended and that all their output was shown. ``say`` shows a line to the user.

        This is called before ``drained``, and only if the ranks have run to their end.
        """

    def drained(self) -> None:
        """Take note that all ranks have ended and that all their output was shown, or that no rank was started."""

    def over(self, code: int, text: str = "") -> None:
        """Take note that the job has ended with exit code ``code``.

        A code of -1 means that the job has no exit code. ``text`` then says why the job has ended.
        """

    def close(self) -> None:
        """Stop watching. The launcher calls nothing else after that."""


class Watches:
    """All watches of one job. Each method passes an event on to all of them. Any thread may call the methods.

    A watch that raises an exception gets no further events but ``close``, and the user is told why.
    """

    def __init__(self, settings: Settings, watches: Sequence[Watch] = ()) -> None:
        self.settings = settings  # for the ranks: those of the job, and those that the watches ask for
        self._all = tuple(watches)
        self._present = self._all
        self._say: Callable[[str], None] = lambda text: None

    @property
    def timeline_dir(self) -> Path | None:
        """The directory to which the ranks' parts of a timeline are brought; None: a watch does not ask for them."""
        return next((watch.timeline_dir for watch in self._all if watch.timeline_dir is not None), None)

    def screens(self, screens: tuple[Screen, Screen]) -> tuple[Screen, Screen]:
        """Return the screens for the job's stdout and stderr, as each watch wants them."""
        both = [screens]
        self._each(lambda watch: both.append(watch.screens(both[-1])))
        return both[-1]

    def open(self, say: Callable[[str], None], show: Callable[[str], None]) -> None:
        """Begin to watch. ``say`` shows a line among the output of the ranks, ``show`` one before there is any."""
        self._say = say

        def one(watch: Watch) -> None:
            line = watch.open(say)
            if line:
                show(line)

        self._each(one)

    def begin(self, ranks: RunningRanks) -> None:
        self._each(lambda watch: watch.begin(ranks))

    def heard(self, rank: LaunchedRank, message: Observation) -> None:
        self._each(lambda watch: watch.heard(rank, message))

    def passed(self, rank: LaunchedRank, message: ToCoordinator, outgoing: Outgoing[LaunchedRank]) -> None:
        self._each(lambda watch: watch.passed(rank, message, outgoing))

    def rank_ended(self, end: End) -> None:
        self._each(lambda watch: watch.rank_ended(end))

    def said(self, text: str) -> None:
        self._each(lambda watch: watch.said(text))

    def finished(self, say: Callable[[str], None]) -> None:
        self._say = say  # what was given before shows nothing any more
        self._each(lambda watch: watch.finished(say))

    def drained(self) -> None:
        self._each(lambda watch: watch.drained())

    def over(self, code: int, text: str = "") -> None:
        self._each(lambda watch: watch.over(code, text))

    def close(self) -> None:
        self._present = self._all  # a watch that has raised may still hold a thread or a process
        self._each(lambda watch: watch.close())

    def _each(self, call: Callable[[Watch], None]) -> None:
        for watch in self._present:
            try:
                call(watch)
            except Exception as error:  # a plugin's watch may raise anything
                self._present = tuple(one for one in self._present if one is not watch)
                self._say(f"{type(watch).__name__} has failed, the job goes on: {type(error).__name__}: {error}")


def draws(settings: Settings, registry: Registry) -> bool:
    """Return whether a watch that ``settings`` ask for draws on the terminal, so that nothing else may draw there."""
    return any(provider.draws for provider in _wanted(settings, registry))


def check_watches(settings: Settings, registry: Registry) -> None:
    """Check that the watches which ``settings`` ask for can observe a job, before anything of it is started.

    Raises PluginError if a watch cannot be used here, and ValueError if it cannot observe as ``settings`` ask for. The
    messages have one line.
    """
    wanted = _wanted(settings, registry)
    _with_asked(wanted, registry, settings)
    for provider in wanted:
        watch: type[Watch] = registry.load(provider)
        watch.check(settings)


@contextlib.contextmanager
def watching(job: WatchedJob, registry: Registry, own: Sequence[Watch] = ()) -> Iterator[Watches]:
    """Return a context manager that yields the watches of ``job``: ``own``, and those that its settings ask for.

    The ranks must get ``Watches.settings``. The watches are closed at the end of the ``with`` block. If an exception
    leaves the block, they are told that this exception is the end of the job. Raises NotStarted if a watch cannot be
    built.
    """
    wanted = _wanted(job.settings, registry)
    built: list[Watch] = []
    try:
        check_watches(job.settings, registry)
        job = replace(job, settings=_with_asked(wanted, registry, job.settings))
        for provider in wanted:
            built.append(_built(provider, registry, job))
    except Exception as error:  # a plugin's watch may raise anything
        Watches(job.settings, built).close()
        expected = isinstance(error, (ValueError, OSError, PluginError))
        raise NotStarted(str(error) if expected else f"a watch cannot be built: {raised_at(error)}") from error
    watches = Watches(job.settings, [*own, *built])
    try:
        yield watches
    except BaseException as error:
        watches.over(-1, f"{type(error).__name__}: {error}")
        raise
    finally:
        watches.close()


def _wanted(settings: Settings, registry: Registry) -> list[WatchProvider]:
    return [one for one in registry.watches.values() if settings.get(one.setting)]


def _with_asked(wanted: Sequence[WatchProvider], registry: Registry, settings: Settings) -> Settings:
    """Return ``settings`` with those that the ``wanted`` watches ask for, which the user has not set.

    Raises ValueError, with a message of one line, if there is no such setting.
    """
    for provider in wanted:
        for name, value in provider.asks:
            if name not in settings:
                why = absent_setting(name, registry) or "no installed plugin has it"
                raise ValueError(f"the watch '{provider.name}' needs the setting {name}; {why}")
            if not settings[name]:
                settings = settings.changed({name: value}, "flag")
    return settings


def _built(provider: WatchProvider, registry: Registry, job: WatchedJob) -> Watch:
    watch: type[Watch] = registry.load(provider)
    try:
        return watch(job)
    except OSError as error:
        raise OSError(
            f"the watch '{provider.name}' ({provider.setting}={job.settings[provider.setting]}): {error}"
        ) from error
