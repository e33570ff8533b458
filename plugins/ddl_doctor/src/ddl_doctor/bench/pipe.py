"""Provide a named pipe. Through it, a rank sends the messages of a benchmark to the launcher, one on each line."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def told(show: Callable[[Mapping[str, Any]], None]) -> Iterator[str]:
    """Create a named pipe, yield its path, and call ``show`` for each line of JSON that is written to it.

    ``show`` is called in a separate thread, with the parsed line. At the end of the ``with`` block, this function waits
    until ``show`` was called for every line that was written. If ``show`` raises an exception, ``show`` is not called
    again, and the exception is raised at the end of the block.
    """
    failure: list[BaseException] = []
    with tempfile.TemporaryDirectory(prefix="ddl-") as directory:
        path = os.path.join(directory, "told")
        os.mkfifo(path, 0o600)
        both = os.open(path, os.O_RDWR)  # opened for writing, too, so that open does not wait and reading never ends

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
