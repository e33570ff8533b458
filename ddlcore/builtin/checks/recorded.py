"""GPUs of a host that was recorded, from one file of JSON beside its /proc and /sys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ddlcore.contracts.check import Gpu, Links

__all__ = ["RECORD", "RecordedGpus"]

RECORD = "gpus.json"


class RecordedGpus:
    """``record``: {"gpus": [{index, name, uuid, bus, memory_bytes}], "peers": [[…]], "links": {latency_us, gbytes_per_s}}."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record

    @classmethod
    def read(cls, text: str) -> RecordedGpus:
        """Raises ValueError in one line for what is no such record."""
        try:
            record = json.loads(text)
            made = cls(record)
            size = len(made.gpus())
            made.links()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{RECORD}: {type(error).__name__}: {error}") from None
        if [len(row) for row in made.peers()] != [size] * size:
            raise ValueError(f"{RECORD}: {size} GPUs need {size} rows of as many peers")
        return made

    def gpus(self) -> Sequence[Gpu]:
        """As recorded."""
        return [Gpu(**one) for one in self._record["gpus"]]

    def peers(self) -> Sequence[Sequence[bool]]:
        """As recorded."""
        return [[bool(value) for value in row] for row in self._record.get("peers", ())]

    def links(self) -> Links | None:
        """As recorded; None where nobody had measured."""
        links = self._record.get("links")
        return None if links is None else Links(links["latency_us"], links["gbytes_per_s"])
