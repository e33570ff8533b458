"""Connect a rank that another launcher has started with the other ranks and with their coordinator.

``ddl run`` sets environment variables that tell its ranks how to connect. Ranks that another launcher has started must
find the coordinator by themselves: rank 0 writes a file with its endpoints, and the other ranks look for that file.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence

import msgspec

from ddlcore.config.loading import Settings, load_settings
from ddlcore.contracts.cluster import RankInfo
from ddlcore.control.channel import Channel
from ddlcore.control.client import connect_with
from ddlcore.control.credentials import Access
from ddlcore.control.embedded_server import EmbeddedServer, listening_address
from ddlcore.control.ports import free_ports
from ddlcore.control.probe import answers, at, open_endpoints, split_endpoint
from ddlcore.control.rendezvous import Invitation, file_name, folders, has_ended, look
from ddlcore.control.store import JobStore
from ddlcore.control.surroundings import host_name, kin
from ddlcore.coordinator.sessions import Sessions
from ddlcore.errors import DdlInternalError, DeadlineExceeded, PeerLost, PluginError
from ddlcore.messages.ranks import LaunchedRank, WorldRank
from ddlcore.messages.to_coordinator import Arrive, ToCoordinator
from ddlcore.messages.to_rank import Arrivals, FromCoordinator, Lost, Refused
from ddlcore.plug.registry import Registry
from ddlcore.process.build import build_sessions
from ddlcore.process.environment import Environment
from ddlcore.process.job import Job
from ddlcore.process.search import build_search_driver
from ddlcore.process.world_place import WorldPlace
from ddlcore.types import Placement

log = logging.getLogger("ddl")
LOOPBACK = "127.0.0.1"
_COORDINATOR = "the coordinator in the process of rank 0"  # rank 0 of the launch
_LOOK_S = (0.01, 0.5)  # pauses between two searches for the file: the first, and the longest
_ANSWER_S = 3.0  # how long an endpoint may take to prove that it knows the keys; another program cannot prove that
_REMIND_S = 1.0  # a rank that waits for the other ranks repeats its Arrive after each such interval


class ExternalRank:
    """A process that another launcher has started as one of several ranks. Only one thread may use this object."""

    def __init__(
        self, cluster: str, rank_info: RankInfo, settings: Settings, registry: Registry, environ: Mapping[str, str]
    ) -> None:
        """Prepare to find the other ranks.

        ``cluster``: the name of the launcher that has started this process. ``rank_info``: the rank, size and host that
        this launcher has given to the process. ``environ``: the environment variables of this process. Raises
        ValueError if the launcher gives this launch no name and the setting ``rendezvous_dir`` is empty.
        """
        wanted = settings.text("rendezvous_dir")
        if not rank_info.launch and not wanted:
            raise ValueError(
                f"started by {cluster} as rank {rank_info.rank} of {rank_info.size}, but nothing names this launch; "
                "set DDL_RENDEZVOUS_DIR to a directory that all its ranks share and no other launch uses"
            )
        self.rank_info = rank_info
        self._settings = settings
        self._registry = registry
        self._pid = os.getpid()
        known = (one.name for one in registry.launchers.values() if cluster in one.clusters)
        self._launched_by = next(known, "")  # some transports work only if their own launcher has started the ranks
        self._token = secrets.token_hex(8)
        self._directories = folders(wanted, environ)
        self._name = file_name(cluster, rank_info.launch)
        self._embedded_server: EmbeddedServer | None = None
        self._access: Access | None = None
        self._address = self._via = ""  # both ends of the route to rank 0

    def job(self, ranks: tuple[LaunchedRank, ...] | None, ordinal: int) -> Job:
        """Wait until all ``ranks`` have arrived at the coordinator. Return this rank's Job, which is not started yet.

        ``ranks``: None means all ranks of the launch. ``ordinal``: how many times this rank has asked for a world of
        these ranks, including this call.

        Raises DeadlineExceeded if some of the ranks have not arrived after ``start_timeout_s``; the message names the
        ranks that have arrived and those that have not. Raises PeerLost if a rank dies while this rank waits. Raises
        DdlInternalError if there is no directory for the file by which the ranks find each other.
        """
        chosen = tuple(map(LaunchedRank, range(self.rank_info.size))) if ranks is None else ranks
        channel, store, arrived = self._join(chosen, time.monotonic() + self._start_timeout_s)
        hosts = _host_indexes(self.rank_info.size, arrived)
        placement = Placement(self.rank_info.rank, hosts)
        addresses = _addresses(arrived, hosts)
        if ranks is None:
            ports = [arrived[rank].ports for rank in chosen]
            Environment.announce(placement, ports, list(addresses.values()), bool(self._settings["torch_env"]))
            self._compare(placement)
        own = addresses[self.rank_info.rank] if len(set(hosts)) > 1 else ""
        coordinator = (
            WorldRank(chosen.index(LaunchedRank(0))) if 0 in chosen and self.rank_info.rank != 0 else WorldRank(-1)
        )
        world_place = WorldPlace(placement, chosen, ordinal, address=own, launched_by=self._launched_by)
        return Job(world_place, lambda: (_ExternalChannel(channel, coordinator), store), self._registry, self._settings)

    def close(self, reason: str, patient: bool) -> None:
        """Close the coordinator if it runs in this process (rank 0). Call this at the end of the process.

        ``reason``: why this process ends; the other ranks are informed of it. ``patient``: first wait until the other
        ranks have left, because they need the coordinator.
        """
        if self._embedded_server is not None and os.getpid() == self._pid:
            self._embedded_server.close(reason, patient)
            self._embedded_server = None

    # --- reaching rank 0

    def _join(
        self, ranks: Sequence[LaunchedRank], deadline_s: float
    ) -> tuple[Channel, JobStore, dict[LaunchedRank, Arrive]]:
        """Connect to the coordinator, and wait until all ``ranks`` have arrived.

        Return the channel to the coordinator, the store, and the Arrive of each rank. ``deadline_s``: the time of
        ``time.monotonic()`` at which to give up.
        """
        while True:
            channel, store = connect_with(self._reach(deadline_s), self.rank_info.rank, _COORDINATOR)
            try:
                return channel, store, self._meet(channel, ranks, deadline_s)
            except _Taken as taken:
                self._access = None  # this coordinator belongs to another launch of the same name; ours has not begun
                channel.close()
                store.close()
                if self._embedded_server is not None or time.monotonic() > deadline_s:
                    raise DdlInternalError(
                        f"init: {taken}, for another launch of the same name ({self._name}); "
                        "set DDL_RENDEZVOUS_DIR to another directory for one of them"
                    ) from None
                time.sleep(_LOOK_S[1])
            except BaseException:
                channel.close()
                store.close()
                raise

    def _reach(self, deadline_s: float) -> Access:
        if self._access is None:
            if self.rank_info.rank == 0:
                invitation = self._invite(deadline_s)
                self._access = at(invitation.access, invitation.endpoints[-1])  # the last endpoint is for this host
            else:
                self._access = self._find(deadline_s)
        return self._access

    def _invite(self, deadline_s: float) -> Invitation:
        settings = self._settings
        address = settings.text("control_address") or listening_address(
            settings.text("network_interface"), self.rank_info.on_one_host
        )
        self._embedded_server = EmbeddedServer(self.rank_info.size, self._sessions(settings), address, deadline_s)
        try:
            self._embedded_server.publish(self._directories, self._name, deadline_s - time.monotonic())
        except BaseException:
            self.close("it did not begin", patient=False)
            raise
        return self._embedded_server.invitation

    def _sessions(self, settings: Settings) -> Sessions:
        """Return the coordinator's side of this launch.

        If a setting that only rank 0 uses is invalid, return sessions that refuse every rank. If rank 0 raised an
        exception instead of this, the other ranks would wait for rank 0 in vain.
        """
        driver = None
        try:
            if settings["autotune"]:  # the tuner takes time from this rank's process; with `ddl run` it does not
                hosts = (0,) * self.rank_info.size if self.rank_info.on_one_host else None
                driver = build_search_driver(settings, self._registry, hosts)
            return build_sessions(self.rank_info.size, settings, self._registry, driver)
        except (ValueError, PluginError, OSError) as error:
            return build_sessions(self.rank_info.size, load_settings({}), self._registry, refuses=str(error))

    def _find(self, deadline_s: float) -> Access:
        """Wait for a file in which rank 0 publishes its endpoints. Return the keys for one endpoint that answers.

        A file is skipped if the process that wrote it has ended or does not answer. Raises DeadlineExceeded if no
        endpoint has answered by ``deadline_s``, a time of ``time.monotonic()``.
        """
        pause_s, own, why = _LOOK_S[0], kin(), ""
        while True:
            found, refused = look(self._directories, self._name)
            for invitation in found:
                if has_ended(invitation, own):
                    why = f"process {invitation.pid} on {invitation.host}, which wrote it, has ended"
                    continue
                for endpoint, address in open_endpoints(invitation.endpoints):
                    access = at(invitation.access, endpoint)
                    if answers(access, self.rank_info.rank, _ANSWER_S):
                        self._address = address
                        self._via = split_endpoint(endpoint)[0] if address else ""
                        return access
                why = f"nobody answers at {', '.join(invitation.endpoints)} for rank 0 on {invitation.host}"
            why = refused[0] if refused else why
            if time.monotonic() > deadline_s:
                where = " or ".join(str(one / self._name) for one in self._directories)
                raise DeadlineExceeded(
                    f"init: rank {self.rank_info.rank} has not found rank 0 within {self._start_timeout_s:g} s "
                    f"(DDL_START_TIMEOUT_S): {why or 'it has not called init'}; it was to write {where}: "
                    "if hosts share neither, set DDL_RENDEZVOUS_DIR to a directory that they share"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S[1])

    # --- meeting the others

    def _meet(self, channel: Channel, ranks: Sequence[LaunchedRank], deadline_s: float) -> dict[LaunchedRank, Arrive]:
        """Wait until all ``ranks`` have arrived, and return the Arrive of each rank.

        Raises DeadlineExceeded if some ranks have not arrived at the time ``deadline_s``, or earlier if the deadline of
        another waiting rank has passed. The message names the ranks that have not arrived.
        """
        arrive = self._arrive(ranks)
        arrivals: Arrivals | None = None
        while arrivals is None and (left_s := deadline_s - time.monotonic()) > 0:
            channel.send(arrive)  # repeated, because another process with the same rank may have received the answer
            arrivals = self._listen(channel, ranks, min(_REMIND_S, left_s))
        if arrivals is None:
            channel.send(msgspec.structs.replace(arrive, patient=False, timeout_s=self._start_timeout_s))
            arrivals = self._listen(channel, ranks, _ANSWER_S)
        if arrivals is None:
            raise DeadlineExceeded(
                f"init: {_COORDINATOR} does not answer; waited {self._start_timeout_s:g} s (DDL_START_TIMEOUT_S); "
                "is that process stopped, or busy in native code?"
            )
        came = dict(arrivals.arrived)
        missing = [rank for rank in ranks if rank not in came]
        if not missing:
            return came
        there = ", ".join(f"{rank} on {one.host.partition(':')[0]}" for rank, one in came.items())
        waited_s = arrivals.gave_up_s or self._start_timeout_s
        raise DeadlineExceeded(
            f"init: rank {', '.join(map(str, missing))} has not called init within {waited_s:g} s "
            f"(DDL_START_TIMEOUT_S); these have: rank {there}"
        )

    @property
    def _start_timeout_s(self) -> float:
        return self._settings.number("start_timeout_s")

    def _arrive(self, ranks: Sequence[LaunchedRank]) -> Arrive:
        return Arrive(
            token=self._token,
            ranks=tuple(ranks),
            host=f"{self.rank_info.host}:as its launcher calls it" if self.rank_info.host else host_name(),
            kin=kin(),
            pid=os.getpid(),
            address=self._address,
            via=self._via,
            ports=tuple(free_ports(2)),
        )

    def _listen(self, channel: Channel, ranks: Sequence[LaunchedRank], timeout_s: float) -> Arrivals | None:
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            for message in channel.receive(left_s):
                if isinstance(message, Arrivals):
                    return message
                if isinstance(message, Lost):
                    lost = tuple(ranks.index(sorted(ranks)[at]) for at in message.ranks)  # ordered as ``ranks``
                    raise PeerLost(lost, message.reason, "init")
                if isinstance(message, Refused):
                    raise _Taken(message.text)
        return None

    def _compare(self, placement: Placement) -> None:
        said = self.rank_info.local_rank
        if said is not None and said != placement.local_rank:
            log.warning(
                "rank %d: its launcher says local rank %d, but its position among the ranks of its host is %d",
                placement.rank,
                said,
                placement.local_rank,
            )


class _Taken(Exception):
    """Raised if another process with the same rank as this process has already arrived at the coordinator."""


def _host_indexes(size: int, arrived: Mapping[LaunchedRank, Arrive]) -> tuple[int, ...]:
    """Return the host index of each rank, shape (size,). Hosts are numbered in the order of their lowest ranks.

    A rank that has not arrived counts as the only rank of a separate host.
    """
    numbers: dict[str, int] = {}
    names = [arrived[rank].host if rank in arrived else f"rank {rank}" for rank in map(LaunchedRank, range(size))]
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def _addresses(arrived: Mapping[LaunchedRank, Arrive], hosts: Sequence[int]) -> dict[int, str]:
    """Return, for each rank that has arrived, the address of the rank's host. The dict is in the order of the ranks.

    A host may have several addresses. For rank 0's host, return the address by which ranks on other hosts have reached
    it. If all ranks are on one host, all addresses are the loopback address.
    """
    if len({hosts[rank] for rank in arrived}) == 1:
        return dict.fromkeys(sorted(arrived), LOOPBACK)
    home = next((one.via for rank, one in sorted(arrived.items()) if hosts[rank] != hosts[0]), "")
    return {rank: home if hosts[rank] == hosts[0] else one.address for rank, one in sorted(arrived.items())}


class _ExternalChannel(Channel):
    """A channel that reports the loss of a rank if the connection to the coordinator is closed.

    The coordinator runs in the process of the launch's rank 0, so a closed connection means that this process is lost.
    ``rank`` is the number of that process in this world. It is -1 if that process is not in this world, or if that
    process is this process. Then a closed connection is not reported as a lost rank, but raises the error of
    ``channel``.
    """

    def __init__(self, channel: Channel, rank: WorldRank) -> None:
        self._channel = channel
        self._rank = rank

    def send(self, message: ToCoordinator) -> None:
        self._channel.send(message)

    def receive(self, timeout_s: float) -> list[FromCoordinator]:
        try:
            return self._channel.receive(timeout_s)
        except DdlInternalError as error:
            if self._rank < 0:
                raise
            rank, self._rank = self._rank, WorldRank(-1)
            return [Lost((rank,), str(error))]

    def wake(self) -> None:
        self._channel.wake()

    def close(self) -> None:
        self._channel.close()
