"""Reads the GPUs of a recorded host from a JSON file.

A recorded host is a folder with copies of files of a host's /proc and /sys. The JSON file is in the same folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ddlcore.contracts.check import Gpu, Links

RECORD = "gpus.json"


class RecordedGpus:
    """The GPUs of a host, as a file has recorded them.

    ``record`` is the content of the file:
    {"gpus": [{index, name, uuid, bus, memory_bytes}], "peers": [[…]], "links": {latency_us, gbytes_per_s}}.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record

    @classmethod
    def read(cls, text: str) -> RecordedGpus:
        """Return the GPUs that ``text``, the content of the JSON file, describes.

        Raises ValueError with a message of one line if ``text`` is not a valid record of GPUs.
        """
        try:
            record = json.loads(text)
            made = cls(record)
            size = len(made.gpus())
            made.links()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{RECORD}: {type(error).__name__}: {error}") from None
        if [len(row) for row in made.peers()] != [size] * size:
            raise ValueError(f"{RECORD}: {size} GPUs need {size} rows of {size} peers each")
        return made

    def gpus(self) -> Sequence[Gpu]:
        """Return the recorded GPUs of the host, in the order of the record."""
        return [Gpu(**one) for one in self._record["gpus"]]

    def peers(self) -> Sequence[Sequence[bool]]:
        """Return the recorded table of direct access between GPUs.

        Row a, column b says whether GPU a can access the memory of GPU b directly.
        """
        return [[bool(value) for value in row] for row in self._record.get("peers", ())]

    def links(self) -> Links | None:
        """Return the recorded measurements of copies between GPUs; None if no measurements were recorded."""
        links = self._record.get("links")
        return None if links is None else Links(links["latency_us"], links["gbytes_per_s"])
