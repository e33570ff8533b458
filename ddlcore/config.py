"""Define the table of all settings, read the environment, and decide which source of a value has priority.

The names of flags, ``DDL_*`` variables and keys of the TOML config file are derived from the table. A flag has priority
over the environment, the environment over the config file, and the config file over the default. No other module reads
the environment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddlcore.text.nearest import nearest
from ddlcore.types import Placement, Value

CHILD_MARK = "DDL_INIT_PID"  # set for the child processes of a rank, which are not ranks themselves
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

# Variables that the launcher sets for its processes. They are not settings.
NOT_SETTINGS = frozenset(
    {
        CHILD_MARK,
        "DDL_ADDRESS",
        "DDL_AGENT",
        "DDL_ELASTIC",
        "DDL_HOST_INDEXES",
        "DDL_JOB_FILE",
        "DDL_LAUNCHED_BY",
        "DDL_RANK",
        "DDL_TIMELINE_DIR",
    }
)

# The groups of options in the help of a command, in this order, and what each is for.
GROUPS: Mapping[str, str] = {
    "job": "what is started, and with which settings",
    "hosts": "where ranks run, and how they are reached",
    "output": "what is shown and recorded",
    "performance": "how tensors are reduced",
    "faults": "when a wait or a difference is reported, or ends the job",
    "tuning": "the search for better settings",
}


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings.

    ``name`` ends with the unit of the value, if the value has a unit. The names of the variable and of the flag are
    derived from ``name``. The help of a command shows the flags in groups, and ``group`` is the key in ``GROUPS`` of
    the flag's group. If ``group`` of a plugin's setting is not a key of ``GROUPS``, the help shows the flag in a group
    of that plugin.
    """

    name: str
    type: type[str] | type[int] | type[float] | type[bool]
    default: Value
    doc: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    group: str = ""
    brief: str = ""  # what the short help says, in one line; empty: only --help-all shows the flag
    metavar: str = ""  # what the help shows in place of the value; empty: a word for the type
    bare: str = ""  # the value if the flag is given without one; empty: the flag needs a value
    form: str = ""  # with ``bare``: regular expression of the words after the flag that are its value

    @property
    def env(self) -> str:
        return "DDL_" + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def parse(self, raw: object, where: str) -> Value:
        """Convert ``raw``, a text or a value from a TOML file, to a value of this setting, and return that value.

        ``where``: the flag, variable or key from which ``raw`` was read. Raises ValueError, with ``where`` in the
        message, if ``raw`` is not a valid value.
        """
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
                raise ValueError  # int() would silently round 1.5 down
            value = self.type(str(raw))
            if value != value:
                raise ValueError  # nan compares false with every limit
            return value
        except ValueError:
            raise ValueError(f"{where}: {raw!r} is not of type {self.type.__name__}") from None


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "backend",
        str,
        "auto",
        "transport: auto; a name that `ddl info` lists; or two names such as shm+NAME, the first within hosts and the "
        "second across them. Exceptions for single operations may follow, such as auto,allgather=NAME",
        group="performance",
        brief="Transport that reduces tensors.",
    ),
    Setting(
        "device_dense",
        str,
        "auto",
        "what reduces tensors on accelerators: auto; the name of a transport; or cpu, which copies them to host memory "
        "and reduces them there",
        group="performance",
    ),
    Setting(
        "device_sparse",
        str,
        "auto",
        "what reduces sparse gradients on accelerators: auto, the same as device_dense; or cpu, which copies them to "
        "host memory and reduces them there",
        choices=("auto", "cpu"),
        group="performance",
    ),
    Setting(
        "fusion_bytes",
        int,
        8 << 20,
        "largest size of a bucket, in which several tensors are reduced together, in bytes; 0: each tensor alone",
        minimum=0,
        group="performance",
        brief="Largest bucket, in bytes.",
    ),
    Setting(
        "first_bucket_bytes",
        int,
        1 << 20,
        "in replay, largest size of the first and of the last bucket of a step, in bytes; 0: the same as fusion_bytes",
        minimum=0,
        group="performance",
    ),
    Setting(
        "overlap",
        str,
        "auto",
        "in replay, when buckets in host memory are reduced. on: while the step still computes; off: at the end of the "
        "step; auto: on across hosts or if a bucket size is set, else off, because on one host the reduction would "
        "take cores from the computation",
        choices=("auto", "on", "off"),
        group="performance",
    ),
    Setting(
        "replay",
        bool,
        True,
        "1: steps that repeat run without control messages; 0: every bucket is negotiated",
        group="performance",
    ),
    Setting(
        "control_address",
        str,
        "",
        "address at which the launcher listens for its ranks: tcp://IP:PORT, with port 0 for any free port; empty: a "
        "socket within this host, or a free port if there are several hosts",
        group="hosts",
    ),
    Setting(
        "network_interface",
        str,
        "",
        "network that the ranks use: an interface or an address; each host uses the first that it has of several, "
        "separated by commas; empty: the interface on the route to the launcher",
        group="hosts",
        brief="Network of the ranks, such as eth0.",
    ),
    Setting(
        "rendezvous_dir",
        str,
        "",
        "directory, shared by all hosts, where ranks that another launcher has started find each other; "
        "empty: SLURM_SUBMIT_DIR, else ~/.ddl",
        group="hosts",
    ),
    Setting(
        "launcher",
        str,
        "auto",
        "what starts ranks on other hosts: auto, or a name that `ddl info` lists",
        group="hosts",
    ),
    Setting("launcher_args", str, "", "more arguments for the program that starts ranks on other hosts", group="hosts"),
    Setting(
        "silence_s",
        float,
        3.0,
        "how long another host may be silent before its ranks count as lost, in seconds",
        minimum=1.5,
        group="faults",
    ),
    Setting(
        "compression",
        str,
        "none",
        "compression of float32 gradients if the script names none: none, fp16, bf16, or a plugin's",
        group="performance",
        brief="Send gradients as fp16 or bf16.",
    ),
    Setting(
        "autotune",
        bool,
        False,
        "1: search for better settings while training, and continue with the best",
        group="tuning",
        brief="Search for better settings while training.",
    ),
    Setting(
        "autotune_log", str, "", "CSV file with one line for each sample of the search; empty: none", group="tuning"
    ),
    Setting(
        "autotune_trials",
        int,
        20,
        "number of samples that the search takes before it compares the best settings",
        minimum=1,
        group="tuning",
    ),
    Setting(
        "autotune_steps",
        int,
        10,
        "number of steps that are measured for one sample; more are measured if they are very short",
        minimum=3,
        group="tuning",
    ),
    Setting(
        "autotune_warmup_steps",
        int,
        2,
        "number of steps after each change of settings that are not measured",
        minimum=0,
        group="tuning",
    ),
    Setting(
        "autotune_compression", bool, False, "1: the search may try compression, which changes values", group="tuning"
    ),
    Setting(
        "tuner",
        str,
        "auto",
        "search algorithm: bayes, grid or a plugin's; auto: bayes if it is installed",
        group="tuning",
    ),
    Setting("fusion_policy", str, "threshold", "policy that decides which tensors share a bucket", group="performance"),
    Setting(
        "start_timeout_s",
        float,
        60.0,
        "how long init waits for the other ranks, in seconds",
        minimum=0.1,
        group="faults",
    ),
    Setting(
        "open_timeout_s", float, 60.0, "how long opening a transport may take, in seconds", minimum=0.1, group="faults"
    ),
    Setting(
        "leave_timeout_s",
        float,
        10.0,
        "how long shutdown waits for announced buckets, in seconds",
        minimum=0.0,
        group="faults",
    ),
    Setting(
        "stall_warning_s",
        float,
        60.0,
        "how long a rank may wait for other ranks before a report, in seconds; the report names the tensors, the "
        "missing ranks, and whether these still answer; 0: no report",
        minimum=0,
        group="faults",
        brief="Report longer waits (seconds).",
    ),
    Setting(
        "stall_shutdown_s",
        float,
        0.0,
        "how long a rank may wait for other ranks before the job is ended, in seconds; every rank raises an error that "
        "says what waits for which ranks, and ranks that do not answer are killed; 0: the job is not ended",
        minimum=0,
        group="faults",
        brief="End a job that waits longer, in seconds.",
    ),
    Setting(
        "verify_every",
        int,
        0,
        "N: compare the ranks' parameters bit by bit after every N steps of an optimizer; "
        "a difference ends the job with ReplicasDiffer on every rank; 0: never",
        minimum=0,
        group="faults",
        brief="Compare the parameters every N steps.",
    ),
    Setting(
        "verify_first_step",
        bool,
        True,
        "after the first step of each optimizer, warn if the ranks' parameters differ: then the script probably lacks "
        "a broadcast_parameters or a DistributedOptimizer",
        group="faults",
    ),
    Setting(
        "join_average",
        str,
        "contributors",
        "by what an average is divided while some ranks have joined: by the number of ranks that contribute values, or "
        "by the size of the process set, as in Horovod",
        choices=("contributors", "size"),
        group="job",
    ),
    Setting(
        "stall_stacks",
        bool,
        False,
        "include in the report of a stall the Python stacks of the ranks that others wait for",
        group="faults",
    ),
    Setting(
        "flight_dir",
        str,
        "",
        "directory where each rank writes its last actions as JSON, if the job fails or stalls, or on flight_signal; "
        "empty: none",
        group="faults",
        brief="Write each rank's last actions if it fails.",
    ),
    Setting(
        "flight_records",
        int,
        1024,
        "how many of its last buckets and decisions each rank keeps for flight_dir; 0: none",
        minimum=0,
        group="faults",
    ),
    Setting(
        "flight_signal",
        str,
        "SIGUSR1",
        "with flight_dir, the signal on which a rank writes its file, unless the script handles it; empty: none",
        group="faults",
    ),
    Setting(
        "min_np",
        int,
        0,
        "elastic job: it goes on without ranks that are lost while at least N are left, and their processes are started "
        "again; 0: it ends with the first rank that fails",
        minimum=0,
        group="faults",
        brief="Go on with at least N ranks.",
    ),
    Setting(
        "max_np",
        int,
        0,
        "elastic job: the most ranks that it has at a time, if the hosts take so many; 0: as many as -np",
        minimum=0,
        group="faults",
    ),
    Setting(
        "host_discovery_script",
        str,
        "",
        "elastic job: a command that prints the hosts that there are now, one a line: HOST:SLOTS, or HOST. It is run once a "
        "second; hosts may come and leave",
        group="faults",
    ),
    Setting(
        "slots_per_host",
        int,
        1,
        "elastic job: how many ranks a host takes for which host_discovery_script prints no number",
        minimum=1,
        group="faults",
    ),
    Setting(
        "host_discovery",
        str,
        "",
        "elastic job: what says which hosts there are now: script, slurm or that of a plugin; empty: the hosts are fixed",
        group="faults",
    ),
    Setting(
        "evict_after_s",
        float,
        0.0,
        "elastic job: the other ranks go on without a rank for which they have waited so long, in seconds; it is killed, and "
        "started again; 0: they wait",
        minimum=0,
        group="faults",
    ),
    Setting(
        "host_cooldown_s",
        str,
        "60 600",
        "elastic job: how long a host is left out after it was lost or its ranks have failed too often, in seconds: after "
        "the first time, and the longest; the time doubles with each failure",
        group="faults",
    ),
    Setting(
        "launcher_loss",
        str,
        "continue",
        "elastic job on several hosts: what happens when the launcher or its host is lost: continue, under a successor on "
        "another host, if more than half of the ranks are left; or end",
        choices=("continue", "end"),
        group="faults",
    ),
    Setting(
        "elastic_timeout_s",
        float,
        600.0,
        "elastic job: how long ranks wait for others while there are fewer than min_np, in seconds",
        minimum=0.1,
        group="faults",
    ),
    Setting(
        "reset_limit",
        int,
        0,
        "elastic job: how often the ranks may form a new world after the first one; 0: any number of times",
        minimum=0,
        group="faults",
    ),
    Setting(
        "restarts",
        int,
        3,
        "elastic job: how often the process of one rank is started again within ten minutes: at once after a signal, "
        "then after 1, 2, 4, … times restart_delay_s; then its host is left out for host_cooldown_s",
        minimum=0,
        group="faults",
    ),
    Setting(
        "restart_delay_s",
        float,
        1.0,
        "elastic job: how long the second start of a rank's process waits, in seconds; each further one waits twice as long",
        minimum=0.0,
        group="faults",
    ),
    Setting(
        "stop_signals",
        str,
        "SIGTERM,SIGUSR1",
        "signals after which should_stop() becomes true on all ranks at the same step, if the script calls it and does not "
        "handle the signal itself; empty: none",
        group="faults",
    ),
    Setting(
        "timeline",
        str,
        "",
        "file for a timeline of all ranks, as a Chrome trace (read it by `ddl timeline summary FILE`); "
        "NAME.zip: a part for each rank, with a manifest for Perfetto; empty: none",
        group="output",
        brief="Write a timeline of all ranks to FILE.",
    ),
    Setting(
        "profiler_ranges",
        bool,
        False,
        "show each bucket by its name in the framework's own profiler, on the thread that reduces it",
        group="output",
    ),
    Setting(
        "timeline_mark_cycles",
        bool,
        False,
        "in the timeline, mark where each period of a schedule begins",
        group="output",
    ),
    Setting(
        "grace_s",
        float,
        5.0,
        "how long the other ranks may continue after a rank has failed, in seconds; then they are ended",
        minimum=0,
        group="faults",
    ),
    Setting(
        "metrics_port",
        int,
        0,
        "port at which the first rank of each host serves metrics to Prometheus; 0: none",
        minimum=0,
        group="output",
        brief="Serve metrics to Prometheus at this port.",
    ),
    Setting(
        "metrics_address",
        str,
        "127.0.0.1",
        "address at which metrics are served; 0.0.0.0: all addresses of the host, so that other hosts can read them",
        group="output",
    ),
    Setting(
        "pulse_s",
        float,
        0.0,
        "how often each rank reports its load and progress to the launcher, in seconds; 0: never. `ddl run --top` "
        "sets it",
        minimum=0,
        group="output",
    ),
    Setting(
        "activity",
        bool,
        False,
        "1: each of these reports also tells what the rank waits for. The launcher sets it for a watch that shows this",
        group="output",
    ),
    Setting(
        "sample_ms",
        float,
        0.0,
        "how often to sample the stack of a rank's main thread, in ms; 0: never. `ddl doctor -- COMMAND` sets it",
        minimum=0,
        group="output",
    ),
    Setting(
        "log_level",
        str,
        "WARNING",
        "lowest level that is logged: DEBUG, INFO, WARNING or ERROR",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        group="output",
        brief="Lowest level that is logged.",
    ),
    Setting(
        "cache_dir",
        str,
        "",
        "directory for compiled kernels; empty: the first of the usual cache directories that is writable",
        group="performance",
    ),
    Setting(
        "switch_interval_ms",
        float,
        0.0,
        "thread switch interval of the Python interpreter while a job runs, in ms; 0: unchanged",
        minimum=0,
        group="performance",
    ),
    Setting(
        "torch_env",
        bool,
        True,
        "0: do not set RANK, WORLD_SIZE, MASTER_ADDR and the others of torchrun's variables for the ranks; then "
        "transformers' Trainer and Accelerate do not distribute the training themselves",
        group="job",
    ),
    Setting(
        "plugins",
        str,
        "",
        "comma-separated names of the only plugins to load; empty: all that are installed",
        group="job",
    ),
    Setting("plugins_off", str, "", "comma-separated names of plugins not to load", group="job"),
)


