"""The plugin declares itself without TensorFlow, has Horovod's names and argument orders, and checks the version."""

from __future__ import annotations

import inspect
import subprocess
import sys

import ddl_tf as ddl
import pytest
import tensorflow as tf
from ddl_tf.plugin import ddl_adapters
from ddl_tf.supported import NEWEST, OLDEST, objection

SIGNATURES = {
    "allreduce": "tensor average device_dense device_sparse compression op prescale_factor postscale_factor name "
    "process_set ignore_name_scope",
    "grouped_allreduce": "tensors average device_dense device_sparse compression op prescale_factor postscale_factor "
    "process_set ignore_name_scope name",
    "reducescatter": "tensor device_dense compression op name process_set ignore_name_scope prescale_factor "
    "postscale_factor",
    "grouped_reducescatter": "tensors device_dense compression op process_set prescale_factor postscale_factor",
    "allgather": "tensor name ignore_name_scope process_set",
    "grouped_allgather": "tensors name ignore_name_scope process_set",
    "broadcast": "tensor root_rank name ignore_name_scope process_set",
    "alltoall": "tensor splits name ignore_name_scope process_set",
    "rank_op": "name",
    "local_rank_op": "name",
    "local_size_op": "name",
    "size_op": "process_set_id name",
    "process_set_included_op": "process_set_id name",
    "broadcast_object": "obj root_rank session name process_set",
    "broadcast_object_fn": "root_rank session name process_set",
    "allgather_object": "obj session name process_set",
}
BASICS = """
    init shutdown is_initialized size rank local_size local_rank cross_size cross_rank is_homogeneous join barrier
    ProcessSet global_process_set add_process_set remove_process_set Compression
    Average Sum Adasum Min Max Product HorovodInternalError DdlInternalError PeerLost
    mpi_built mpi_enabled mpi_threads_supported gloo_built gloo_enabled nccl_built ddl_built ccl_built cuda_built
    rocm_built gpu_available
"""
FIVE_LINES = """
import tensorflow as tf
import ddl_tf as ddl
ddl.init()
assert ddl.allreduce(tf.ones(3)).numpy().tolist() == [1.0] * 3
print(ddl.size(), ddl.rank())
"""


@pytest.mark.parametrize("name", SIGNATURES)
def test_argument_order(name: str) -> None:
    """Positional arguments of Horovod's scripts have the same meaning here."""
    assert list(inspect.signature(getattr(ddl, name)).parameters) == SIGNATURES[name].split()


def test_exports() -> None:
    """All exported names are public and defined."""
    assert set(SIGNATURES) | set(BASICS.split()) <= set(ddl.__all__)
    assert not [name for name in ddl.__all__ if not hasattr(ddl, name)]


def test_horovods_integers() -> None:
    """The numbers of the ops are Horovod's."""
    assert [ddl.Average, ddl.Sum, ddl.Adasum, ddl.Min, ddl.Max, ddl.Product] == [0, 1, 2, 3, 4, 5]


def test_what_is_built() -> None:
    """The functions about TensorFlow and installed transports return booleans and need no job."""
    assert ddl.cuda_built() is tf.test.is_built_with_cuda()
    assert ddl.rocm_built() is tf.test.is_built_with_rocm()
    assert ddl.ddl_built() is False
    assert ddl.gpu_available() is bool(tf.config.list_physical_devices("GPU"))


@pytest.mark.parametrize("version", ["2.16.1", "2.22.0", "2.19.0-rc1", "2.20.0.dev1"])
def test_versions_that_serve(version: str) -> None:
    assert objection(version) == ""


def test_the_supported_releases_are_the_tested_ones() -> None:
    """`ddl info` shows the same range that the import enforces."""
    ((shown,),) = [provider.tested for provider in ddl_adapters()]
    assert (shown.oldest, shown.newest) == tuple(".".join(map(str, bound)) for bound in (OLDEST, NEWEST))


@pytest.mark.parametrize("version", ["2.15.1", "2.23.0", "1.15.5", "3.0.0", "nightly"])
def test_versions_that_do_not(version: str) -> None:
    """An unsupported version gives one line: the supported range, the installed version, and what to install."""
    text = objection(version)
    assert "2.16 to 2.22" in text and version in text and "pip install" in text and "\n" not in text


def shown(code: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=check)


def test_introduction_imports_no_tensorflow() -> None:
    """Listing plugins does not import a framework: the plugin's module works without the rest of its package."""
    code = (
        "import sys; from ddlcore.plug.finding import run_alone; "
        "(one,) = run_alone('ddl_tf.plugin').ddl_adapters(); print(one.target, 'tensorflow' in sys.modules)"
    )
    assert shown(code).stdout.split() == ["ddl_tf.adapter:TfAdapter", "False"]


def test_a_missing_tensorflow_is_said_in_one_line() -> None:
    """A missing TensorFlow raises an ImportError that says what to install."""
    done = shown("import sys; sys.modules['tensorflow'] = None; import ddl_tf", check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ddl_tf needs TensorFlow 2.16 to 2.22") and "pip install" in last


@pytest.mark.long
def test_a_world_of_one() -> None:
    """The five lines of a script run without a launcher, as a job of one rank."""
    assert shown(FIVE_LINES).stdout.split() == ["1", "0"]
