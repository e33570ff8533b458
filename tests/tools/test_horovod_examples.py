"""Horovod's scripts and blocks, as the runner would run them from a checkout: here small ones of our own."""

from __future__ import annotations

import struct
import sys
import zipfile
from pathlib import Path

import pytest

from tools import horovod_examples
from tools.horovod_blocks import Block, blocks_of, program_of
from tools.horovod_examples import Example, Result, examples_of, main, markdown, reason_in
from tools.horovod_standins import digits, write_digits, write_image_folders, write_records, write_words

PASSES = """
import horovod.torch as hvd
import torch
from torchvision import datasets, models, transforms

hvd.init()
steps = [transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))]
images = datasets.MNIST("nowhere", train=False, download=True, transform=transforms.Compose(steps))
image, label = images[0]
assert image.shape == (1, 28, 28) and 0 <= label < 10 and len(images) == 128
assert models.resnet50()(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size() == 2
"""
FAILS = (
    "import horovod.torch as hvd\nhvd.init()\nif hvd.rank() == 1:\n    raise ValueError('rank 1 fails')\nhvd.join()\n"
)
TOO_OLD = "import torch\ntorch.no_such_name\n"
PAGE = """Title
=====

   .. code-block:: python
      :emphasize-lines: 1

      dataset = ...
      for batch in load(dataset, batch_size=...):
          print(batch)

Text.

.. code-block:: python

    # on ranks 0 and 2
    print(1)
    open('/tmp/file', 'w')

.. code-block:: bash

    echo
"""


def test_blocks_become_programs(tmp_path: Path) -> None:
    """What a block leaves out stands before it, and its files are in the folder in which it runs."""
    (tmp_path / "page.rst").write_text(PAGE)
    first, second = blocks_of(tmp_path / "page.rst")
    assert first == "dataset = ...\nfor batch in load(dataset, batch_size=...):\n    print(batch)\n"
    assert program_of(first, Block("made_dataset = []\n", "end()\n"), Path("/x")) == (
        "made_dataset = []\n\ndataset = made_dataset\nfor batch in load(dataset, batch_size=4):\n    print(batch)\n\nend()\n"
    )
    said = "if hvd.rank() in (0, 2):\n    print(1)\nopen('/x/file', 'w')\n"
    assert program_of(second, Block(), Path("/x")) == f"\n{said}\n"


def test_examples_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may be run in several ways. Those that need what is not here yet are named, too."""
    for name in ("torch/one.py", "torch/two.py", "spark/three.py", "torch/page.txt"):
        (tmp_path / "examples" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "examples" / name).write_text("")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.rst").write_text(PAGE)
    known = tuple(Example("examples/torch/one.py", way) for way in ("", "by hand"))
    monkeypatch.setattr(horovod_examples, "EXAMPLES", known)
    found = [one.name for one in examples_of(tmp_path)]
    scripts = ["spark/three.py", "torch/one.py", "torch/one.py, by hand", "torch/two.py"]
    assert found == [*(f"examples/{one}" for one in scripts), "docs/page.rst#1", "docs/page.rst#2"]
    assert next(examples_of(tmp_path)).why_not == "Not here yet: it needs horovod.spark."


def test_the_first_cause_is_told_and_no_echo() -> None:
    """The error of the rank that failed counts, and not that of a rank which has lost it."""
    text = "[1] Traceback (most recent call last):\n[1] ValueError: bad\n[0] ddlcore.errors.PeerLost: rank 1 ended\n"
    assert reason_in(text, 1) == "ValueError: bad"
    assert reason_in("no error", 3) == "exit code 3"


def test_the_table_has_a_row_for_each_example() -> None:
    """A row has the time, unless the example was not run."""
    rows = [Result("a.py", "passed", 4.4, "generated data"), Result("b.py", "cannot run here", why="no ray")]
    assert markdown(rows)[2:] == [
        "| `a.py` | passed | 4 | generated data |",
        "| `b.py` | cannot run here |  | no ray |",
    ]


def test_generated_files_have_their_formats(tmp_path: Path) -> None:
    """Records begin with their magic number, at the places that the other file says."""
    images, labels = digits(20, 1)
    assert images.shape == (20, 28, 28) and sorted(labels) == sorted([*range(10), *range(10)])
    write_image_folders(tmp_path / "images", count=2, classes=3)
    assert len(list((tmp_path / "images").iterdir())) == 3
    assert len(list((tmp_path / "images").glob("*/*.jpg"))) == 2
    write_records(tmp_path / "some.rec", 3)
    written = (tmp_path / "some.rec").read_bytes()
    for line in (tmp_path / "some.idx").read_text().splitlines():
        key, _, begins = line.partition("\t")
        magic, _, _, label = struct.unpack_from("<IIIf", written, int(begins))
        assert (magic, label) == (0xCED7230A, float(key))


def test_generated_archives_have_their_formats(tmp_path: Path) -> None:
    """The archive of words has exactly the size that the script expects."""
    write_words(tmp_path / "words.zip", 2_000_000)
    assert (tmp_path / "words.zip").stat().st_size == 2_000_000
    with zipfile.ZipFile(tmp_path / "words.zip") as file:
        assert len(set(file.read(file.namelist()[0]).split())) == 60_000
    write_digits(tmp_path / "digits.zip")
    with zipfile.ZipFile(tmp_path / "digits.zip") as file:
        assert struct.unpack_from(">IIII", file.read("t10k-images-idx3-ubyte")) == (2051, 128, 28, 28)


@pytest.mark.long
@pytest.mark.processes
def test_a_checkout_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One script passes with stand-ins for its data, one fails on one rank, and one is too old."""
    (tmp_path / "examples/torch").mkdir(parents=True)
    for name, text in (("passes", PASSES), ("fails", FAILS), ("too_old", TOO_OLD)):
        (tmp_path / f"examples/torch/{name}.py").write_text(text)
    (tmp_path / "table.md").write_text(
        "before\n<!-- horovod_examples: begin -->\n<!-- horovod_examples: end -->\nbehind\n"
    )
    reasons = {"*/too_old.py": ("no_such_name", "Too old.")}
    monkeypatch.setattr(horovod_examples, "WHY_NOT", reasons)
    monkeypatch.setattr(sys, "argv", ["horovod_examples", str(tmp_path), "--markdown", str(tmp_path / "table.md")])
    assert main() == 1
    out = capsys.readouterr().out
    assert "examples/torch/passes.py: passed" in out, out
    assert "examples/torch/too_old.py: cannot run here" in out
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("before\n") and table.endswith("behind\n")
    assert "| `examples/torch/fails.py` | failed |" in table and "ValueError: rank 1 fails" in table