class Settings(Mapping[str, Value]):
    """The settings of one job, as an immutable mapping: ``settings["fusion_bytes"]``."""

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
        """Return the source of the value of the setting ``name``: "flag", "env", "file", "default" or "tuner".

        The source is "tuner" if a search for better settings has chosen the value.
        """
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
        """Return whether buckets in host memory are reduced while the step still computes. ``hosts``: number of hosts.

        If the setting ``overlap`` is "auto", the result is true in two cases: there is more than one host, or the user
        has set a bucket size. On a single host, buckets that run during the computation take processor cores from the
        computation, and there is too little communication to make up for this. Raises ValueError for an unknown value
        of ``overlap``.
        """
        wanted = self.text("overlap")
        if wanted not in ("auto", "on", "off"):
            raise ValueError(f"overlap={wanted!r} is not one of auto, on, off")
        chosen = any(self._sources[name] != "default" for name in ("fusion_bytes", "first_bucket_bytes"))
        return wanted == "on" or (wanted == "auto" and (hosts > 1 or chosen))

    def changed(self, values: Mapping[str, Value], source: str = "tuner") -> Settings:
        """Return a copy of these settings in which ``values`` replace the old values. They come from ``source``."""
        return Settings({**self._values, **values}, {**self._sources, **dict.fromkeys(values, source)})

    def names(self, name: str) -> tuple[str, ...]:
        """Return the parts of the comma-separated value of the setting ``name``, without empty parts."""
        return tuple(part.strip() for part in self.text(name).split(",") if part.strip())


