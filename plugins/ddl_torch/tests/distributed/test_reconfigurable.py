"""A process group whose peers come and go. Worlds of several ranks are processes: a process has one job at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import ddl_torch as ddl
import pytest
import torch
import torch.distributed as dist
from ddl_torch.distributed.creating import create
from ddl_torch.distributed.group import DdlProcessGroup
from ddl_torch.distributed.reconfigurable import PeerHandle, ReconfigurableGroup

from ddlcore.api.framework_groups import add_members_set
from ddlcore.errors import DeadlineExceeded, InvalidArgument, NotInitialized, ReentrantCall
from ddlcore.testing import run_world
from plugins.ddl_torch.tests.launching import PROGRAMS, together
from tests.docs.blocks import blocks

SHORT, LONG = timedelta(seconds=0.3), timedelta(seconds=60)


def made() -> ReconfigurableGroup:
    return ReconfigurableGroup(dist.HashStore(), 0, 1, LONG)


def opts(uuid: int, handles: Any, timeout: timedelta | None = None, **hints: str) -> Any:
    """Return what has the attributes of torch's ReconfigureOptions, which older versions do not have."""
    return SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout, hints=hints)


@pytest.fixture
def group(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReconfigurableGroup]:
    monkeypatch.setenv("DDL_RENDEZVOUS_DIR", str(tmp_path))
    one = made()
    yield one
    one.abort()


CALLS: dict[str, Callable[[ReconfigurableGroup], Any]] = {
    "allreduce": lambda group: group.allreduce([torch.ones(1)]),
    "broadcast": lambda group: group.broadcast([torch.ones(1)]),
    "allgather": lambda group: group.allgather([[torch.ones(1)]], [torch.ones(1)]),
    "reduce_scatter_single": lambda group: group.reduce_scatter_single(torch.ones(1), torch.ones(1)),
    "all_to_all_single": lambda group: group.all_to_all_single(torch.ones(1), torch.ones(1), [], []),
    "barrier": lambda group: group.barrier(),
    "monitored_barrier": lambda group: group.monitored_barrier(),
    "send": lambda group: group.send([torch.ones(1)], 0),
    "recv": lambda group: group.recv([torch.ones(1)], 0),
}


def test_it_has_peers_only_after_reconfigure(group: ReconfigurableGroup) -> None:
    own = group.get_reconfigure_handle()
    assert group.supports_reconfigure and own == group.get_reconfigure_handle() != made().get_reconfigure_handle()
    for uuid in range(3):
        for call in CALLS.values():
            with pytest.raises(NotInitialized, match=r"has no peers: it was made with enable_reconfigure=True"):
                call(group)
        group.reconfigure(opts(uuid, {own} if uuid else [own])).wait()
        assert (group.getRank(), group.getSize(), ddl.size()) == (0, 1, 1)
        assert str(group.get_error()).endswith("SUCCESS")
        tensor = torch.full((2,), 3.0)
        group.allreduce([tensor]).wait()
        group.barrier().wait()
        assert tensor.tolist() == [3.0, 3.0]
        if uuid:
            group.abort()
        else:
            group.shutdown()
        assert not ddl.is_initialized()


