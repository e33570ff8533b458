"""Runs those of Horovod's own tests that start jobs themselves, and lends them what they use of Horovod's launcher.

    python tools/horovod_launches.py CHECKOUT [the options of tools/horovod_suite.py]

The tests in test/integration and test/single of a checkout of Horovod run in one process. Most of them start ranks by
functions of Horovod's launcher that ddl does not have. The stand-ins here run ddl's command horovodrun instead. With
this they make up for three differences, so that the tests can show others:

- Horovod takes localhost and 127.0.0.1 as two hosts, and ddl as one. Here, 127.0.0.1 is a host of another name, whose
  ssh is a script that starts processes on this machine.
- The training scripts wait in the middle of an epoch until the launcher has told rank 0 of a change of the hosts, by
  reading an attribute of the state that ddl's states do not have. Here, this attribute waits until ddl's ranks have
  agreed at which commit they form the next world.
- HOROVOD_HOSTNAME is the name of the host, not its address.

Scripts for release 1 of TensorFlow get tensorflow.compat.v1.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script's own path is tools/, not the tree's root

import cloudpickle

__all__ = ["FILES", "LIMIT_S", "NOT_RUN", "REASONS", "lend_launcher", "main", "starts_jobs", "travel"]

FILES = "integration/test_*,single/test_*"
LIMIT_S = 400.0  # how long a test may take at least: the longest starts two jobs, in which ranks start late
_IN_RANKS = ("test_stall.py",)  # of these folders, what runs in ranks itself
_INSIDE = "It tests a class of Horovod's launcher that no script uses: "
_SPARK = "It needs Spark: "
_RAY = "It needs Ray: "
NOT_RUN: Mapping[str, str] = {  # files, with the reasons
    "test_buildkite.py": "It tests the script that makes Horovod's own pipeline of tests.",
    "test_compute_service.py": f"{_INSIDE}the service behind horovod.tensorflow.data.",
    "test_elastic_driver.py": f"{_INSIDE}ElasticDriver.",
    "test_run.py": f"{_INSIDE}how it makes variables for Horovod's library of its flags, and lines for mpirun.",
    "test_service.py": f"{_INSIDE}BasicDriverService.",
    "test_task_service.py": f"{_INSIDE}BasicTaskService.",
    "test_util.py": f"{_INSIDE}Pipe.",
    "test_elastic_spark_tensorflow.py": f"{_SPARK}horovod.spark.run_elastic.",
    "test_elastic_spark_tensorflow2.py": f"{_SPARK}horovod.spark.run_elastic.",
    "test_elastic_spark_torch.py": f"{_SPARK}horovod.spark.run_elastic.",
    "test_spark.py": f"{_SPARK}horovod.spark.run.",
    "test_spark_keras.py": f"{_SPARK}estimators.",
    "test_spark_lightning.py": f"{_SPARK}estimators.",
    "test_spark_torch.py": f"{_SPARK}estimators.",
    "test_ray.py": f"{_RAY}RayExecutor.",
    "test_ray_elastic.py": f"{_RAY}ElasticRayExecutor.",
    "test_ray_elastic_v2.py": f"{_RAY}RayExecutor.",
}
_HOST = "After a failure, ddl goes on with the other ranks of that host; Horovod leaves out the whole host."
_VERBOSE = "The job does what the test wants, which then looks for the lines that Horovod's launcher prints."
_EXECVE = "It looks whether this process is replaced by mpirun; ddl stays, and starts the ranks itself."
_MPIRUN = "It wants the words of mpirun; the launcher of ddl names the rank that has failed, and its error."
_TEXT = "The error of horovod.run has another text: it names the rank and its error."
_ONE_HOST = "ddl takes localhost and 127.0.0.1 as one host, and wants it once."
# Tests that cannot pass, by the end of their name, as in tools/horovod_suite.py, and the files above.
REASONS: Mapping[str, str] = {
    **{f"all of {name}": why for name, why in NOT_RUN.items()},
    "test_single_rank_failure": _HOST,
    "test_resurrecting_blacklisted_hosts_exponential_backoff": _HOST,
    "test_fault_tolerance_without_scaling": "Without --max-np, Horovod starts ranks at all slots, and ddl -np.",
    "ElasticRunTests.test_run_with_hosts": _ONE_HOST,
    "ElasticRunTests.test_run_with_discovery_script": _ONE_HOST,
    "InteractiveRunTests.test_failed_run": _TEXT,
    **{f"test_run_success_gloo_local_{kind}": _VERBOSE for kind in ("cmd", "func")},
    "test_run_failure_gloo_local_cmd": _VERBOSE,
    "test_run_failure_gloo_local_func": _TEXT,
    "test_run_success_mpi_local_func": _VERBOSE,
    **{f"test_run_{outcome}_mpi_local_cmd": _EXECVE for outcome in ("success", "failure")},
    "test_run_failure_mpi_local_func": _MPIRUN,
}

_RESET_LIMIT = "Horovod was shutdown because number of resets during elastic job exceeded limit: {}"
_FAILED = "Horovod detected that one or more processes exited with non-zero status"
_ELASTIC_TIMEOUT_S = 600
_SECOND = "second-host"  # the name under which 127.0.0.1 is a host of its own
_SSH = """#!/bin/sh
while case "$1" in -p|-i) shift 2;; -*) shift;; *) false;; esac; do :; done
shift
export HOST=127.0.0.1
exec setsid --fork --wait sh -c "$*"
"""
_LEAST_TIMEOUT_S = 10  # ddl's time limit includes the end of processes that leave, which takes longer than in Horovod
_CHANGE_S = 60.0  # how long a script waits for a change of the hosts; a new rank has to import its framework first
_TENSORFLOW_1 = "import tensorflow.compat.v1 as tf; tf.disable_v2_behavior()"
_TOGETHER_S = 3.0  # from the first rank that waits to join to the last


def starts_jobs(file: Path) -> bool:
    """Return whether the tests in ``file`` run in one process, and start jobs themselves."""
    return file.parent.name in ("integration", "single") and file.name not in _IN_RANKS


def lend_launcher() -> None:
    """Make the modules of Horovod's launcher that the tests import or patch. What exists already stays."""
    from horovod.common.util import mpi_built

    network = types.SimpleNamespace(
        filter_local_addresses=lambda hosts: hosts,
        get_local_host_addresses=lambda: ["127.0.0.1"],
        resolve_host_address=lambda host: host,
    )
    lent: dict[str, dict[str, Any]] = {
        "": {"_HorovodArgs": _Arguments},
        ".launch": {
            "_check_all_hosts_ssh_successful": lambda _hosts, **_kwargs: False,
            "_run": _run,
            "_run_elastic": _run_elastic,
            "network": network,
            "parse_args": lambda: sys.argv[1:],
        },
        ".common": {},
        ".common.util": {},
        ".common.util.config_parser": {"set_env_from_args": lambda _environ, _args: None},
        ".common.util.safe_shell_exec": {"execute": _shell},
        ".elastic": {},
        ".elastic.constants": {"RESET_LIMIT_EXCEEDED_MESSAGE": _RESET_LIMIT},
        ".elastic.discovery": {"HostDiscoveryScript": _HostDiscoveryScript},
        ".elastic.driver": {"DISCOVER_HOSTS_FREQUENCY_SECS": 1.0, "ELASTIC_TIMEOUT_SECS": _ELASTIC_TIMEOUT_S},
        ".gloo_run": {"_get_min_start_hosts": lambda _settings: 2, "network": network},
        ".mpi_run": {"mpi_available": lambda _environ=None: mpi_built(), "os": os},
    }
    for name, members in lent.items():
        _lend(f"horovod.runner{name}", members)


