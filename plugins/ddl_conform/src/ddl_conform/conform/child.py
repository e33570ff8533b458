"""The child process that runs the suite of one plugin under pytest, and writes each result at once as a line of JSON.

watch.py starts this process as ``python -m ddl_conform.conform.child ORDER``. ORDER is a JSON file that names the
plugin and the tests to run. The child process may hang or crash in the plugin's native code. In this case, the last
line that the process wrote names the test that was running.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ddl_conform.conform.kinds import KINDS, ProviderUnderTest, subjects, suites_of
from ddl_conform.conform.unwritten import unwritten

_SOURCE = "from ddl_conform.conform import child\nglobals().update({one.__name__: one for one in child.suites()})\n"
_NOT_OF_PLUGINS = ("ddlcore", "pytest", "_pytest", "pluggy", "hypothesis")  # packages, see ``_place``
_current: dict[str, Any] = {}  # the suites of this session; a process has only one session


def main(order: str) -> int:
    """Run the tests of the plugin that the JSON file ``order`` names, and return the exit code of the process.

    The exit code is 0 if the pytest session ended normally, even if tests failed. It is also 0 if the plugin cannot be
    tested at all; in this case, a line of the report says why.
    """
    wanted = json.loads(Path(order).read_text())
    words = open(wanted["words"], "a", buffering=1)  # noqa: SIM115  # closed with the process
    stderr = os.fdopen(os.dup(2), "w")  # pytest replaces the original one to capture the tests' output
    faulthandler.enable(stderr)
    teller = _Teller(words, stderr, wanted)
    try:
        _prepare(wanted, teller)
    except Exception as error:
        teller.say(refused=f"{error}" if type(error).__name__ == "PluginError" else _one_line(error))
        return 0
    folder = Path(order).parent
    (folder / "test_conform.py").write_text(_SOURCE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    arguments = ["-q", "-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "--import-mode=importlib"]
    arguments += ["-p", "no:cacheprovider", "-p", "no:faulthandler", str(folder / "test_conform.py")]
    code = pytest.main(arguments, plugins=[teller])
    return 0 if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED) else 1


def suites() -> list[Any]:
    """Return the suite classes that this process must run.

    The test file that pytest collects defines only these classes.
    """
    found: list[Any] = _current["suites"]
    return found


def _prepare(wanted: Mapping[str, Any], teller: _Teller) -> None:
    from ddlcore.plug.settings import settings_of

    registry = settings_of(os.environ)[1]
    (subject,) = subjects(registry, wanted["name"], wanted["kind"])
    tested, classes = suites_of(subject, registry)
    _current["suites"] = [_collected(suite, subject) for suite in classes]
    teller.say(unwritten=_to_write(subject, tested, classes))


def _to_write(subject: ProviderUnderTest, tested: Any, classes: list[Any]) -> list[str]:
    own = [suite for suite in classes if not suite.__module__.startswith("ddlcore.")]
    lines = unwritten(tested, KINDS[subject.kind].contract)
    return lines + [line for suite in own for line in unwritten(suite, type("", (), {}))]


def _collected(suite: Any, subject: ProviderUnderTest) -> Any:
    """Return a subclass of ``suite`` that pytest collects.

    pytest collects only classes whose names begin with Test and whose ``__test__`` is true. The suite of a plugin need
    not fulfil these conditions.
    """
    told = {"provider": subject.provider} if hasattr(suite, "provider") else {}
    return type(f"Test{suite.__name__.removeprefix('Test')}", (suite,), {"__test__": True, **told})


class _Teller:
    """A pytest plugin that writes the beginning and the result of each test as lines of JSON.

    This plugin also ends the process if a test exceeds its time limit.
    """

    def __init__(self, words: Any, stderr: Any, wanted: Mapping[str, Any]) -> None:
        self._words, self._stderr = words, stderr
        self._only, self._done = wanted["only"], set(wanted["done"])
        self._test_s: float = wanted["test_s"]

    def say(self, **word: object) -> None:
        self._words.write(json.dumps(word) + "\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._only:
            items[:] = [item for item in items if any(_matches(_name(item), only) for only in self._only)]
        names = [_name(item) for item in items]
        items[:] = [item for item in items if _name(item) not in self._done]
        self.say(collected=names)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say(refused=str(report.longrepr).strip().splitlines()[-1])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.say(begin=_name(item))
        faulthandler.dump_traceback_later(self._test_s, exit=True, file=self._stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        word: dict[str, object] = {"name": _name(item), "seconds": round(call.duration, 4)}
        if report.skipped:
            self.say(end={**word, "outcome": "skipped", "reason": _skip_reason(report)})
        elif report.failed:
            error = call.excinfo.value if call.excinfo else None
            self.say(end={**word, "outcome": "failed", "phase": call.when, **_failure(error)})
        elif call.when == "call":
            self.say(end={**word, "outcome": "passed"})
        return report


def _name(item: pytest.Item) -> str:
    return item.nodeid.rpartition("::")[2]


def _matches(name: str, only: str) -> bool:
    return only in (name, name.partition("[")[0])


def _skip_reason(report: Any) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail.removeprefix('reason: ')}"
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ")


def _failure(error: BaseException | None) -> dict[str, str]:
    if error is None:
        return {"reason": "it failed without an error"}
    missing = _not_implemented(error)
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"reason": _one_line(error), "detail": text[-20_000:], "unwritten": missing}


def _one_line(error: BaseException) -> str:
    """Return the first paragraph of the message of ``error`` as one line.

    If ``error`` is an AssertionError with a message, the line contains only this message. For all other errors, the
    line begins with the name of the error's class and ends with the place where the error was raised.
    """
    text = " ".join(str(error).partition("\nTraceback")[0].split("\n--- ")[0].split())
    if isinstance(error, AssertionError) and text:
        return text[:600]
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = _place(error)
    return named[:600] + (f" ({place})" if place else "")


def _place(error: BaseException) -> str:
    """Return the file, the line and the function where ``error`` was raised, as text; "" if it has no traceback.

    Return the innermost frame that belongs to the plugin's code. If there is no such frame, return the innermost frame.
    All frames are the plugin's code except those of Python's library, of pytest and of ddlcore.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_foreign(frame.filename)]
    return next((f"{frame.filename}:{frame.lineno}, in {frame.name}" for frame in reversed(own or frames)), "")


