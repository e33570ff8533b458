"""Provide a named pipe through which a rank reports to its launcher how a benchmark goes, line by line."""

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

    ``show`` is called in a separate thread. When the block ends, everything that was written has been shown. An
    exception of ``show`` is raised at the end of the block.
    """
    failure: list[BaseException] = []
    with tempfile.TemporaryDirectory(prefix="ddl-") as directory:
        path = os.path.join(directory, "told")
        os.mkfifo(path, 0o600)
        both = os.open(path, os.O_RDWR)  # also for writing: so opening need not wait for a rank, and reading never ends

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
