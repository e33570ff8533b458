"""The process that serves the page: who is let in, what goes over its stream, and that it ends with its launcher."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from ddl_dashboard import records
from ddl_dashboard.job_page import JobPage
from ddl_doctor.reports import to_send

from ddlcore.launch.ranks.exit_status import End
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_coordinator import Bye, Hello
from ddlcore.messages.to_rank import Welcome
from plugins.ddl_dashboard.tests.pretend import PretendJob, watched

pytestmark = pytest.mark.processes
ROOT = Path(__file__).resolve().parents[3]
PATHS = ("/", "/page.js", "/page.css", "/charts.js", "/stream", "/nothing")


@pytest.fixture
def begin() -> Iterator[Callable[..., JobPage]]:
    """``begin(dashboard="auto")``: a page of a job of four ranks; it is closed after the test."""
    begun: list[JobPage] = []

    def start(dashboard: str = "auto", hosts: tuple[str, ...] = ("node1", "node1", "node2", "node2")) -> JobPage:
        begun.append(JobPage(watched(dashboard, "python train.py", hosts)))
        return begun[-1]

    yield start
    for page in begun:
        page.close()


def get(url: str, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body. The stream is read up to its first event."""
    parts = urlsplit(url)
    line = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=20)
    with contextlib.closing(line):
        line.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = line.getresponse()
        streams = answer.headers.get_content_type() == "text/event-stream"
        body = answer.readline() if streams else answer.read()
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, body


class Stream:
    """An open page: ``next()`` is what it is told next; None after the end."""

    def __init__(self, url: str, **headers: str) -> None:
        parts = urlsplit(url)
        self._line = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=20)
        self._line.request("GET", "/stream", headers=headers)
        self._answer = self._line.getresponse()
        assert self._answer.status == 200

    def next(self) -> dict[str, Any] | None:
        while line := self._answer.readline():
            if line.startswith(b"data: "):
                data: dict[str, Any] = json.loads(line[6:])
                return data
        return None

    def until(self, wanted: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """The first state, of what it is told from now on, that is as ``wanted``."""
        for _ in range(200):
            data = self.next()
            assert data is not None, "the stream has ended"
            if wanted(data["now"]):
                now: dict[str, Any] = data["now"]
                return now
        raise AssertionError("it was not told that")

    def close(self) -> None:
        self._line.close()


def test_what_a_page_is_told(begin: Callable[..., JobPage]) -> None:
    """States of ranks, events, pulses, and the end; then the stream ends too."""
    page = begin()
    stream = Stream(page.url)
    first = stream.next()
    assert first is not None and first["first"]
    assert [rank["state"] for rank in first["now"]["ranks"]] in ([], ["starting"] * 4)
    hello = Hello(LaunchedRank(0), tuple(map(LaunchedRank, range(4))), 1, 2, "0.1.0", 1)
    page.passed(0, hello, [])
    now = stream.until(lambda now: now["ranks"][0]["state"] == "init")
    assert [rank["state"] for rank in now["ranks"]] == ["init", "starting", "starting", "starting"]
    page.passed(3, hello, [(rank, Welcome("world1")) for rank in map(LaunchedRank, range(4))])
    for record in PretendJob().pulses(1.0):
        assert isinstance(record, records.Heard)
        page.heard(record.rank, to_send(record.pulse))
    now = stream.until(lambda now: now["summary"]["memory_most"])
    assert [rank["state"] for rank in now["ranks"]] == ["running"] * 4
    page.said("stalled for more than 60 s in discovery:\n  tensor  ready on")
    page.passed(1, Bye("ended its script without shutdown()"), [])
    page.passed(2, Bye("raised ValueError: no"), [])
    page.rank_ended(End(LaunchedRank(2), 1, 0.0))
    page.rank_ended(End(LaunchedRank(3), -15, 0.0, stopped=True))
    now = stream.until(lambda now: now["ranks"][3]["state"] == "stopped")
    assert [(one["kind"], one["text"]) for one in now["events"]] == [
        ("warning", "stalled for more than 60 s in discovery:\n  tensor  ready on"),
        ("error", "rank 2 raised ValueError: no"),
        ("error", "rank 2 exited with code 1"),
    ]
    assert now["ranks"][2]["state"] == "failed"
    page.over(1)
    assert stream.until(lambda now: now["over"])["over"] == {"code": 1}
    assert stream.next() is None
    stream.close()


def test_local_pages_need_the_name_of_this_host(begin: Callable[..., JobPage]) -> None:
    """Else a page of the internet whose name leads to 127.0.0.1 could read everything."""
    page = begin()
    port = urlsplit(page.url).port
    for name in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "LOCALHOST:9", f"[::1]:{port}"):
        assert get(page.url, "/", Host=name)[0] == 200, name
    for name in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "", "127.0.0.1.nip.io:80", ":80"):
        for path in PATHS:
            status, _, body = get(page.url, path, Host=name)
            assert (status, len(body) < 100) == (421, True), (name, path)


def test_other_pages_need_the_token(begin: Callable[..., JobPage]) -> None:
    """Nothing is answered without it, not even a file; with it the browser gets a cookie, and a plain address."""
    page = begin("0.0.0.0:0")
    parts = urlsplit(page.url)
    url = f"http://127.0.0.1:{parts.port}"
    token = parts.query.partition("=")[2]
    assert len(token) >= 32
    for path in (*PATHS, "/?token=", f"/?token={token[:-1]}", f"/?token={token}x", "/?token=%ff%00", "/stream?token=x"):
        status, _, body = get(url, path)
        assert (status, len(body) < 100) == (401, True), path
    for cookie in ("", "a=b", f"ddl-dashboard-{parts.port}=", f"ddl-dashboard-{parts.port}=x", "=;;\x01"):
        assert get(url, "/stream", Cookie=cookie)[0] == 401, cookie
    status, headers, _ = get(url, f"/?token={token}")
    assert (status, headers["location"]) == (303, "/")
    assert "httponly" in headers["set-cookie"].lower() and "samesite=lax" in headers["set-cookie"].lower()
    cookie = headers["set-cookie"].partition(";")[0]
    assert get(url, "/", Cookie=cookie, Host="any.name")[0] == 200
    assert get(url, "/stream", Cookie=f"a=b; {cookie}")[2].startswith(b"data: ")