def travel(module: types.ModuleType) -> None:
    """Let functions of ``module``, a file of tests, be called in ranks, which could not import what it imports."""
    cloudpickle.register_pickle_by_value(module)


def _lend(name: str, members: Mapping[str, Any]) -> None:
    try:
        module = import_module(name)
    except ModuleNotFoundError:
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
        parent, _, last = name.rpartition(".")
        setattr(sys.modules[parent], last, module)
    vars(module).update(members)


class _Arguments:
    """The arguments of Horovod's launcher, as a test sets them: None unless it has set them."""

    num_proc = 1

    def __getattr__(self, name: str) -> None:
        return None


class _HostDiscoveryScript:
    """Horovod's class of this name, which runs a script that prints hosts; here, ddl reads what it has printed."""

    _execute_discovery_script: Callable[[], str]  # the tests set it

    def __init__(self, discovery_script: object, slots: object) -> None:
        self._slots = slots

    def find_available_hosts_and_slots(self) -> dict[str, object]:
        """Return the slots of each host."""
        from ddlcore.builtin.discovery import ScriptDiscovery

        unknown = 999_999  # no host of the tests has so many slots
        script = f"printf %s {shlex.quote(self._execute_discovery_script())}"
        discovery = ScriptDiscovery()
        discovery.begin({}, {"host_discovery_script": script, "slots_per_host": unknown})
        return {one.host: self._slots if one.slots == unknown else one.slots for one in discovery.hosts()}


def _shell(command: str, env: Mapping[str, str] | None = None, **_kwargs: Any) -> int:
    return subprocess.run(command, shell=True, env=env).returncode


def _run_elastic(words: Sequence[str]) -> None:
    """Run horovodrun with ``words``. Raise RuntimeError with Horovod's message if it fails."""
    timeout_s = import_module("horovod.runner.elastic.driver").ELASTIC_TIMEOUT_SECS  # a test may have patched it
    flags = [] if timeout_s == _ELASTIC_TIMEOUT_S else ["--elastic-timeout", str(max(timeout_s, _LEAST_TIMEOUT_S))]
    at = words.index("python")
    limit = next((after for word, after in pairwise(words[:at]) if word == "--reset-limit"), "")
    with _two_hosts() as folder:
        options = [_with_second_host(word, before, folder) for before, word in pairwise(["", *words[:at]])]
        _horovodrun([*options, *flags, sys.executable, __file__, "--script", *words[at + 1 :]], limit)


