"""The one table of settings, the only reader of the environment, and how flag, env, file and default rank.

Flags, ``DDL_*`` variables and the keys of a TOML file are all made from the table; a flag wins over
the environment, that over the file, that over the default.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddlcore.types import Placement, Value

__all__ = [
    "CHILD_MARK",
    "SETTINGS",
    "Environment",
    "Setting",
    "Settings",
    "Value",
    "load_settings",
    "read_toml",
]

CHILD_MARK = "DDL_INIT_PID"  # in the environment of what a rank starts: that is no rank


@dataclass(frozen=True)
class Setting:
    """One row: ``name`` carries its unit; env and flag are made from it."""

    name: str
    type: type[str] | type[int] | type[float] | type[bool]
    default: Value
    doc: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    former: str = ""  # an earlier name, which is still accepted, with a warning

    @property
    def env(self) -> str:
        return "DDL_" + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def parse(self, raw: object, where: str) -> Value:
        """The value that ``raw`` (text, or what TOML gave) stands for; ValueError names ``where`` it came from."""
        value = self._convert(raw, where)
        if self.choices and value not in self.choices:
            raise ValueError(f"{where}: {raw!r} is not one of {', '.join(self.choices)}")
        if self.minimum is not None and not isinstance(value, str) and value < self.minimum:
            raise ValueError(f"{where}: {raw!r} is below the least allowed value {self.minimum:g}")
        return value

    def _convert(self, raw: object, where: str) -> Value:
        if self.type is bool and isinstance(raw, str):
            word = raw.strip().lower()
            if word in ("1", "true", "yes", "on"):
                return True
            if word in ("0", "false", "no", "off", ""):
                return False
            raise ValueError(f"{where}: {raw!r} is neither true nor false (use 1 or 0)")
        if isinstance(raw, bool) is not (self.type is bool):
            raise ValueError(f"{where}: {raw!r} is not of type {self.type.__name__}")
        if isinstance(raw, bool):
            return raw
        try:
            if self.type is int and isinstance(raw, float):
                raise ValueError  # 1.5 is no whole number, and int() would not say so
            value = self.type(str(raw))
            if value != value:
                raise ValueError  # nan: no limit is ever passed by it, nor kept
            return value
        except ValueError:
            raise ValueError(f"{where}: {raw!r} is not of type {self.type.__name__}") from None


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "backend",
        str,
        "auto",
        "transport: auto; the name of one (`ddl info` lists them); shm+NAME, one within and one across hosts; "
        "and behind any of these, what serves some operations instead, such as auto,allgather=NAME",
    ),
    Setting(
        "device_dense",
        str,
        "auto",
        "what reduces tensors on accelerators: auto; cpu, staged in host memory; or the name of a transport",
    ),
    Setting(
        "device_sparse",
        str,
        "auto",
        "the same for sparse gradients: auto, as all others; or cpu",
        choices=("auto", "cpu"),
    ),
    Setting(
        "fusion_bytes", int, 8 << 20, "largest bucket that tensors are fused into, in bytes; 0 fuses nothing", minimum=0
    ),
    Setting(
        "first_bucket_bytes",
        int,
        1 << 20,
        "in replay, the first and the last bucket of a step have at most so many bytes; 0: as many as any",
        minimum=0,
        former="first_batch_bytes",
    ),
    Setting(
        "overlap",
        str,
        "auto",
        "in replay, whether tensors in host memory go off while the step computes: on; off: together, at its end; "
        "auto: off on one host, where that takes the cores that compute, unless a bucket size is set",
    ),
    Setting(
        "replay",
        bool,
        True,
        "1: steps that repeat run without a control message; 0: every bucket is negotiated",
    ),
    Setting(
        "control_address",
        str,
        "",
        "where the launcher listens to its ranks: tcp://IP:PORT, port 0 for any free one; empty: within the host",
    ),
    Setting(
        "network_interface",
        str,
        "",
        "network interface that ranks talk over, or this host's own address: the first of these, separated by commas, "
        "that the host has; empty: the one on the route to the launcher",
    ),
    Setting(
        "rendezvous_dir",
        str,
        "",
        "where ranks that another launcher has started find each other: a directory that their hosts share; "
        "empty: SLURM_SUBMIT_DIR, else ~/.ddl",
    ),
    Setting("launcher", str, "auto", "what starts ranks on other hosts: auto, or a name that `ddl info` lists"),
    Setting("launcher_args", str, "", "more arguments for the program that starts ranks on other hosts"),
    Setting(
        "silence_s",
        float,
        3.0,
        "how long another host may be silent, in seconds, before its ranks are taken for lost",
        minimum=1.5,
    ),
    Setting(
        "compression",
        str,
        "none",
        "what float32 gradients travel as where the script names no compression: none, fp16, bf16, or a plugin's",
    ),
    Setting("autotune", bool, False, "1: look for better settings while training, and go on with the best"),
    Setting("autotune_log", str, "", "CSV file that gets a line for each sample of the search; empty: none"),
    Setting("autotune_trials", int, 20, "samples that the search takes before it compares the best", minimum=1),
    Setting("autotune_steps", int, 10, "steps that count in a sample; of very short steps more are taken", minimum=3),
    Setting("autotune_warmup_steps", int, 2, "steps after each change that do not count", minimum=0),
    Setting("autotune_compression", bool, False, "1: the search may try compression, which changes values"),
    Setting("tuner", str, "auto", "how the search goes: bayes, grid or a plugin's; auto: bayes where it is installed"),
    Setting("fusion_policy", str, "threshold", "which policy lays tensors out in buckets"),
    Setting("start_timeout_s", float, 60.0, "how long init waits for the other ranks, in seconds", minimum=0.1),
    Setting("open_timeout_s", float, 60.0, "how long opening a transport may take, in seconds", minimum=0.1),
    Setting("leave_timeout_s", float, 10.0, "how long shutdown lets promised buckets finish, in seconds", minimum=0.0),
    Setting(
        "stall_warning_s",
        float,
        60.0,
        "after how long a wait for other ranks is reported, with tensors, ranks and whether these answer, in seconds; "
        "0: never",
        minimum=0,
    ),
    Setting(
        "stall_shutdown_s",
        float,
        0.0,
        "after how long a stall ends the job, with an error on every rank that names what waits for whom; ranks that do "
        "not answer are killed; in seconds; 0: never",
        minimum=0,
    ),
    Setting(
        "verify_every",
        int,
        0,
        "after how many steps of an optimizer the ranks' parameters are compared, to the last bit; "
        "a difference ends the job with ReplicasDiffer on every rank; 0: never",
        minimum=0,
    ),
    Setting(
        "verify_first_step",
        bool,
        True,
        "after the first step of each optimizer, warn if the ranks' parameters differ: a broadcast_parameters or a "
        "DistributedOptimizer that was forgotten",
    ),
    Setting("stall_stacks", bool, False, "a stall's report has the Python stacks of the ranks that are waited for"),
    Setting(
        "flight_dir",
        str,
        "",
        "directory where each rank writes, as JSON, what it did last when the job fails or stalls, or on flight_signal; "
        "empty: nowhere",
    ),
    Setting("flight_records", int, 1024, "of how many buckets and decisions a rank remembers that; 0: none", minimum=0),
    Setting(
        "flight_signal",
        str,
        "SIGUSR1",
        "with flight_dir, the signal on which a rank writes it, unless the script handles that signal; empty: none",
    ),
    Setting(
        "timeline",
        str,
        "",
        "file to which what every rank does is written, as a Chrome trace (`ddl timeline summary FILE`); "
        "NAME.zip: a part for each rank, with a manifest for Perfetto; empty: none",
    ),
    Setting(
        "profiler_ranges",
        bool,
        False,
        "buckets appear by name in the framework's own profiler while that runs, on the thread that runs them",
    ),
    Setting("timeline_mark_cycles", bool, False, "in the timeline, mark where each period of a schedule begins"),
    Setting(
        "grace_s",
        float,
        5.0,
        "how long ranks may go on after another failed before they are ended, in seconds",
        minimum=0,
    ),
    Setting(
        "metrics_port",
        int,
        0,
        "port at which the first rank of each host serves its numbers to Prometheus; 0: none",
        minimum=0,
    ),
    Setting("metrics_address", str, "127.0.0.1", "address that it listens at; 0.0.0.0: any, for whoever can reach it"),
    Setting(
        "pulse_s",
        float,
        0.0,
        "how often each rank tells the launcher how it is, in seconds, as `ddl run --top` asks; 0: never",
        minimum=0,
    ),
    Setting(
        "sample_ms",
        float,
        0.0,
        "how often to look where a rank's main thread stands, in ms, as `ddl doctor -- COMMAND` asks; 0: never",
        minimum=0,
    ),
    Setting("log_level", str, "WARNING", "least level that is logged", choices=("DEBUG", "INFO", "WARNING", "ERROR")),
    Setting("cache_dir", str, "", "where compiled kernels are kept; empty: the first writable of the usual places"),
    Setting(
        "switch_interval_ms",
        float,
        0.0,
        "interpreter's thread switch interval while a job runs, in ms; 0: left alone",
        minimum=0,
    ),
    Setting("plugins", str, "", "comma-separated names of the only plugins to load; empty: all that are installed"),
    Setting("plugins_off", str, "", "comma-separated names of plugins not to load"),
)


class Settings(Mapping[str, Value]):
    """What holds for this job: ``settings["fusion_bytes"]``. Immutable; ``source(name)`` says where from."""

    def __init__(self, values: Mapping[str, Value], sources: Mapping[str, str]) -> None:
        self._values = dict(values)
        self._sources = dict(sources)

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def source(self, name: str) -> str:
        """ "flag", "env", "file", "default" or, while a search runs, "tuner"."""
        return self._sources[name]

    def text(self, name: str) -> str:
        return str(self._values[name])

    def number(self, name: str) -> float:
        value = self._values[name]
        assert not isinstance(value, str), name
        return float(value)

    def whole(self, name: str) -> int:
        value = self._values[name]
        assert isinstance(value, int), name
        return value

    def overlaps(self, hosts: int) -> bool:
        """Whether buckets of host memory are to run while the step still computes, of ranks on so many hosts.

        On one host they would take the cores that compute, and a core has little to hide. Sizes that
        somebody has chosen are kept to. Raises ValueError for a setting that is none.
        """
        wanted = self.text("overlap")
        if wanted not in ("auto", "on", "off"):
            raise ValueError(f"overlap={wanted!r} is none of auto, on, off")
        chosen = any(self._sources[name] != "default" for name in ("fusion_bytes", "first_bucket_bytes"))
        return wanted == "on" or (wanted == "auto" and (hosts > 1 or chosen))

    def changed(self, values: Mapping[str, Value]) -> Settings:
        """These settings with some of them changed; their source is "tuner"."""
        return Settings({**self._values, **values}, {**self._sources, **dict.fromkeys(values, "tuner")})

    def names(self, name: str) -> tuple[str, ...]:
        """A comma-separated setting as its parts."""
        return tuple(part.strip() for part in self.text(name).split(",") if part.strip())


def load_settings(
    environ: Mapping[str, str],
    file: Mapping[str, object] | None = None,
    flags: Mapping[str, object] | None = None,
    rows: Iterable[Setting] = SETTINGS,
) -> Settings:
    """The settings of one job. ``rows`` may hold a plugin's own beside the core's.

    Raises ValueError, naming the variable, file key or flag, for a value that does not parse and for
    a file key that no row has.
    """
    table = {row.name: row for row in rows}
    file = _renamed(file or {}, table)
    environ = _renamed_variables(environ, table)
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    unknown = sorted(set(file) - set(table))
    if unknown:
        raise ValueError(
            f"config file: no setting is called {', '.join(unknown)}; there are {', '.join(sorted(table))}"
        )
    values: dict[str, Value] = {}
    sources: dict[str, str] = {}
    for name, row in table.items():
        if name in flags:
            values[name], sources[name] = row.parse(flags[name], row.flag), "flag"
        elif row.env in environ:
            values[name], sources[name] = row.parse(environ[row.env], row.env), "env"
        elif name in file:
            values[name], sources[name] = row.parse(file[name], f"config file, {name}"), "file"
        else:
            values[name], sources[name] = row.default, "default"
    return Settings(values, sources)


def _renamed(file: Mapping[str, object], table: Mapping[str, Setting]) -> Mapping[str, object]:
    """Return the keys of a config file under the present names of settings; warn where it has a former one."""
    former = {row.former: row.name for row in table.values() if row.former in file}
    for old, new in former.items():
        _warn_former(f"config file: {old}", new)
    return {former.get(key, key): value for key, value in sorted(file.items(), key=lambda item: item[0] not in former)}


def _renamed_variables(environ: Mapping[str, str], table: Mapping[str, Setting]) -> Mapping[str, str]:
    """Return ``environ`` with the present names of settings for former ones; warn where it has a former one."""
    found = {f"DDL_{row.former.upper()}": row.env for row in table.values() if row.former}
    former = {old: new for old, new in found.items() if old in environ}
    for old, new in former.items():
        _warn_former(old, new)
    return {**{new: environ[old] for old, new in former.items()}, **environ} if former else environ


def _warn_former(old: str, new: str) -> None:
    warnings.warn(f"{old} is called {new} now; the old name will go in a later version", FutureWarning, stacklevel=4)


def read_toml(path: str | Path) -> dict[str, object]:
    """The keys of a config file. Raises ValueError in one line where it is missing or no TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as handle:
            return dict(tomllib.load(handle))
    except OSError as error:
        raise ValueError(f"config file {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        if str(path).endswith((".yaml", ".yml")):
            raise ValueError(
                f"config file {path}: YAML is for horovodrun; write settings as TOML, NAME = VALUE"
            ) from None
        raise ValueError(f"config file {path}: {error}") from None


@dataclass(frozen=True)
class Environment:
    """What the launcher told this process. ``job_file`` holds endpoint and keys; see control/credentials.py.

    ``address`` is this host's own on the route to the launcher, "" where all ranks are on one host.
    """

    placement: Placement
    job_file: str
    address: str = ""
    launcher: str = ""  # what started this process, by its name among the launchers
    timeline_dir: str = ""  # where whoever started it awaits its part of a timeline; "": nobody does

    VARIABLES = ("DDL_RANK", "DDL_HOST_INDEXES", "DDL_JOB_FILE")

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment | None:
        """None where no launcher of ours stands behind this process."""
        if "DDL_JOB_FILE" not in environ:
            return None
        missing = [name for name in cls.VARIABLES if name not in environ]
        if missing:
            raise ValueError(f"{', '.join(missing)} not set although DDL_JOB_FILE is; start the script by `ddl run`")
        hosts = tuple(int(host) for host in environ["DDL_HOST_INDEXES"].split(","))
        placement = Placement(int(environ["DDL_RANK"]), hosts)
        given = {name: environ.get(name, "") for name in ("DDL_ADDRESS", "DDL_LAUNCHED_BY", "DDL_TIMELINE_DIR")}
        return cls(placement, environ["DDL_JOB_FILE"], *given.values())

    @staticmethod
    def child_of() -> str:
        """The process id of the rank that this process was started by after its ``init``; "" for a rank itself."""
        mark = os.environ.get(CHILD_MARK, "")
        return "" if mark == str(os.getpid()) else mark

    @staticmethod
    def announce(placement: Placement, ports: Sequence[Sequence[int]], addresses: Sequence[str]) -> None:
        """Sets what scripts of other libraries expect, as `ddl run` would, where the launcher has not.

        ``ports``, ``addresses``: (size,), of each rank two free ports and its host's address.
        """
        if not all(len(two) == 2 for two in ports):
            return  # a host without free ports: nothing that is said here would be right
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
        for name, value in own.items():
            os.environ.setdefault(name, str(value))
        if not os.environ.keys() & {"MASTER_ADDR", "MASTER_PORT"}:  # half of it would be neither's
            os.environ.update({"MASTER_ADDR": addresses[0], "MASTER_PORT": str(ports[0][1])})
        os.environ.setdefault("TF_CONFIG", json.dumps(tf_config))

    @staticmethod
    def mark_children(on: bool, external: bool = False) -> None:
        """From now on (or no longer), what this rank starts is told by its environment that it is no rank.

        ``external``: another launcher has started this rank.
        """
        if on and (external or "DDL_JOB_FILE" in os.environ):
            os.environ[CHILD_MARK] = str(os.getpid())
        elif not on and os.environ.get(CHILD_MARK) == str(os.getpid()):
            del os.environ[CHILD_MARK]

    def variables(self) -> dict[str, str]:
        """The environment that ``read`` understands."""
        hosts = ",".join(map(str, self.placement.hosts))
        return {
            "DDL_RANK": str(self.placement.rank),
            "DDL_HOST_INDEXES": hosts,
            "DDL_JOB_FILE": self.job_file,
            "DDL_ADDRESS": self.address,  # these also where they are empty: a job started by a rank must not inherit that one's
            "DDL_LAUNCHED_BY": self.launcher,
            "DDL_TIMELINE_DIR": self.timeline_dir,
        }
