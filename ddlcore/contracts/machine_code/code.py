"""Describe functions in Python that numba compiles, for the compiler, the launcher and the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

__all__ = ["MachineCode"]


@dataclass(frozen=True, eq=False)
class MachineCode:
    """Functions in Python that numba compiles into one file, once for each machine.

    A provider of a plugin names such an object as its ``machine_code``, so that the launcher compiles the functions
    before it starts the ranks; ``loading.load`` loads their machine code in a rank. The functions are written with the
    module ``intrinsics``, must not raise errors, and all return an int64. Raises ValueError if there are none, or
    if two functions, also of ``uses``, have the same name.
    """

    functions: Mapping[str, str]  # by name, a letter for the type of each argument: q is int64, d is float64
    modules: tuple[str, ...]  # dotted names of the modules that define them; only the compiler imports these
    also: tuple[str, ...] = ()  # modules, beside those, whose text changes the machine code, such as constants
    uses: tuple[MachineCode, ...] = ()  # whose functions these functions call, each declared by intrinsics.outside

    def __post_init__(self) -> None:
        """Check that there are functions, and that the names are different: the linker knows functions by their names."""
        if not self.functions:
            raise ValueError("machine code: there is no function; name at least one")
        names = [name for one in (self, *self.uses) for name in one.functions]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"machine code: two functions are called {', '.join(twice)}")

    @staticmethod
    def named(target: str) -> MachineCode:
        """Return the object called ``target``, which is "module:name". Raises ImportError if there is none."""
        module, _, name = target.partition(":")
        found = getattr(import_module(module), name, None)
        if not isinstance(found, MachineCode):
            raise ImportError(f"{target} is no MachineCode")
        return found
