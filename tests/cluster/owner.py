"""Owns a test cluster, says where its directory is and what runs in it, and waits to be killed."""

from __future__ import annotations

import sys

from tools.test_cluster import TestCluster

if __name__ == "__main__":
    with TestCluster(2) as cluster:
        cluster.popen("server2", ["sleep", "60"])
        cluster.run("server1", ["ssh", "server2", "sleep 60 </dev/null >/dev/null 2>&1 &"], check=True)
        print(cluster.directory, flush=True)
        sys.stdin.read()
