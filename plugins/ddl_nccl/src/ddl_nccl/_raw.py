"""The functions of NCCL, called through nccl4py. This is the only file that calls nccl4py.

nccl4py's raw layer takes addresses and costs 0.1 µs per call. But nccl4py does not promise to keep the raw layer; it
promises only the names in ``nccl.core``. If the raw layer differs from that of nccl4py 0.5 and 0.6, this module uses
``nccl.core`` instead.
"""

from __future__ import annotations

import inspect
import logging
from importlib import import_module
from typing import Any

from ddl_nccl.layer import Comm, Raw

log = logging.getLogger("ddl")

# The functions that are called, and the names of their arguments.
DIRECT = {
    "get_version": (),
    "get_unique_id": (),
    "comm_init_rank_config": ("nranks", "comm_id", "rank", "config"),
    "comm_get_async_error": ("comm",),
    "comm_abort": ("comm",),
    "comm_destroy": ("comm",),
    "get_last_error": ("comm",),
    "group_start": (),
    "group_end": (),
    "all_reduce": ("sendbuff", "recvbuff", "count", "datatype", "op", "comm", "stream"),
    "reduce": ("sendbuff", "recvbuff", "count", "datatype", "op", "root", "comm", "stream"),
    "reduce_scatter": ("sendbuff", "recvbuff", "recvcount", "datatype", "op", "comm", "stream"),
    "all_gather": ("sendbuff", "recvbuff", "sendcount", "datatype", "comm", "stream"),
    "broadcast": ("sendbuff", "recvbuff", "count", "datatype", "root", "comm", "stream"),
    "send": ("sendbuff", "count", "datatype", "peer", "comm", "stream"),
    "recv": ("recvbuff", "count", "datatype", "peer", "comm", "stream"),
}


def load() -> Raw:
    """Return an object that calls the installed nccl4py. This function needs neither a GPU nor libnccl.

    Raises ImportError if nccl4py is not installed.
    """
    nccl = import_module("nccl.bindings.nccl")
    changed = changes(nccl)
    if not changed:
        return _Direct(nccl)
    log.warning("nccl: nccl4py's raw layer is another one (%s): each call goes its longer way", "; ".join(changed))
    return _Public(import_module("nccl.core"))


def changes(nccl: Any) -> list[str]:
    """Return a list of texts that say how nccl4py's raw layer differs from DIRECT.

    It is empty if there is no difference.
    """
    found = []
    for name, expected in DIRECT.items():
        function = getattr(nccl, name, None)
        try:
            arguments = tuple(inspect.signature(function).parameters) if function else None
        except (TypeError, ValueError):  # a function without a readable signature
            arguments = None
        if arguments != expected:
            found.append(f"{name}({', '.join(arguments)})" if arguments is not None else f"no {name}")
    return found + [f"no {name}" for name in ("Comm", "Config", "UniqueId") if not hasattr(nccl, name)]


class _Direct:
    """NCCL through nccl4py's raw layer, which takes addresses.

    The functions that each step calls are nccl4py's own functions, without a wrapper.
    """

    def __init__(self, nccl: Any) -> None:
        self._nccl = nccl
        self._configs: dict[str, Any] = {}  # by name; never freed: NCCL keeps the address of the name, not a copy
        self.version = nccl.get_version
        self.state = nccl.comm_get_async_error
        self.abort = nccl.comm_abort
        self.destroy = nccl.comm_destroy
        self.group_start, self.group_end = nccl.group_start, nccl.group_end
        self.all_reduce, self.reduce, self.reduce_scatter = nccl.all_reduce, nccl.reduce, nccl.reduce_scatter
        self.all_gather, self.broadcast = nccl.all_gather, nccl.broadcast
        self.send, self.recv = nccl.send, nccl.recv

    def unique_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    def init(self, size: int, unique_id: bytes, rank: int, device: int, name: str) -> Comm:
        known = self._nccl.UniqueId.from_buffer(bytearray(unique_id))
        return self._nccl.comm_init_rank_config(size, known, rank, self._config(name).ptr)

    def _config(self, name: str) -> Any:
        config = self._configs.get(name)
        if config is None:
            config = self._nccl.Config()
            config.blocking = 1  # otherwise NCCL starts a thread for each call
            config.split_share = 0  # an abort would not reach communicators that share resources
            if hasattr(config, "comm_name"):
                config.comm_name = name
            config = self._configs.setdefault(name, config)
        return config

    def last_error(self, comm: Comm | None) -> str:
        return str(self._nccl.get_last_error(self._nccl.Comm() if comm is None else comm))


