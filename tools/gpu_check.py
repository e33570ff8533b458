"""Checks and measures ddl on this machine's GPU: one command, no network, one GPU.

    python tools/gpu_check.py [--rounds 15] [--json] [--markdown FILE] [--no-gpu] [--only NAME,…] [--within SECONDS]

It checks the kernels against float64; NCCL in a world of one and, since NCCL 2.30, in a world of two on one GPU; two
processes on one GPU through shared memory; a replayed training; and the numbers that docs/benchmarks.md asks for. Rows
are printed as they come, and the table at the end. Without a GPU everything runs that can: in numba's simulator, over a
stand-in for NCCL, or on the CPU; the other rows say why they were not measured. The exit status is 1 if something is
wrong or misses its target.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds modules in its own folder only

from tools.gpu.copies_asked import COPY_ROWS
from tools.gpu.metadata import write_missing
from tools.gpu.rows import FAILED, MISSES, Row, check, heard, not_measured, reasons, table
from tools.training.report import aligned, markdown, refreshed

__all__ = ["Part", "main", "parts", "run_part", "why_no_gpu"]

ROOT = Path(__file__).resolve().parents[1]
MARKS = ("<!-- gpu: begin -->", "<!-- gpu: end -->")
MODELS = "deep,gpt,resnet"
NO_COMPILER = 3  # compile_all's exit status
GRACE_S = 10.0  # for a part to end after it was terminated
IMPORT_S = 300.0  # for importing torch from a disk that has not read it yet
SHARES = 23000  # the first NCCL version whose ranks can share a GPU


@dataclass(frozen=True)
class Part:
    """One program that prints rows, or whose exit status makes one row (``title``)."""

    name: str
    command: Sequence[str]
    timeout_s: float = 300.0
    environment: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    stand_in: str = ""
    why: str = ""  # why it is not run


def why_no_gpu() -> str:
    """Return why torch and ddl cannot use a GPU on this machine, or ""."""
    sys.path.append(str(ROOT / "plugins/ddl_nccl/src"))  # used if it is not installed
    from ddl_nccl.probe import gpu

    missing = gpu()
    if missing:
        return missing
    asked = "import torch; print(torch.cuda.is_available(), torch.__version__)"
    try:
        found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"torch is not imported within {IMPORT_S:.0f} s"
    if found.returncode:
        return f"torch cannot be imported: {found.stderr.strip()[-200:]}"
    available, version = found.stdout.split()[-2:]
    return "" if available == "True" else f"torch {version} sees no GPU: is it built for CUDA?"


def why_not_shared() -> str:
    """Return why two ranks cannot use NCCL on one GPU, or ""."""
    from ddl_nccl.library import library

    found = library()
    if found is None:
        return "there is no NCCL"
    return "" if found.version >= SHARES else f"{found.name}: ranks can share a GPU since NCCL 2.30"


def _ranks(n: int) -> list[str]:
    return [sys.executable, "-m", "ddlcore.launch", "run", "-np", str(n), sys.executable]


def parts(on_gpu: bool, rounds: int, meeting: Path) -> Iterator[Part]:
    """Yield what is run, in order. ``meeting``: a directory for files by which torch's processes meet."""
    here = [sys.executable, "-m"]
    yield Part("compile", [*here, "ddl_nccl.cuda.compile_all"], title="every kernel compiles, by accesses of 16 bytes")
    yield Part("kernels", [*here, "tools.gpu.kernels", *(["--gpu"] if on_gpu else [])], 600.0)
    if not on_gpu:
        yield from _stand_ins(here, meeting)
        return
    nccl, host = {"DDL_DEVICE_DENSE": "nccl"}, {"DDL_DEVICE_DENSE": "cpu", "CUDA_VISIBLE_DEVICES": _first_gpu()}
    yield Part("copies", [*here, "tools.gpu.copies"])
    what = ["--what", "NCCL, world of one: collectives"]
    yield Part("nccl", [*here, "tools.gpu.collectives", *what, "--route", "nccl"], environment=nccl)
    what = ["--what", "NCCL, two processes on one GPU: collectives", "--route", "nccl"]
    both = {**nccl, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "CUDA_VISIBLE_DEVICES": _first_gpu()}
    command = [*_ranks(2), "-m", "tools.gpu.collectives", *what]
    yield Part("nccl of two", command, environment=both, why=why_not_shared())
    what = ["--what", "two processes, one GPU, staged on the host: collectives"]
    yield Part("two", [*_ranks(2), "-m", "tools.gpu.collectives", *what], environment=host)
    timed = ["--models", MODELS, "--rounds", str(rounds)]
    one = ["--backend", "nccl", "--over-none", "1.03", "--over-peer", "1.0", "--meeting", str(meeting / "one")]
    yield Part("training", [*here, "tools.gpu.training", *timed, *one], 900.0, nccl)
    two = ["--backend", "gloo", "--over-peer", "0.6", "--meeting", str(meeting / "two")]
    yield Part("training of two", [*_ranks(2), "-m", "tools.gpu.training", *timed, *two], 900.0, host)