def _is_foreign(filename: str) -> bool:
    if filename.startswith("<"):
        return True
    library, packages = (sysconfig.get_path(name) for name in ("stdlib", "purelib"))
    tops = (str(Path(str(sys.modules[name].__file__)).parent) for name in _NOT_OF_PLUGINS if name in sys.modules)
    in_library = _below(filename, library) and not _below(filename, packages)
    return in_library or any(_below(filename, top) for top in tops)


def _below(filename: str, directory: str) -> bool:
    return filename.startswith(directory + os.sep)


def _not_implemented(error: BaseException | None, depth: int = 0) -> str:
    """Return the name of the method that has raised a NotImplementedError.

    The NotImplementedError is ``error`` itself or one of its causes. Return "" if there is none among them. ``depth``
    counts the recursive calls; causes that are more than 8 levels deep are ignored.
    """
    if error is None or depth > 8:
        return ""
    if isinstance(error, NotImplementedError):
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        return frame.tb_frame.f_code.co_name if frame is not None else "?"
    inner = [*getattr(error, "exceptions", ()), error.__cause__, error.__context__]
    return next((found for one in inner if (found := _not_implemented(one, depth + 1))), "")


if __name__ == "__main__":
    sys.modules.update(
        {"ddl_conform.conform.child": sys.modules["__main__"]}
    )  # the collected file must import this session's module
    _code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(_code)  # do not wait for threads that hang in the plugin
