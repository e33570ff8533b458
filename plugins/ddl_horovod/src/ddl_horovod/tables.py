"""Tables of Horovod's flags and environment variables, and their effects in ddl.

The effect of each is a setting of ddl, an environment variable, or a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddlcore.launch.job.host_table import cooldown_range


@dataclass(frozen=True)
class Foreign:
    """A flag or environment variable of Horovod, and its effect in ddl.

    Exactly one of ``setting``, ``environ``, ``note`` and ``later`` is given. It determines the effect.
    """

    names: tuple[str, ...]
    values: int = 1  # number of words that follow the flag
    setting: str = ""  # the name of the ddl setting that gets the value of the flag or variable
    convert: Callable[[str], object] = str  # raises ValueError for a bad value; returns None to ignore the flag
    environ: str = ""  # NAME=VALUE, added to the ranks' environment
    note: str = ""  # a message for the user; the job starts
    later: str = ""  # a message for the user; a flag with such a message, but not a variable, prevents the start

    def answer(self, name: str, value: str, given: Answers) -> None:
        """Add the setting, variable or message that results from ``value`` to ``given``.

        ``name`` is the flag or variable as the user wrote it, and ``value`` is its value. Raises ValueError, with a
        message of one line, for a bad value.
        """
        if self.later and _off(value):
            return
        if self.later:
            given.refusals.append(f"{name}: {self.later}")
        elif self.note:
            given.notes.append(f"{name}: {self.note}")
        elif self.environ:
            variable, _, to = self.environ.partition("=")
            given.environ[variable] = to
        elif self.setting:
            try:
                converted = self.convert(value)
            except ValueError as error:
                raise ValueError(f"{name} {value}: {error}") from None
            if converted is None:
                return
            if self.setting == "launcher_args" and self.setting in given.settings:
                converted = f"{given.settings[self.setting]} {converted}"
            given.settings[self.setting] = converted


@dataclass
class Answers:
    """The settings, environment variables and messages that result from all given flags or variables of Horovod.

    ``refusals`` has the messages about flags that prevent the start, and ``notes`` has all other messages.
    """

    settings: dict[str, object] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def _off(value: str) -> bool:
    return value.strip().lower() in ("", "0", "false", "no", "off")


def _number(text: str) -> float:
    value = float(text) if text.replace(".", "", 1).lstrip("+-").isdecimal() else math.nan
    if not value >= 0:
        raise ValueError("must be a number >= 0")
    return value


def _mebibytes(text: str) -> int:
    return int(_number(text) * (1 << 20))


def _whole(text: str) -> int:
    return int(_number(text))


def log_level(text: str) -> str:
    """Return the name of Python's log level for ``text``, a log level of Horovod. Raises ValueError for other texts."""
    level = text.strip().upper()
    names = {"TRACE": "DEBUG", "FATAL": "ERROR", "0": "DEBUG", "1": "DEBUG", "2": "INFO", "3": "WARNING", "4": "ERROR"}
    level = names.get(level, level)
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError("is none of TRACE, DEBUG, INFO, WARNING, ERROR, FATAL")
    return level


def _no_warning(text: str) -> float | None:
    return None if _off(text) else 0.0


def _always(value: str) -> Callable[[str], str]:
    return lambda _: value


def _range(text: str) -> str:
    cooldown_range(text)
    return text


def _name(text: str) -> str:
    return text.strip().lower()


_WARMUP = "use --autotune-warmup-steps: the number of steps after a change that are not measured"
_NOISE = "the noise is estimated from the measurements; there is nothing to set"
_ROUTE = "there is no switch: --backend auto uses shared memory within a host, --backend NAME does not"
_CYCLE = "ddl does not work in cycles, so there is no cycle time to set"
_CACHE = "repeated steps are replayed, however many tensors they have; --no-replay turns that off"
_THREADS = "it has no effect: one thread of each rank calls the transport"
_STREAMS = "one stream is used; there is nothing to set"
_AFFINITY = "no thread of ours is bound to a core; taskset or numactl before the command binds a rank"
_STAMPS = "Python's logging decides the form of log lines; --prefix-output-with-timestamp stamps all output"
_BUILD = "it has no effect, because ddl is not compiled at installation; `ddl info` lists what is installed"
_LAUNCHED = "it has no effect here: only Horovod's own launcher sets it for its ranks"
_KNOB = "it has no effect here: ddl has no such option"

