"""Read a trace that ``ddl run --timeline`` has written."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from ddl_doctor.recording.merge import Event, decoded, metadata_of, read_part


def read_trace(path: Path) -> tuple[Event, list[Event]]:
    """Read a trace: a merged JSON file, a zip archive of parts, or the part of one rank. Return (metadata, events).

    Raises ValueError, with a message of one line, if the file is not a trace, and OSError if it cannot be read.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if "perfetto_manifest.json" not in names:
                raise ValueError(f"{path} is a zip without a perfetto_manifest.json; give a file that ddl wrote")
            manifest = json.loads(archive.read("perfetto_manifest.json"))["perfetto_manifest"]
            events = [event for one in manifest["files"] for event in json.loads(archive.read(one["path"]))]
            return json.loads(manifest["attributes"]["ddl"]), events
    data = path.read_bytes()
    try:
        found = decoded(data)
    except ValueError as error:
        if data.startswith(b"[") and (part := read_part(path)).facts:  # a part whose last write was cut short
            return metadata_of([part]), part.events
        raise ValueError(f"{path} is no JSON ({error}); give a file that --timeline has written") from None
    if isinstance(found, dict) and isinstance(found.get("traceEvents"), list):
        return found.get("metadata", {}), found["traceEvents"]
    if isinstance(found, list) and all(isinstance(event, dict) for event in found):
        part = read_part(path)
        return metadata_of([part]), part.events
    raise ValueError(f"{path} holds no trace; give a file that --timeline has written")
