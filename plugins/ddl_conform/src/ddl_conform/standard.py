"""The base class of all suites of the conformance kit.

The class has one test. This test fails if a subclass removes a standard test, or overrides one without a reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["StandardSuite"]

GUARD = "test_every_standard_test_stands"
MARKS_WITH_REASON = ("skip", "skipif", "xfail")


class StandardSuite:
    """The base class of all suites.

    A subclass may override a standard test only if the override has a pytest mark that gives the reason:
    ``@pytest.mark.xfail(reason="…")``, ``skip`` or ``skipif``. The override should call ``super()``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if GUARD in vars(cls):
            raise TypeError(f"{cls.__name__} replaces {GUARD}, which guards the standard tests; remove that")

    def test_every_standard_test_stands(self) -> None:
        """The suite has all standard tests: none is removed, and none is overridden without a mark with a reason."""
        faults = []
        for name, standard in _standard_tests(type(self)):
            present = getattr(type(self), name, None)
            if present is standard or (callable(present) and _reason(present)):
                continue
            what = "overrides" if callable(present) else "removes"
            faults.append(
                f'{type(self).__name__} {what} {name}; mark it @pytest.mark.xfail(reason="…") or let it stand'
            )
        assert not faults, "\n".join(faults)


def _standard_tests(suite: type) -> Iterator[tuple[str, Any]]:
    """Yield (name, function) for each test that a base class of ``suite`` in the conformance kit defines."""
    package = __name__.rpartition(".")[0] + "."
    seen = set()
    for base in suite.__mro__:
        if not base.__module__.startswith(package):
            continue
        for name, value in vars(base).items():
            if name.startswith("test") and name not in seen:
                seen.add(name)
                yield name, value


def _reason(test: Any) -> str:
    """Return the reason that a mark ``skip``, ``skipif`` or ``xfail`` of the test gives; "" if no mark gives a reason.

    The reason is the argument ``reason`` of the mark. For ``skip``, it may also be the first positional argument.
    """
    for mark in getattr(test, "pytestmark", ()):
        if mark.name not in MARKS_WITH_REASON:
            continue
        reason = mark.kwargs.get("reason", mark.args[0] if mark.name == "skip" and mark.args else "")
        if isinstance(reason, str) and reason.strip():
            return reason
    return ""