NATIVE: Mapping[str, str] = {  # horovodrun's flag: ours, which does the same
    "-v": "--version",
    "--version": "--version",
    "-cb": "--check-build",
    "--check-build": "--check-build",
    "-np": "-np",
    "--num-proc": "-np",
    "--min-np": "--min-np",
    "--max-np": "--max-np",
    "--slots-per-host": "--slots-per-host",
    "--host-discovery-script": "--host-discovery-script",
    "--reset-limit": "--reset-limit",
    "--network-interfaces": "--network-interface",
    "--network-interface": "--network-interface",
    "--output-filename": "--output-dir",
    "--verbose": "--verbose",
    "--config-file": "--config",
    "-p": "--ssh-port",
    "--ssh-port": "--ssh-port",
    "-i": "--ssh-identity-file",
    "--ssh-identity-file": "--ssh-identity-file",
    "-prefix-timestamp": "--prefix-output-with-timestamp",
    "--prefix-output-with-timestamp": "--prefix-output-with-timestamp",
    "--log-level": "--log-level",
    "--autotune": "--autotune",
    "--no-autotune": "--no-autotune",
    "--timeline-mark-cycles": "--timeline-mark-cycles",
    "--no-timeline-mark-cycles": "--no-timeline-mark-cycles",
    "-H": "-H",
    "--hosts": "-H",
    "-hostfile": "--hostfile",
    "--hostfile": "--hostfile",
}

FLAGS: tuple[Foreign, ...] = (
    Foreign(("--gloo",), 0, setting="backend", convert=_always("gloo")),
    Foreign(("--mpi",), 0, setting="backend", convert=_always("mpi")),
    Foreign(("--jsrun",), 0, later="start the script with jsrun itself, whose ranks ddl recognises; or use -H"),
    Foreign(("--start-timeout",), setting="start_timeout_s", convert=_number),
    Foreign(("--disable-cache",), 0, note="it has no effect: nothing is cached between starts"),
    Foreign(("--fusion-threshold-mb",), setting="fusion_bytes", convert=_mebibytes),
    Foreign(("--cycle-time-ms",), note=_CYCLE),
    Foreign(("--cache-capacity",), note=_CACHE),
    Foreign(("--hierarchical-allreduce", "--no-hierarchical-allreduce"), 0, note=_ROUTE),
    Foreign(("--hierarchical-allgather", "--no-hierarchical-allgather"), 0, note=_ROUTE),
    Foreign(("--torus-allreduce", "--no-torus-allreduce"), 0, note=_ROUTE),
    Foreign(("--autotune-log-file",), setting="autotune_log"),
    Foreign(("--autotune-warmup-samples",), note=_WARMUP),
    Foreign(("--autotune-steps-per-sample",), setting="autotune_steps", convert=_whole),
    Foreign(("--autotune-bayes-opt-max-samples",), setting="autotune_trials", convert=_whole),
    Foreign(("--autotune-gaussian-process-noise",), note=_NOISE),
    Foreign(("--min-num-proc",), setting="min_np", convert=_whole),
    Foreign(("--max-num-proc",), setting="max_np", convert=_whole),
    Foreign(("--elastic-timeout",), setting="elastic_timeout_s", convert=_number),
    Foreign(("--blacklist-cooldown-range",), 2, setting="host_cooldown_s", convert=_range),
    Foreign(("--timeline-filename",), setting="timeline"),
    Foreign(("--no-stall-check",), 0, setting="stall_warning_s", convert=lambda _: 0.0),
    Foreign(("--stall-check",), 0, setting="stall_warning_s", convert=lambda _: 60.0),
    Foreign(("--stall-check-warning-time-seconds",), setting="stall_warning_s", convert=_number),
    Foreign(("--stall-check-shutdown-time-seconds",), setting="stall_shutdown_s", convert=_number),
    Foreign(("--mpi-threads-disable", "--no-mpi-threads-disable"), 0, note=_THREADS),
    Foreign(("--mpi-args",), setting="launcher_args"),
    Foreign(("--binding-args",), setting="launcher_args"),
    Foreign(("--tcp",), 0, environ="NCCL_IB_DISABLE=1"),
    Foreign(("--num-nccl-streams",), note=_STREAMS),
    Foreign(("--thread-affinity",), note=_AFFINITY),
    Foreign(("--gloo-timeout-seconds",), setting="open_timeout_s", convert=_number),
    Foreign(("--log-with-timestamp", "--log-without-timestamp"), 0, note=_STAMPS),
    Foreign(("--log-hide-timestamp", "--no-log-hide-timestamp"), 0, note=_STAMPS),
)

