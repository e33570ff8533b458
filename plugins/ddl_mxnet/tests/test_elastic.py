"""The elastic state of MXNet in one process: what it keeps, what it puts back, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
import pytest
from ddl_mxnet import elastic


@pytest.fixture
def one_rank() -> Iterator[None]:
    ddl.init()
    yield
    ddl.shutdown()


def network() -> Any:
    net = mx.gluon.nn.Sequential()
    net.add(mx.gluon.nn.Dense(3, in_units=2), mx.gluon.nn.BatchNorm(in_channels=3))
    net.initialize()
    return net


def trainer_of(net: Any) -> Any:
    return ddl.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})


def forward_and_backward(net: Any) -> None:
    with mx.autograd.record():
        loss = (net(mx.nd.array(np.random.standard_normal((4, 2)))) ** 2 + net[0](mx.nd.ones((4, 2)))).sum()
    loss.backward()


def values_of(net: Any) -> list[Any]:
    return [param.data().asnumpy() for param in net.collect_params().values()]


def equal(left: list[Any], right: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.usefixtures("one_rank")
def test_a_void_step_leaves_nothing() -> None:
    """Running statistics, gradients and numpy's generator go back to the last step that was applied."""
    net = network()
    trainer = trainer_of(net)
    state: Any = elastic.MXNetState(net, trainer, batch=0)
    forward_and_backward(net)
    trainer.step(4)
    assert state.steps == 1
    expected, following = values_of(net), np.random.get_state()[1].copy()  # type: ignore[index]
    forward_and_backward(net)
    state.batch = 5
    assert not equal(values_of(net), expected)
    state.restore()
    assert equal(values_of(net), expected)
    assert np.array_equal(np.random.get_state()[1], following)  # type: ignore[index]
    assert (state.steps, state.batch) == (1, 0)
    with pytest.raises(UserWarning, match="has not been updated"):  # the gradients of the void step are not used
        trainer.step(4)


@pytest.mark.usefixtures("one_rank")
def test_commits_go_back_to_all_of_the_copy() -> None:
    """With rollback="commit", also the parameters, the momentum and the count of updates go back."""
    net = network()
    trainer = trainer_of(net)
    state: Any = elastic.MXNetState(net, trainer, rollback="commit")
    results: list[tuple[list[Any], int]] = []
    for _ in range(2):
        np.random.seed(1)
        if not results:
            forward_and_backward(net)
            trainer.step(4)
            state.commit()
            assert state.steps == 1
        else:
            state.restore()
        np.random.seed(2)
        for _ in range(2):
            forward_and_backward(net)
            trainer.step(4)
        results.append((values_of(net), trainer._optimizer.num_update))
    assert results[0][1] == results[1][1] == 3
    assert equal(results[0][0], results[1][0])


@pytest.mark.usefixtures("one_rank")
def test_a_state_takes_over_all_of_another() -> None:
    """What root sends gives a fresh process the same next step, and the user's scheduler stays the same object."""
    nets = [network(), network()]
    schedules = [mx.lr_scheduler.FactorScheduler(1, 0.5) for _ in nets]
    trainers = [
        ddl.DistributedTrainer(
            net.collect_params(), "adam", {"learning_rate": 0.1, "lr_scheduler": schedule}, prefix=str(place)
        )
        for place, (net, schedule) in enumerate(zip(nets, schedules, strict=True))
    ]
    states = [elastic.MXNetState(net, trainer) for net, trainer in zip(nets, trainers, strict=True)]
    for _ in range(3):
        forward_and_backward(nets[0])
        trainers[0].step(4)
    states[1]._take(*states[0]._whole())
    assert trainers[1]._optimizer.lr_scheduler is schedules[1]
    assert trainers[1].learning_rate == trainers[0].learning_rate
    for net, trainer in zip(nets, trainers, strict=True):
        np.random.seed(3)
        forward_and_backward(net)
        trainer.step(4)
    assert equal(values_of(nets[0]), values_of(nets[1]))


@pytest.mark.usefixtures("one_rank")
def test_a_wrong_shape_changes_nothing() -> None:
    """The shapes are compared before the first parameter is written."""
    net = network()
    state: Any = elastic.MXNetState(net, trainer_of(net))
    values, trainer_state, others = state._whole()
    before = values_of(net)
    values[0] = values[0] + 1
    values[-1] = np.zeros(7, np.float32)
    with pytest.raises(ValueError, match="has shape"):
        state._take(values, trainer_state, others)
    assert equal(values_of(net), before)


@pytest.mark.usefixtures("one_rank")
def test_what_is_refused() -> None:
    """Each refusal says what to pass instead."""
    net = network()
    with pytest.raises(ValueError, match="rollback='epoch'"):
        elastic.MXNetState(net, rollback="epoch")
    with pytest.raises(ValueError, match="DistributedTrainer"):
        elastic.MXNetState(net, mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=None))
    with pytest.raises(ValueError, match="pass a Block"):
        elastic.MXNetState(3)
    with pytest.raises(ValueError, match="pass it as net"):
        elastic.MXNetState(other=net)
    with pytest.raises(ValueError, match="steps is a name"):
        elastic.MXNetState(net, steps=1)
    with pytest.raises(ValueError, match="commit is a name"):
        elastic.MXNetState(net, commit=1)
    deferred = mx.gluon.nn.Dense(3)
    deferred.initialize()
    with pytest.raises(ValueError, match="in_units"):
        elastic.run(lambda state: None)(elastic.MXNetState(deferred))


@pytest.mark.usefixtures("one_rank")
def test_the_sampler_goes_on_where_it_was() -> None:
    """A loader takes the samples that are left of the epoch; the next epoch has all of them in another order."""
    sampler = elastic.ElasticSampler(range(10), seed=4)
    loader = mx.gluon.data.DataLoader(mx.gluon.data.SimpleDataset(range(10)), batch_size=4, sampler=sampler)
    first = [int(value) for value in next(iter(loader)).asnumpy()]
    state: Any = elastic.MXNetState(sampler=sampler)
    assert state.sampler is sampler
    sampler.record_batch(0, 4)
    state.commit()
    assert len(sampler) == 10
    state.restore()
    rest = list(sampler)
    assert sorted(first + rest) == list(range(10))
    sampler.record_batch(1, 4)
    state.restore()
    assert list(sampler) == rest
    sampler.set_epoch(1)
    assert len(sampler) == 10
    assert sorted(sampler) == list(range(10))


@pytest.mark.usefixtures("one_rank")
def test_global_batches() -> None:
    """A loader takes them as a batch sampler; the state keeps the sampler, whose position moves by what is recorded."""
    sampler = elastic.GlobalBatchSampler(range(10), 4, seed=4)
    loader = mx.gluon.data.DataLoader(mx.gluon.data.SimpleDataset(range(10)), batch_sampler=sampler)
    batches = [batch.asnumpy().astype(int).tolist() for batch in loader]
    assert batches == list(sampler)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    state: Any = elastic.MXNetState(sampler=sampler)
    assert state.sampler is sampler
    assert sampler.share() == ddl.Share(4, 4, 1)
    sampler.record_batch()
    state.commit()
    sampler.record_batch()
    assert list(sampler) == batches[2:]
    state.restore()
    assert list(sampler) == batches[1:]
