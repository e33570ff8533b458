"""The stand-ins for Horovod's launcher, with tests that are written like Horovod's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import horovod_launches, horovod_suite

LAUNCHES = """
import json, os, sys, unittest
import mock
import pytest
from horovod.runner import _HorovodArgs
from horovod.runner.common.util import config_parser
from horovod.runner.elastic import constants, driver
from horovod.runner.launch import _run, _run_elastic, parse_args

def ask(name):
    from horovod.runner.common.util.env import get_env_rank_and_size
    return name, get_env_rank_and_size()

class LaunchTests(unittest.TestCase):
    def elastic(self, place, *flags):
        log = os.path.join(place, "log")
        script = os.path.join(os.path.dirname(__file__), "data", "script.py")
        with mock.patch.object(sys, "argv", ["horovodrun", *flags, "python", script, log]):
            args = parse_args()
            config_parser.set_env_from_args({}, args)
            _run_elastic(args)
        with open(log) as file:
            return sorted(map(json.loads, file))

    @mock.patch("horovod.runner.elastic.driver.ELASTIC_TIMEOUT_SECS", 20)
    @mock.patch("horovod.runner.gloo_run._get_min_start_hosts", return_value=1)
    def test_a_two_hosts(self, _start):
        import tempfile
        with tempfile.TemporaryDirectory() as place:
            found = self.elastic(place, "-np", "2", "--min-np", "2", "-H", "localhost:1,127.0.0.1:1")
        self.assertEqual(found, [[0, 2, "localhost", True], [1, 2, "127.0.0.1", True]])

    def test_b_it_fails(self):
        message = "Horovod detected that one or more processes exited with non-zero status"
        with pytest.raises(RuntimeError, match=message):
            self.elastic("/no/such/place", "-np", "1", "--min-np", "1", "-H", "localhost:1")

    def test_c_a_function(self):
        args = _HorovodArgs()
        args.num_proc, args.run_func = 2, lambda: ask("it")
        self.assertEqual(_run(args), [("it", (0, 2)), ("it", (1, 2))])
        self.assertIsNone(args.hosts)

    def test_d_fails(self):
        self.assertEqual(constants.RESET_LIMIT_EXCEEDED_MESSAGE.format(1)[-1], "2")
"""
SCRIPT = """
import json, os, sys
import horovod.common.elastic as elastic
from ddlcore import init
from ddlcore.api.elastic import ObjectState, run

init()
state = ObjectState()

@run
def train(state):
    with open(sys.argv[1], "a") as file:
        names = ("HOROVOD_RANK", "HOROVOD_SIZE")
        told = [int(os.environ[name]) for name in names]
        print(json.dumps([*told, os.environ["HOROVOD_HOSTNAME"], hasattr(state, "_host_messages")]), file=file)

train(state)
"""
IN_RANKS = """
import horovod.common.util

def test():
    assert horovod.common.util.env is not None
"""


def test_the_other_host_has_a_name_of_its_own() -> None:
    """The name is replaced in a list of hosts, too. A host whose name only begins with 127.0.0.1 keeps its name."""
    assert horovod_launches._renamed("localhost:2,127.0.0.1:2") == "localhost:2,second-host:2"
    assert horovod_launches._renamed("127.0.0.1:1,127.0.0.11:1") == "second-host:1,127.0.0.11:1"


def test_what_a_discovery_script_prints_is_renamed(tmp_path: Path) -> None:
    """The script of a test may have a blank in its path; other words of the command line stay."""
    script = tmp_path / "they are"
    script.write_text("#!/bin/sh\necho localhost:2\necho 127.0.0.1:2\n")
    script.chmod(0o755)
    ours = horovod_launches._with_second_host(str(script), "--host-discovery-script", tmp_path)
    assert subprocess.run([ours], capture_output=True, text=True).stdout == "localhost:2\nsecond-host:2\n"
    assert horovod_launches._with_second_host("127.0.0.1:1", "-np", tmp_path) == "127.0.0.1:1"


def test_a_class_that_reads_hosts() -> None:
    """Horovod's tests set the function of the class that returns what the script has printed."""
    found = horovod_launches._HostDiscoveryScript(None, "all")
    found._execute_discovery_script = lambda: "\na:2\n\nb\n"
    assert found.find_available_hosts_and_slots() == {"a": 2, "b": "all"}


@pytest.mark.long
@pytest.mark.processes
def test_a_checkout_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Tests that start jobs run in one process, a plain function runs in ranks, and tests that need Ray do not run."""
    (tmp_path / "test/integration/data").mkdir(parents=True)
    (tmp_path / "test/single").mkdir()
    (tmp_path / "test/integration/test_launch.py").write_text(LAUNCHES)
    (tmp_path / "test/integration/data/script.py").write_text(SCRIPT)
    (tmp_path / "test/integration/test_stall.py").write_text(IN_RANKS)
    (tmp_path / "test/single/test_ray.py").write_text("import ray")
    monkeypatch.setattr(sys, "argv", ["horovod_launches", str(tmp_path)])
    assert horovod_launches.main() == 1
    out = capsys.readouterr().out
    for row in (
        "| `test_launch.py` | 3 | 1 | 0 |",
        "| `test_stall.py` | 1 | 0 | 0 |",
        "| failed | `LaunchTests.test_d_fails` |",
        "| It needs Ray: RayExecutor. | `all of test_ray.py` |",
    ):
        assert row in out
    assert (
        horovod_suite._reason(horovod_suite.TestOutcome("all of test_ray.py", "ended")) == "It needs Ray: RayExecutor."
    )