VARIABLES: tuple[Foreign, ...] = (
    Foreign(("HOROVOD_START_TIMEOUT",), setting="start_timeout_s", convert=_number),
    Foreign(("HOROVOD_FUSION_THRESHOLD",), setting="fusion_bytes", convert=_whole),
    Foreign(("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"), setting="backend", convert=_name),
    Foreign(("HOROVOD_GLOO_IFACE",), setting="network_interface"),
    Foreign(("HOROVOD_GLOO_TIMEOUT_SECONDS",), setting="open_timeout_s", convert=_number),
    Foreign(("HOROVOD_STALL_CHECK_TIME_SECONDS",), setting="stall_warning_s", convert=_number),
    Foreign(("HOROVOD_STALL_CHECK_DISABLE",), setting="stall_warning_s", convert=_no_warning),  # last: it counts
    Foreign(("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",), setting="stall_shutdown_s", convert=_number),
    Foreign(("HOROVOD_LOG_LEVEL",), setting="log_level", convert=log_level),
    Foreign(("HOROVOD_LOG_HIDE_TIME",), note=_STAMPS),
    Foreign(("HOROVOD_CYCLE_TIME",), note=_CYCLE),
    Foreign(("HOROVOD_CACHE_CAPACITY",), note=_CACHE),
    Foreign(
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "HOROVOD_HIERARCHICAL_ALLGATHER", "HOROVOD_TORUS_ALLREDUCE"), note=_ROUTE
    ),
    Foreign(("HOROVOD_AUTOTUNE",), setting="autotune", convert=lambda text: not _off(text)),
    Foreign(("HOROVOD_AUTOTUNE_LOG",), setting="autotune_log"),
    Foreign(("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",), setting="autotune_steps", convert=_whole),
    Foreign(("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",), setting="autotune_trials", convert=_whole),
    Foreign(("HOROVOD_AUTOTUNE_WARMUP_SAMPLES",), note=_WARMUP),
    Foreign(("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",), note=_NOISE),
    Foreign(("HOROVOD_ELASTIC",), note=_LAUNCHED),
    Foreign(("HOROVOD_ELASTIC_TIMEOUT",), setting="elastic_timeout_s", convert=_number),
    Foreign(("HOROVOD_TIMELINE",), setting="timeline"),
    Foreign(("HOROVOD_TIMELINE_MARK_CYCLES",), setting="timeline_mark_cycles", convert=lambda text: not _off(text)),
    Foreign(("HOROVOD_MPI_THREADS_DISABLE",), note=_THREADS),
    Foreign(("HOROVOD_NUM_NCCL_STREAMS",), note=_STREAMS),
    Foreign(("HOROVOD_THREAD_AFFINITY",), note=_AFFINITY),
    Foreign(
        (
            "HOROVOD_HOSTNAME",
            "HOROVOD_RANK",
            "HOROVOD_SIZE",
            "HOROVOD_LOCAL_RANK",
            "HOROVOD_LOCAL_SIZE",
            "HOROVOD_CROSS_RANK",
            "HOROVOD_CROSS_SIZE",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR",
            "HOROVOD_GLOO_RENDEZVOUS_PORT",
        ),
        note=_LAUNCHED,
    ),
    Foreign(
        (
            "HOROVOD_BATCH_D2D_MEMCOPIES",
            "HOROVOD_CCL_CACHE",
            "HOROVOD_ADASUM_MPI_CHUNK_SIZE",
            "HOROVOD_DISABLE_GROUP_FUSION",
            "HOROVOD_DISABLE_NVTX_RANGES",
            "HOROVOD_ENABLE_ASYNC_COMPLETION",
            "HOROVOD_DYNAMIC_PROCESS_SETS",
            "HOROVOD_ENABLE_XLA_OPS",
            "HOROVOD_SPARK_START_TIMEOUT",
            "HOROVOD_SPARK_WORK_DIR",
            "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX",
        ),
        note=_KNOB,
    ),
    Foreign(
        (
            "HOROVOD_WITH_TENSORFLOW",
            "HOROVOD_WITH_PYTORCH",
            "HOROVOD_WITH_MXNET",
            "HOROVOD_WITH_MPI",
            "HOROVOD_WITH_GLOO",
            "HOROVOD_WITHOUT_TENSORFLOW",
            "HOROVOD_WITHOUT_PYTORCH",
            "HOROVOD_WITHOUT_MXNET",
            "HOROVOD_WITHOUT_MPI",
            "HOROVOD_WITHOUT_GLOO",
            *(
                f"HOROVOD_GPU_{what}"
                for what in ("OPERATIONS", "ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER")
            ),
            "HOROVOD_GPU",
            "HOROVOD_CUDA_HOME",
            "HOROVOD_ROCM_HOME",
            "HOROVOD_NCCL_HOME",
            "HOROVOD_NCCL_INCLUDE",
            "HOROVOD_NCCL_LIB",
            "HOROVOD_NCCL_LINK",
            "HOROVOD_ALLOW_MIXED_GPU_IMPL",
            "HOROVOD_BUILD_ARCH_FLAGS",
            "HOROVOD_BUILD_CUDA_CC_LIST",
            "HOROVOD_CMAKE",
            "HOROVOD_DEBUG",
        ),
        note=_BUILD,
    ),
)
# What a key of horovodrun's config file becomes if its flag is also one of ``ddl run``.
SETTINGS_OF_NATIVE: Mapping[str, Foreign] = {
    "--autotune": Foreign(("--autotune",), 0, setting="autotune", convert=lambda _: True),
    "--no-autotune": Foreign(("--no-autotune",), 0, setting="autotune", convert=lambda _: False),
    "--timeline-mark-cycles": Foreign(
        ("--timeline-mark-cycles",), 0, setting="timeline_mark_cycles", convert=lambda _: True
    ),
    "--no-timeline-mark-cycles": Foreign(
        ("--no-timeline-mark-cycles",), 0, setting="timeline_mark_cycles", convert=lambda _: False
    ),
    "--log-level": Foreign(("--log-level",), setting="log_level", convert=log_level),
}
_BY_FLAG = {name: row for row in FLAGS for name in row.names}
_BY_VARIABLE = {name: row for row in VARIABLES for name in row.names}
_ORDER = {name: at for at, name in enumerate(_BY_VARIABLE)}


