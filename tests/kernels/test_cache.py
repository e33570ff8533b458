"""Compiled kernels are kept where only their owner can write, are found again, and are not needed to be kept."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddlcore.contracts import cache
from ddlcore.contracts.machine_code import loading
from ddlcore.contracts.machine_code.code import MachineCode
from ddlcore.contracts.machine_code.cpu import CPU
from ddlcore.launch.ranks.warmup import compile_all
from tests.kernels.compiled import ALL_CODE

ROOT = Path(__file__).resolve().parents[2]
USE = """
import sys
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.types import DType, ReduceOp
assert "numba" not in sys.modules and "llvmlite" not in sys.modules
kernels = CpuKernels()
import array
x, y = array.array("f", [1, 2, 3]), array.array("f", [10, 20, 30])
kernels.reduce([x.buffer_info()[0], y.buffer_info()[0]], x.buffer_info()[0], 3, DType.F32, ReduceOp.Sum)
print(list(x), "numba" in sys.modules)
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A compiler that takes no time; the list grows with each use."""
    uses: list[int] = []

    def compile_object(code: object) -> bytes:
        uses.append(1)
        return b"machine code"

    monkeypatch.setattr("ddlcore.contracts.machine_code.compile.compile_object", compile_object)
    return uses


def test_order_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chosen directory is the only one; else XDG's, the home's, the temporary one's, in that order."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert list(cache.cache_directories("/a", {"DDL_CACHE_DIR": "/b"})) == [Path("/a")]
    assert list(cache.cache_directories("", {"DDL_CACHE_DIR": "/b"})) == [Path("/b")]
    places = list(cache.cache_directories("", {"XDG_CACHE_HOME": "/x"}))
    assert places[:2] == [Path("/x/ddl"), Path("/home/someone/.cache/ddl")]
    assert places[2].name == f"ddl-{os.getuid()}"


def test_kept_and_found(tmp_path: Path) -> None:
    """The first writable place takes it; it is found again; nothing half-written stays."""
    places = [Path("/dev/null/nowhere"), tmp_path / "deep" / "cache"]
    assert cache.keep("k.o", b"abc", iter(places)) == places[1]
    assert cache.find("k.o", iter(places)) == b"abc"
    assert [path.name for path in places[1].iterdir()] == ["k.o"]
    assert cache.find("other.o", iter(places)) is None


def test_who_only_looks_makes_no_directory(tmp_path: Path) -> None:
    """A kernel that was never compiled leaves nothing in any of the directories that could have it."""
    places = [tmp_path / "first", tmp_path / "second"]
    assert cache.find("k.o", iter(places)) is None
    assert list(tmp_path.iterdir()) == []
    cache.keep("k.o", b"abc", iter(places))
    assert list(tmp_path.iterdir()) == places[:1]


def test_nowhere_to_keep() -> None:
    """Where no place is writable nothing is kept, and nothing raises."""
    places = [Path("/dev/null/nowhere"), Path("/proc/nowhere")]
    assert cache.keep("k.o", b"abc", iter(places)) is None
    assert cache.find("k.o", iter(places)) is None


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b"x" + b[1:], lambda b: b""], ids=["cut", "changed", "empty"]
)
def test_damaged_files_are_not_loaded(tmp_path: Path, damage: object) -> None:
    """A file that is not whole counts as missing."""
    cache.keep("k.o", b"machine code", iter([tmp_path]))
    path = tmp_path / "k.o"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]  # one of the lambdas above
    assert cache.find("k.o", iter([tmp_path])) is None


def test_what_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    """Machine code is neither loaded from nor written to a directory that others may write to."""
    cache.keep("k.o", b"machine code", iter([tmp_path]))
    tmp_path.chmod(0o777)
    assert cache.find("k.o", iter([tmp_path])) is None
    assert cache.keep("k.o", b"machine code", iter([tmp_path])) is None
    tmp_path.chmod(0o700)
    assert cache.find("k.o", iter([tmp_path])) == b"machine code"


def test_a_file_that_others_could_have_written_is_not_loaded(tmp_path: Path) -> None:
    """By its mode, as a link, as a pipe that nobody writes to: none is read, and none is waited for."""
    cache.keep("k.o", b"machine code", iter([tmp_path]))
    (tmp_path / "k.o").chmod(0o666)
    assert cache.find("k.o", iter([tmp_path])) is None
    (tmp_path / "k.o").chmod(0o600)
    (tmp_path / "link.o").symlink_to(tmp_path / "k.o")
    os.mkfifo(tmp_path / "pipe.o", 0o600)
    assert cache.find("link.o", iter([tmp_path])) is None
    assert cache.find("pipe.o", iter([tmp_path])) is None
    assert cache.find("k.o", iter([tmp_path])) == b"machine code"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
@pytest.mark.parametrize("whose", ["file", "directory"])
def test_another_users_work_is_not_loaded(tmp_path: Path, whose: str) -> None:
    """Whatever its mode, and whatever stands in it."""
    place = tmp_path / "cache"
    cache.keep("k.o", b"machine code", iter([place]))
    os.chown(place / "k.o" if whose == "file" else place, 65534, 65534)
    assert cache.find("k.o", iter([place])) is None


def test_what_was_checked_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another directory that takes the name after the check changes nothing: no window is left."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    cache.keep("k.o", b"ours", iter([ours]))
    cache.keep("k.o", b"theirs", iter([theirs]))
    theirs.chmod(0o777)
    check = cache._refuse_foreign

    def swap(facts: os.stat_result) -> None:
        check(facts)
        if theirs.exists():
            ours.rename(tmp_path / "aside")
            theirs.rename(ours)

    monkeypatch.setattr(cache, "_refuse_foreign", swap)
    assert cache.find("k.o", iter([ours])) == b"ours"


def test_a_link_is_no_cache(tmp_path: Path) -> None:
    """Neither as the directory nor as what is written to it."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "real")
    assert cache.keep("k.o", b"abc", iter([tmp_path / "cache"])) is None
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "real" / "k.o").symlink_to(tmp_path / "victim")
    assert cache.keep("k.o", b"abc", iter([tmp_path / "real"])) == tmp_path / "real"
    assert (tmp_path / "victim").read_text() == "precious"
    assert cache.find("k.o", iter([tmp_path / "real"])) == b"abc"


