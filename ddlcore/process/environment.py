"""The variables by which a launcher of ddl tells a process which rank it is, and those that other libraries read.

Other modules get ``os.environ`` as a whole, and read settings and the variables of other launchers from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddlcore.config.table import CHILD_MARK
from ddlcore.types import Placement

# The variables that torchrun sets. Other libraries read the rank of their process from them.
TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Environment:
    """The values that the launcher has passed to this process by environment variables.

    ``job_file`` is the path of the file that contains the launcher's endpoint and keys, see control/credentials.py.
    ``address`` is this host's own address on the route to the launcher, or "" if all ranks are on one host.
    """

    placement: Placement
    job_file: str
    address: str = ""
    launcher: str = ""  # name of the launcher that started this process
    timeline_dir: str = ""  # directory for this rank's part of a timeline; "": none is wanted
    elastic: bool = False  # the job goes on without ranks that are lost

    VARIABLES = ("DDL_RANK", "DDL_HOST_INDEXES", "DDL_JOB_FILE")

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment | None:
        """Return the values that the launcher has passed, or None if no launcher of ddl has started this process.

        The launchers of ddl are ``ddl run`` and ``ddlcore.run``. Raises ValueError if the launcher's variables are
        incomplete.
        """
        if "DDL_JOB_FILE" not in environ:
            return None
        missing = [name for name in cls.VARIABLES if name not in environ]
        if missing:
            raise ValueError(f"{', '.join(missing)} not set although DDL_JOB_FILE is; start the script by `ddl run`")
        hosts = tuple(int(host) for host in environ["DDL_HOST_INDEXES"].split(","))
        placement = Placement(int(environ["DDL_RANK"]), hosts)
        given = {name: environ.get(name, "") for name in ("DDL_ADDRESS", "DDL_LAUNCHED_BY", "DDL_TIMELINE_DIR")}
        address, launcher, timeline_dir = given.values()
        elastic = environ.get("DDL_ELASTIC", "") == "1"
        return cls(placement, environ["DDL_JOB_FILE"], address, launcher, timeline_dir, elastic)

    @staticmethod
    def child_of() -> str:
        """Return the process id of the rank that has started this process as a child, or "" if no rank has done so.

        Only children that the rank has started after its ``init`` count.
        """
        mark = os.environ.get(CHILD_MARK, "")
        return "" if mark == str(os.getpid()) else mark

    @staticmethod
    def announce(
        placement: Placement, ports: Sequence[Sequence[int]], addresses: Sequence[str], torch_env: bool = True
    ) -> None:
        """Set the environment variables that other libraries read to find their ranks. Variables already set are kept.

        ``ddl run`` sets the same variables for its ranks. ``ports``: shape (size, 2), two free ports for each rank. If
        two ports are not given for every rank, nothing is set. ``addresses``: shape (size,), the address of each rank's
        host. ``torch_env``: whether to set the variables of torchrun, too.
        """
        if not all(len(two) == 2 for two in ports):
            return  # a host has found no free ports, so no correct address can be set
        rank = placement.rank
        own = {
            "RANK": rank,
            "WORLD_SIZE": placement.size,
            "LOCAL_RANK": placement.local_rank,
            "LOCAL_WORLD_SIZE": placement.local_size,
            "GROUP_RANK": placement.hosts[rank],
        }
        workers = [
            f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            for address, (port, _) in zip(addresses, ports)
        ]
        tf_config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        os.environ.setdefault("TF_CONFIG", json.dumps(tf_config))
        if not torch_env:
            return
        for name, value in own.items():
            os.environ.setdefault(name, str(value))
        if not os.environ.keys() & {"MASTER_ADDR", "MASTER_PORT"}:  # never mix an address and a port of two sources
            os.environ.update({"MASTER_ADDR": addresses[0], "MASTER_PORT": str(ports[0][1])})

    @staticmethod
    def mark_children(on: bool, external: bool = False) -> None:
        """Set or remove the variable that marks the child processes of this rank, which are not ranks themselves.

        ``on``: whether to set the variable or to remove it. ``external``: whether a launcher other than ddl's has
        started this rank. If no launcher has started this process, the variable is not set.
        """
        if on and (external or "DDL_JOB_FILE" in os.environ):
            os.environ[CHILD_MARK] = str(os.getpid())
        elif not on and os.environ.get(CHILD_MARK) == str(os.getpid()):
            del os.environ[CHILD_MARK]

    def variables(self) -> dict[str, str]:
        """Return these values as environment variables. ``read`` makes an equal Environment from the result."""
        hosts = ",".join(map(str, self.placement.hosts))
        return {
            "DDL_RANK": str(self.placement.rank),
            "DDL_HOST_INDEXES": hosts,
            "DDL_JOB_FILE": self.job_file,
            # Also set if empty: otherwise a job that a rank starts would inherit these values from that rank.
            "DDL_ADDRESS": self.address,
            "DDL_LAUNCHED_BY": self.launcher,
            "DDL_ELASTIC": "1" if self.elastic else "",
            "DDL_TIMELINE_DIR": self.timeline_dir,
        }
