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
    time.sleep(0.1)  # gives a wait that ends too early the time to end
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
    """A wait that takes several requests ends at its deadline, too."""
    monkeypatch.setattr(compute, "_LOOK_S", 0.05)
    with pytest.raises(TimeoutError, match=r"dispatcher 0 has not been registered within 0\.2 s"):
        ComputeClient(service.addresses(), KEY).wait_for_dispatcher_registration(0, 0.2)


def test_all_are_told_to_end() -> None:
    """Clients that wait are told to end, and so are clients that come when the service is gone."""
    made = ComputeService(1, 1, KEY)
    client = ComputeClient(made.addresses(), KEY)
    waiters = [threading.Thread(target=client.wait_for_shutdown, daemon=True) for _ in range(3)]
    for one in waiters:
        one.start()
    time.sleep(0.1)  # so that they wait, most probably; the result is the same if they come later
    client.shutdown()
    for one in waiters:
        one.join(30)
    assert not any(one.is_alive() for one in waiters)
    made.shutdown()
    client.wait_for_shutdown()
    with pytest.raises(ConnectionError, match="cannot be reached"):
        client.shutdown()


def test_who_waits_is_told_that_the_service_ends() -> None:
    """A client that waits for what will not be registered any more gets an error at once, not at its deadline."""
    made = ComputeService(1, 1, KEY)
    client = ComputeClient(made.addresses(), KEY)
    client.shutdown()
    for wait in (client.wait_for_dispatcher_registration, client.wait_for_dispatcher_worker_registration):
        with pytest.raises(ValueError, match="the service ends, so nothing more will be registered"):
            wait(0, 600)
    made.shutdown()


def test_a_silent_stranger_does_not_hold_up_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    """A peer without the key has a connection, and sends a byte now and then. Nothing is printed about it."""
    made = ComputeService(1, 1, KEY)
    ((address, *_),) = made.addresses().values()
    with socket.create_connection(address, 10) as stranger:
        stranger.recv(32, socket.MSG_WAITALL)
        stranger.sendall(b"x")
        ended = threading.Thread(target=made.shutdown, daemon=True)
        ended.start()
        ended.join(8)  # the stranger would be waited for 10 s, and longer with each byte
        assert not ended.is_alive()
    assert capfd.readouterr().err == ""


def test_who_does_not_know_the_key_is_not_heard(service: ComputeService) -> None:
    """Another key, other bytes, and the request that somebody else has sent before have no effect."""
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
    """There must be at least one dispatcher and one worker."""
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