def test_directories_on_the_way_are_ours_alone(tmp_path: Path) -> None:
    """With any umask: who may write above the cache may replace it."""
    before = os.umask(0)
    try:
        cache.keep("k.o", b"abc", iter([tmp_path / "deep" / "cache"]))
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "deep", tmp_path / "deep" / "cache")]
    assert modes == [0o700, 0o700]
    assert (tmp_path / "deep" / "cache" / "k.o").stat().st_mode & 0o777 == 0o600


def test_compiled_once_with_one_line(tmp_path: Path, fake: list[int]) -> None:
    """The first compile_all says so in one line and takes time; the second does and says nothing."""
    said: list[str] = []
    assert compile_all(ALL_CODE[:1], said.append, str(tmp_path)) > 0
    assert compile_all(ALL_CODE[:1], said.append, str(tmp_path)) == 0
    assert len(said) == len(fake) == 1
    assert str(tmp_path) in said[0]
    assert "\n" not in said[0]


def test_says_when_it_cannot_keep(fake: list[int]) -> None:
    """Without a place the line says which setting helps, and the next process compiles again."""
    said: list[str] = []
    compile_all(ALL_CODE[:1], said.append, "/dev/null/nowhere")
    assert "DDL_CACHE_DIR" in said[0]
    compile_all(ALL_CODE[:1], said.append, "/dev/null/nowhere")
    assert len(fake) == 2