def load_settings(
    environ: Mapping[str, str],
    file: Mapping[str, object] | None = None,
    flags: Mapping[str, object] | None = None,
    rows: Iterable[Setting] = SETTINGS,
) -> Settings:
    """Return the settings of one job, read from the environment, the config file and the flags.

    ``file``: the keys and values of the config file. ``flags``: the values of the flags, by the name of the setting; a
    value of None means that the flag was not given. ``rows``: the table of settings, which is the core's table or
    contains plugins' settings, too. Raises ValueError if a value is not valid. Raises UnknownSetting, a ValueError, if
    ``file`` or ``flags`` contains a name that is not in the table. The error message names the variable, the flag, or
    the key with its file and line.
    """
    table = {row.name: row for row in rows}
    file = file or {}
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    unknown = [_unknown(where_in(file, name), name, table) for name in sorted(set(file) - set(table))]
    unknown += [_unknown(f"--{name.replace('_', '-')}", name, table) for name in sorted(set(flags) - set(table))]
    if unknown:
        raise UnknownSetting("; ".join(unknown))
    values: dict[str, Value] = {}
    sources: dict[str, str] = {}
    for name, row in table.items():
        if name in flags:
            values[name], sources[name] = row.parse(flags[name], row.flag), "flag"
        elif row.env in environ:
            values[name], sources[name] = row.parse(environ[row.env], row.env), "env"
        elif name in file:
            values[name], sources[name] = row.parse(file[name], where_in(file, name)), "file"
        else:
            values[name], sources[name] = row.default, "default"
    return Settings(values, sources)


