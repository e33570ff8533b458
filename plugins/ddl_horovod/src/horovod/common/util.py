"""Helpers that Horovod's packages export, some of them by accident."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, TypeVar

from ddlcore.api import built, built_version, resolve_op
from horovod.common.exceptions import HorovodVersionMismatchError, get_version_mismatch_message

__all__ = [
    "EXTENSIONS",
    "HorovodVersionMismatchError",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "get_extension_full_path",
    "get_version_mismatch_message",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

T = TypeVar("T")
EXTENSIONS = ["tensorflow", "torch", "mxnet"]
_PACKAGES = {"tensorflow": "ddl_tf", "torch": "ddl_torch", "mxnet": "ddl_mxnet"}


def get_ext_suffix() -> str:
    """Return the ending of the file names of compiled modules."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return where Horovod would have a compiled module. There is no such file here."""
    return os.path.join(os.path.dirname(pkg_path), *args[:-1], args[-1] + get_ext_suffix())


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError if the package of ddl for ``ext_name``, such as "horovod.torch", is not installed.

    The other arguments, the place of a compiled library in Horovod, are not used.
    """
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        name = _PACKAGES.get(framework, framework).replace("_", "-")
        raise ImportError(f"{ext_name} needs {name} and its framework: pip install {name}")


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Do nothing: no library is compiled for a version of a framework."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether ``horovod.<ext_base_name>`` can be imported: the framework and its package of ddl are installed.

    ``verbose`` has no effect.
    """
    return ext_base_name in _PACKAGES and all(map(find_spec, (ext_base_name, _PACKAGES[ext_base_name])))


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework ``ext_base_name`` sees a GPU. The framework is imported. ``verbose`` has no effect."""
    return extension_available(ext_base_name) and bool(import_module(f"horovod.{ext_base_name}")._check_has_gpu())


def mpi_built(verbose: bool = False) -> bool:
    """Return whether MPI is installed as a transport. ``verbose`` has no effect."""
    return built("mpi")


def gloo_built(verbose: bool = False) -> bool:
    """Return whether Gloo is installed as a transport. ``verbose`` has no effect."""
    return built("gloo")


def nccl_built(verbose: bool = False) -> int:
    """Return the version code of NCCL, or 0 if it cannot be used here. ``verbose`` has no effect."""
    return built_version("nccl")


def ddl_built(verbose: bool = False) -> bool:
    """Return False: IBM's DDL is not supported. ``verbose`` has no effect."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return whether oneCCL is installed as a transport. ``verbose`` has no effect."""
    return built("ccl")


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables within the ``with`` block, and restore them afterwards. None removes the variable."""
    before = {name: os.environ.get(name) for name in kwargs}
    try:
        _set(kwargs)
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Return the function that makes one operation of the arguments ``op`` and ``average``. ``reduce_ops`` is not used."""
    return resolve_op


def is_iterable(x: object) -> bool:
    """Return whether ``iter(x)`` works."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether the version ``ver`` is ``target``, of the form "1.2.3", or later. Raises ValueError for other types."""
    from packaging.version import parse

    if not isinstance(ver, str) or not isinstance(target, str) or len(target.split(".")) != 3:
        raise ValueError(f"two versions are compared, the second of the form 1.2.3; they are {ver!r} and {target!r}")
    return parse(ver) >= parse(target)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether ``num_rank`` is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741  # Horovod's name
    """Return ``l`` in ``n`` parts whose lengths differ by at most one; the first ones are longer, the last may be empty."""
    each, more = divmod(len(l), n)
    ends = [each * part + min(part, more) for part in range(n + 1)]
    return [l[begin:end] for begin, end in pairwise(ends)]
