"""Owns a bed, says where its directory is and what runs in it, and waits to be killed."""

from __future__ import annotations

import sys

from tools.bed import Bed

if __name__ == "__main__":
    with Bed(2) as bed:
        bed.popen("server2", ["sleep", "60"])
        bed.run("server1", ["ssh", "server2", "sleep 60 </dev/null >/dev/null 2>&1 &"], check=True)
        print(bed.directory, flush=True)
        sys.stdin.read()