def _with_second_host(word: str, before: str, folder: Path) -> str:
    """Return ``word``, which stands behind ``before`` on a command line, with another name for 127.0.0.1."""
    if before == "-H":
        return _renamed(word)
    if before == "--host-discovery-script":
        script = folder / "hosts"
        script.write_text(f"#!/bin/sh\n{shlex.quote(word)} | sed 's/^127\\.0\\.0\\.1/{_SECOND}/'\n", encoding="utf-8")
        script.chmod(0o755)
        return str(script)
    return word


def _renamed(hosts: str) -> str:
    return re.sub(r"(^|,)127\.0\.0\.1(?=[:,]|$)", rf"\g<1>{_SECOND}", hosts)


@contextmanager
def _two_hosts() -> Iterator[Path]:
    """Make an environment in which ssh leads to a second host on this machine. The result is a folder for files."""
    with tempfile.TemporaryDirectory() as place:
        ssh = Path(place) / "ssh"
        ssh.write_text(_SSH, encoding="utf-8")
        ssh.chmod(0o755)
        path = os.pathsep.join([place, os.environ.get("PATH", os.defpath)])
        variables = {"PATH": path, "HOST": "localhost", "DDL_CONTROL_ADDRESS": "tcp://127.0.0.1:0"}
        with mock.patch.dict(os.environ, variables):
            yield Path(place)


def _horovodrun(words: Sequence[str], reset_limit: str = "") -> None:
    command = [sys.executable, "-m", "horovod.runner.launch", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate()
    finally:
        process.kill()  # if this test has taken too long; the ranks end with their launcher
        process.wait()
    print(output, flush=True)
    if process.returncode:
        is_limit = reset_limit and "(--reset-limit)" in output
        raise RuntimeError(f"{_RESET_LIMIT.format(reset_limit) if is_limit else _FAILED}\n{output[-3000:]}")


def _run(args: _Arguments) -> Any:
    """Do what the function of this name in Horovod's launcher does with ``args``: run a function or a command."""
    hosts, given = _renamed(args.hosts or ""), vars(args)
    if "run_func" in given and given["run_func"] is not None:
        import horovod

        names = ("num_proc", "min_num_proc", "max_num_proc", "use_gloo", "use_mpi", "verbose", "disable_cache")
        asked = {name: given[name] for name in names if given.get(name) is not None}
        with _two_hosts():
            return horovod.run(_with_helpers(given["run_func"]), hosts=hosts or None, **asked)
    flags = {"-np": "num_proc", "--min-num-proc": "min_num_proc", "--max-num-proc": "max_num_proc"}
    words = [word for flag, name in flags.items() if given.get(name) for word in (flag, str(given[name]))]
    words += [f"--{name}" for name in ("gloo", "mpi") if given.get(f"use_{name}")]
    words += [*(["-H", hosts] if hosts else []), *(["--verbose"] if given.get("verbose") else [])]
    with _two_hosts():
        _horovodrun([*words, *given["command"]])
    return None


def _with_helpers(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return ``function`` for a rank, in which it also finds what the tests use of Horovod's launcher."""
    root = str(Path(__file__).resolve().parents[1])

    def called() -> Any:
        sys.path.insert(0, root)
        from tools.horovod_suite import _lend_helpers

        _lend_helpers(Path(os.devnull))
        return function()

    return called


# --- in a rank: a training script of the tests


class _HostMessages:
    """Replaces Horovod's queue of messages about changed hosts. The scripts only ask whether the queue is empty."""

    def empty(self) -> bool:
        """Wait until the ranks have agreed on the commit at which they form the next world.

        Return False if they have agreed, and True if they have not agreed in time or the job has failed.
        """
        from ddlcore.api.world import current_job

        job = current_job()
        until_s = time.monotonic() + _CHANGE_S
        while job.commit_calls._point is None and job.failed_with() is None and time.monotonic() < until_s:
            time.sleep(0.05)
        time.sleep(_TOGETHER_S)
        return job.commit_calls._point is None


def _run_script(words: Sequence[str]) -> None:
    """Run a training script in this rank, with its arguments."""
    from ddlcore.api.elastic import State

    State._host_messages = _HostMessages()  # type: ignore[attr-defined]
    os.environ["HOROVOD_HOSTNAME"] = os.environ["HOST"]
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).parent)
    source = Path(words[0]).read_text(encoding="utf-8")
    if "tf.ConfigProto" in source:
        source = source.replace("import tensorflow as tf", _TENSORFLOW_1)
    exec(compile(source, words[0], "exec"), {"__name__": "__main__", "__file__": words[0]})


def main() -> int:
    """Run the tests and print the table. Return the exit code."""
    if sys.argv[1:2] == ["--script"]:
        _run_script(sys.argv[2:])
        return 0
    from tools import horovod_suite

    return horovod_suite.main(FILES)


if __name__ == "__main__":
    sys.exit(main())
