"""Tests of the file that calls nccl4py: it fits the installed version, and uses another layer if that has changed."""

from __future__ import annotations

import inspect
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from ddl_nccl import _raw
from ddl_nccl.codes import IN_PROGRESS, OPS, REMOTE_ERROR, RESULTS, SUCCESS, TYPES
from ddl_nccl.errors import explained
from ddl_nccl.library import Features, library, spelled
from ddl_nccl.probe import gpu
from ddl_nccl.standin import StandIn, StandInError

from ddlcore.types import DType, ReduceOp

ARGUMENTS = {"all_reduce": (16, 32, 5, 7, 0), "reduce": (16, 32, 5, 7, 0, 1), "reduce_scatter": (16, 32, 5, 7, 0)}
ARGUMENTS |= {
    "all_gather": (16, 32, 5, 1),
    "broadcast": (16, 32, 5, 1, 0),
    "send": (16, 5, 1, 1),
    "recv": (32, 5, 1, 1),
}


def without(what: str) -> str:
    """Return why a test is skipped: ``what`` is installed only on machines with a GPU, although the test needs none."""
    return f"no GPU, and so no {what}" if gpu() else f"{what} is not installed"


def installed() -> Any:
    return pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")


def test_the_raw_layer_is_as_it_is_called() -> None:
    """Every function that is called takes these arguments in this order; loading needs neither GPU nor libnccl."""
    nccl = installed()
    assert _raw.changes(nccl) == []
    assert type(_raw.load()).__name__ == "_Direct"


def test_the_numbers_are_those_of_the_header() -> None:
    """The numbers of types, ops and results are those that nccl4py takes from nccl.h."""
    nccl = installed()
    names = {
        DType.I8: "Int8", DType.U8: "Uint8", DType.I32: "Int32", DType.I64: "Int64",
        DType.F16: "Float16", DType.BF16: "Bfloat16", DType.F32: "Float32", DType.F64: "Float64",
    }  # fmt: skip
    assert {dtype: int(getattr(nccl.DataType, name)) for dtype, name in names.items()} == TYPES
    ops = {
        "Sum": ReduceOp.Sum,
        "Prod": ReduceOp.Product,
        "Max": ReduceOp.Max,
        "Min": ReduceOp.Min,
        "Avg": ReduceOp.Average,
    }
    assert {op: int(getattr(nccl.RedOp, name)) for name, op in ops.items()} == OPS
    results = nccl.Result
    assert (results.Success, results.InProgress, results.RemoteError) == (SUCCESS, IN_PROGRESS, REMOTE_ERROR)
    assert len(RESULTS) == results.NumResults


def test_a_configuration_is_taken() -> None:
    """The fields that ddl sets exist, and a unique id survives the conversion to bytes and back."""
    nccl = installed()
    config = nccl.Config()
    config.blocking, config.split_share, config.comm_name = 1, 0, "ddl-test"
    assert (config.blocking, config.split_share, config.comm_name) == (1, 0, "ddl-test")
    known = bytes(range(128))
    assert bytes(nccl.UniqueId.from_buffer(bytearray(known))) == known


def test_without_the_library_it_says_which_to_install() -> None:
    """Without libnccl.so.2, the error says which package to install."""
    installed()
    raw = _raw.load()
    found = library()
    if found is not None:
        assert found.version == raw.version()
        return
    with pytest.raises(RuntimeError) as told:
        raw.version()
    assert "pip install nvidia-nccl-cu13" in str(explained("loading NCCL", told.value))


def loaded() -> Any:
    """Return the raw layer over NCCL itself, much of which works without a GPU."""
    installed()
    if library() is None:
        pytest.skip(without("libnccl.so.2"))
    return _raw.load()


def test_groups_of_the_library_itself() -> None:
    """Empty groups are allowed, an error in a group ends with the group, and None is not a communicator."""
    raw = loaded()
    nobody = installed().Comm()
    raw.group_start()
    raw.group_end()
    raw.group_start()
    for call in (lambda: raw.send(16, 5, 1, 0, nobody, 0), raw.group_end):
        with pytest.raises(installed().NCCLError) as told:
            call()
        assert told.value.status == 4
    raw.group_start()
    raw.group_end()
    with pytest.raises(TypeError):
        raw.send(16, 5, 1, 0, None, 0)


def test_a_communicator_of_the_library_itself() -> None:
    """A communicator of one rank works; without a GPU, NCCL's error says what is missing."""
    raw = loaded()
    unique_id, other = raw.unique_id(), raw.unique_id()
    assert len(unique_id) == 128 and unique_id != other
    try:
        comm = raw.init(1, unique_id, 0, 0, "ddl-test")
    except installed().NCCLError as error:
        said = str(explained("opening", error, raw.last_error(None)))
        assert "the NVIDIA driver is missing or older" in said or "no CUDA-capable device" in said
        return
    assert raw.state(comm) == SUCCESS
    raw.destroy(comm)


def test_the_name_of_a_communicator_outlives_its_opening() -> None:
    """The configuration is kept alive, because NCCL keeps the address of the name; only intended fields are set."""
    opened: list[Any] = []
    nccl = installed()
    names = {name: getattr(nccl, name) for name in ("Config", "UniqueId", *_raw.DIRECT)}
    direct = _raw._Direct(SimpleNamespace(**{**names, "comm_init_rank_config": lambda *given: opened.append(given)}))
    known = bytes(range(128))
    for name in ("ddl-a", "ddl-b", "ddl-a"):
        direct.init(2, known, 1, 0, name)
    assert [(size, bytes(unique_id), rank) for size, unique_id, rank, _ in opened] == [(2, known, 1)] * 3
    a, b, again = (nccl.Config.from_ptr(config, True, opened) for *_, config in opened)
    assert (a.comm_name, b.comm_name, again.ptr) == ("ddl-a", "ddl-b", a.ptr)
    plain = nccl.Config()
    fields = [name for name in dir(plain) if not name.startswith("_") and isinstance(getattr(plain, name), (int, str))]
    set_ = {name for name in fields if getattr(a, name) != getattr(plain, name)} - {"ptr"}
    assert set_ == {"blocking", "split_share", "comm_name"} and plain.magic == 0xCAFEBEEF


