"""The cells of docs/notebooks.md, run by a Jupyter kernel: they print what the page shows below them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import Block, blocks
from tests.docs.workshop import Workshop

PAGE = "docs/notebooks.md"
CELLS = ("python", "ipython")
LIMIT_S = 120
COLOURS = re.compile(r"\x1b\[[\d;]*m")


def cells() -> list[tuple[Block, list[str]]]:
    """Each cell that is run, with the lines that the page shows below it."""
    found: list[tuple[Block, list[str]]] = []
    for block in blocks(PAGE):
        if block.language in CELLS and not block.not_run:
            found.append((block, []))
        elif block.language == "text":
            found[-1][1].extend(block.code.splitlines())
    return found


def printed(cell: Any) -> list[str]:
    """The lines that a cell of a notebook has printed, without those of ``ddl run`` itself."""
    texts = [output["text"] for output in cell["outputs"] if output["output_type"] == "stream"]
    lines = COLOURS.sub("", "".join(texts)).splitlines()  # a notebook gives `!` a terminal
    return [line for line in lines if line and not line.startswith(("ddl run: ", "ddlcore.run: "))]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_the_cells_print_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one kernel, one after the other."""
    nbformat = pytest.importorskip("nbformat", reason="it makes the notebook")
    client = pytest.importorskip("nbclient", reason="it runs the notebook")
    pytest.importorskip("ipykernel", reason="it is the kernel")
    pytest.importorskip("torch", reason="the page trains with it")
    shop = Workshop(PAGE, tmp_path)
    for name, value in {
        **shop.environment(),
        "IPYTHONDIR": str(tmp_path),
        "JUPYTER_RUNTIME_DIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    wanted = cells()
    assert len(wanted) >= 5 and sum(bool(lines) for _, lines in wanted) >= 4
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(block.code.rstrip()) for block, _ in wanted])
    client.NotebookClient(
        book, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(shop.folder)}}
    ).execute()
    for (block, lines), cell in zip(wanted, book.cells):
        if lines:
            assert sorted(printed(cell)) == sorted(lines), block
    assert "IFrame" in str(book.cells[-1]["outputs"])
    assert (shop.folder / "t.html").stat().st_size > 5000


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_the_stop_button_ends_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt of the kernel raises KeyboardInterrupt in the cell, and leaves no rank."""
    manager = pytest.importorskip("jupyter_client.manager", reason="it starts and interrupts the kernel")
    pytest.importorskip("ipykernel", reason="it is the kernel")
    shop = Workshop(PAGE, tmp_path)
    for name, value in {
        **shop.environment(),
        "IPYTHONDIR": str(tmp_path),
        "JUPYTER_RUNTIME_DIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    code = """
def waits():
    import os, time
    print("rank", os.getpid(), flush=True)
    time.sleep(100)

import ddlcore
ddlcore.run(waits, num_proc=1)
"""
    kernel, client = manager.start_new_kernel(kernel_name="python3", cwd=str(shop.folder))
    try:
        seen: list[int] = []

        def output(message: Any) -> None:
            text = message["content"].get("text", "")
            if message["msg_type"] == "stream" and "rank " in text:
                seen.append(int(text.rpartition("rank ")[2]))
                kernel.interrupt_kernel()

        reply = client.execute_interactive(code, output_hook=output, timeout=60)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert seen and not Path(f"/proc/{seen[0]}").exists()
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