class UnknownSetting(ValueError):
    """Raised if the name of a flag or a key of a config file is not the name of a setting."""


def _unknown(where: str, name: str, table: Iterable[str]) -> str:
    near = nearest(name, table)
    what_next = f"did you mean {near}?" if near else f"there are {', '.join(sorted(table))}"
    return f"{where}: no setting is called {name}; {what_next}"


class ConfigFile(dict[str, object]):
    """The keys and values of a config file. ``where(key)`` returns the file and line of a key, for messages."""

    def __init__(self, values: Mapping[str, object], path: str | Path, text: str) -> None:
        super().__init__(values)
        self._path = path
        self._lines = text.splitlines()

    def only(self, names: Iterable[str]) -> ConfigFile:
        """Return a copy that contains only those keys that are in ``names``."""
        return ConfigFile({name: self[name] for name in names if name in self}, self._path, "\n".join(self._lines))

    def where(self, key: str) -> str:
        """Return the place of ``key`` as "FILE:LINE", or as "FILE" if no line of the file begins with ``key``."""
        for number, line in enumerate(self._lines, 1):
            if line.partition("=")[0].strip().strip("'\"") == key:
                return f"{self._path}:{number}"
        return str(self._path)


def where_in(file: Mapping[str, object], key: str) -> str:
    """Return the text by which messages name the place of ``key`` in a config file.

    ``file`` contains the keys and values of that config file.
    """
    return file.where(key) if isinstance(file, ConfigFile) else f"config file, {key}"


def read_toml(path: str | Path) -> ConfigFile:
    """Return the keys and values of the config file at ``path``.

    Raises ValueError with a message of one line if the file cannot be read or is not valid TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        text = Path(path).read_text("utf-8")
        return ConfigFile(tomllib.loads(text), path, text)
    except OSError as error:
        raise ValueError(f"config file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"config file {path}: it is not encoded in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        if str(path).endswith((".yaml", ".yml")):
            raise ValueError(
                f"config file {path}: YAML is for horovodrun; write settings as TOML, NAME = VALUE"
            ) from None
        raise ValueError(f"config file {path}: {error}") from None


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