class _Public:
    """NCCL through nccl4py's public functions, which take arrays.

    These functions are slower: they look for the framework that owns an array, and import frameworks to do so.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self.group_start, self.group_end = core.group_start, core.group_end

    def version(self) -> int:
        library = self._core.get_version().libnccl
        if library is None:
            raise RuntimeError("libnccl.so.2 not found")
        major, minor, patch = library.version.release[:3]
        return int(major * 10000 + minor * 100 + patch)

    def unique_id(self) -> bytes:
        return bytes(self._core.get_unique_id())

    def init(self, size: int, unique_id: bytes, rank: int, device: int, name: str) -> Comm:
        config = self._core.NCCLConfig(blocking=True, split_share=False, comm_name=name)
        return self._core.Communicator.init(size, rank, self._core.UniqueId.from_bytes(unique_id), config)

    def state(self, comm: Comm) -> int:
        return int(comm.get_async_error())

    def last_error(self, comm: Comm | None) -> str:
        return str(comm.get_last_error()) if comm is not None else ""

    def abort(self, comm: Comm) -> None:
        comm.abort()

    def destroy(self, comm: Comm) -> None:
        comm.destroy()

    def all_reduce(self, source: int, target: int, count: int, dtype: int, op: int, comm: Comm, stream: int, /) -> None:
        comm.allreduce(_Array(source, count, dtype), _Array(target, count, dtype), op, stream=stream)

    def reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, root: int, comm: Comm, stream: int, /
    ) -> None:
        comm.reduce(_Array(source, count, dtype), _Array(target, count, dtype), op, root, stream=stream)

    def reduce_scatter(
        self, source: int, target: int, count: int, dtype: int, op: int, comm: Comm, stream: int, /
    ) -> None:
        whole = _Array(source, count * comm.nranks, dtype)
        comm.reduce_scatter(whole, _Array(target, count, dtype), op, stream=stream)

    def all_gather(self, source: int, target: int, count: int, dtype: int, comm: Comm, stream: int, /) -> None:
        comm.allgather(_Array(source, count, dtype), _Array(target, count * comm.nranks, dtype), stream=stream)

    def broadcast(
        self, source: int, target: int, count: int, dtype: int, root: int, comm: Comm, stream: int, /
    ) -> None:
        comm.broadcast(_Array(source, count, dtype), _Array(target, count, dtype), root, stream=stream)

    def send(self, source: int, count: int, dtype: int, peer: int, comm: Comm, stream: int, /) -> None:
        comm.send(_Array(source, count, dtype), peer, stream=stream)

    def recv(self, target: int, count: int, dtype: int, peer: int, comm: Comm, stream: int, /) -> None:
        comm.recv(_Array(target, count, dtype), peer, stream=stream)


_NUMPY_TYPES = {0: "|i1", 1: "|u1", 2: "<i4", 4: "<i8", 6: "<f2", 7: "<f4", 8: "<f8"}  # bfloat16 has no such name


class _Array:
    """A block of device memory that implements CUDA's array interface."""

    def __init__(self, address: int, count: int, dtype: int) -> None:
        if dtype not in _NUMPY_TYPES:
            raise RuntimeError(f"nccl4py's public layer takes no arrays of NCCL's type {dtype} by address")
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": _NUMPY_TYPES[dtype], "data": (address, False), "version": 3, "stream": None,
        }  # fmt: skip