def test_the_public_layer_is_as_it_is_called() -> None:
    """The public functions that replace a changed raw layer take these arguments."""
    core = pytest.importorskip("nccl.core", reason=without("cuda-bindings"), exc_type=ImportError)
    calls: dict[str, tuple[Any, ...]] = {
        "allreduce": (1, 2, 0), "reduce": (1, 2, 0, 0), "reduce_scatter": (1, 2, 0), "allgather": (1, 2),
        "broadcast": (1, 2, 0), "send": (1, 0), "recv": (1, 0),
    }  # fmt: skip
    for name, arguments in calls.items():
        inspect.signature(getattr(core.Communicator, name)).bind(None, *arguments, stream=9)
    for name in ("get_async_error", "get_last_error", "abort", "destroy"):
        inspect.signature(getattr(core.Communicator, name)).bind(None)
    inspect.signature(core.Communicator.init).bind(2, 1, None, None)
    config = core.NCCLConfig(blocking=True, split_share=False, comm_name="ddl-test")
    assert (config.blocking, config.split_share, config.comm_name) == (True, False, "ddl-test")
    known = bytes(range(128))
    assert bytes(core.UniqueId.from_bytes(known)) == known and hasattr(core.Communicator, "nranks")
    assert hasattr(core.get_version(), "libnccl")


class _Core:
    """The part of nccl.core that is used; ``heard`` records its calls."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        version = SimpleNamespace(release=(2, 28, 3))
        self.version: Any = SimpleNamespace(libnccl=SimpleNamespace(version=version))

    def get_version(self) -> Any:
        return self.version

    def get_unique_id(self) -> bytes:
        return b"u" * 128

    def group_start(self) -> None:
        self.heard.append(("group_start",))

    def group_end(self) -> None:
        self.heard.append(("group_end",))


class _Communicator:
    """A communicator of that fake, with three ranks."""

    nranks = 3

    def __init__(self, core: _Core) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, stream: int = 0) -> int:
            told = [getattr(a, "__cuda_array_interface__", a) for a in arguments]
            shown = [(a["data"][0], a["shape"][0], a["typestr"]) if isinstance(a, dict) else a for a in told]
            self._core.heard.append((name, *shown, stream))
            return 6

        return call


def test_another_raw_layer_is_not_called(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If a signature of the raw layer has changed, all calls use the public layer, and a warning says so."""

    def all_reduce(comm: object, sendbuff: int, recvbuff: int) -> None:
        raise AssertionError("called")

    changed = SimpleNamespace(all_reduce=all_reduce)
    core = _Core()
    monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", changed)
    monkeypatch.setitem(sys.modules, "nccl.core", core)
    with caplog.at_level(logging.WARNING, "ddl"):
        raw = _raw.load()
    assert "all_reduce(comm, sendbuff, recvbuff)" in caplog.text and "no send" in caplog.text
    assert raw.version() == 22803 and raw.unique_id() == b"u" * 128
    comm = _Communicator(core)
    raw.group_start()
    for name, arguments in ARGUMENTS.items():
        getattr(raw, name)(*arguments, comm, 99)
    raw.group_end()
    assert raw.state(comm) == 6
    raw.abort(comm)
    raw.destroy(comm)
    assert core.heard == [
        ("group_start",),
        ("allreduce", (16, 5, "<f4"), (32, 5, "<f4"), 0, 99),
        ("reduce", (16, 5, "<f4"), (32, 5, "<f4"), 0, 1, 99),
        ("reduce_scatter", (16, 15, "<f4"), (32, 5, "<f4"), 0, 99),
        ("allgather", (16, 5, "|u1"), (32, 15, "|u1"), 99),
        ("broadcast", (16, 5, "|u1"), (32, 5, "|u1"), 0, 99),
        ("send", (16, 5, "|u1"), 1, 99),
        ("recv", (32, 5, "|u1"), 1, 99),
        ("group_end",),
        ("get_async_error", 0),
        ("abort", 0),
        ("destroy", 0),
    ]
    with pytest.raises(RuntimeError, match="NCCL's type 9"):
        raw.all_reduce(16, 32, 5, TYPES[DType.BF16], 0, comm, 99)
    core.version = SimpleNamespace(libnccl=None)
    with pytest.raises(RuntimeError, match="libnccl"):
        raw.version()


@pytest.mark.parametrize("error", [OSError("libnccl.so.2"), StandInError(2, "SystemError (2)")])
def test_a_library_that_fails_is_none(error: Exception) -> None:
    """A library whose version call fails counts as missing, also if it is another library's stub of NCCL."""

    class Failing(StandIn):
        def version(self) -> int:
            raise error

    assert library(Failing()) is None


def test_what_a_version_offers() -> None:
    """The features are those of the loaded library's version."""
    new, old = library(StandIn(23203)), library(StandIn(2708))
    assert new is not None and old is not None
    assert (new.name, new.version) == ("NCCL 2.32.3", 23203) and "average" in new.facts["reduces by"]
    assert (old.name, old.version) == ("NCCL 2.7.8", 2708) and "average" not in old.facts["reduces by"]
    assert spelled(21003) == "2.10.3"
    assert not Features.of(20999).bfloat16 and Features.of(21000).bfloat16
