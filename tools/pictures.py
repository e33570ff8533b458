"""Makes the pictures of ddl's own pages and plots again, into docs/images.

    python tools/pictures.py                      all of them
    python tools/pictures.py timeline tune        some of them

timeline and timeline-phone need chromium, doctor needs root (for a test cluster) and ddl-gloo, and all need matplotlib.
What they show is measured on this machine, so its numbers change; look at each picture before you commit it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds modules in its own folder only

from tools.test_cluster import TestCluster

ROOT = Path(__file__).resolve().parents[1]
LARGEST_BYTES = 150_000  # of a picture in the repository
COLOURS = 160  # in a picture: enough for a scale of colours, and a third of the bytes
PHONE = 390, 950  # pixels
# Rank 2 is slower than the others, the steps vary, and the later gradients are ready while the first are reduced.
TRAINING = """
import sys, time
import numpy as np
import ddlcore as ddl

ddl.init()
random = np.random.default_rng(ddl.rank())
gradients = [np.ones(size, np.float32) for size in (300_000, 60_000, 450_000, 500_000)]
for step in range(int(sys.argv[1])):
    time.sleep(0.006 + 0.006 * (ddl.rank() == 2) + random.exponential(0.002))
    handles = []
    for layer, gradient in enumerate(gradients):
        time.sleep(0.004)
        handles.append(ddl.allreduce_async(gradient, name=f"layer{layer}.weight", op=ddl.Average))
    for handle in handles:
        ddl.synchronize(handle)
"""


def _ddl(*arguments: str, cwd: Path) -> None:
    print(f"$ ddl {' '.join(arguments)}", flush=True)
    here = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }
    subprocess.run([sys.executable, "-m", "ddlcore", *arguments], cwd=cwd, env=os.environ | here, check=True)


def _training(folder: Path, steps: int) -> list[str]:
    """Write the script of the training into ``folder``, and return its command line, which pictures may show."""
    (folder / "train.py").write_text(TRAINING, encoding="utf-8")
    return ["python", "train.py", str(steps)]


def _page(folder: Path) -> Path:
    """Write the page of a timeline into ``folder``, and return its path."""
    page = folder / "t.html"
    if not page.exists():
        run = ["run", "-np", "3", "--overlap", "on", "--fusion-bytes", "2097152", "--timeline", "t.json"]
        _ddl(*run, *_training(folder, 100), cwd=folder)
        _ddl("timeline", "summary", "t.json", "--html", page.name, cwd=folder)
    return page


def browser() -> str:
    """Return the path of a browser that can write a screenshot. Raises SystemExit if there is none."""
    found = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    if found is None:
        raise SystemExit("pictures of pages need chromium; on Debian: apt-get install chromium")
    return found


def screenshot(page: Path, target: Path, width: int, height: int, dark: bool = False) -> None:
    """Write what a window of this size shows of ``page``, in pixels, to ``target``."""
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--window-size={width},{height}", f"--screenshot={target}"]
    if dark:
        command.append("--blink-settings=preferredColorScheme=0")
    subprocess.run([*command, page.resolve().as_uri()], check=True, timeout=120, stderr=subprocess.DEVNULL)


def timeline(folder: Path, target: Path) -> None:
    """Draw the page of a timeline as a large window shows it."""
    screenshot(_page(folder), target, 980, 1030)


def timeline_phone(folder: Path, target: Path) -> None:
    """Draw the same page as a phone shows it in dark mode. No window is that narrow, so a frame in one is."""
    width, height = PHONE
    name = _page(folder).name
    frame = folder / "phone.html"
    frame.write_text(
        f'<body style="margin:0"><iframe src="{name}" style="width:{width}px;height:{height}px;border:0"></iframe></body>'
    )
    screenshot(frame, target, 500, height, dark=True)
    from PIL import Image

    with Image.open(target) as image:
        cut = image.crop((0, 0, width, height))
    cut.save(target)


def doctor(folder: Path, target: Path) -> None:
    """Draw the links between six ranks on three hosts."""
    with TestCluster(3, rate_mbit=1000) as cluster:
        hosts = ",".join(f"{name}:2" for name in cluster.names)
        command = [sys.executable, "-m", "ddlcore", "doctor", "-H", hosts, "--backend", "gloo", "--plot", str(target)]
        print(f"server1$ {' '.join(['ddl', *command[3:]])}", flush=True)
        done = cluster.run("server1", command, cwd=ROOT)
        print(done.stdout)
        if not target.exists():
            raise SystemExit(done.stderr)


def tune(folder: Path, target: Path) -> None:
    """Draw the search for settings of a training."""
    _ddl("tune", "-np", "2", "--out", "tuned.toml", *_training(folder, 100_000), cwd=folder)
    shutil.copy(folder / "tuned.png", target)


def bench(folder: Path, target: Path) -> None:
    """Draw three collectives of ddl beside those of a peer."""
    what = ["--ops", "allreduce,allgather,broadcast", "--sizes", "4,1K,16K,64K,256K,1M,4M,16M"]
    _ddl("bench", "-np", "2", *what, "--plot", str(target), cwd=folder)


PICTURES: dict[str, Callable[[Path, Path], None]] = {
    "timeline": timeline,
    "timeline-phone": timeline_phone,
    "doctor": doctor,
    "tune": tune,
    "bench": bench,
}


def shrink(path: Path) -> None:
    """Write the picture again with few colours. Raises SystemExit if it is still too large for the repository."""
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    if path.stat().st_size > LARGEST_BYTES:
        raise SystemExit(f"{path}: {path.stat().st_size} bytes are more than {LARGEST_BYTES}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the pictures that are named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PICTURES)} [default: all]")
    parser.add_argument(
        "--into", type=Path, default=ROOT / "docs" / "images", metavar="DIR", help="[default docs/images]"
    )
    asked = parser.parse_args(arguments)
    unknown = [name for name in asked.names if name not in PICTURES]
    if unknown:
        parser.error(f"there is no picture called {', '.join(unknown)}; there are {', '.join(PICTURES)}")
    with tempfile.TemporaryDirectory(prefix="ddl-pictures-") as folder:
        for name in asked.names or PICTURES:
            target = asked.into.resolve() / f"{name}.png"
            PICTURES[name](Path(folder), target)
            shrink(target)
            print(f"wrote {target} ({target.stat().st_size} bytes)", flush=True)


if __name__ == "__main__":
    main()
