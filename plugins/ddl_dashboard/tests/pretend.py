"""A job that is only told of: what its launcher would tell the live page, second by second."""

from __future__ import annotations

from collections.abc import Sequence

from ddl_dashboard import records
from ddl_dashboard.records import Heard, JobBegin, RankState, Record
from ddl_doctor.reports import Activity, Pulse, Traffic

from ddlcore.launch.job.watch import WatchedJob
from ddlcore.plug.settings import settings_of

__all__ = ["HOSTILE", "PretendJob", "watched"]
PULSE_S = 1.0

HOSTILE = "<img src=x onerror=\"document.title='bad'\"><script>document.title='bad'</script><b>bold</b>\u202e&lt;i&gt;"


class PretendJob:
    """Ranks on ``hosts`` that make a step every ``step_s``. Time is what ``pulses`` is told."""

    def __init__(
        self,
        hosts: Sequence[str] = ("node1", "node1", "node2", "node2"),
        title: str = "python train.py --epochs 90",
        step_s: float = 0.05,
        names: Sequence[str] = ("grad.fc.bias", "grad.fc.weight"),
        token: str = "",
        begun_s: float = 0.0,
    ) -> None:
        self.hosts = hosts
        self.begin = JobBegin(title, tuple(hosts), "0.1.0", begun_s, token, 1.0)
        self.exposed = [0.2] * len(hosts)  # share of a step
        self.input = [0.1] * len(hosts)
        self.memory = [1.5 * 2**30] * len(hosts)
        self.gpu = False
        self.step_s = step_s
        self.bytes_per_step = 40e6
        self.late: set[int] = set()
        self.silent: set[int] = set()
        self._names = names
        self._at_s = 0.0
        self._steps = 0.0
        self._since_s = 0.0
        self._user_s = [0.0] * len(hosts)
        self._input_s = [0.0] * len(hosts)

    def started(self) -> list[Record]:
        return [RankState(rank, records.RUNNING) for rank in range(len(self.hosts))]

    def pulses(self, at_s: float) -> list[Record]:
        """Let time go on to ``at_s``, and return a pulse of each rank that is not silent."""
        elapsed_s = at_s - self._at_s
        self._at_s = at_s
        if not self.late and not self.silent:
            self._steps += elapsed_s / self.step_s
            self._since_s = at_s
        for rank in range(len(self.hosts)):
            self._user_s[rank] += self.exposed[rank] * elapsed_s
            self._input_s[rank] += self.input[rank] * elapsed_s
        return [Heard(rank, self._pulse(rank)) for rank in range(len(self.hosts)) if rank not in self.silent]

    def _pulse(self, rank: int) -> Pulse:
        waits = bool(self.late or self.silent) and rank not in self.late
        moved = self._steps * self.bytes_per_step
        first = rank == self.hosts.index(self.hosts[rank])
        activity = Activity(
            doing="it waits for its gradients"
            if waits
            else "all its operations are complete; it is running its own code",
            waits_s=self._at_s - self._since_s if waits else 0.0,
            in_flight=tuple((name, ()) for name in sorted(self._names)) if waits else (),
            pending=len(self._names) if waits else 0,
            input_s=self._input_s[rank],
            sampled_s=self._at_s,
            transport_s=0.15 * self._at_s,
            nbytes=int(moved),
            route="shm+tcp" if len(set(self.hosts)) > 1 else "shm",
            traffic=(Traffic("eth0", int(moved * 1.1), int(moved * 1.05), 10e9),) if first else (),
        )
        return Pulse(
            at_s=self._at_s,
            steps=int(self._steps),
            user_s=self._user_s[rank],
            cpu_s=1.6 * self._at_s,
            resident_bytes=int(self.memory[rank]),
            gpu_share=0.83 if self.gpu else -1.0,
            gpu_used_bytes=int(11.5 * 2**30) if self.gpu else 0,
            gpu_total_bytes=16 << 30 if self.gpu else 0,
            activity=activity,
        )


def watched(dashboard: str, title: str, hosts: Sequence[str]) -> WatchedJob:
    """The job that a page at ``dashboard`` is to show."""
    settings, _ = settings_of({}, {"dashboard": dashboard, "pulse_s": PULSE_S})
    return WatchedJob(settings, title, tuple(hosts))
