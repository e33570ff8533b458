"""Run on every rank: rank 0 prints on which host each rank is, as lines of JSON."""

from __future__ import annotations

import json
import socket

import ddlcore as ddl


def main() -> None:
    """Print one line for each rank, in their order."""
    ddl.init()
    mine = {
        "rank": ddl.rank(),
        "host": socket.gethostname(),
        "local_rank": ddl.local_rank(),
        "local_size": ddl.local_size(),
        "cross_rank": ddl.cross_rank(),
        "cross_size": ddl.cross_size(),
    }
    everyone = ddl.allgather_object(mine)
    if ddl.rank() == 0:
        print("\n".join(json.dumps(one) for one in everyone), flush=True)


if __name__ == "__main__":
    main()
