"""A named pipe through which a rank tells its launcher how a benchmark goes, line by line."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["told"]


@contextmanager
def told(show: Callable[[Mapping[str, Any]], None]) -> Iterator[str]:
    """The path of the pipe. Every line of JSON that is written there calls ``show``, in one thread of its own.

    When the block ends, all that was written has been shown. What ``show`` raises, the end of the block raises.
    """
    failure: list[BaseException] = []
    with tempfile.TemporaryDirectory(prefix="ddl-") as directory:
        path = os.path.join(directory, "told")
        os.mkfifo(path, 0o600)
        both = os.open(path, os.O_RDWR)  # as a writer too: it opens before a rank has come, and never ends by itself

        def read() -> None:
            with open(both, encoding="utf-8", closefd=False) as lines:
                for text in iter(lines.readline, "\n"):
                    try:
                        if not failure:
                            show(json.loads(text))
                    except BaseException as error:
                        failure.append(error)

        reader = threading.Thread(target=read, name="ddl-bench-told", daemon=True)
        reader.start()
        try:
            yield path
        finally:
            os.write(both, b"\n")
            reader.join()
            os.close(both)
    if failure:
        raise failure[0]
