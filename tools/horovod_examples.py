"""Runs the scripts and the documentation's programs of Horovod on ddl, under horovodrun, and prints which of them pass.

    python tools/horovod_examples.py CHECKOUT [--only 'examples/torch*'] [--np 2] [--limit-s 300] [--markdown FILE]

CHECKOUT is a checkout of Horovod, best at the tag v0.28.1. Of it, examples/ and the blocks of Python in docs/ are used, and
nothing else; the names that they import come from ddl-horovod. The scripts run as they are. Their arguments make them short,
their data is generated, and names that frameworks have lost since are lent to them: tools/horovod_standins.py does this on
the ranks. Keras is the one of Horovod's time, tf_keras. A program "cannot run here" if WHY_NOT says why and the program's
output shows that this is the reason. The exit code is 1 if a program failed for another reason.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script's own path is tools/, not the tree's root

from tools.bench_verdicts import put
from tools.horovod_blocks import BLOCKS, Block, blocks_of, program_of
from tools.horovod_standins import GROUPS, write_image_folders, write_records

__all__ = ["EXAMPLES", "Example", "Result", "examples_of", "main", "markdown", "reason_in", "run_example"]

PASSED, FAILED, CANNOT = "passed", "failed", "cannot run here"
VARIABLE = "STANDINS_OF_EXAMPLE"  # in it, the ranks find the names of their groups of stand-ins

_BEGIN = """import os, sys
sys.path.insert(0, {tools!r})
import horovod_standins
del sys.path[0]
horovod_standins.install(list(filter(None, os.environ.get({variable!r}, "").split(","))))
"""


@dataclass(frozen=True)
class Example:
    """How a program is run.

    ``runs``: the arguments of each run; later ones find the files of earlier ones. ``flags``: further ones of horovodrun.
    ``alone``: the script starts the ranks itself. ``service``: flags of TensorFlow's data service, which is started, too.
    """

    program: str  # below the checkout, and the number of the block, such as docs/keras.rst#3
    way: str = ""  # what tells it from other examples with the same program
    runs: tuple[str, ...] = ("",)
    standins: tuple[str, ...] = ("data",)
    flags: str = ""
    ranks: int | None = None
    alone: bool = False
    service: str | None = None
    prepare: Callable[[Path], None] | None = None
    why_not: str = ""

    @property
    def name(self) -> str:
        """The program, and the way in which it is run if there are several."""
        return ", ".join(filter(None, [self.program, self.way]))


@dataclass(frozen=True)
class Result:
    """What became of an example: PASSED, FAILED or CANNOT, and why."""

    example: str
    outcome: str
    seconds: float = 0.0
    why: str = ""
    text: str = ""


def _images(place: Path) -> None:
    for name in ("train", "validation"):
        write_image_folders(place / name)


def _records(place: Path) -> None:
    for name in ("train", "validation"):
        write_records(place / f"{name}.rec")


_TF = ("data", "short")
_TF1 = (*_TF, "tensorflow 1")
_BOARD = ("data", "tensorboard")
_FOLDERS = "--train-dir train --val-dir validation --batch-size 2 --val-batch-size 2"
_RECORDS = (
    "--use-rec --no-cuda --batch-size 4 --num-epochs 1 --warmup-epochs 0 --model resnet18_v1 --rec-train train.rec "
    "--rec-train-idx train.idx --rec-val validation.rec --rec-val-idx validation.idx"
)
_FEW = "--batch-size 2 --num-iters 2 --num-batches-per-iter 2 --num-warmup-batches 1 --no-cuda"
_LOCAL = "--num-proc {ranks} --hosts localhost:{ranks} --communication gloo"
_ELASTIC = "--min-np {ranks}"

EXAMPLES: tuple[Example, ...] = (
    Example(
        "examples/adasum/adasum_bench.ipynb", why_not="A notebook that starts the script below 600 times by mpirun."
    ),
    Example("examples/adasum/adasum_small_model.py", runs=("--op Average", "--op Adasum"), standins=()),
    Example(
        "examples/elastic/pytorch/pytorch_imagenet_resnet50_elastic.py",
        runs=("--epochs 1 --batch-size 4 --batches-per-commit 2", "--epochs 2 --batch-size 4 --batches-per-commit 2"),
        standins=_BOARD,
        flags=_ELASTIC,
    ),
    Example("examples/elastic/pytorch/pytorch_mnist_elastic.py", runs=("--epochs 2",), flags=_ELASTIC),
    Example("examples/elastic/pytorch/pytorch_synthetic_benchmark_elastic.py", runs=(_FEW,), flags=_ELASTIC),
    Example(
        "examples/elastic/tensorflow/tensorflow_keras_mnist_elastic.py",
        runs=("--epochs 2 --batches-per-epoch 8 --batch-size 32",),
        standins=_TF1,
        flags=_ELASTIC,
    ),
    Example("examples/elastic/tensorflow2/tensorflow2_keras_mnist_elastic.py", standins=_TF, flags=_ELASTIC),
    Example(
        "examples/elastic/tensorflow2/tensorflow2_keras_mnist_elastic.py",
        "mixed precision",
        ("--use-mixed-precision",),
        _TF,
        _ELASTIC,
    ),
    Example("examples/elastic/tensorflow2/tensorflow2_keras_mnist_elastic.py", "in a job of fixed size", standins=_TF),
    Example("examples/elastic/tensorflow2/tensorflow2_mnist_elastic.py", standins=_TF, flags=_ELASTIC),
    Example(
        "examples/elastic/tensorflow2/tensorflow2_mnist_elastic.py",
        "by horovod.run",
        ("{ranks} {ranks} {ranks} localhost:{ranks}",),
        _TF,
        alone=True,
    ),
    Example(
        "examples/elastic/tensorflow2/tensorflow2_synthetic_benchmark_elastic.py",
        runs=(_FEW,),
        standins=_TF,
        flags=_ELASTIC,
    ),
    Example(
        "examples/elastic/tensorflow2/tensorflow2_synthetic_benchmark_elastic.py",
        "in a job of fixed size",
        (_FEW,),
        _TF,
    ),
    Example(
        "examples/keras/keras_imagenet_resnet50.py", runs=(f"{_FOLDERS} --epochs 1",), standins=_TF1, prepare=_images
    ),
    Example(
        "examples/keras/keras_imagenet_resnet50.py",
        "resumed",
        (f"{_FOLDERS} --epochs 1 --fp16-allreduce", f"{_FOLDERS} --epochs 2 --fp16-allreduce"),
        _TF1,
        prepare=_images,
    ),
    Example("examples/keras/keras_mnist.py", standins=_TF1),
    Example("examples/keras/keras_mnist_advanced.py", runs=("--epochs 6 --batch-size 32",), standins=_TF1),
    Example("examples/mxnet/mxnet2_mnist.py", standins=("data", "mxnet 2")),
    Example(
        "examples/mxnet/mxnet_imagenet_resnet50.py",
        "Module",
        (f"{_RECORDS} --mode module --eval-epoch",),
        prepare=_records,
    ),
    Example("examples/mxnet/mxnet_imagenet_resnet50.py", "Gluon", (f"{_RECORDS} --mode gluon",), prepare=_records),
    Example("examples/mxnet/mxnet_mnist.py"),
    Example("examples/mxnet/mxnet_mnist.py", "float16", ("--fp16-allreduce --gradient-predivide-factor 2",)),
    Example("examples/mxnet/mxnet_mnist.py", "by horovod.run", (_LOCAL,), alone=True),
    Example(
        "examples/pytorch/pytorch_imagenet_resnet50.py",
        runs=("--epochs 1 --batch-size 4", "--epochs 2 --batch-size 4 --batches-per-allreduce 2 --fp16-allreduce"),
        standins=_BOARD,
    ),
    Example("examples/pytorch/pytorch_lightning_mnist.py", standins=_BOARD),
    Example("examples/pytorch/pytorch_mnist.py", runs=("--epochs 2",)),
    Example(
        "examples/pytorch/pytorch_mnist.py", "float16", ("--epochs 1 --gradient-predivide-factor 2 --fp16-allreduce",)
    ),
    Example("examples/pytorch/pytorch_mnist.py", "Adasum", ("--epochs 1 --use-adasum",)),
    Example("examples/pytorch/pytorch_mnist.py", "by horovod.run", (f"--epochs 1 {_LOCAL}",), alone=True),
    Example("examples/pytorch/pytorch_synthetic_benchmark.py", runs=(_FEW, f"{_FEW} --use-adasum")),
    Example("examples/tensorflow/tensorflow_keras_mnist.py", standins=_TF1),
    Example("examples/tensorflow/tensorflow_mnist.py", standins=_TF1),
    Example("examples/tensorflow/tensorflow_mnist.py", "Adasum", ("--use-adasum",), _TF1),
    Example("examples/tensorflow/tensorflow_mnist.py", "predivided", ("--gradient-predivide-factor 2",), _TF1),
    Example("examples/tensorflow/tensorflow_mnist_eager.py", standins=_TF1),
    Example("examples/tensorflow/tensorflow_mnist_estimator.py", standins=_TF1),
    Example(
        "examples/tensorflow/tensorflow_synthetic_benchmark.py", runs=(f"{_FEW} --model MobileNet",), standins=_TF1
    ),
    Example(
        "examples/tensorflow/tensorflow_synthetic_benchmark.py",
        "eager",
        (f"{_FEW} --model MobileNet --eager",),
        _TF1,
    ),
    Example("examples/tensorflow/tensorflow_word2vec.py", standins=_TF1),
    Example("examples/tensorflow2/tensorflow2_keras_mnist.py", standins=_TF),
    Example(
        "examples/tensorflow2/tensorflow2_keras_mnist.py",
        "by horovod.run",
        ("{ranks} localhost:{ranks} gloo",),
        _TF,
        alone=True,
    ),
    Example(
        "examples/tensorflow2/tensorflow2_keras_synthetic_benchmark.py",
        runs=("--batch-size 2 --num-iters 2 --num-batches-per-iter 2 --no-cuda --fp16-allreduce",),
        standins=_TF,
    ),
    Example("examples/tensorflow2/tensorflow2_mnist.py", standins=_TF),
    Example(
        "examples/tensorflow2/tensorflow2_mnist.py",
        "by horovod.run",
        ("{ranks} localhost:{ranks} gloo",),
        _TF,
        alone=True,
    ),
    Example(
        "examples/tensorflow2/tensorflow2_mnist_data_service.py",
        runs=("compute.json",),
        standins=_TF,
        service="",
    ),
    Example(
        "examples/tensorflow2/tensorflow2_mnist_data_service.py",
        "dispatcher of the training",
        ("compute.json --reuse-dataset --round-robin",),
        _TF,
        service="--dispatcher-side training",
    ),
    Example(
        "examples/tensorflow2/tensorflow2_synthetic_benchmark.py", runs=(f"{_FEW} --fp16-allreduce",), standins=_TF
    ),
)
# Why a program does not run here, by a pattern of its name. The program has failed for this reason if its output has the words.
_LIGHTNING = ("unexpected keyword argument 'gpus'", "Lightning 2 has neither gpus= nor accelerator='horovod'.")
WHY_NOT: dict[str, tuple[str, str]] = {
    "examples/pytorch/pytorch_lightning_mnist.py": _LIGHTNING,
    "docs/pytorch.rst#4": _LIGHTNING,
    "examples/tensorflow/tensorflow_synthetic_benchmark.py, eager": (
        "does not support eager execution",
        "Horovod refuses it, too: the script calls broadcast_global_variables in eager mode.",
    ),
    "examples/keras/keras_imagenet_resnet50.py, resumed": (
        "MismatchError: broadcast: variable",
        "In a graph, tf_keras orders and names the variables of a loaded model's optimizer unlike those of a new one's, "
        "so neither their places nor their names, by which Horovod goes, say which belong together.",
    ),
}
_FOLDERS_NOT_HERE = {"ray": "horovod.ray", "spark": "horovod.spark"}


def examples_of(checkout: Path) -> Iterator[Example]:
    """Yield the examples of ``checkout``: its scripts and notebooks, and the blocks of its documentation."""
    known: dict[str, list[Example]] = {}
    for one in EXAMPLES:
        known.setdefault(one.program, []).append(one)
    for path in sorted((checkout / "examples").rglob("*")):
        if path.suffix not in (".py", ".ipynb"):
            continue
        program = str(path.relative_to(checkout))
        lacking = _FOLDERS_NOT_HERE.get(path.relative_to(checkout).parts[1], "")
        if lacking:
            yield Example(program, why_not=f"Not here yet: it needs {lacking}.")
        elif "__main__" not in path.read_text(encoding="utf-8") and "train_fn" in path.name:
            yield Example(program, why_not="A module that a script in the same folder imports.")
        else:
            yield from known.get(program, [Example(program)])
    for page in sorted((checkout / "docs").glob("*.rst")):
        for number, _ in enumerate(blocks_of(page), 1):
            block = BLOCKS.get(f"{page.name}#{number}", Block())
            yield Example(
                f"docs/{page.name}#{number}",
                standins=block.standins,
                flags=block.flags,
                ranks=block.ranks,
                service=block.service,
                why_not=block.why_not,
            )


def _script(example: Example, checkout: Path, place: Path) -> Path:
    """Return the path of the script, which is written first if it is a block."""
    name, _, number = example.program.partition("#")
    if not number:
        return checkout / name
    page = checkout / name
    text = list(blocks_of(page))[int(number) - 1]
    script = place / "block.py"
    script.write_text(program_of(text, BLOCKS.get(f"{page.name}#{number}", Block()), place), encoding="utf-8")
    return script


def run_example(example: Example, checkout: Path, ranks: int, limit_s: float) -> Result:
    """Run ``example`` in a new folder, and return what became of it. ``limit_s`` is for each of its runs."""
    if example.why_not:
        return Result(example.name, CANNOT, why=example.why_not)
    ranks = example.ranks or ranks
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        place, site, home = (Path(name) / one for one in ("work", "site", "home"))
        for folder in (place, site, home / ".keras/datasets"):
            folder.mkdir(parents=True)
        (cache := Path("~/.cache").expanduser()).mkdir(exist_ok=True)
        (home / ".cache").symlink_to(cache)  # it has ddl's compiled kernels
        begin = _BEGIN.format(tools=str(Path(__file__).resolve().parent), variable=VARIABLE)
        (site / "sitecustomize.py").write_text(begin, encoding="utf-8")
        if example.prepare is not None:
            example.prepare(place)
        script = _script(example, checkout, place)
        environ = _environ(site, home, example.standins)
        launch = [sys.executable, "-m", "horovod.runner.launch", "-np", str(ranks), "-H", f"localhost:{ranks}"]
        text, code = "", 0
        with _service(example, launch, place, environ):
            for arguments in example.runs:
                given = shlex.split(f"{example.flags} -- {arguments}".format(ranks=ranks))
                flags, words = given[: given.index("--")], given[given.index("--") + 1 :]
                start = [] if example.alone else [*launch, *flags]
                code, said = _run([*start, sys.executable, str(script), *words], place, environ, limit_s)
                text += said
                if code:
                    break
    seconds = time.monotonic() - begun_s
    if not code:
        return Result(example.name, PASSED, seconds, _replaced(example), text)
    found = next(
        (why for name, (words, why) in WHY_NOT.items() if fnmatch.fnmatch(example.name, name) and words in text), ""
    )
    return Result(example.name, CANNOT if found else FAILED, seconds, found or reason_in(text, code), text)


def _replaced(example: Example) -> str:
    block = BLOCKS.get(example.program.removeprefix("docs/"), Block())
    said = ["what the block leaves out"] if block.before or block.behind else []
    return "; ".join([*said, *(GROUPS[one].says for one in example.standins)])


def _environ(site: Path, home: Path, standins: Sequence[str]) -> dict[str, str]:
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "HOME": str(home),
        VARIABLE: ",".join(standins),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_USE_LEGACY_KERAS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


@contextmanager
def _service(example: Example, launch: Sequence[str], place: Path, environ: dict[str, str]) -> Iterator[None]:
    """Have TensorFlow's data service run beside the example, if it needs that."""
    if example.service is None:
        yield
        return
    program = ["-m", "horovod.tensorflow.data.compute_worker", *shlex.split(example.service), "compute.json"]
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            [*launch, sys.executable, *program],
            cwd=place,
            env=environ,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)  # a training that ends well ends the service, too
        finally:
            _end(process)


