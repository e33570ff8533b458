"""The live page in a browser: headless Chromium, told of a pretended job or of a real one."""

from __future__ import annotations

import re
import shutil
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

from ddlcore.messages.elastic import WorldReport
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_coordinator import Bye, Hello
from ddlcore.messages.to_rank import Welcome
from plugins.ddl_dashboard.tests.pretend import HOSTILE, PretendJob, watched
from tests.launch.conftest import begin, begun
from tests.launch.starting import Begin

__all__ = ["begin", "begun"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("no Chromium is installed (Debian: apt-get install chromium)", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")

pytestmark = [pytest.mark.processes]
PHONE = {"width": 360, "height": 740}
PULSE_S = 1.0


class Told:
    """A page that is told of a pretended job once a second, by a thread."""

    def __init__(self, job: PretendJob, dashboard: str = "auto") -> None:
        self.job = job
        self.page = JobPage(watched(dashboard, job.begin.title, job.hosts))
        self.url = self.page.url
        size = len(job.hosts)
        hello = Hello(LaunchedRank(0), tuple(map(LaunchedRank, range(size))), 1, 2, "0.1.0", 1)
        self.page.passed(0, hello, [(rank, Welcome("world1")) for rank in map(LaunchedRank, range(size))])
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        for at_s in range(1, 15):  # what a job has told that has run for a while
            self._tell(float(at_s))
        self._thread.start()

    def _tell(self, at_s: float) -> None:
        for record in self.job.pulses(at_s):
            assert isinstance(record, records.Heard)
            self.page.heard(record.rank, to_send(record.pulse))

    def _run(self) -> None:
        begun_s = time.monotonic() - 14.0
        while not self._end.wait(PULSE_S):
            self._tell(time.monotonic() - begun_s)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self.page.close()


@pytest.fixture
def told() -> Iterator[Callable[..., Told]]:
    made: list[Told] = []

    def make(job: PretendJob | None = None, dashboard: str = "auto") -> Told:
        made.append(Told(job or PretendJob(), dashboard))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """``opened(url, **of the browser's context)``: the page, drawn; what the browser complains of fails the test."""
    complaints: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])

        def open_page(url: str, **context: Any) -> Any:
            tab = browser.new_context(**context).new_page()
            tab.set_default_timeout(80_000)
            host = urlsplit(url).netloc
            tab.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
            tab.on("pageerror", lambda error: complaints.append(str(error)))
            tab.on("request", lambda one: complaints.append(one.url) if urlsplit(one.url).netloc != host else None)
            tab.goto(url)
            tab.wait_for_selector("#ranks tbody tr[data-rank]")
            return tab

        yield open_page
        browser.close()
    assert complaints == []


def until(tab: Any, condition: str) -> None:
    """Waits until the expression is true in the page. The page's policy forbids that Playwright itself does this there."""
    deadline_s = time.monotonic() + 80
    while not tab.evaluate(condition):
        assert time.monotonic() < deadline_s, f"waited in vain for {condition}"
        time.sleep(0.05)


def drawn(tab: Any) -> None:
    """Waits for the charts."""
    until(tab, "document.querySelectorAll('.chart .main-svg').length >= 4")


BEYOND = """
[...document.querySelectorAll('main *, header *')]
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1 && !one.closest('pre.table, svg'))
  .map((one) => one.outerHTML.slice(0, 120))
"""


def tells_without_colour(tab: Any) -> None:
    """Asserts that lines have dashes of their own, areas have patterns, bars have patterns, and bars have figures."""
    traces = "document.getElementById('chart-{}').data.map(one => one.{})"
    dashes = tab.evaluate(traces.format("links", "line.dash"))
    assert len(dashes) == len(set(dashes)) == 4
    patterns = tab.evaluate(traces.format("parts", "fillpattern.shape"))
    assert len(patterns) == len(set(patterns)) == 3
    image = "getComputedStyle(document.querySelector('.bar .{}')).backgroundImage"
    images = [tab.evaluate(image.format(name)) for name in ("compute", "exposed", "input")]
    assert len(set(images)) == 3
    assert tab.inner_text("#ranks tr[data-rank='0'] .bar-text") == "70 % · 20 % · 10 %"


