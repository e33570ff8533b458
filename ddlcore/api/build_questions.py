"""Makes the functions that Horovod's scripts call to find out with which libraries a package was built.

In ddl, these functions return which transports are installed. A framework's package only
gives names to the functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ddlcore.api.transports import built, built_version, enabled, threads_supported

__all__ = ["BuildQuestions"]

T = TypeVar("T")


class BuildQuestions:
    """A factory of functions for the module with the name ``module``. The functions have docstrings and no arguments.

    Each method returns one function. The arguments of the methods: ``name`` is the name of the new function.
    ``transport`` is the name of the transport that the new function asks about. ``library`` is the usual name of the
    library that this transport uses.

    >>> x_built = BuildQuestions(__name__).built("x_built", "x", "X")
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def built(self, name: str, transport: str, library: str, note: str = "") -> Callable[[], bool]:
        """Return a function that returns whether the transport is installed; see ``ddlcore.api.built``.

        ``note``: a sentence for the function's docstring.
        """
        said = f"Return whether {library} is installed as a transport. "
        return self._made(name, partial(built, transport), said + (note or "It may be called before ``init``."))

    def enabled(self, name: str, transport: str, library: str) -> Callable[[], bool]:
        """Return a function that returns whether the current job uses the transport; see ``ddlcore.api.enabled``."""
        said = f"Return whether the current job communicates over {library}. Raises NotInitialized before ``init``."
        return self._made(name, partial(enabled, transport), said)

    def built_version(self, name: str, transport: str, library: str, example: int) -> Callable[[], int]:
        """Return a function that returns the version code of the library; see ``ddlcore.api.built_version``.

        ``example``: a version code for the function's docstring.
        """
        said = f"Return the version code of {library}, such as {example}, or 0 if {library} cannot be used here."
        return self._made(name, partial(built_version, transport), f"{said} It may be called before ``init``.", "int")

    def threads_supported(self, name: str, transport: str, library: str) -> Callable[[], bool]:
        """Return a function that returns whether the user's program may call the library while a job uses it.

        See ``ddlcore.api.threads_supported``.
        """
        said = (
            f"Return whether the program may call {library} while the job runs, whatever transport that uses.\n\n"
            "Every rank must call it. Raises ValueError if that library is not installed or did not start the "
            "processes, and before ``init``."
        )
        return self._made(name, partial(threads_supported, transport), said)

    def _made(self, name: str, answer: Callable[[], T], doc: str, returns: str = "bool") -> Callable[[], T]:
        def question() -> T:
            return answer()

        question.__doc__, question.__module__ = doc, self._module
        question.__name__ = question.__qualname__ = name
        question.__annotations__["return"] = returns
        return question
