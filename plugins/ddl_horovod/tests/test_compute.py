"""Where a training and the processes that prepare its data meet."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ddl_horovod import compute
from ddl_horovod.compute import ComputeClient, ComputeService, make_key

from plugins.ddl_horovod.tests.test_scripts import PROGRAMS, RUN, output_of
from tests.launch.starting import environment

KEY = make_key()


@pytest.fixture
def service() -> Iterator[ComputeService]:
    """Two dispatchers with two workers each."""
    made = ComputeService(2, 2, KEY)
    yield made
    made.shutdown()


def test_they_find_each_other(service: ComputeService) -> None:
    """A wait ends when what it waits for has been registered, for each dispatcher by itself."""
    client = ComputeClient(service.addresses(), KEY)
    found: list[str] = []
    waiter = threading.Thread(target=lambda: found.append(client.wait_for_dispatcher_registration(1, 30)), daemon=True)
    waiter.start()
    client.register_dispatcher(0, "grpc://a:1")
    time.sleep(0.1)
    assert found == []
    client.register_dispatcher(1, "grpc://b:2")
    waiter.join(30)
    assert found == ["grpc://b:2"] and client.wait_for_dispatcher_registration(0, 0) == "grpc://a:1"
    client.register_dispatcher(1, "grpc://b:2")  # once more is no other one
    with pytest.raises(ValueError, match="dispatcher 1 is registered already, at grpc://b:2"):
        client.register_dispatcher(1, "grpc://c:3")
    client.register_worker_for_dispatcher(1, 2)
    client.register_worker_for_dispatcher(1, 2)
    with pytest.raises(TimeoutError, match=r"not all workers of dispatcher 1 have been registered within 0\.1 s"):
        client.wait_for_dispatcher_worker_registration(1, 0.1)
    client.register_worker_for_dispatcher(1, 3)
    client.wait_for_dispatcher_worker_registration(1, 0)
    with pytest.raises(ValueError, match="there is no dispatcher 2, but dispatchers 0 to 1"):
        client.wait_for_dispatcher_registration(2, 1)


def test_a_wait_has_a_deadline(service: ComputeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it takes several requests."""
    monkeypatch.setattr(compute, "_LOOK_S", 0.05)
    with pytest.raises(TimeoutError, match=r"dispatcher 0 has not been registered within 0\.2 s"):
        ComputeClient(service.addresses(), KEY).wait_for_dispatcher_registration(0, 0.2)


def test_all_are_told_to_end() -> None:
    """Those that wait, and those that come when the service is gone."""
    made = ComputeService(1, 1, KEY)
    client = ComputeClient(made.addresses(), KEY)
    waiters = [threading.Thread(target=client.wait_for_shutdown, daemon=True) for _ in range(3)]
    for one in waiters:
        one.start()
    time.sleep(0.1)
    client.shutdown()
    for one in waiters:
        one.join(30)
    assert not any(one.is_alive() for one in waiters)
    made.shutdown()
    client.wait_for_shutdown()
    with pytest.raises(ConnectionError, match="cannot be reached"):
        client.shutdown()


def test_who_does_not_know_the_key_is_not_heard(service: ComputeService) -> None:
    """Neither with another key, nor with other bytes, nor with the request of somebody else once more."""
    with pytest.raises(ConnectionError, match="has another key"):
        ComputeClient(service.addresses(), make_key()).register_dispatcher(0, "evil")
    ((address, *_),) = service.addresses().values()
    recorded = b""
    for attempt in (b"", b"x" * 100, struct.pack("!I", 1 << 30) + b"x" * 40, None):
        with socket.create_connection(address, 10) as connection:
            number = connection.recv(32, socket.MSG_WAITALL)
            if attempt is None:  # what was recorded answers another number
                attempt = recorded
            if not recorded:
                recorded = compute._signed(b'{"do": "shutdown"}', KEY, number + b"?")
            connection.sendall(attempt)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    with pytest.raises(TimeoutError):
        ComputeClient(service.addresses(), KEY).wait_for_dispatcher_registration(0, 0)
    assert not service._is_over


def test_numbers_that_are_none_are_refused() -> None:
    """Of dispatchers and workers."""
    for numbers in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="there must be dispatchers and workers"):
            ComputeService(*numbers, KEY)


@pytest.mark.long
@pytest.mark.parametrize("side", ["compute", "training"])
def test_a_training_gets_its_data_from_another_job(side: str, tmp_path: Path) -> None:
    """Both are started by horovodrun; the training ends the other job."""
    file = tmp_path / "compute.json"
    more = ["--dispatchers", "2", "--dispatcher-side", side, str(file)]
    command = [*RUN, "-np", "2", sys.executable, "-m", "horovod.tensorflow.data.compute_worker", *more]
    with (tmp_path / "said").open("w+") as said:
        workers = subprocess.Popen(command, stdout=said, stderr=said, env=environment({"TF_CPP_MIN_LOG_LEVEL": "3"}))
        try:
            train = [*RUN, "-np", "2", sys.executable, str(PROGRAMS / "data_service.py"), str(file)]
            code, out, err = output_of(train, {"TF_CPP_MIN_LOG_LEVEL": "3"})
            assert code == 0, err
            assert sorted(out.splitlines()) == [f"[{rank}] all {sum(range(100))}" for rank in range(2)]
            assert file.stat().st_mode & 0o777 == 0o600
            assert workers.wait(60) == 0, (tmp_path / "said").read_text()
        finally:
            workers.kill()
            workers.wait(40)