def _stand_ins(here: list[str], meeting: Path) -> Iterator[Part]:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    suite = ROOT / "plugins/ddl_nccl/tests/test_conformance.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(suite)]
    title = "NCCL: the transport suite"
    yield Part("nccl", command, environment=hidden, title=title, stand_in="a stand-in for NCCL")
    stand_in = ["--device", "cpu", "--stand-in", "on the CPU"]
    what = ["--what", "two processes: collectives"]
    yield Part("two", [*_ranks(2), "-m", "tools.gpu.collectives", *what, *stand_in], environment=hidden)
    trained = ["--models", "deep", "--backend", "gloo", *stand_in]
    for name, command in (("one", here), ("two", [*_ranks(2), "-m"])):
        at = ["--meeting", str(meeting / name)]
        yield Part(f"training of {name}", [*command, "tools.gpu.training", *trained, *at], environment=hidden)


def _first_gpu() -> str:
    """Return the first GPU that this process may use; two ranks share it."""
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]


def _not_measured(why: str) -> Iterator[Row]:
    """Yield the rows that need a GPU."""
    for what, target in COPY_ROWS:
        yield not_measured(what, target, why)
    for model in MODELS.split(","):
        yield not_measured(f"{model}, alone: step over without ddl", "≤ 1.03 ×", why)
        yield not_measured(f"{model}, alone: step over DDP on nccl", "≤ 1 ×", why)
    for model in MODELS.split(","):
        yield not_measured(f"{model}, 2 ranks: step over DDP on gloo", "≤ 0.6 ×", why)


def run_part(part: Part, show: bool, beside: str = "") -> Iterator[Row]:
    """Run a part and yield its rows; if it crashes or hangs, yield a row that says so.

    ``show``: print its other output. ``beside``: one more directory in which it looks for modules and metadata.
    """
    if part.why:
        yield not_measured(part.title or part.name, "", part.why)
        return
    environment = {**os.environ, "PYTHONPATH": _path(beside), "PYTHONUNBUFFERED": "1", **part.environment}
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = threading.Timer(part.timeout_s, process.terminate)
    too_late = threading.Timer(part.timeout_s + GRACE_S, _kill, (process,))
    late.daemon = too_late.daemon = True
    last, rows = "", 0
    try:
        late.start()
        too_late.start()
        assert process.stdout is not None
        for line in process.stdout:
            try:
                row = heard(line)
            except (ValueError, TypeError):  # e.g. the lines of two ranks mixed into one
                row = check(part.name, "", f"a row that cannot be read: {line.strip()[:200]}")
            if row is not None:
                rows += 1
                yield row
            elif line.strip():
                last = line.strip()
                if show and part.name != "compile":  # compile prints a line for every kernel
                    print(f"  {part.name}: {last}", flush=True)
        status = process.wait()  # it has ended by then, or was killed
    finally:
        hung = not late.is_alive()
        late.cancel()
        too_late.cancel()
        _kill(process)
        process.wait()
    if part.title:
        yield _by_status(part, status, last)
    elif status or not rows:
        said = f"no end within {part.timeout_s:.0f} s" if hung else f"exit status {status}: {last[-200:]}"
        yield check(part.name, "", said)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the process and all that it has started and left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _rows(chosen: Sequence[Part], show: bool, beside: str, end_s: float) -> Iterator[Row]:
    """Yield the rows of all parts, until ``end_s`` of the monotonic clock.

    A part that fails does not affect the rows of the others.
    """
    for part in chosen:
        if show:
            print(f"{part.name} …", flush=True)
        left_s = end_s - time.monotonic() - GRACE_S
        if left_s <= 0:
            yield not_measured(part.title or part.name, "", "the time was over (--within)")
            continue
        try:
            yield from run_part(replace(part, timeout_s=min(part.timeout_s, left_s)), show, beside)
        except Exception as error:
            yield check(part.name, "", f"{type(error).__name__}: {error}")