def test_the_launcher_of_this_process_has_no_say(group: ReconfigurableGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun may have started it as one of several ranks."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "one"}.items():
        monkeypatch.setenv(name, value)
    group.reconfigure(opts(0, [group.get_reconfigure_handle()])).wait()
    assert (ddl.rank(), ddl.size()) == (0, 1)


def test_subgroups_of_earlier_peers_are_dead(group: ReconfigurableGroup) -> None:
    """A subgroup of the next peers may have the number that the old one had, and other members."""
    subgroups = []
    for uuid in range(2):
        group.reconfigure(opts(uuid, [group.get_reconfigure_handle()]))
        subgroup = DdlProcessGroup(dist.HashStore(), 0, [0], add_members_set([0], "one"), LONG, False, None)
        subgroup.allreduce([torch.ones(1)]).wait()
        subgroups.append((subgroup, subgroup._set.process_set_id))
    (old, _), (_, number) = subgroups
    assert number == subgroups[0][1]
    with pytest.raises(InvalidArgument, match="is not registered in this job"):
        old.allreduce([torch.ones(1)])


def test_a_signal_handler_in_the_middle_changes_nothing(
    group: ReconfigurableGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.reconfigure(opts(0, [group.get_reconfigure_handle()]))
    with monkeypatch.context() as patch:
        patch.setattr("ddlcore.api.framework_groups.on_own_thread", lambda: True)
        with pytest.raises(ReentrantCall):
            group.abort()
    group.barrier().wait()
    group.abort()
    assert not ddl.is_initialized()


@pytest.mark.parametrize("place", [0, 1])
def test_a_peer_that_does_not_come(group: ReconfigurableGroup, place: int) -> None:
    """The group is as good as new after that."""
    own = group.get_reconfigure_handle()
    handles = [made().get_reconfigure_handle()]
    handles.insert(place, own)
    who = "rank 1 has not called init" if place == 0 else "rank 1 has not found rank 0"
    with pytest.raises(DeadlineExceeded, match=f"{who} within 0.3 s"):
        group.reconfigure(opts(0, handles, SHORT))
    with pytest.raises(NotInitialized, match=r"reconfigure\(\) has not been called, has failed"):
        group.barrier()
    with pytest.raises(InvalidArgument, match="uuid 0 and the same handles before; give another uuid"):
        group.reconfigure(opts(0, handles, SHORT))
    group.reconfigure(opts(0, [own])).wait()
    group.barrier().wait()


def test_bad_handles_change_nothing(group: ReconfigurableGroup) -> None:
    own, other = group.get_reconfigure_handle(), made().get_reconfigure_handle()
    group.reconfigure(opts(0, [own])).wait()
    wrong = {
        "'gloo:1' is not a handle of the backend ddl": [own, "gloo:1"],
        "'{}' is not a handle of the backend ddl": [own, "{}"],
        "'7' is not a handle of the backend ddl": [own, "7"],
        r"'\[\"nccl\", 1, 2\]' is not a handle of the backend ddl": [own, '["nccl", 1, 2]'],
        "is not among the 1 handles": [other],
        "a handle is there twice": [own, own],
        "uuid 0 and the same handles before": [own],
    }
    for words, handles in wrong.items():
        with pytest.raises(InvalidArgument, match=words):
            group.reconfigure(opts(0, handles))
    with pytest.raises(InvalidArgument, match=r"no hints; these were given: {'a': 'b'}"):
        group.reconfigure(opts(1, [own], a="b"))
    group.barrier().wait()  # still in the world of the first call
    group.reconfigure(opts(1, [own])).wait()  # what was refused does not count


def test_torch_asks_for_such_a_group() -> None:
    asked = SimpleNamespace(
        store=dist.HashStore(),
        group_rank=2,
        group_size=3,
        timeout=LONG,
        global_ranks_in_group=[],
        enable_reconfigure=True,
    )
    group = create(asked)
    assert isinstance(group, ReconfigurableGroup) and (group.getRank(), group.getSize()) == (2, 3)
    assert not ddl.is_initialized()
    with pytest.raises(AttributeError, match="has no attribute 'something'"):
        _ = group.something


def test_another_job_is_not_ended(monkeypatch: pytest.MonkeyPatch, group: ReconfigurableGroup) -> None:
    def play(rank: int, job: Any) -> None:
        for call in (made, lambda: group.reconfigure(opts(0, [group.get_reconfigure_handle()]))):
            with pytest.raises(InvalidArgument, match="ddl has a job in this process already"):
                call()
        assert ddl.is_initialized()

    run_world(1, play)
    monkeypatch.setenv("DDL_JOB_FILE", "there")
    for name in ("DDL_RANK", "DDL_HOST_INDEXES"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(InvalidArgument, match="or ddl's launcher has started it"):
        made()


def test_handles_are_different_for_each_group_and_equal_for_each_host() -> None:
    one, two = (PeerHandle.read(made().get_reconfigure_handle()) for _ in range(2))
    assert one.word != two.word and one.host == two.host


@pytest.mark.processes
def test_the_page_shows_how() -> None:
    """The block of docs/torch-backend.md runs. It calls torch's own functions."""
    if not hasattr(dist, "_reconfigure"):
        pytest.skip(f"torch {torch.__version__} has no reconfigure: 2.14 has")
    (block,) = [block for block in blocks("docs/torch-backend.md") if "enable_reconfigure=True" in block.code][:1]
    subprocess.run([sys.executable, "-c", block.code], check=True, timeout=100)


def play(size: int, *arguments: str) -> tuple[list[int], list[str]]:
    """Run the program on ``size`` processes. Return their exit codes and what they printed."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, str(PROGRAMS / "reconfigured.py"), str(store.port)]
    ended = together([[*command, str(number), str(size), *arguments] for number in range(size)])
    return [code for code, _ in ended], [text for _, text in ended]


@pytest.mark.processes
def test_processes_go_on_after_kills() -> None:
    """The first and the last rank are killed, in turn, and the ranks also change their order."""
    codes, shown = play(4)
    assert codes == [-9, 0, 0, -9], shown
    for number in (1, 2):
        assert f"process {number} has ended" in shown[number], shown


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("silent", [0, 2])
def test_a_silent_peer_holds_nobody_up_for_long(silent: int) -> None:
    """The others leave it behind while a collective waits for it. When it goes on, it learns that it was left."""
    codes, shown = play(3, str(silent))
    assert codes == [0, 0, 0], shown
    assert "PeerLost" in shown[silent], shown
