"""Reads the GPUs of a recorded host from a JSON file, which lies next to the host's recorded /proc and /sys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ddlcore.contracts.check import Gpu, Links

RECORD = "gpus.json"


class RecordedGpus:
    """The GPUs of a host, as they were recorded in a file.

    ``record``: {"gpus": [{index, name, uuid, bus, memory_bytes}], "peers": [[…]], "links": {latency_us, gbytes_per_s}}.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record

    @classmethod
    def read(cls, text: str) -> RecordedGpus:
        """Return the GPUs that ``text`` records. Raises ValueError, in one line, if ``text`` is not such a record."""
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
        """Return the recorded GPUs."""
        return [Gpu(**one) for one in self._record["gpus"]]

    def peers(self) -> Sequence[Sequence[bool]]:
        """Return for each pair of GPUs whether the first can access the memory of the second, as it was recorded.

        The result is a table with a row for each first GPU.
        """
        return [[bool(value) for value in row] for row in self._record.get("peers", ())]

    def links(self) -> Links | None:
        """Return the recorded measurements of copies between GPUs; None if there are none."""
        links = self._record.get("links")
        return None if links is None else Links(links["latency_us"], links["gbytes_per_s"])