@pytest.mark.slow("a browser starts")
def test_what_is_on_the_page(told: Callable[..., Told], opened: Callable[..., Any]) -> None:
    """Head, figures, four charts, ranks by host, links and events, without a request to anybody else.

    All is told without colours, too. The page follows a system that becomes dark, and a window that becomes narrow.
    """
    one = told()
    one.page.said("first line")
    tab = opened(one.url)
    drawn(tab)
    assert tab.inner_text("h1") == "python train.py --epochs 90"
    assert tab.inner_text("#about").startswith("4 ranks on 2 hosts · since ")
    assert tab.inner_text("#status") == "● live"
    until(tab, "/steps\\/s/.test(document.getElementById('tiles').innerText)")
    tiles = tab.inner_text("#tiles")
    assert re.search(r"Communication\s+20 %", tiles) and re.search(r"Input\s+10 %", tiles)
    assert re.search(r"Memory\s+1\.50 GiB", tiles) and re.search(r"Ranks\s+4\s+of 4", tiles)
    hosts = tab.locator("tr.host").all_inner_texts()
    assert [host.split()[0] for host in hosts] == ["node1", "node2"]
    rows = tab.locator("#ranks tr[data-rank]").all_inner_texts()
    assert len(rows) == 4 and all("● running" in row.replace("\t", " ") for row in rows)
    assert tab.locator("#links tbody tr").count() == 4
    assert tab.locator("#events li").all_inner_texts()[0].endswith("first line")
    assert tab.locator("#waits").is_hidden()
    tells_without_colour(tab)
    red = "Number(getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0])"
    fill = "getComputedStyle(document.querySelector('#chart-rate .xtick text')).fill"
    before = tab.evaluate(fill)
    assert tab.evaluate(red) > 200
    tab.emulate_media(color_scheme="dark")
    until(tab, f"{red} < 60 && {fill} !== '{before}'")
    tab.set_viewport_size(PHONE)
    until(tab, f"document.documentElement.scrollWidth <= {PHONE['width']} && ({BEYOND}).length === 0")


@pytest.mark.long
def test_it_goes_on_without_a_reload(told: Callable[..., Told], opened: Callable[..., Any]) -> None:
    """Figures and charts change in the page that was loaded once."""
    one = told()
    tab = opened(one.url)
    drawn(tab)
    tab.evaluate("window.loadedOnce = true")
    steps = tab.inner_text("#ranks tr[data-rank='0'] td:nth-child(3)")
    count = "document.getElementById('chart-rate').data[0].y.length"
    points = tab.evaluate(count)
    until(tab, f"document.querySelector(\"#ranks tr[data-rank='0']\").cells[2].innerText !== '{steps}'")
    until(tab, f"{count} >= {points} + 2")
    one.page.said("something new")
    until(tab, "document.getElementById('events').innerText.includes('something new')")
    assert tab.evaluate("window.loadedOnce") is True


@pytest.mark.long
def test_a_rank_that_stalls_appears_within_3_s(told: Callable[..., Told], opened: Callable[..., Any]) -> None:
    """With what waits, on whom, and for how long; and it goes when the rank goes on."""
    one = told()
    tab = opened(one.url)
    assert tab.locator("#waits").is_hidden()
    tries_s: list[float] = []
    while not tries_s or (min(tries_s) > 3.0 and len(tries_s) < 4):  # on a busy machine, the browser itself is late
        one.job.late = set()
        tab.wait_for_selector("#waits", state="hidden")
        one.job.late = {2}
        began_s = time.monotonic()
        tab.wait_for_selector("#waits:not([hidden])")
        tries_s.append(time.monotonic() - began_s)
    assert min(tries_s) < 3.0, tries_s
    assert re.match(r"◆ Rank 2 keeps others waiting for \d+ s", tab.inner_text("#waits h2"))
    table = tab.inner_text("#waits table")
    assert "grad.fc.bias, grad.fc.weight" in table and "0-1,3" in table
    states = tab.locator("#ranks tr[data-rank] td.state").all_inner_texts()
    assert states == ["◐ waiting", "◐ waiting", "◆ late", "◐ waiting"]
    one.job.late = set()
    tab.wait_for_selector("#waits", state="hidden")


