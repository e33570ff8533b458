"""A plugin's own machine code: as the page shows it, and beside that of ddl, which it calls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddlcore.contracts.machine_code.code import MachineCode
from ddlcore.contracts.machine_code.cpu import CPU
from ddlcore.contracts.machine_code.loading import load
from ddlcore.launch.ranks.warmup import compile_all, compile_kernels
from tests.kernels.compiled import ALL_CODE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
USE = """
import array, sys
from ddlcore.contracts.machine_code.loading import load
from ddl_mine.machine_code import MINE
function = load(MINE, sys.argv[1]).function("mine_reverse")
x, y = array.array("q", [1, 2, 3]), array.array("q", [0, 0, 0])
assert function(x.buffer_info()[0], y.buffer_info()[0], 3) == 0
print(list(y), "numba" in sys.modules)
"""
CALLS = """
from ddlcore.contracts.machine_code.cpu import CPU
from ddlcore.contracts.machine_code.intrinsics import compiled, outside

reduce = outside(CPU, "ddl_reduce")


@compiled("qqqqqq")
def mine_sum(sources: int, n: int, target: int, count: int, dtype: int, op: int) -> int:
    return reduce(sources, n, target, count, dtype, op, 1.0, 1.0)
"""
USE_CALLS = """
import array, sys
from ddlcore.contracts.machine_code.code import MachineCode
from ddlcore.contracts.machine_code.loading import load
from ddlcore.contracts.machine_code.cpu import CPU
from ddlcore.types import DType, ReduceOp
code = MachineCode(functions={"mine_sum": "qqqqqq"}, modules=("ddl_mine.calls",), uses=(CPU,))
function = load(code, sys.argv[1]).function("mine_sum")
x, y = array.array("d", [1, 2, 3]), array.array("d", [10, 20, 30])
table = array.array("q", [x.buffer_info()[0], y.buffer_info()[0]])
assert function(table.buffer_info()[0], 2, y.buffer_info()[0], 3, DType.F64, ReduceOp.Sum) == 0
print(list(y), "numba" in sys.modules)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package of the page, in a folder."""
    blocks = re.findall(r"```python\n# ddl_mine/(\w+\.py)\n(.*?)```", PAGE, re.DOTALL)
    folder = tmp_path / "ddl_mine"
    folder.mkdir()
    for name, text in [*blocks, ("calls.py", CALLS), ("__init__.py", "")]:
        (folder / name).write_text(text)
    assert {name for name, _ in blocks} == {"kernels.py", "machine_code.py"}
    return tmp_path


def run(program: str, package: Path) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)])}
    words = [sys.executable, "-c", program, str(package / "cache")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.processes
def test_the_example_of_the_page(package: Path) -> None:
    """It is compiled once; the second process loads it without numba."""
    assert run(USE, package) == "[3, 2, 1] True"
    assert run(USE, package) == "[3, 2, 1] False"


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(300)
def test_it_may_call_the_cpu_kernels(package: Path) -> None:
    """Where both are compiled in this process, and where both come from the cache."""
    assert run(USE_CALLS, package) == "[11.0, 22.0, 33.0] True"
    assert run(USE_CALLS, package) == "[11.0, 22.0, 33.0] False"


BROKEN = """
from ddlcore.contracts.machine_code.code import MachineCode
from ddlcore.contracts.machine_code.cpu import CPU
from ddlcore.contracts.machine_code.compile import compile_object
sums = {"mine_sum": "qqqqqq"}
for functions, uses in (({**sums, "mine_other": "q"}, (CPU,)), ({"mine_sum": "qqqqqd"}, (CPU,)), (sums, ())):
    try:
        compile_object(MachineCode(functions, ("ddl_mine.calls",), uses=uses))
    except ImportError as error:
        print(error)
"""


@pytest.mark.processes
def test_what_does_not_fit_is_named(package: Path) -> None:
    """A function that is missing, other arguments than declared, and a call whose machine code is not declared."""
    missing, other, undeclared = run(BROKEN, package).splitlines()
    assert missing == "machine code: no module of ddl_mine.calls has a compiled function mine_other"
    assert re.fullmatch(r"machine code: mine_sum is compiled as \(int64,.*, and declared as 'qqqqqd'", other)
    assert undeclared == "machine code: ddl_reduce is called; name its MachineCode in `uses`"


def test_names_are_different() -> None:
    """The linker knows functions by their names."""
    with pytest.raises(ValueError, match="two functions are called ddl_reduce"):
        MachineCode({"ddl_reduce": "q"}, (), uses=(CPU,))
    with pytest.raises(ValueError, match="there is no function"):
        MachineCode({}, ())
    with pytest.raises(KeyError, match="no function nobody"):
        load(CPU).function("nobody")


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a plugin that cannot be imported, nor one that raises anything. Each is reported by its name."""
    (tmp_path / "ddl_raises.py").write_text("raise AttributeError('wet')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("ddlcore.contracts.machine_code.compile.compile_object", lambda code: b"machine code")
    names = ("ddl_nowhere:X", "ddl_raises:X", *ALL_CODE[:1])
    said: list[str] = []
    assert compile_all(names, said.append, str(tmp_path / "cache")) > 0
    assert [line.partition(" could not")[0] for line in said[:2]] == [
        "the CPU kernels of ddl_nowhere:X",
        "the CPU kernels of ddl_raises:X",
    ]
    assert said[2].startswith("compiled the CPU kernels in") and len(said) == 3
    said.clear()
    compile_kernels(names, said.append, str(tmp_path / "cache"))
    assert len(said) == 2 and said[1].endswith("could not be compiled beforehand: wet")


LAUNCH = """
import sys
from ddlcore.launch.ranks.warmup import compile_kernels
for names in (("ddl_mine.broken:CODE", "ddl_mine.machine_code:MINE"), ("ddl_mine.machine_code:MINE",)):
    compile_kernels(names, print, sys.argv[1])
"""


@pytest.mark.processes
def test_the_child_process_compiles_what_it_can(package: Path) -> None:
    """It gets the names and the directory, and its lines arrive: one for what failed, and one for what was compiled."""
    (package / "ddl_mine" / "broken.py").write_text(
        "from ddlcore.contracts.machine_code.code import MachineCode\n"
        "CODE = MachineCode({'mine_other': 'q'}, ('ddl_mine.kernels',))\n"
    )
    failed, compiled = run(LAUNCH, package).splitlines()  # and nothing the second time
    assert failed.startswith("the CPU kernels of ddl_mine.broken:CODE could not be compiled beforehand: ImportError: ")
    assert failed.endswith("machine code: no module of ddl_mine.kernels has a compiled function mine_other")
    assert re.fullmatch(rf"compiled the CPU kernels in \S+ s, once for this machine; kept in {package}/cache", compiled)
    assert len(list((package / "cache").glob("*.o"))) == 1
