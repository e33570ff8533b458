"""Every block of code in every page is run; what cannot be run here says why in its page, and is parsed."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddlcore.config.file import read_toml
from ddlcore.config.loading import load_settings
from tests.docs.blocks import PAGES, ROOT, Block, blocks
from tests.docs.commands import commands, objection
from tests.docs.workshop import Workshop, imports, smaller
from tests.plug.conftest import forget
from tests.tiers import long
from tools.test_cluster import Slurm, TestCluster

ALL = [block for page in PAGES for block in blocks(page)]
SHELL = ("sh", "bash", "console")
FRAMEWORKS = ("torch", "tensorflow", "mxnet", "mpi4py", "jax", "prometheus_client", "skopt")
JOB_S = 60.0
FIRST = ("README.md", "docs/getting-started.md")


def pages(wanted: Callable[[Block], bool]) -> list[str]:
    return sorted({block.page for block in ALL if wanted(block)})


def run_here(block: Block) -> bool:
    return block.language in (*SHELL, "python", "toml") and not (block.not_run or block.run_by or block.place)


def need(chosen: list[Block]) -> None:
    """Skips, with the reason, where a framework that they use is not installed."""
    code = "".join(block.before + block.code for block in chosen)
    for name in FRAMEWORKS:
        if re.search(rf"^ *(import|from)\b.*\b(ddl_)?{name}\b", code, re.MULTILINE):
            pytest.importorskip(name)


def test_blocks_are_found() -> None:
    """Else all that follows would pass for want of any."""
    assert len(PAGES) > 30 and len(ALL) > 70
    assert sum(map(run_here, ALL)) > 30


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_block_is_what_it_says(block: Block) -> None:
    """It has a language, which parses it: for each language the parser that will meet it."""
    if block.language == "python":
        compile(block.before + "\n" + block.code + "\n" + block.after, str(block), "exec")
        shown = re.findall(r"^# \$ (.*)", block.code, re.MULTILINE)
        assert [why for command in shown if (why := objection(command))] == []
        if block.not_run and importlib.util.find_spec("torch"):
            imports(block.code, str(block))
    elif block.language == "ipython":
        assert [why for line in block.code.splitlines() if (why := magic_objection(line))] == []
        transformer = pytest.importorskip("IPython.core.inputtransformer2", reason="it reads the cells of a notebook")
        compile(transformer.TransformerManager().transform_cell(block.code), str(block), "exec")
    elif block.language in SHELL:
        assert commands(block), "it holds no command: call it text"
        script = block.code if block.language != "console" else "\n".join(commands(block))
        assert objection(script) == ""
    elif block.language == "yaml":
        documents = list(yaml.safe_load_all(block.code))
        assert all({"apiVersion", "kind", "metadata", "spec"} <= set(document) for document in documents)
        assert [why for document in documents for argv in argvs(document) if (why := objection(shlex.join(argv)))] == []
    elif block.language == "dockerfile":
        steps = [line.partition(" ") for line in block.code.splitlines() if line and not line.startswith("#")]
        assert {word for word, _, _ in steps} <= {"FROM", "RUN", "COPY", "WORKDIR"}
        assert [why for word, _, rest in steps if word == "RUN" and (why := objection(rest))] == []
    elif block.language == "toml":
        assert not block.not_run, "it can be loaded anywhere"
    else:
        assert block.language == "text", (
            f"{block}: a block of {block.language or 'no language'} is not known how to be run"
        )
        assert re.findall(r"^\$ .*|^(?:ddl|pip) (?!\w+:).*", block.code, re.MULTILINE) == [], "call it console, or sh"


def magic_objection(line: str) -> str:
    """What is wrong with the shell's command in a line of a cell; "" if there is none, or nothing is wrong with it."""
    return objection(line[1:]) if line.startswith(("!", "%pip ")) else ""


def argvs(node: Any) -> list[list[str]]:
    """What a manifest's containers execute."""
    if isinstance(node, dict):
        own = [[*map(str, node["command"]), *map(str, node.get("args", ()))]] if "command" in node else []
        return own + [argv for value in node.values() for argv in argvs(value)]
    return [argv for value in node for argv in argvs(value)] if isinstance(node, list) else []


@pytest.mark.parametrize("block", [block for block in ALL if block.run_by], ids=str)
def test_whoever_runs_it_is_there(block: Block) -> None:
    """The test that a page names reads that page."""
    text = (ROOT / block.run_by).read_text()
    page = Path(block.page)
    name = page.parent.name if page.stem == "README" else page.stem
    asks = f'run_by == "{block.run_by}"' in text  # all pages for what is its own
    assert asks or name.removeprefix("ddl_") in text, f"{block.run_by} says nothing of {block.page}"


def with_tiers(all_pages: list[str]) -> list[Any]:
    """The two pages that everybody reads first are tried by `make test`, the others by `make test-long`."""
    return [*(page for page in all_pages if page in FIRST), *long(*(page for page in all_pages if page not in FIRST))]


@pytest.fixture(autouse=True)
def _forgets(tmp_path: Path) -> Iterator[None]:
    """Plugins that a page writes and imports are not there for other tests."""
    yield
    forget(tmp_path)


@pytest.mark.processes
@pytest.mark.slow("a page is run as its reader runs it")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", with_tiers(pages(run_here)))
def test_a_page_does_what_it_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks in turn, in one folder: a later one may use what an earlier one has left."""
    chosen = [block for block in blocks(page) if run_here(block)]
    need(chosen)
    shop = Workshop(page, tmp_path)
    monkeypatch.chdir(shop.folder)
    monkeypatch.syspath_prepend(str(shop.site))
    for block in chosen:
        if block.language == "python":
            shop.python(block)
        elif block.language == "toml":
            path = shop.folder / block.code.partition("\n")[0].removeprefix("# ")  # its first line is its name
            path.write_text(block.code)
            load_settings({}, file=read_toml(path))
        else:
            run_shell(block, shop.shell)


def run_shell(block: Block, run: Callable[[str], str]) -> None:
    if block.before:
        run(block.before)
    if block.code.startswith("#!"):
        run(block.code)
        return
    for command in commands(block):
        if not block.why_not(command):
            run(command)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", pages(lambda block: block.place == "on hosts"))
def test_on_hosts(
    page: str, new_cluster: Callable[..., TestCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts of a test cluster have the place of the page's."""
    shop = Workshop(page, tmp_path)
    chosen = [block for block in blocks(page) if block.place == "on hosts"]
    monkeypatch.chdir(shop.folder)
    shop.names["new_cluster"] = new_cluster
    cluster = new_cluster(2)
    for block in chosen:
        if block.language == "python":
            shop.python(block)
        else:
            run_shell(block, partial(shop.shell, run=partial(cluster.run, "server1")))
    assert [cluster.leftovers(name) for name in cluster.names] == [[], []]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", pages(lambda block: block.place == "on Slurm"))
def test_on_slurm(page: str, slurm: Slurm, tmp_path: Path) -> None:
    """Batch files end well, on two nodes."""
    shop = Workshop(page, tmp_path)
    for block in blocks(page):
        if block.place == "on Slurm":
            (shop.folder / "job.sh").write_text(smaller(block.code))
            out = shop.folder / "out"
            path = shop.environment()["PATH"]
            job = slurm.submit([f"--output={out}", "job.sh"], cwd=shop.folder, env=shop.environment() | {"PATH": path})
            assert slurm.wait(job, JOB_S) == ("COMPLETED", 0), f"{block}\n{out.read_text()}"
            assert "is done" in out.read_text(), f"{block} has run no rank"