def read_variables(environ: Mapping[str, str]) -> Answers:
    """Return the settings and messages that result from the HOROVOD_* variables in ``environ``.

    Raises ValueError, with a message of one line, for a malformed value. The ``refusals`` of the result name variables
    that ddl cannot honour. For such variables, the caller only shows the messages and starts the job. For a flag, a
    refusal would prevent the start.
    """
    given = Answers()
    names = [name for name in environ if name.startswith("HOROVOD_")]
    for name in sorted(names, key=lambda name: (_ORDER.get(name, len(_ORDER)), name)):
        row = _BY_VARIABLE.get(name)
        if row is None:
            given.notes.append(f"{name}: Horovod has no such variable that ddl knows; it is ignored")
        else:
            row.answer(name, environ[name], given)
    return given


def read_config(flags: Sequence[tuple[str, str]]) -> Answers:
    """Return the settings and messages that result from ``flags``, what a config file of horovodrun stands for.

    Each flag has its value, or "" if it takes none. Raises ValueError, with a message of one line, for a bad value. If
    the result has ``refusals``, the caller must not start the job.
    """
    answers = Answers()
    for name, value in flags:
        row = SETTINGS_OF_NATIVE.get(name) or _BY_FLAG.get(name)
        if row is None:
            answers.notes.append(f"{name}: horovodrun has no such flag; that line of the config file is ignored")
        else:
            row.answer(name, "1" if row.values == 0 else value, answers)
    return answers