def test_those_who_come_together_compile_once(tmp_path: Path, fake: list[int]) -> None:
    """Eight threads find an empty cache at the same time; one compiles, the others get its file."""
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(loading.obtain(CPU, str(tmp_path))[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert got == [b"machine code"] * 8
    assert len(fake) == 1


def test_another_process_is_waited_for(tmp_path: Path) -> None:
    """While one holds the lock another waits, and goes on without it when that takes too long."""
    with cache.alone(iter([tmp_path]), 5.0):
        waited = threading.Event()

        def wait() -> None:
            with cache.alone(iter([tmp_path]), 0.2):
                waited.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not waited.wait(0.1)
        assert waited.wait(20.0)
        thread.join()


@pytest.mark.parametrize("name", ALL_CODE)
def test_all_that_compiled_modules_import_is_a_source(name: str) -> None:
    """Also constants: else stale code would be loaded after a change of them. numba and llvmlite count by their versions."""
    code = MachineCode.named(name)
    here, package = name.partition(":")[0], MachineCode.__module__.rpartition(".")[0]
    known = {*code.modules, *code.also, here, *(f"{package}.{one}" for one in ("code", "cpu", "intrinsics"))}
    seen: set[str] = set()
    todo = list(code.modules)
    while todo:
        seen.add(module := todo.pop())
        text = Path(str(find_spec(module).origin)).read_text()  # type: ignore[union-attr]  # it is installed
        found = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module}
        ours = {one for one in found if one.startswith("ddl")}
        assert ours <= known, module
        todo += [one for one in ours - seen if one in {*code.modules, *code.also}]
    assert seen >= {*code.modules}


def test_name_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a module, also of one that only another's functions need, and the arguments change the file's name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []
    for text in ("one", "two"):
        (tmp_path / "ddl_source_of_code.py").write_text(f"x = {text!r}")
        used = MachineCode({"f": "q"}, (), ("ddl_source_of_code",))
        names += [loading.file_name(used), loading.file_name(MachineCode({"g": "q"}, (), uses=(used,)))]
    names.append(loading.file_name(MachineCode({"f": "qq"}, (), ("ddl_source_of_code",))))
    compilers = {f"{loading.__package__}.{one}" for one in loading._COMPILERS}
    assert compilers == {f"{loading.__package__}.{one}" for one in ("code", "compile", "intrinsics")}
    monkeypatch.setattr(loading, "_COMPILERS", ("code", "compile"))
    names.append(loading.file_name(used))
    assert len(set(names)) == len(names)


def test_what_is_absent_is_named() -> None:
    """The error names what is wrong: an object that is no MachineCode, or a source module that cannot be read."""
    with pytest.raises(ImportError, match="types:DType is no MachineCode"):
        MachineCode.named("ddlcore.types:DType")
    for name in ("ddlcore.nowhere", "sys"):
        with pytest.raises(ImportError, match=f"{name}, a source of machine code"):
            loading.file_name(MachineCode({"f": "q"}, (name,)))


def _use(environment: dict[str, str], root: Path = ROOT) -> str:
    basic = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", USE],
        env={**basic, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _copy_of_the_package(tmp_path: Path) -> Path:
    """The package as in a site-packages that nobody may write to."""
    root = tmp_path / "site-packages"
    for source in (ROOT / "ddlcore").rglob("*.py"):
        target = root / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        target.chmod(0o444)
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        folder.chmod(0o555)
    return root


@pytest.mark.processes
def test_read_only_site_packages(tmp_path: Path) -> None:
    """A package that cannot be written to: its kernels come from the user's cache, without numba."""
    (tmp_path / "home" / ".cache" / "ddl").mkdir(parents=True, mode=0o700)
    image, _ = loading.obtain(CPU)
    cache.keep(loading.file_name(CPU), image, iter([tmp_path / "home" / ".cache" / "ddl"]))
    root = _copy_of_the_package(tmp_path)
    before = sorted(root.rglob("*"))
    try:
        assert _use({"HOME": str(tmp_path / "home")}, root) == "[11.0, 22.0, 33.0] False"
        assert sorted(root.rglob("*")) == before
    finally:
        for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
            folder.chmod(0o755)


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(360)
def test_no_writable_directory_at_all() -> None:
    """No home, no cache directory: the kernels are compiled in memory, and work."""
    nowhere = "/dev/null/nowhere"
    environment = {"HOME": nowhere, "XDG_CACHE_HOME": nowhere, "DDL_CACHE_DIR": nowhere}
    assert _use(environment) == "[11.0, 22.0, 33.0] True"
