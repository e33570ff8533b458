"""Every kernel compiles for a GPU, without one, and accesses 16 bytes at once; skipped if there is no compiler.

The extra `ddl-nccl[cu13]` (or `[cu12]`) brings a compiler, and numba also finds a CUDA toolkit. `python -m
ddl_nccl.cuda.compile_all` does the same for all kernels, including the translation to machine code.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ddl_nccl.cuda import code, compile_all
from ddl_nccl.cuda.compile import KernelError, NoCompiler, compile_ptx
from ddl_nccl.cuda.names import COPY, FILL, Name, catalogue, conversion

from ddlcore.contracts import pip_install
from ddlcore.types import DType


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(540)
def test_kernels_compile_and_access_sixteen_bytes() -> None:
    """All kernels compile with 16-byte accesses, in a process of its own.

    In this process, numba's simulator may be enabled, which has no compiler.
    """
    command = [sys.executable, "-m", "ddl_nccl.cuda.compile_all", "--ptx-only", "--one-op", "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480)
    if ended.returncode == compile_all.NO_COMPILER:
        assert "ddl-nccl[cu13]" in ended.stderr
        pytest.skip(f"no compiler for a GPU here: {ended.stderr.strip()}")
    found = json.loads(ended.stdout)
    assert found["bad"] == [] and ended.returncode == 0
    assert {kernel["name"] for kernel in found["kernels"]} >= {
        str(name) for name in catalogue() if name.verb != "reduce"
    }
    assert len(found["kernels"]) == len(list(catalogue())) - 3 * len(DType)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ImportError("no libnvvm"), NoCompiler),
        (OSError("no libnvvm"), NoCompiler),
        (TypeError("no such type"), KernelError),
    ],
)
def test_one_line_says_what_to_install(
    error: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every failure of the compiler says in one line what to install; KernelError and NoCompiler are told apart."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("ddl_nccl.cuda.compile._Nvvm.ptx", fail)
    monkeypatch.setattr("ddl_nccl.cuda.compile._Nvvm.__init__", lambda _: None)
    install = re.escape(pip_install("ddl-nccl[cu13]"))
    with pytest.raises(kind, match=rf"{error}; [^\n]*{install} [^\n]*$"):
        compile_ptx(COPY, (9, 0))


@pytest.mark.parametrize(
    ("written", "capability", "expected"),
    [
        ("9.5", (9, 0), "8.0"),
        ("9.5", (8, 0), "8.0"),
        ("7.8", (9, 0), "7.8"),
        ("9.5", (8, 8), "9.0"),
        ("9.5", (12, 0), "8.7"),
        ("9.5", (13, 0), "9.5"),
    ],
)
def test_code_is_for_drivers_older_than_the_compiler(
    written: str, capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The PTX version is lowered to the oldest that knows the device, because older drivers refuse a later version.

    For an unknown device the compiler's version is kept.
    """
    text = f"//\n.version {written}\n.target sm_90\n.visible .entry mangled(\n.param .u64 mangled_param_0\n)"
    monkeypatch.setattr("ddl_nccl.cuda.compile._Nvvm.ptx", lambda *_: text)
    monkeypatch.setattr("ddl_nccl.cuda.compile._Nvvm.__init__", lambda _: None)
    compiled = compile_ptx(COPY, capability)
    assert compiled == text.replace(f".version {written}", f".version {expected}").replace("mangled", "ddl_copy")


@pytest.mark.parametrize("present", [True, False])
def test_the_compiler_finds_numpy_as_it_was(present: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """During a compilation numpy has ``row_stack``, which numba-cuda needs; afterwards numpy is unchanged."""
    own, seen = object(), list[object]()
    monkeypatch.setattr(np, "row_stack", own, raising=False)
    if not present:
        monkeypatch.delattr(np, "row_stack")

    class Compiler:
        def compile_ptx(self, *_: object, **__: object) -> tuple[str, None]:
            seen.append(getattr(np, "row_stack"))  # noqa: B009  # numpy's stubs may not have it
            return ".visible .entry mangled(", None

    def init(nvvm: Any) -> None:
        nvvm._cuda, nvvm._void, nvvm.types = Compiler(), lambda *_: None, dict.fromkeys("qd")

    monkeypatch.setattr("ddl_nccl.cuda.compile._Nvvm.__init__", init)
    monkeypatch.setattr("ddl_nccl.cuda.kernels.build", lambda *_: None)
    compile_ptx(COPY, (9, 0))
    assert seen == [own if present else np.vstack]
    assert hasattr(np, "row_stack") is present


def report(**changed: int) -> compile_all.CompileReport:
    good = {"loads": 2, "stores": 2, "narrow": 0, "calls": 0, "machine_code": 0, "seconds": 0}
    return compile_all.CompileReport(name="ddl_copy", **(good | changed))


def test_a_kernel_is_wrong_that_reads_or_writes_in_pieces() -> None:
    assert not report().fails()
    for name, value in (("loads", 0), ("stores", 0), ("narrow", 1), ("calls", 1)):
        assert report(**{name: value}).fails()


def test_code_is_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Name] = []

    def compile_image(name: Name, capability: tuple[int, int]) -> bytes:
        compiled.append(name)
        return f"{name} {capability}".encode()

    monkeypatch.setattr("ddl_nccl.cuda.compile.compile_image", compile_image)
    for _ in range(2):
        assert code.obtain(COPY, (9, 0), str(tmp_path)) == b"ddl_copy (9, 0)"
        assert code.obtain(COPY, (8, 0), str(tmp_path)) == b"ddl_copy (8, 0)"
        assert code.obtain(FILL, (9, 0), str(tmp_path)) == b"ddl_fill (9, 0)"
    assert compiled == [COPY, COPY, FILL]


def test_names_tell_kernels_apart() -> None:
    names = list(catalogue())
    assert len({str(name) for name in names}) == len(names)
    assert conversion(DType.F32, DType.F32, 1.0) == COPY
    assert str(conversion(DType.F32, DType.F32, 0.5)) == "ddl_convert_float32_float32"
    assert str(conversion(DType.F32, DType.F16, 1.0)) == "ddl_convert_float32_float16"
