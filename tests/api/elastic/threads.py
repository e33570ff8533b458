"""Elastic jobs whose processes are threads: each can be killed, and another one can be started in its place."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ddlcore import api
from ddlcore.control.local import LocalNetwork
from ddlcore.errors import Closed
from ddlcore.launch.job.history import History
from ddlcore.launch.job.network import ObservedCoordinator
from ddlcore.launch.ranks.exit_status import End
from ddlcore.messages.elastic import NextWorld
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.plug.settings import settings_of
from ddlcore.process.build import build_membership, build_sessions
from ddlcore.process.elastic_member import ElasticMember, JobBeforeWorld
from ddlcore.process.job import Job
from ddlcore.process.world_place import WorldPlace
from ddlcore.types import Placement

DEADLINE_S = 60.0
PATIENCE: Mapping[str, object] = {"start_timeout_s": 40.0, "open_timeout_s": 40.0, "leave_timeout_s": 5.0}


class Killed(BaseException):
    """Raised in a thread that ends as a killed process does: without a word. ``again``: another one is started."""

    def __init__(self, again: bool = False) -> None:
        self.again = again


class ElasticThreads:
    """An elastic job of ``size`` places. ``run(place)`` is what each thread does; its results are in ``results``."""

    def __init__(
        self,
        size: int,
        run: Callable[[int], Any],
        least: int = 1,
        backend: str = "threads",
        hosts: tuple[int, ...] | None = None,
        **settings: object,
    ) -> None:
        given = {"backend": backend, "min_np": least, **PATIENCE, **settings}
        self.settings, self._registry = settings_of(os.environ, given)
        self.hosts = hosts or (0,) * size
        self.membership = build_membership(self.hosts, self.settings)
        sessions = build_sessions(size, self.settings, self._registry, membership=self.membership)
        self.said: list[str] = []  # what the user is told about worlds
        self.history = History(self.said.append)
        log = ObservedCoordinator(sessions, sessions.dead, history=self.history)
        self.network = LocalNetwork(size, log)
        self._run = run
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.results: dict[int, Any] = {}  # by place, of its last thread
        self.deaths = 0

    def start(self, place: LaunchedRank, again: bool = False) -> None:
        """Start a thread at ``place``; ``again``: another one has ended there."""
        if again:
            self.network.rank_started(place)
        thread = threading.Thread(target=self._live, args=(place,), name=f"place-{place}", daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def play(self) -> dict[int, Any]:
        """Start all threads, wait until all have ended, and return their results."""
        for place in map(LaunchedRank, range(len(self.hosts))):
            self.start(place)
        done = 0
        while done < len(self._threads):  # more may be started meanwhile
            thread = self._threads[done]
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), f"{thread.name} has not ended within {DEADLINE_S:g} s"
            done += 1
        return self.results

    def _live(self, place: LaunchedRank) -> None:
        mute: list[bool] = []

        def network() -> Any:
            channel = self.network.channel(place)
            send = channel.send
            channel.send = lambda message: None if mute else send(message)  # type: ignore[method-assign]
            return channel, self.network.store(place)

        def in_world(world: NextWorld) -> Job:
            here = Placement(place, world.hosts)
            world_place = WorldPlace(here, world.members, world.generation, elastic=True)
            return Job(world_place, network, self._registry, self.settings)

        world_place = WorldPlace(Placement(place, self.hosts), tuple(map(LaunchedRank, range(len(self.hosts)))), 0)
        before = JobBeforeWorld(world_place, network, self._registry, self.settings)
        before.start()
        again = False
        with api.use_job(before, ElasticMember(network, in_world)):
            try:
                self.results[place] = self._run(place)
                reason = "exited with code 0"
            except Killed as killed:
                self.deaths += 1
                again = killed.again
                reason = "killed by signal 9 (SIGKILL)"
            except BaseException as error:
                self.results[place] = error
                reason = "exited with code 1"
            present = api.current_job() if api.is_initialized() else None
            if not reason.startswith("killed"):
                if present is not None:
                    present.shutdown()
                self.network.rank_ended(place, reason)
                return
            mute.append(True)  # a process that was killed says nothing any more
            self.history.ended(End(place, -int(signal.SIGKILL), time.monotonic()))
            self.network.rank_ended(place, reason)
            if again:
                self.start(place, again=True)
            if present is not None and not isinstance(present, JobBeforeWorld):
                present._parts.end(lambda during: Closed("killed"))
                present.shutdown()