def _by_status(part: Part, status: int, last: str) -> Row:
    if part.name == "compile" and status == NO_COMPILER:
        return not_measured(part.title, "", last)
    fault = "" if status == 0 else f"exit status {status}: {last[-200:]}"
    return check(part.title, "", fault, "no GPU is needed" if part.name == "compile" else part.stand_in)


def _path(beside: str) -> str:
    """Return the path on which this tree's modules are found, even if none of them is installed."""
    sources = [str(path) for path in sorted(ROOT.glob("plugins/*/src"))]
    return os.pathsep.join([str(ROOT), *sources, *filter(None, [beside, os.environ.get("PYTHONPATH", "")])])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns that each contender has in a training (15)")
    parser.add_argument("--json", action="store_true", help="print the rows as one object, and nothing else")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the table between the marks of this file")
    parser.add_argument("--no-gpu", action="store_true", help="as on a machine without one")
    parser.add_argument("--only", default="", metavar="NAME,…", help="parts to run; all by default")
    parser.add_argument(
        "--within", type=float, default=3600.0, metavar="SECONDS", help="be done by then, table and all"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and return the exit status."""
    asked = _options(arguments)
    end_s = time.monotonic() + asked.within
    why = "--no-gpu was given" if asked.no_gpu else why_no_gpu()
    if not asked.json:
        print(f"no GPU: {why}" if why else "checking cuda:0", flush=True)
    rows: list[Row] = []
    wanted = set(filter(None, asked.only.split(",")))
    with tempfile.TemporaryDirectory(prefix="ddl-gpu-check-") as place:
        metadata = Path(place, "metadata")
        write_missing(ROOT, metadata)
        of = list(parts(not why, asked.rounds, Path(place)))
        unknown = wanted - {part.name for part in of}
        if unknown:
            sys.exit(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in of)}")
        chosen = [part for part in of if not wanted or part.name in wanted]
        for row in _rows(chosen, not asked.json, str(metadata), end_s):
            rows.append(row)
            if not asked.json:  # printed now, in case the run is stopped before the table
                print(f"  {row.verdict}: {row.what}, {row.measured} {row.why}".rstrip(), flush=True)
    if why and not wanted:
        rows += _not_measured(f"no GPU: {why}")
    bad = any(row.verdict in (FAILED, MISSES) for row in rows)
    if asked.json:
        print(
            json.dumps({"gpu": not why, "why": why, "holds": not bad, "rows": [asdict(row) for row in rows]}, indent=1)
        )
    else:
        print("\n" + aligned(table(rows)))
        for i, reason in enumerate(reasons(rows)):
            print(f"({i + 1}) {reason}")
    if asked.markdown is not None:
        text = asked.markdown.read_text(encoding="utf-8") if asked.markdown.exists() else ""
        notes = "\n".join(f"{i + 1}. {reason}" for i, reason in enumerate(reasons(rows)))
        asked.markdown.write_text(refreshed(text, f"{markdown(table(rows))}\n\n{notes}", MARKS), encoding="utf-8")
    return int(bad)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and with this program the part that runs
    sys.exit(main())