SCRIPT = """
import os, time
import numpy as np
import ddlcore as ddl
ddl.init()
for step in range(100000):
    ddl.allreduce(np.ones(1000, np.float32), name="gradient")
    time.sleep(0.01)
    if step == 400 and ddl.rank() == 1:
        print("stalls", time.time(), flush=True)
        deadline = time.time() + 50  # a busy machine may need long until its browser shows this rank
        while not os.path.exists("seen") and time.time() < deadline:
            time.sleep(0.1)
        break
"""


@pytest.mark.long
def test_a_rank_of_a_real_job_that_stalls(tmp_path: Path, begin: Begin, opened: Callable[..., Any]) -> None:
    """From its own loop to the browser in seconds; when the job has failed, the page says so and stays."""
    (tmp_path / "train.py").write_text(SCRIPT)
    process = begin("run", "-np", "3", "--dashboard", "train.py")
    assert process.stderr is not None and process.stdout is not None
    address = next(line for line in process.stderr if "live page" in line).split()[-1]
    tab = opened(address)
    stalls = next(line for line in process.stdout if "stalls" in line)
    tab.wait_for_selector("#waits:not([hidden])")
    assert time.time() - float(stalls.split()[-1]) < 30.0  # usually below 3
    assert tab.inner_text("#ranks tr[data-rank='1'] td.state") == "◆ late"
    assert "gradient" in tab.inner_text("#waits")
    (tmp_path / "seen").touch()
    until(tab, "document.getElementById('status').innerText.includes('the job has ended')")
    assert process.wait(60) != 0
    assert tab.inner_text("#status").startswith("✕ the job has ended: exit code")
    assert tab.locator("#ranks tr[data-rank]").count() == 3


@pytest.mark.long
def test_the_world_of_an_elastic_job(told: Callable[..., Told], opened: Callable[..., Any]) -> None:
    """One more figure, which only an elastic job has."""
    one = told()
    tab = opened(one.url)
    until(tab, "/steps\\/s/.test(document.getElementById('tiles').innerText)")
    assert "World" not in tab.inner_text("#tiles")
    report = WorldReport(3, 4, ranks_lost=2, ranks_joined=1, seconds_lost=1.25)
    one.page.passed(
        0,
        Hello(LaunchedRank(0), (), 3, 2, "0.1.0", 1),
        [(rank, Welcome("world3", report)) for rank in map(LaunchedRank, range(4))],
    )
    until(tab, "/World/.test(document.getElementById('tiles').innerText)")
    tiles = tab.inner_text("#tiles")
    assert re.search(r"World\s+3\s+4 ranks; lost: 2, joined: 1; stood still for 1\.25 s", tiles), tiles


@pytest.mark.long
def test_hostile_texts_do_nothing(told: Callable[..., Told], opened: Callable[..., Any]) -> None:
    """Names of tensors and hosts, the command, and what ranks raise are shown as what they are."""
    job = PretendJob((HOSTILE, HOSTILE + "2"), title=f"python {HOSTILE}", names=(HOSTILE, "<a href='javascript:1'>"))
    one = told(job)
    tab = opened(one.url)
    drawn(tab)
    job.late = {1}
    one.page.said(f"stalled: {HOSTILE}\n{HOSTILE}")
    one.page.passed(0, Bye(f"raised ValueError: {HOSTILE}"), [])
    tab.wait_for_selector("#events li:nth-child(2)")
    until(tab, "document.getElementById('chart-links').innerText.includes('<img src=x onerr')")
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert shown in tab.inner_text("h1")
    assert shown in tab.inner_text("#events")
    assert tab.inner_text("tr.host:first-child").startswith(shown)
    assert tab.title() != "bad" and "bad" not in tab.evaluate("Object.keys(window).join()")
    assert tab.locator("img, b, a, iframe, body script").count() == 0