def _run(command: Sequence[str], place: Path, environ: dict[str, str], limit_s: float) -> tuple[int, str]:
    """Run ``command``, and return its exit code and output. After ``limit_s`` seconds, end it and what it has started."""
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        process = subprocess.Popen(
            command, cwd=place, env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        late = ""
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = f"\nTimeoutError: it was ended after {limit_s:.0f} s\n"
        finally:
            _end(process)
        file.seek(0)
        return 124 if late else process.returncode, file.read() + late


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def reason_in(text: str, code: int) -> str:
    """Return the last error in ``text`` that is no echo of another rank's end, or the exit code."""
    named = r"^(?:\[[\d,-]+\] ?)?((?:ddlcore\.errors\.\w+|(?:\w+\.)*\w*(?:Error|Exception))\b.*)$"
    errors = re.findall(named, text, re.MULTILINE)
    causes = [one for one in errors if "PeerLost" not in one and "Graph execution error" not in one] or errors
    return causes[-1][:200].replace("|", "\\|") if causes else f"exit code {code}"


def markdown(results: Sequence[Result]) -> list[str]:
    """Return a table of the results."""
    lines = ["| program | outcome | seconds | why, or what was replaced |", "|---|---|--:|---|"]
    for one in results:
        seconds = f"{one.seconds:.0f}" if one.seconds else ""
        lines.append(f"| `{one.example}` | {one.outcome} | {seconds} | {one.why} |")
    return lines


def main() -> int:
    """Run the examples and print the table. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of Horovod")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="examples whose names match, such as '*keras*'")
    parser.add_argument("--np", type=int, default=2, help="ranks of each example (default: 2)")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds that a run may take (default: 300)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the table into this file, between its marks")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    results = []
    for example in examples_of(checkout):
        if not fnmatch.fnmatch(example.name, options.only):
            continue
        one = run_example(example, checkout, options.np, options.limit_s)
        results.append(replace(one, text=""))
        print(f"{one.example}: {one.outcome} after {one.seconds:.0f} s. {one.why}", flush=True)
        if one.outcome == FAILED:
            print(one.text[-3000:], flush=True)
    print(*markdown(results), sep="\n")
    if options.markdown:
        put(options.markdown, markdown(results), "horovod_examples")
    return int(any(one.outcome == FAILED for one in results))


if __name__ == "__main__":
    sys.exit(main())
