"""MXNet can be imported with current numpy by any script; if that is impossible, one line says what to install."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from plugins.ddl_mxnet.tests.launching import SOURCE, run_python

ROOT = SOURCE.parents[2]
SCRIPT = """import mxnet as mx
import ddl_mxnet as ddl
ddl.init()
print("sum", ddl.allreduce(mx.np.array([True]).astype("int32"), op=ddl.Sum).asnumpy()[0])
"""


@pytest.mark.long
def test_a_script_that_begins_with_mxnet(tmp_path: Path) -> None:
    """A script that imports mxnet first runs unchanged if the wheel is installed, also under `ddl run`."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))
    for name in ("ddl_mxnet.pth", "_ddl_mxnet_numpy.py"):
        (packages / name).write_text((SOURCE / name).read_text())
    others = [str(SOURCE), str(ROOT), str(ROOT / "plugins/ddl_shm/src"), sysconfig.get_path("purelib")]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command, line in (([], "sum 1"), (["-m", "ddlcore.launch", "run", "-np", "2", str(python)], "sum 2")):
        done = subprocess.run(
            [str(python), *command, str(script)], env=env, capture_output=True, text=True, timeout=240.0
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert line in done.stdout


@pytest.mark.long
def test_nothing_happens_before_mxnet_is_imported() -> None:
    """Neither the interpreter's start nor a search for MXNet imports or changes numpy; the import warns of nothing."""
    code = (
        f"import sys, site, importlib.util; site.addsitedir({str(SOURCE)!r})\n"
        "assert [getattr(finder, '__name__', '') for finder in sys.meta_path].count('_Watch') == 1\n"
        "assert importlib.util.find_spec('mxnet') is not None and importlib.util.find_spec('no_such_thing') is None\n"
        "assert 'numpy' not in sys.modules and 'mxnet' not in sys.modules\n"
        "import numpy; assert 'bool' not in vars(numpy)\n"
        "import mxnet; assert numpy.bool is bool\n"
        "assert mxnet.nd.dot(mxnet.nd.ones((99, 99)), mxnet.nd.ones((99, 99)))[0, 0].asscalar() == 99\n"
    )
    assert run_python(code) == (0, "")


def _stub(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """Return a folder with a numpy that lacks the name ``bool``, and an MXNet that reads this name."""
    _stub(tmp_path, "numpy", "__version__ = '1.26.4'\n")
    _stub(tmp_path, "mxnet", "import numpy\n__version__, seen = '1.9.1', numpy.bool\n")
    return tmp_path


def test_mxnet_may_be_the_first_import(stubs: Path) -> None:
    """With the wheel's .pth file in the interpreter's packages, MXNet finds the name that numpy lacks."""
    begin, code = f"import site; site.addsitedir({str(SOURCE)!r})\n", "import mxnet; assert mxnet.seen is bool"
    assert run_python(begin + code, "-S", PYTHONPATH=str(stubs)) == (0, "")
    status, output = run_python(code, "-S", PYTHONPATH=str(stubs))
    assert status == 1
    assert "module 'numpy' has no attribute 'bool'" in output  # so the stubs can show a missing .pth file


def test_the_start_of_an_interpreter_changes_nothing(stubs: Path) -> None:
    """Until MXNet is imported, numpy is neither imported nor changed, also if a program looks whether MXNet is there."""
    code = (
        "import sys, site; before = set(sys.modules)\n"
        f"site.addsitedir({str(SOURCE)!r})\n"
        "assert set(sys.modules) - before <= {'_ddl_mxnet_numpy'}, set(sys.modules) - before\n"
        "assert [getattr(finder, '__name__', '') for finder in sys.meta_path].count('_Watch') == 1\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('mxnet') is not None and importlib.util.find_spec('no_such_thing') is None\n"
        "assert 'numpy' not in sys.modules and 'mxnet' not in sys.modules\n"
        "import numpy; assert 'bool' not in vars(numpy)\n"
        "import mxnet; assert numpy.bool is bool\n"
    )
    assert run_python(code, "-S", PYTHONPATH=str(stubs)) == (0, "")


@pytest.mark.parametrize(
    ("numpy", "mxnet", "line"),
    [
        ("2.1.0", "__version__ = '1.9.1'", 'numpy 2.1.0 is installed; run: pip install "numpy>=1.26,<2"'),
        ("1.26.4", None, 'not installed; run: pip install "mxnet>=1.9.1,<2" "numpy>=1.26,<2"'),
        ("1.26.4", "__version__ = '1.6.0'", '1.6.0 is installed; run: pip install "mxnet>=1.9.1,<2"'),
        ("1.26.4", "__version__ = '2.0.0b1'", '2.0.0b1 is installed; run: pip install "mxnet>=1.9.1,<2"'),
        ("1.26.4", "raise OSError('libquadmath.so.0: no such file')", "libquadmath.so.0.*apt-get install"),
    ],
    ids=["numpy2", "missing", "older", "newer", "library"],
)
def test_what_is_wrong_is_said_with_the_line_that_helps(
    tmp_path: Path, numpy: str, mxnet: str | None, line: str
) -> None:
    """A wrong installation raises ImportError with the command to run in one line, before MXNet itself fails."""
    _stub(tmp_path, "numpy", f"__version__ = {numpy!r}\n")
    if mxnet is not None:
        _stub(tmp_path, "mxnet", mxnet)
    path = os.pathsep.join(map(str, (tmp_path, SOURCE, ROOT)))
    code, output = run_python("import ddl_mxnet", "-S", PYTHONPATH=path)
    assert code == 1
    last = output.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    head, _, tail = line.partition(".*")
    assert head in last
    assert tail in last


@pytest.mark.long
def test_beside_torch() -> None:
    """MXNet and torch both compute in one process, although each brings its own threading and matrix libraries."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    code = (
        "import torch, _ddl_mxnet_numpy as n; n.watch_for_mxnet(); import mxnet\n"
        "assert mxnet.nd.dot(mxnet.nd.ones((99, 99)), mxnet.nd.ones((99, 99)))[0, 0].asscalar() == 99\n"
        "assert (torch.ones(99, 99) @ torch.ones(99, 99))[0, 0].item() == 99\n"
    )
    assert run_python(code) == (0, "")