@pytest.mark.parametrize("dashboard", ["auto", "0.0.0.0:0"])
def test_headers_of_every_answer(dashboard: str, begin: Callable[..., JobPage]) -> None:
    """No script but ours, no frame, nothing guessed from content, nothing kept but the charts' library."""
    page = begin(dashboard)
    parts = urlsplit(page.url)
    cookie = get(page.url, f"/?{parts.query}")[1].get("set-cookie", "").partition(";")[0]
    for path in PATHS:
        status, headers, _ = get(f"http://127.0.0.1:{parts.port}", path, Cookie=cookie)
        assert status == (404 if path == "/nothing" else 200)
        policy = headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self';" in policy and "unsafe-eval" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == ("private, max-age=86400" if path == "/charts.js" else "no-store")
        assert "server" not in headers


def test_the_page_can_only_be_read(begin: Callable[..., JobPage]) -> None:
    page = begin()
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert get(page.url, "/", method)[0] == 405
    assert get(page.url, "/", "HEAD")[0] == 200


def test_the_charts_come_from_the_wheel(begin: Callable[..., JobPage]) -> None:
    """Compressed for whom it helps; nothing of the page names another host."""
    page = begin()
    plain = get(page.url, "/charts.js")[2]
    packed = get(page.url, "/charts.js", Accept_Encoding="gzip")
    assert b"plotly" in plain[:500].lower() and len(plain) > 1 << 20
    assert packed[1]["content-encoding"] == "gzip" and len(packed[2]) < len(plain) / 2
    for path in ("/", "/page.js", "/page.css"):
        assert b"//" not in get(page.url, path)[2].replace(b"// ", b""), path


def test_a_flood_of_connections(begin: Callable[..., JobPage]) -> None:
    """Whoever opens many and says nothing keeps nobody from the page."""
    page = begin()
    parts = urlsplit(page.url)
    stream = Stream(page.url)
    idle: list[socket.socket] = []
    try:
        for number in range(300):
            idle.append(socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20))
            if number % 100 == 99:
                assert get(page.url)[0] == 200
        assert stream.next() is not None and stream.next() is not None, "an open page stays open"
    finally:
        for one in idle:
            one.close()
        stream.close()


def test_too_many_open_pages(begin: Callable[..., JobPage]) -> None:
    """The next one is told to come back; a place becomes free when one is closed."""
    page = begin()
    streams = [Stream(page.url) for _ in range(16)]
    assert get(page.url, "/stream")[0] == 503
    for stream in streams:
        stream.close()
    deadline_s = time.monotonic() + 20
    while get(page.url, "/stream")[0] != 200:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_a_page_that_is_closed_is_gone(begin: Callable[..., JobPage]) -> None:
    """No process, no port, no thread; a second job may have the same port at once."""
    page = begin()
    port = urlsplit(page.url).port
    stream = Stream(page.url)
    assert stream.next() is not None
    page.over(0)
    page.close()
    assert stream.until(lambda now: now["over"])["over"] == {"code": 0}
    assert page._process.returncode == 0
    assert [thread for thread in threading.enumerate() if thread.name == "ddl-page"] == []
    assert not _is_open(page.url)
    begin(str(port))
    stream.close()


def test_a_process_that_dies_does_not_end_the_job(begin: Callable[..., JobPage]) -> None:
    """The user is told once."""
    page = begin()
    said: list[str] = []
    assert page.open(said.append) == f"live page: {page.url}"
    assert get(page.url)[0] == 200
    page._process.kill()
    page._process.wait()
    deadline_s = time.monotonic() + 20
    while not said:
        page.said("something")
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    page.said("something else")
    page.close()
    assert said == ["the live page is gone, the job goes on: exit code -9"]


def _is_open(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=1).close()
    except ConnectionRefusedError:
        return False
    return True


LAUNCHER = """
import os, sys, time
from ddl_dashboard.job_page import JobPage
from ddlcore.launch.job.watch import WatchedJob
from ddlcore.plug.settings import settings_of
settings, _ = settings_of({}, {"dashboard": "auto"})
page = JobPage(WatchedJob(settings, "python train.py", ("node1",)))
if os.fork():  # the child holds the launcher's end of the pipe, as a process of the user's might
    print(page.url, flush=True)
time.sleep(3600)
"""


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """Not even if another process holds the pipe; an open page is told."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert launcher.stdout is not None
    url = launcher.stdout.readline().strip()
    stream = Stream(url)
    assert stream.next() is not None
    launcher.kill()
    launcher.wait()
    try:
        now = stream.until(lambda now: now["over"])
        assert now["over"] == {"code": -1}
        assert now["events"][-1]["text"].startswith("The launcher is gone")
        deadline_s = time.monotonic() + 20
        while _is_open(url):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.stdout.close()
        stream.close()


@pytest.mark.parametrize("name", ["queue.py", "json.py", "starlette.py"])
def test_the_users_directory_hides_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: Callable[..., JobPage]
) -> None:
    """A script of the user's may be called as a module that the process needs."""
    (tmp_path / name).write_text("raise SystemExit('the wrong one')\n")
    monkeypatch.chdir(tmp_path)
    assert get(begin().url)[0] == 200
