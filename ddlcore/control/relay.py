"""Pass message frames between the ranks of an agent's host and the launcher, without reading the frames.

The agent gives its ranks the same things that the launcher would give them: a job file, keys, an ipc socket, and a
process whose end means the end of the job. The agent has only one connection to the launcher. This connection carries
the frames of the ranks and the agent's own messages.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable

import zmq

from ddlcore.control.beats import Beats
from ddlcore.control.credentials import Access, JobFile
from ddlcore.control.line import BROKEN, Refusals, open_dealer
from ddlcore.control.listener import Listener
from ddlcore.control.server import OWN, agent_name
from ddlcore.control.wake import Wake
from ddlcore.threads import OwnThread

_LINGER_MS = 1000  # time for the last messages to the launcher
_AGAIN_S = 0.05
_MOST_HELD = 1 << 14  # frames of ranks; each sends a few until the successor of a lost launcher has answered
_MOST_AT_ONCE = 1024  # frames from one side before the other side is served


class Relay:
    """A thread that passes frames between the launcher and the ranks that agent number ``index`` has started.

    ``access`` leads to the launcher. ``heard`` is called with each message of the launcher to the agent itself.
    ``gone`` is called once, with the reason, if the launcher is gone; it counts as gone after ``silence_s`` without a
    message, too. Both are called in the relay's thread. Set ``patient`` if the launcher may not know the agent's key
    yet: the relay then connects again and again until it hears from the launcher. One thread creates, starts and closes
    the relay; any thread may call ``say``, ``lose`` and ``join``.

    An agent whose launcher is gone may ``hold`` what its ranks send, and ``join`` a successor of the launcher.
    """

    def __init__(
        self,
        access: Access,
        index: int,
        *,
        heard: Callable[[bytes], None],
        gone: Callable[[str], None],
        silence_s: float,
        patient: bool = False,
    ) -> None:
        self._heard = heard
        self._gone = gone
        self._beats: Beats[str] = Beats(silence_s)
        self._said: deque[bytes] = deque()
        self._stopping = False
        self._over = False
        self._names: set[bytes] = set()  # connections of ranks that have sent something
        self._stale: set[bytes] = set()  # those of them that belong to a launcher that is gone
        self._held: list[list[bytes]] | None = None  # what ranks have sent to a successor that has not answered yet
        self._has_held = False  # whether the first launcher is lost
        self._farewell = b""  # what ranks were told then
        self._wishes: deque[Callable[[], None]] = deque()  # of other threads
        self._patient = patient  # until the launcher has sent something
        self._wake = Wake()
        self._listener = Listener()
        endpoint = self._listener.bind_within()
        self._job_file = JobFile(self._listener.access(endpoint))
        self.job_file = self._job_file.path
        self._unheard: list[bytes] = []  # messages that the launcher may not have received
        self._access, self._index = access, index
        self._token, self._attempts = secrets.token_hex(4), 0
        self._poller = zmq.Poller()
        self._listener.register(self._poller)
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        self._connect()
        self._thread = OwnThread(target=self._run, name="ddl-relay")

    def start(self) -> None:
        """Start the relay's thread. Call this only once."""
        self._thread.start()

    def say(self, data: bytes) -> None:
        """Send ``data``, a message of the agent itself, to the launcher. Returns at once. Any thread may call this."""
        self._said.append(data)
        self._wake.set()

    def lose(self, reason: str) -> None:
        """Take it that the first launcher is gone, for ``reason``. Any thread may call this; it returns at once.

        It has no effect after ``hold``: then the loss is known, and this relay may serve a successor already.
        """
        self._wishes.append(lambda: None if self._has_held else self._end(reason))
        self._wake.set()

    def hold(self, farewell: bytes) -> None:
        """Send ``farewell`` to each rank that is connected to the coordinator, and keep what ranks send from now on.

        Nothing that they send on their present connections counts any more. Call it within ``gone``.
        """
        self._held, self._has_held, self._farewell = [], True, farewell
        for name in self._names:
            if name.startswith(b"c"):
                self._listener.send([name, farewell])
        self._stale |= self._names
        self._names.clear()

    def join(self, access: Access, first: bytes) -> None:
        """Connect to a successor of the launcher by ``access``, and send ``first`` before anything else.

        Connects again and again until the successor has sent something. What ranks have sent is passed on when the
        successor has answered with more than a heartbeat. Any thread may call this, after ``hold``; it returns at once.
        A further call takes the place of the one before.
        """
        self._wishes.append(lambda: self._join(access, first))
        self._wake.set()

    def close(self) -> None:
        """Remove the job file, and stop the thread. The ranks then notice that their connection has ended.

        The relay tries for at most one second to send its remaining messages to the launcher.
        """
        self._job_file.close()
        self._stopping = True
        self._wake.set()
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._listener.release()
            self._wake.close()

    # --- the connection to the launcher

    def _connect(self) -> None:
        context = self._listener.context
        name = agent_name(self._index, self._token, self._attempts)
        events = f"inproc://{name.decode()}"
        self._attempts += 1
        self._upstream = open_dealer(context, self._access, name, beats=False)
        self._upstream.linger = _LINGER_MS
        self._upstream.monitor(events, BROKEN | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._refusals = Refusals(self._access.endpoint)
        self._events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._events.linger = 0
        self._events.connect(events)
        self._upstream.connect(self._access.endpoint)
        for source in (self._upstream, self._events):
            self._poller.register(source, zmq.POLLIN)

    def _disconnect(self) -> None:
        for source in (self._upstream, self._events):
            self._poller.unregister(source)
        self._upstream.disable_monitor()
        self._events.close()
        self._upstream.close()

    def _try_again(self) -> None:
        """Open a new connection to the launcher, because the launcher has refused the current connection.

        ZeroMQ does not connect again after a refusal. Messages that the launcher may not have received are sent again.
        """
        self._upstream.linger = 0  # otherwise the old connection might still send these messages, under its old name
        self._disconnect()
        time.sleep(_AGAIN_S)  # blocking does no harm: nothing else can happen before the launcher answers
        self._connect()
        if self._held is None:
            self._said.extendleft(reversed(self._unheard))
            self._unheard.clear()
        else:
            for data in self._unheard:
                self._send_up([OWN, data])

    def _join(self, access: Access, first: bytes) -> None:
        if self._held is None:  # the one before has answered after all, and may have what ranks have sent
            self.hold(self._farewell)
        self._upstream.linger = 0
        self._disconnect()
        self._access = access
        self._beats = Beats(self._beats.silence_s)
        self._over, self._patient = False, True
        self._unheard = [first]
        self._connect()
        self._send_up([OWN, first])

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._poller.poll(self._patience_ms())
                self._wake.clear()
                while self._wishes:
                    self._wishes.popleft()()
                self._listener.let_in()
                self._downward()
                self._upward()
                self._keep_beat(time.monotonic())
            self._upward()
        except Exception as error:  # otherwise the agent would wait forever for replies that nothing reads
            self._end(f"what it said could not be followed ({error})")
        finally:
            self._disconnect()
            self._listener.close_sockets()

    def _patience_ms(self) -> int:
        deadline_s = self._beats.deadline_s()
        return 1000 if deadline_s is None else max(math.ceil((deadline_s - time.monotonic()) * 1000), 0)

    def _downward(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(_MOST_AT_ONCE):
                frames = self._upstream.recv_multipart(zmq.NOBLOCK)
                if self._over:
                    continue  # nothing counts that a launcher says after its loss
                self._beats.heard("launcher", time.monotonic())
                self._patient = False
                if frames[0] != OWN or frames[-1]:  # a successor's heartbeat does not say that it takes this agent over
                    self._let_go()
                if frames[0] != OWN:
                    self._listener.send(frames)
                elif frames[-1]:
                    self._heard(frames[-1])
        with contextlib.suppress(zmq.Again):
            head, where = self._events.recv_multipart(zmq.NOBLOCK)
            event = int.from_bytes(head[:2], sys.byteorder)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._refusals.heard()
                return
            if self._patient:
                self._try_again()
                return
            if self._refusals.forgive(event):
                return
            closed = event == zmq.EVENT_DISCONNECTED
            self._end(f"it {'closed the connection' if closed else 'does not admit this agent'} at {where.decode()}")

    def _upward(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(_MOST_AT_ONCE):
                self._take(self._listener.receive())
        while self._said and self._held is None:
            said = self._said.popleft()
            if self._patient:
                self._unheard.append(said)
            self._send_up([OWN, said])

    def _take(self, frames: list[bytes]) -> None:
        """Pass on ``frames``, which a rank has sent; while there is no launcher, keep them."""
        if frames[0] in self._stale:
            return
        self._names.add(frames[0])
        if self._held is None:
            self._send_up(frames)
        elif len(self._held) < _MOST_HELD:
            self._held.append(frames)

    def _let_go(self) -> None:
        held, self._held = self._held or [], None
        for frames in held:
            self._send_up(frames)

    def _send_up(self, frames: list[bytes]) -> None:
        if not self._over:
            with contextlib.suppress(zmq.Again):  # the connection was refused, which the next event will report
                self._upstream.send_multipart(frames, zmq.NOBLOCK)

    def _keep_beat(self, now_s: float) -> None:
        for _ in self._beats.due(now_s):
            self._send_up([OWN, b""])
        for _ in self._beats.silent(now_s):
            self._end(f"no message from it for {self._beats.silence_s:g} s")

    def _end(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self._gone(reason)