@pytest.mark.long
@pytest.mark.parametrize("hosts", [("node1", "node1", "node2"), ("n" * 120, HOSTILE)], ids=["usual", "hostile"])
def test_on_a_phone(hosts: tuple[str, ...], told: Callable[..., Told], opened: Callable[..., Any]) -> None:
    """Nothing is wider than the screen, and every figure of a rank can be seen."""
    job = PretendJob(hosts, title="python train.py " + "--option " * 30, names=("x" * 180, "y y"))
    job.gpu = True
    one = told(job)
    tab = opened(one.url, viewport=PHONE, is_mobile=True, has_touch=True, device_scale_factor=2)
    drawn(tab)
    job.late = {1}
    one.page.said("a table:\n  " + "wide " * 60)
    tab.wait_for_selector("#waits:not([hidden])")
    tab.wait_for_selector("#events pre.table")
    assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert tab.evaluate(BEYOND) == []
    # Each is asked in one call: the page replaces its rows at every message.
    until(tab, "document.querySelector(\"#ranks tr[data-rank='0'] td.state\")?.checkVisibility()")
    until(tab, "document.querySelector(\"#ranks tr[data-rank='0'] .bar\")?.getBoundingClientRect().width > 200")


CONTRAST = """
(selector) => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const node = document.querySelector(selector);
  let behind = node;
  while (parse(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const both = [light(parse(getComputedStyle(node).color)), light(parse(getComputedStyle(behind).backgroundColor))];
  return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
}
"""


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_the_dark(scheme: str, told: Callable[..., Told], opened: Callable[..., Any]) -> None:
    """The page follows the system, charts included, and everything has enough contrast."""
    one = told()
    one.page.said("an event")
    tab = opened(one.url, color_scheme=scheme)
    drawn(tab)
    red = int(re.findall(r"\d+", tab.evaluate("getComputedStyle(document.body).backgroundColor"))[0])
    assert (red < 60) == (scheme == "dark")
    for selector in (
        "h1",
        "#about",
        "#status",
        ".tile dt",
        ".tile dd",
        "figcaption h2",
        "td.state",
        "#events time",
        ".note",
    ):
        assert tab.evaluate(CONTRAST, selector) >= 4.5, selector
    fill = "getComputedStyle(document.querySelector('#chart-rate .xtick text')).fill"
    before = tab.evaluate(fill)
    tab.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    until(tab, f"{fill} !== '{before}'")


@pytest.mark.long
def test_without_colour(told: Callable[..., Told], opened: Callable[..., Any]) -> None:
    """States have symbols and words, lines have dashes, areas have patterns, and bars have figures."""
    one = told()
    tab = opened(one.url)
    drawn(tab)
    one.job.late = {2}
    tab.wait_for_selector("tr.is-late")
    symbols = [text.split()[0] for text in tab.locator("#ranks td.state").all_inner_texts()]
    assert len(set(symbols)) == 2
    tells_without_colour(tab)


@pytest.mark.long
def test_the_end_of_the_job(told: Callable[..., Told], opened: Callable[..., Any]) -> None:
    """The page says how it ended, keeps what it shows, and asks no more."""
    one = told()
    tab = opened(one.url)
    drawn(tab)
    one.page.over(0)
    one.close()
    until(tab, "document.getElementById('status').innerText === '■ the job has ended: exit code 0'")
    time.sleep(1.0)
    assert tab.inner_text("#status") == "■ the job has ended: exit code 0"
    assert tab.locator("#ranks tr[data-rank]").count() == 4
    assert tab.inner_text("#events").endswith("the job has ended: exit code 0")


@pytest.mark.long
def test_the_token_in_a_browser(told: Callable[..., Told], opened: Callable[..., Any]) -> None:
    """The address that is printed leads to the page; the token is then no longer in the address."""
    one = told(dashboard="0.0.0.0:0")
    parts = urlsplit(one.url)
    tab = opened(f"http://127.0.0.1:{parts.port}/?{parts.query}")
    assert tab.url == f"http://127.0.0.1:{parts.port}/"
    assert tab.evaluate("document.cookie") == ""
