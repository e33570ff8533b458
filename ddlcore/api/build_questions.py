"""Makes the functions by which scripts written for Horovod ask what a framework's package was built with.

Here they answer what is installed. A framework's package names the functions, and nothing else of them is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ddlcore.api.transports import built, built_version, enabled, threads_supported

__all__ = ["BuildQuestions"]

T = TypeVar("T")


class BuildQuestions:
    """Makes functions without arguments for the module with the name ``module``, with docstrings for ``help``.

    Each method takes the name of the function, the name of the transport that it asks about, and what users call the
    library behind that transport.

    >>> x_built = BuildQuestions(__name__).built("x_built", "x", "X")
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def built(self, name: str, transport: str, library: str, note: str = "") -> Callable[[], bool]:
        """Return the function that tells whether the transport is installed; see ``ddlcore.api.built``.

        ``note``: what else its docstring says.
        """
        said = f"Return whether {library} is installed as a transport. "
        return self._made(name, partial(built, transport), said + (note or "It may be called before ``init``."))

    def enabled(self, name: str, transport: str, library: str) -> Callable[[], bool]:
        """Return the function that tells whether the current job uses the transport; see ``ddlcore.api.enabled``."""
        said = f"Return whether the current job communicates over {library}. Raises NotInitialized before ``init``."
        return self._made(name, partial(enabled, transport), said)

    def built_version(self, name: str, transport: str, library: str, example: int) -> Callable[[], int]:
        """Return the function that tells the library's version code; see ``ddlcore.api.built_version``."""
        said = f"Return the version code of {library}, such as {example}, or 0 if {library} cannot be used here."
        return self._made(name, partial(built_version, transport), f"{said} It may be called before ``init``.", "int")

    def threads_supported(self, name: str, transport: str, library: str) -> Callable[[], bool]:
        """Return the function that tells whether other code may call the library, too.

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
