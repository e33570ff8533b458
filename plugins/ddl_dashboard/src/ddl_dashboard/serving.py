"""Serve the live page from a separate process. The process ends with the job, when the pipe from the launcher ends."""

from __future__ import annotations

import asyncio
import gzip
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from ddl_dashboard.guard import Guard
from ddl_dashboard.history import JobHistory
from ddl_dashboard.place import chart_library
from ddl_dashboard.records import JobBegin, Over, decoded

TURN_S = 0.5  # time between two updates of the open pages
MOST_STREAMS = 16  # at most so many pages are open at one time
MOST_CONNECTIONS = 64
REQUEST_S = 5.0  # time for the first request of a connection to arrive
_LAST_S = 1.0  # time for the last update of the open pages, which says that the job has ended
_LONGEST_LINE = 64 << 20
_LARGEST_HEAD = 16 << 10
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_CHARTS_FOR = "private, max-age=86400"  # a browser may store the library of the charts for a day


class Site:
    """The web application: serves the files of the page, and a stream of server-sent events to each open page."""

    def __init__(self, history: JobHistory, clock: Callable[[], float] = time.time) -> None:
        self._history = history
        self._clock = clock
        self._turned = asyncio.Event()
        self._now = b"{}"
        self._charts: bytes | None = None
        self.streams = 0
        self.turn()

    def app(self) -> Starlette:
        """Return the application for the web server."""
        routes = [Route(path, self._file) for path in _FILES]
        return Starlette(routes=[*routes, Route("/charts.js", self._chart_file), Route("/stream", self._stream)])

    def turn(self) -> None:
        """Send the present state of the job, and the new points of the charts, to all open pages."""
        now_s = self._clock()
        self._history.tick(now_s)
        self._now = msgspec.json.encode(self._history.now(now_s))
        turned, self._turned = self._turned, asyncio.Event()
        turned.set()

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Read the launcher's records and pass them to the history, until the last record or the end of the pipe."""
        while not isinstance(self._history.over, Over):
            line = await reader.readline()
            if not line:
                self.end()
                return
            self._history.take(decoded(line), self._clock())
        self.turn()

    def end(self) -> None:
        """Send a last update to all open pages.

        If the launcher has not sent how the job ended, the update says that the launcher is gone.
        """
        if self._history.over is None:
            self._history.take(Over(-1, "The launcher is gone, so nothing more is known of the job."), self._clock())
        self.turn()

    async def _file(self, request: Request) -> Response:
        name, kind = _FILES[request.url.path]
        return Response((Path(__file__).parent / "page" / name).read_bytes(), media_type=kind)

    async def _chart_file(self, request: Request) -> Response:
        file = chart_library()
        if file is None:
            return PlainTextResponse("plotly is not installed any more\n", 404)
        headers = {"cache-control": _CHARTS_FOR, "vary": "accept-encoding"}
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(file.read_bytes(), media_type="text/javascript", headers=headers)
        if self._charts is None:
            self._charts = await run_in_threadpool(lambda: gzip.compress(file.read_bytes(), 5))
        return Response(self._charts, media_type="text/javascript", headers={**headers, "content-encoding": "gzip"})

    async def _stream(self, request: Request) -> Response:
        if self.streams >= MOST_STREAMS:
            return PlainTextResponse("Too many pages are open.\n", 503, {"retry-after": "5"})
        return StreamingResponse(self._events(request), media_type="text/event-stream")

    async def _events(self, request: Request) -> AsyncIterator[bytes]:
        """Yield an event for each update: the present state, and the points since the last event of this stream.

        The first event contains all points. If a page reads slowly, it gets fewer events, each with more points, so no
        queue of events grows.
        """
        self.streams += 1
        try:
            made = -1
            while True:
                turned = self._turned
                points, reached = self._history.points_after(max(made, 0))
                first, made = b"true" if made < 0 else b"false", reached
                yield b'data: {"first":%b,"points":%b,"now":%b}\n\n' % (first, msgspec.json.encode(points), self._now)
                if self._history.over is not None:
                    return
                await turned.wait()
                if await request.is_disconnected():
                    return
        finally:
            self.streams -= 1


class BrowserConnection(H11Protocol):
    """A connection of a browser with the server.

    If there are more than MOST_CONNECTIONS, the oldest connection without a request in progress is closed. A connection
    is also closed if its first request does not arrive within REQUEST_S seconds.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.began_s = time.monotonic()
        connections: Any = self.connections
        if len(connections) > MOST_CONNECTIONS:
            idle = [one for one in connections if one.cycle is None or one.cycle.response_complete]
            min(idle, key=lambda one: one.began_s).transport.abort()
        self.loop.call_later(REQUEST_S, self._end_if_silent)

    def _end_if_silent(self) -> None:
        cycle: Any = self.cycle  # the library's annotation leaves out that it is None before the first request
        if cycle is None and not self.transport.is_closing():
            self.transport.abort()


async def serve(listening: socket.socket, reader: asyncio.StreamReader) -> None:
    """Serve the page at the socket ``listening`` until the launcher's records, read from ``reader``, have ended.

    Raises ValueError if the first record is not a JobBegin.
    """
    begin = decoded(await reader.readline())
    if not isinstance(begin, JobBegin):
        raise ValueError("the first record does not say what the job is")
    site = Site(JobHistory(begin))
    server = uvicorn.Server(
        uvicorn.Config(
            Guard(site.app(), begin.token, listening.getsockname()[1]),
            http=BrowserConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=_LARGEST_HEAD,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    reading = asyncio.create_task(site.read(reader))
    launcher = os.getppid()
    while not reading.done() and not serving.done():
        await asyncio.wait({reading, serving}, timeout=TURN_S, return_when=asyncio.FIRST_COMPLETED)
        if os.getppid() != launcher:  # another process may still hold the launcher's end of the pipe
            site.end()
            break
        site.turn()
    until_s = time.monotonic() + _LAST_S
    while site.streams and time.monotonic() < until_s:
        await asyncio.sleep(0.02)
    server.should_exit = True
    reading.cancel()
    await serving


async def _run(fd: int) -> None:
    reader = asyncio.StreamReader(limit=_LONGEST_LINE)
    pipe = sys.stdin.buffer
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    await serve(socket.socket(fileno=fd), reader)


def main() -> None:
    """Run the process that serves the page.

    Its command-line argument is the file descriptor of the listening socket. It reads the records from stdin.
    """
    asyncio.run(_run(int(sys.argv[1])))
