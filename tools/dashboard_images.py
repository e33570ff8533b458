"""Take the pictures of the live page for docs/images: a pretended job, 12 minutes after its start, in Chromium.

python tools/dashboard_images.py [DIRECTORY]
"""

from __future__ import annotations

import asyncio
import io
import math
import random
import shutil
import sys
import threading
import time
from pathlib import Path

import uvicorn
from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ddl_dashboard.guard import Guard  # noqa: E402
from ddl_dashboard.history import JobHistory  # noqa: E402
from ddl_dashboard.place import Place, listen  # noqa: E402
from ddl_dashboard.records import JobEvent  # noqa: E402
from ddl_dashboard.serving import Site  # noqa: E402

from plugins.ddl_dashboard.tests.pretend import PretendJob  # noqa: E402

MINUTES = 12
PICTURES = {
    "dashboard": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "dashboard-dark": {"viewport": {"width": 1280, "height": 1000}, "color_scheme": "dark"},
    "dashboard-phone": {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True},
}


def history(now_s: float, stalls: bool) -> JobHistory:
    """A job with a stall after 3 minutes, and a slow rank since 7; if ``stalls``, that rank is late at the end."""
    chance = random.Random(1)
    begun_s = now_s - 60 * MINUTES
    hosts = ("node1",) * 4 + ("node2",) * 4
    names = tuple(f"layer{i}.{j}.conv{k}.weight" for i in range(1, 5) for j in range(2) for k in (1, 2))
    job = PretendJob(hosts, "python train.py --epochs 90 --batch-size 64", 0.18, names, begun_s=begun_s)
    job.gpu = True
    found = JobHistory(job.begin)
    for record in job.started():
        found.take(record, begun_s)
    found.take(JobEvent(begun_s + 9, "info", "the steps repeat: the ranks run them from memory"), begun_s)
    for second in range(1, 60 * MINUTES + 1):
        slow = second > 60 * 7
        job.step_s = (0.215 if slow else 0.18) + 0.008 * math.sin(second / 37) + chance.uniform(-0.006, 0.006)
        job.exposed = [(0.31 if slow else 0.16) + chance.uniform(-0.02, 0.02) for _ in hosts]
        job.input = [0.05 + 0.02 * math.sin(second / 60) for _ in hosts]
        job.memory = [(2.1 + 0.3 * min(1.0, second / 90) + 0.02 * rank) * 2**30 for rank in range(8)]
        if slow:
            job.exposed[6], job.input[6] = 0.05, 0.24
        stalled = 178 < second <= 240 or (stalls and second > 60 * MINUTES - 7)
        job.late = {6} if stalled else set()
        for record in job.pulses(float(second)):
            found.take(record, begun_s + second)
        found.tick(begun_s + second)
        if second == 239:
            report = (
                "stalled for more than 60 s in replay (epoch 3, place 7920):\n"
                "  tensor                 ready on  missing ranks  waits s\n"
                "  layer4.1.conv2.weight  0-5,7     6                 60.2\n"
                "  rank 6 answers: it is running its own code"
            )
            found.take(JobEvent(begun_s + second, "warning", report), begun_s + second)
    return found


def serve(stalls: bool) -> tuple[uvicorn.Server, threading.Thread, int]:
    """The page of such a job, whose time stands still."""
    now_s = time.mktime((2026, 5, 12, 14, 42, 0, 0, 0, -1))
    listening = listen(Place())

    async def run() -> None:
        site = Site(history(now_s, stalls), lambda: now_s)
        app = Guard(site.app(), "", listening.getsockname()[1])
        server.config = uvicorn.Config(app, lifespan="off", log_config=None)
        await server.serve(sockets=[listening])

    server = uvicorn.Server(uvicorn.Config("", lifespan="off", log_config=None))
    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    return server, thread, listening.getsockname()[1]


def save(picture: bytes, file: Path) -> None:
    """Write the picture with a palette of its own, which makes it a third as large."""
    with Image.open(io.BytesIO(picture)) as image:
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)
    print(file, file.stat().st_size // 1000, "kB")


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    for stalls in (False, True):
        server, thread, port = serve(stalls)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for name, context in PICTURES.items():
                if stalls == (name == "dashboard"):
                    continue
                tab = browser.new_context(**context).new_page()  # type: ignore[arg-type]
                tab.goto(f"http://127.0.0.1:{port}/")
                tab.wait_for_selector("#chart-memory .main-svg")
                tab.wait_for_timeout(800)
                save(tab.screenshot(full_page=name == "dashboard"), directory / f"{name}.png")
            browser.close()
        server.should_exit = True
        thread.join(5)


if __name__ == "__main__":
    main()
