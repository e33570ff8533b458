"""Write parts of a timeline as ranks do, without a job."""

from __future__ import annotations

from pathlib import Path

from ddl_doctor.recording.part_writer import TraceFile
from ddl_doctor.recording.ring_buffer import RecordKind, RingBuffer
from ddl_doctor.recording.trace_writer import TraceWriter
from msgspec.structs import asdict

from ddlcore.messages.coding import encode
from ddlcore.messages.elastic import WorldReport
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_rank import Planned
from ddlcore.types import DType, Kind


def part(path: Path, rank: int, world: int, first_us: int) -> None:
    """Write what ``rank`` records in a world: three periods of one bucket, and no end of its replay."""
    report = asdict(
        WorldReport(world, 2, lost=(LaunchedRank(1),) if world > 1 else (), still_s=0.5, text=f"world {world}")
    )
    writer = TraceWriter(rank, rank, "h", lambda set_id, kind: "shm", world=report)
    file = TraceFile(path)
    file.add(writer.begin({"rank": rank, "size": 2, "host": "h", "world": f"world{world}"}, first_us * 1000))
    ring = RingBuffer(64)
    bucket = Planned(0, Kind.ALLREDUCE, ("x",), (encode(Spec(Kind.ALLREDUCE, DType.F32, (100,))),))
    ring.put(RecordKind.REPLAY, first_us * 1000, 1, 0, (bucket,), 0)
    for place in range(3):
        begin = 1000 * (first_us + 1000 * (place + 1) + 100 * rank)
        ring.put(RecordKind.BUCKET, begin, begin + 500_000, 100, 100, place, bucket, 400)
    file.add(writer.write(list(ring.take())))
    file.close()
