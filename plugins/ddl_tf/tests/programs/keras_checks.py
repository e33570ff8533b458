"""Many checks of ddl_tf.keras in one pair of ranks; prints which checks passed.

They run with Keras 3, or with tf_keras if TF_USE_LEGACY_KERAS=1 is set.
"""

from __future__ import annotations

import copy
import logging
import pickle
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import ddl_tf.keras as ddl
import numpy as np
import pytest
import tensorflow as tf
from ddl_tf.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer

keras: Any = tf.keras
LEGACY = type(keras.optimizers.SGD()).__module__.startswith("tf_keras")
older: Any = keras.optimizers.legacy if LEGACY else None
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(160, 6)), RNG.normal(size=(160, 2))  # 10 steps of 16 rows
FOLDER = Path(sys.argv[1])

Make = Callable[[], Any]
Check = Callable[[], None]
CHECKS: list[Check] = []
LEGACY_ONLY, KERAS3_ONLY = "legacy", "keras3"


def check(only: str = "") -> Callable[[Check], Check]:
    """Register a function as a check, for both Kerases or for one."""

    def put(function: Check) -> Check:
        if only in ("", LEGACY_ONLY if LEGACY else KERAS3_ONLY):
            CHECKS.append(function)
        return function

    return put


# --- models and their training


def own(rows: Any, batch: int = 16) -> Any:
    """Return this rank's half of each batch."""
    parts = rows.reshape(len(rows) // batch, 2, batch // 2, *rows.shape[1:])
    return np.ascontiguousarray(parts[:, ddl.rank()]).reshape(-1, *rows.shape[1:])


def network(seed: int = 1, **kwargs: Any) -> Any:
    keras.utils.set_random_seed(seed)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((6,)), dense(8, activation="tanh", **kwargs), dense(2)])


def fit(optimizer: Any, x: Any, y: Any, batch: int, model: Any = None, **kwargs: Any) -> Any:
    """Train as users do: with a compiled model, in a graph."""
    model = model or network()
    model.compile(optimizer=optimizer, loss="mse", **kwargs)
    model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)
    return model


def walk(optimizer: Any, x: Any, y: Any, batch: int, model: Any = None) -> Any:
    """Do the same as ``fit`` eagerly, in a loop of the user's own, which starts faster."""
    model = model or network()
    variables = model.trainable_variables
    for i in range(0, len(x), batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x[i : i + batch], training=True) - y[i : i + batch]) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return model


def apart(a: Any, b: Any) -> float:
    """Return the largest difference between two models' weights."""
    return float(max(np.abs(np.asarray(x, np.float64) - y).max() for x, y in zip(a.get_weights(), b.get_weights())))


def equal_on_all(model: Any) -> None:
    """Check that the weights of all ranks are equal to the last bit."""
    for i, weights in enumerate(model.get_weights()):
        everyones = ddl.allgather(weights[None], name=f"equal.{i}")
        assert (everyones == everyones[:1]).all(), "the ranks' weights differ"


def same_as_alone(make: Make, train: Any = walk, tolerance: float = 1e-10, passes: int = 1, **options: Any) -> Any:
    """Check that ten steps on all ranks give what one process gives with the whole batch."""
    if passes > 1:
        options = {"average_aggregated_gradients": True, **options, "backward_passes_per_step": passes}
    alone = walk(make(), X, Y, 16)
    here = train(DistributedOptimizer(make(), **options), own(X), own(Y), 8 // passes)
    assert apart(alone, here) <= tolerance, apart(alone, here)
    equal_on_all(here)
    return here


def raises(kind: type[BaseException], text: str, function: Callable[[], object]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        function()


def sgd(rate: float = 0.1, **kwargs: Any) -> Any:
    return keras.optimizers.SGD(rate, **kwargs)


# --- the optimizer


@check()
def ten_steps_come_to_the_same() -> None:
    same_as_alone(lambda: sgd(momentum=0.9), fit)
    same_as_alone(lambda: keras.optimizers.Adam(0.01), fit)
    same_as_alone(lambda: keras.optimizers.Adam(0.01))


@check(LEGACY_ONLY)
def ten_steps_of_the_older_optimizers() -> None:
    same_as_alone(lambda: older.SGD(0.1, momentum=0.9), fit)
    same_as_alone(lambda: older.Adam(0.01))


@check()
def clipping_comes_after_the_reduction() -> None:
    for kwargs in ({"clipnorm": 0.05}, {"clipvalue": 0.01}, {"global_clipnorm": 0.05}):
        same_as_alone(partial(sgd, **kwargs))
    if LEGACY:
        same_as_alone(lambda: older.SGD(0.1, clipnorm=0.05))


@check()
def sums_where_a_sum_is_asked_for() -> None:
    alone = walk(sgd(0.1), X, Y, 16)
    here = walk(DistributedOptimizer(sgd(0.05), op=ddl.Sum), own(X), own(Y), 8)
    assert apart(alone, here) <= 1e-10


@check()
def other_ways_to_reduce() -> None:
    same_as_alone(sgd, gradient_predivide_factor=4.0)
    same_as_alone(sgd, groups=2)
    same_as_alone(sgd, tolerance=1e-3, compression=ddl.Compression.fp16)
    model = network()
    optimizer = DistributedOptimizer(sgd(), groups=[model.trainable_variables[:2], model.trainable_variables[2:]])
    walk(optimizer, own(X), own(Y), 8, model)
    assert apart(walk(sgd(), X, Y, 16), model) <= 1e-10


@check()
def a_process_set_of_one() -> None:
    only = ddl.add_process_set([0])
    here = walk(DistributedOptimizer(sgd(), process_set=only), own(X), own(Y), 8)
    assert apart(walk(sgd(), own(X), own(Y), 8), here) == 0.0
    ddl.remove_process_set(only)


@check()
def weights_of_rows() -> None:
    rows = slice(0, 6) if ddl.rank() == 0 else slice(6, 16)
    counter = tf.Variable(0.0)
    for weight in (counter, lambda: rows.stop - rows.start, ddl.Share(rows.stop - rows.start, 16, 2)):
        alone = walk(sgd(momentum=0.9), X, Y, 16)
        here, optimizer = network(), DistributedOptimizer(sgd(momentum=0.9), weight=weight)
        for i in range(0, len(X), 16):
            counter.assign(float(rows.stop - rows.start))
            walk(optimizer, X[i : i + 16][rows], Y[i : i + 16][rows], 16, here)
        assert apart(alone, here) <= 1e-10, apart(alone, here)
        equal_on_all(here)
    twice: dict[str, Any] = {"weight": 1, "backward_passes_per_step": 2}
    raises(ValueError, "needs backward_passes_per_step=1", lambda: DistributedOptimizer(sgd(), **twice))


@check()
def several_passes_a_step() -> None:
    for make in (lambda: keras.optimizers.Adam(0.01, clipnorm=0.5), *([lambda: older.Adam(0.01)] if LEGACY else [])):
        model = same_as_alone(make, fit, passes=2)
        assert int(np.asarray(model.optimizer.iterations)) == 10
    same_as_alone(sgd, passes=4)
    half = DistributedOptimizer(sgd(0.05), backward_passes_per_step=2)  # summed, not averaged
    assert apart(walk(sgd(), X, Y, 16), walk(half, own(X), own(Y), 4)) <= 1e-10


@check()
def sparse_gradients() -> None:
    words = RNG.integers(0, 20, (160, 3))
    goal = Y[:, :1]

    def reader() -> Any:
        keras.utils.set_random_seed(2)
        layers = [keras.Input((3,), dtype="int64"), keras.layers.Embedding(20, 4), keras.layers.Flatten()]
        return keras.Sequential([*layers, keras.layers.Dense(1)])

    alone = walk(sgd(), words, goal, 16, reader())
    for dense in (False, True):
        here = walk(DistributedOptimizer(sgd(), sparse_as_dense=dense), own(words), own(goal), 8, reader())
        assert apart(alone, here) <= 1e-10, dense
    passes = DistributedOptimizer(sgd(), backward_passes_per_step=2, average_aggregated_gradients=True)
    assert apart(alone, walk(passes, own(words), own(goal), 4, reader())) <= 1e-10


@check()
def local_variables_stay() -> None:
    for scaled in (True, False):
        model = network()
        optimizer = DistributedOptimizer(sgd(), scale_local_gradients=scaled)
        optimizer.register_local_var(model.layers[-1].bias)
        x, y = own(X)[:8], own(Y)[:8]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        before = model.get_weights()
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        factor = 0.5 if scaled else 1.0
        for i, (was, now) in enumerate(zip(before, model.get_weights())):
            mine = np.asarray(gradients[i])
            expected = mine * factor if i == 3 else ddl.allreduce(mine, name=f"expected.{i}")
            np.testing.assert_allclose(was - now, 0.1 * expected, atol=1e-12)


@check()
def local_layers_stay() -> None:
    model = network()
    optimizer = PartialDistributedOptimizer(sgd(), local_layers=model.layers[-1], scale_local_gradients=False)
    walk(optimizer, own(X), own(Y), 8, model)
    kernels = [ddl.allgather(layer.kernel.numpy()[None]) for layer in model.layers]
    assert (kernels[0][0] == kernels[0][1]).all()
    assert (kernels[1][0] != kernels[1][1]).any()
    unbuilt = PartialDistributedOptimizer(sgd(), local_layers=[keras.layers.Dense(3)])
    raises(ValueError, "is not built", lambda: walk(unbuilt, own(X), own(Y), 8))


@check()
def two_optimizers_in_one_function() -> None:
    models = [network(1), network(2)]
    optimizers = [DistributedOptimizer(sgd()) for _ in models]
    alone = [walk(sgd(), X[:16], Y[:16], 16, network(seed)) for seed in (1, 2)]
    for model, optimizer in zip(models, optimizers):
        getattr(optimizer, "build", lambda _: None)(model.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def step(x: Any, y: Any) -> None:
        for model, optimizer in zip(models, optimizers):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    step(own(X)[:8], own(Y)[:8])
    assert max(apart(a, b) for a, b in zip(alone, models)) <= 1e-10


# --- mixed precision


def scaled(optimizer: Any, **kwargs: Any) -> Any:
    module = keras.mixed_precision if LEGACY else keras.optimizers
    return module.LossScaleOptimizer(optimizer, **kwargs)


def applying(optimizer: Any, variables: list[Any]) -> Any:
    """Return a graph that applies ``value`` as the gradient of every variable."""

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def step(value: Any) -> None:
        optimizer.apply_gradients([(tf.fill(variable.shape, value), variable) for variable in variables])

    return step


@check()
def loss_scaling_skips_on_all_ranks_or_none() -> None:
    """Both ranks skip a step in which one rank overflows.

    This holds for every order of wrapping, and however the model is compiled.
    """
    keras.backend.set_floatx("float32")
    ways: list[Make] = [lambda: DistributedOptimizer(scaled(sgd())), lambda: scaled(DistributedOptimizer(sgd()))]
    if LEGACY:
        ways += [
            lambda: DistributedOptimizer(scaled(older.SGD(0.1))),
            lambda: scaled(DistributedOptimizer(older.SGD(0.1))),
        ]
    for way in ways:
        model, optimizer = network(), way()
        model.build((None, 6))
        step, before = applying(optimizer, model.trainable_variables), model.get_weights()
        bad = np.float32(np.inf if ddl.rank() == 1 else 1.0)
        for value in (bad, np.float32(1.0)):
            step(tf.constant(value))
            equal_on_all(model)
            if value is bad:
                assert all((a == b).all() for a, b in zip(before, model.get_weights())), "the step was not skipped"
        assert any((a != b).any() for a, b in zip(before, model.get_weights()))
    keras.backend.set_floatx("float64")


@check()
def mixed_precision_by_compile() -> None:
    """With the policy mixed_float16, Keras wraps the distributed optimizer in a loss scaler."""
    keras.backend.set_floatx("float32")
    for passes in (1, 2):
        model = network(dtype="mixed_float16")
        if not LEGACY:
            model.dtype_policy = keras.dtype_policies.DTypePolicy("mixed_float16")
            optimizer = DistributedOptimizer(sgd(), backward_passes_per_step=passes)
        else:
            optimizer = scaled(DistributedOptimizer(sgd(), backward_passes_per_step=passes))
        before = model.get_weights()
        fit(optimizer, own(X).astype("float32"), own(Y).astype("float32"), 8, model)
        assert hasattr(model.optimizer, "inner_optimizer")
        assert any((a != b).any() for a, b in zip(before, model.get_weights()))
        equal_on_all(model)
    keras.backend.set_floatx("float64")


# --- saved models


@check()
def saved_as_the_plain_optimizer() -> None:
    plain, wrapped = sgd(momentum=0.9), DistributedOptimizer(sgd(momentum=0.9))
    first, second = (keras.optimizers.serialize(optimizer) for optimizer in (plain, wrapped))
    for found in (first, second):
        found["config"].pop("name")
    assert first == second, (first, second)
    if LEGACY:  # of tf_keras, only the older optimizers can be copied
        copied = copy.deepcopy(DistributedOptimizer(older.SGD(0.1), backward_passes_per_step=2))
    else:
        copied = pickle.loads(pickle.dumps(wrapped))
    before, after = walk(sgd(0.0), own(X)[:8], own(Y)[:8], 8), walk(copied, own(X)[:8], own(Y)[:8], 8)
    mine = ddl.allgather(after.get_weights()[0][None])
    assert (mine[0] != mine[1]).any()
    assert apart(before, after) > 0.0
    DistributedOptimizer(copied)  # raises if the copy is distributed already


@check()
def goes_on_from_a_file() -> None:
    # Keras 3 loses the optimizer of .h5 files, and .keras files of tf_keras lose the state of an older optimizer.
    ways: list[tuple[Make, str]] = [
        (lambda: sgd(momentum=0.9), "keras"),
        (lambda: keras.optimizers.Adam(0.01), "keras"),
    ]
    if LEGACY:
        ways += [(lambda: sgd(momentum=0.9), "h5"), (lambda: older.SGD(0.1, momentum=0.9), "h5")]
    for i, (make, suffix) in enumerate(ways):
        alone = walk(make(), X, Y, 16)
        half = fit(DistributedOptimizer(make()), own(X)[:40], own(Y)[:40], 8)
        path = str(FOLDER / f"model{i}.{ddl.rank()}.{suffix}")
        half.save(path)
        plain = keras.models.load_model(path)
        assert type(plain.optimizer) is type(make())
        loaded = ddl.load_model(path)
        loaded.fit(own(X)[40:], own(Y)[40:], batch_size=8, shuffle=False, verbose=0)
        assert apart(alone, loaded) <= 1e-10, (i, suffix, apart(alone, loaded))
        raises(ValueError, "already", partial(DistributedOptimizer, loaded.optimizer))


class Slow(keras.optimizers.SGD):  # type: ignore[misc]  # Keras has no types
    """An optimizer class of the user's own."""


@check()
def custom_optimizers_are_known() -> None:
    path = str(FOLDER / f"custom.{ddl.rank()}.keras")
    fit(DistributedOptimizer(Slow(0.1)), own(X)[:40], own(Y)[:40], 8).save(path)
    loaded = ddl.load_model(path, custom_optimizers=[Slow])
    assert type(loaded.optimizer) is Slow
    loaded.fit(own(X), own(Y), batch_size=8, verbose=0)
    equal_on_all(loaded)


# --- XLA


@check(KERAS3_ONLY)
def automatic_xla_is_off() -> None:
    heard: list[str] = []

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    handler = Hears()
    logging.getLogger("ddl").addHandler(handler)
    trainer: Any = next(cls for cls in keras.Model.__mro__ if "_resolve_auto_jit_compile" in vars(cls))
    before = trainer._resolve_auto_jit_compile
    trainer._resolve_auto_jit_compile = lambda self: True
    try:
        plain, ours = network(), network()
        plain.compile(optimizer=sgd(), loss="mse")
        assert plain.jit_compile is True
        ours.compile(optimizer=DistributedOptimizer(sgd()), loss="mse")
        assert ours.jit_compile is False
        path = str(FOLDER / f"jit.{ddl.rank()}.keras")
        plain.save(path)
        assert ddl.load_model(path).jit_compile is False
    finally:
        trainer._resolve_auto_jit_compile = before
        logging.getLogger("ddl").removeHandler(handler)
    assert len(heard) == (2 if ddl.rank() == 0 else 0), heard
    assert all("jit_compile" in line and "\n" not in line for line in heard)
    equal_on_all(fit(ours.optimizer, own(X), own(Y), 8, ours))


@check()
def xla_around_a_step_is_refused() -> None:
    raises(ValueError, "jit_compile", lambda: fit(DistributedOptimizer(sgd()), own(X), own(Y), 8, jit_compile=True))
    model, optimizer = network(), DistributedOptimizer(sgd())
    getattr(optimizer, "build", lambda _: None)(model.trainable_variables)

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def step() -> None:
        optimizer.apply_gradients([(tf.ones_like(v), v) for v in model.trainable_variables])

    raises(ValueError, "jit_compile", step)


# --- callbacks


@check()
def all_ranks_begin_alike() -> None:
    """Built models get the root's variables before the first step, so that training equals that of one process."""
    makes: list[Make] = [lambda: sgd(momentum=0.9), *([lambda: older.SGD(0.1, momentum=0.9)] if LEGACY else [])]
    for make in makes:
        alone = walk(make(), X, Y, 16, network(seed=8))
        model = network(seed=7 + ddl.rank())
        model.compile(optimizer=DistributedOptimizer(make()), loss="mse")
        begin = ddl.callbacks.BroadcastGlobalVariablesCallback(1)
        model.fit(own(X), own(Y), batch_size=8, shuffle=False, verbose=0, callbacks=[begin])
        assert begin.broadcast_done
        assert apart(alone, model) <= 1e-10
        equal_on_all(model)


@check()
def models_that_are_built_late_begin_alike() -> None:
    """Rank 0 builds the model before the first step, rank 1 in it, and both have the root's variables after it.

    A local variable stays unchanged.
    """
    keras.utils.set_random_seed(ddl.rank())
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(2)])
    if ddl.rank() == 0:
        model.build((None, 6))
    model.compile(optimizer=DistributedOptimizer(sgd(momentum=0.9)), loss="mse")
    begin = ddl.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(own(X), own(Y), batch_size=8, verbose=0, callbacks=[begin])
    equal_on_all(model)
    for bare in (False, True):  # Keras' variable, or the TensorFlow variable inside it
        model = network(seed=ddl.rank())
        model.compile(optimizer=DistributedOptimizer(sgd(0.0)), loss="mse")
        kernel = model.layers[-1].kernel
        kernel = kernel.value if bare and not LEGACY else kernel
        begin = ddl.callbacks.BroadcastGlobalVariablesCallback(0, "", kernel)
        model.fit(own(X), own(Y), batch_size=8, verbose=0, callbacks=[begin])
        kernels = [ddl.allgather(layer.kernel.numpy()[None]) for layer in model.layers]
        assert (kernels[0][0] == kernels[0][1]).all()
        assert (kernels[1][0] != kernels[1][1]).any(), bare


class After(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Records the logs that earlier callbacks have left, and the learning rate of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, Any]] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(np.asarray(self.model.optimizer.learning_rate)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


@check()
def metrics_are_averaged() -> None:
    model = network()
    model.compile(optimizer=DistributedOptimizer(sgd(0.0)), loss="mse", metrics=["mae"])
    after, average = After(), ddl.callbacks.MetricAverageCallback()
    data = own(X), own(Y)
    history = model.fit(*data, batch_size=8, verbose=0, validation_data=data, callbacks=[average, after])
    whole = model.evaluate(X, Y, batch_size=8, verbose=0)
    for name, value in zip(("loss", "mae"), whole):
        for key in (name, f"val_{name}"):
            assert abs(after.logs[0][key] - value) <= 1e-10, (key, after.logs, whole)
            assert history.history[key] == [after.logs[0][key]]
    logs = {"loss": 1.0, f"only{ddl.rank()}": 2.0}
    raises(ValueError, "MetricAverageCallback", lambda: average.on_epoch_end(0, logs))
    table: dict[str, Any] = {"loss": np.float32(1 + ddl.rank()), "by_class": np.array([1.0, 2.0]) * ddl.rank()}
    average.on_epoch_end(0, table)
    assert table["loss"] == 1.5 and type(table["loss"]) is float
    np.testing.assert_array_equal(table["by_class"], [0.5, 1.0])


def rates_of(optimizer: Any, callbacks: list[Any], epochs: int = 1) -> After:
    model, after = network(), After()
    # Eagerly: the rates are the same, and a graph for each of these many short runs would take most of the time.
    model.compile(optimizer=DistributedOptimizer(optimizer), loss="mse", run_eagerly=True)
    model.fit(own(X), own(Y), batch_size=16, epochs=epochs, verbose=0, shuffle=False, callbacks=[*callbacks, after])
    return after


@check()
def learning_rates_follow_a_schedule() -> None:
    schedule, warmup = ddl.callbacks.LearningRateScheduleCallback, ddl.callbacks.LearningRateWarmupCallback
    makes: list[Callable[..., Any]] = [keras.optimizers.SGD, *([older.SGD] if LEGACY else [])]
    for make in makes:
        after = rates_of(make(0.1), [schedule(0.1, lambda epoch: 0.5**epoch, start_epoch=1)], 3)
        np.testing.assert_allclose(after.rates[::5], [0.1, 0.05, 0.025], rtol=1e-6)
        assert [round(logs["lr"], 6) for logs in after.logs] == [0.1, 0.05, 0.025]
        after = rates_of(make(0.1), [schedule(0.2, 0.1, end_epoch=2), schedule(0.2, 3.0, start_epoch=2)], 3)
        np.testing.assert_allclose(after.rates[::5], [0.02, 0.02, 0.6], rtol=1e-6)
        after = rates_of(make(0.1), [schedule(1.0, lambda epoch: epoch, staircase=False)], 2)
        np.testing.assert_allclose(after.rates, np.arange(10) / 5, atol=1e-6)
        after = rates_of(make(0.8), [warmup(0.8, warmup_epochs=2, verbose=1)], 3)
        grows = [0.8 * ((i + 1) / 10 + 1) / 2 for i in range(10)]
        np.testing.assert_allclose(after.rates, grows + [0.8] * 5, rtol=1e-6)
    raises(ValueError, "initial_lr", lambda: schedule(cast("float", None), 1.0))
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    raises(ValueError, "is a schedule", lambda: rates_of(keras.optimizers.SGD(decay), [schedule(0.2, 0.1)]))


@check()
def momentum_is_corrected() -> None:
    """The accumulated momentum is scaled with the learning rate (Goyal et al. 2017, equation 10)."""
    makes: list[Callable[..., Any]] = [keras.optimizers.SGD, *([older.SGD] if LEGACY else [])]
    for make in makes:
        for corrected in (True, False):
            model = network()
            model.compile(optimizer=DistributedOptimizer(make(0.1, momentum=0.5)), loss="mse")
            rate = ddl.callbacks.LearningRateScheduleCallback(
                0.1, lambda epoch: [1.0, 2.0][int(epoch)], momentum_correction=corrected
            )
            weights, velocity, rates = model.get_weights(), [0.0] * 4, [0.1] * 5 + [0.2] * 5
            bare, x, y = network(), own(X)[:80], own(Y)[:80]
            for i, lr in enumerate(rates):
                bare.set_weights(weights)
                batch = slice(16 * (i % 5), 16 * (i % 5) + 16)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((bare(x[batch]) - y[batch]) ** 2)
                found = tape.gradient(loss, bare.trainable_variables)
                mean = [ddl.allreduce(g.numpy(), name=f"mean.{j}") for j, g in enumerate(found)]
                factor = lr / rates[max(i - 1, 0)] if corrected else 1.0
                velocity = [0.5 * factor * v - lr * g for v, g in zip(velocity, mean)]
                weights = [w + v for w, v in zip(weights, velocity)]
            model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[rate])
            for a, b in zip(weights, model.get_weights()):
                np.testing.assert_allclose(a, b, atol=1e-7)  # tf_keras' learning rates are float32


@check()
def the_best_model_is_kept() -> None:
    raises(ValueError, "no file", lambda: rates_of(sgd(), [ddl.callbacks.BestModelCheckpoint()]))
    model = network()
    model.compile(optimizer=DistributedOptimizer(sgd()), loss="mse")
    name = "best.weights.h5"
    best = ddl.callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=True)
    best.filepath = str(FOLDER / f"{ddl.rank()}.{name}")
    average = ddl.callbacks.MetricAverageCallback()
    model.fit(own(X), own(Y), batch_size=8, epochs=2, verbose=0, callbacks=[average, best])
    assert (FOLDER / f"{ddl.rank()}.{name}").exists() == (ddl.rank() == 0)
    whole = ddl.callbacks.BestModelCheckpoint(monitor="loss", filepath=str(FOLDER / f"whole{ddl.rank()}.keras"))
    model.fit(own(X), own(Y), batch_size=8, verbose=0, callbacks=[average, whole])
    if ddl.rank() == 0:
        assert apart(keras.models.load_model(FOLDER / "whole0.keras"), model) == 0.0


# --- values


@check()
def values() -> None:
    me = ddl.rank()
    assert ddl.allreduce(float(me)) == 0.5
    assert ddl.allreduce(me, op=ddl.Sum) == 1
    np.testing.assert_array_equal(ddl.allreduce([1.0, me], name="list", op=ddl.Max), [1.0, 1.0])
    np.testing.assert_array_equal(ddl.allgather([[me, 2]]), [[0, 2], [1, 2]])
    assert ddl.broadcast(np.float32(me), 1) == 1.0
    np.testing.assert_array_equal(ddl.reducescatter([1.0, 2.0, 3.0, 4.0], op=ddl.Sum), [[2, 4], [6, 8]][me])
    assert ddl.allreduce(tf.constant(3.0), compression=ddl.Compression.fp16) == 3.0
    assert ddl.allreduce(np.float32(3.0 + me), average=False) == 7.0

    class Halved:
        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            return tensor / 2, None

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            return tensor * 2

    assert ddl.allreduce(3.0, compression=Halved) == 3.0
    raises(RuntimeError, "eager", lambda: ddl.broadcast_global_variables(0))


# --- batch normalization


def normalizing(layer: Any, shape: tuple[int, ...], x: Any, upstream: Any, mask: Any = None) -> list[Any]:
    """Return output, gradients of input and parameters, and moving statistics of one training step."""
    layer.build((None, *shape))
    for i, weight in enumerate(layer.trainable_weights):
        weight.assign(np.linspace(0.5, 1.5, weight.shape[0]) * (i + 1))
    x = tf.constant(x)
    options = {} if mask is None else {"mask": tf.constant(mask)}

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = layer(x, training=True, **options)
            loss = tf.reduce_sum(output * upstream)
        weights = [w if isinstance(w, tf.Variable) else w.value for w in layer.trainable_weights]
        return output, *tape.gradient(loss, [x, *weights])

    results = [part.numpy() for part in step(x)]
    return [*results, *(np.asarray(w) for w in layer.non_trainable_weights)]


@check()
def batch_norm_sees_all_ranks() -> None:
    """Batch normalization equals that of one device with the batches of both ranks, which have 3 and 5 rows.

    This holds for the forward pass, the backward pass and the moving statistics.
    """
    keras.utils.set_random_seed(3)
    mine = slice(0, 3) if ddl.rank() == 0 else slice(3, 8)
    plain = {"momentum": 0.5, **({"fused": False} if LEGACY else {})}  # tf_keras has momentum as float32
    for shape, axis in (((4,), -1), ((2, 3, 4), -1), ((4, 2, 3), 1)):
        rng = np.random.default_rng(4)
        x, upstream = rng.normal(5.0, 2.0, (8, *shape)), rng.normal(size=(8, *shape))
        whole = normalizing(keras.layers.BatchNormalization(axis=axis, **plain), shape, x, upstream)
        if ddl.rank() == 0:
            ddl.SyncBatchNormalization()  # changes the numbers in the names of this rank's later layers
        part = normalizing(ddl.SyncBatchNormalization(axis=axis, momentum=0.5), shape, x[mine], upstream[mine])
        for i, (a, b) in enumerate(zip(whole, part)):
            if i < 2:
                a = a[mine]
            elif i < 4:  # gradients of parameters are local; the optimizer reduces them
                b = ddl.allreduce(b, op=ddl.Sum, name=f"parameter.{i}")
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12, err_msg=f"{shape}, {i}")
    raises(ValueError, "fused", lambda: ddl.SyncBatchNormalization(fused=True))
    raises(ValueError, "renorm", lambda: ddl.SyncBatchNormalization(renorm=True))


@check(KERAS3_ONLY)
def batch_norm_heeds_a_mask() -> None:
    rng = np.random.default_rng(5)
    x, upstream, mask = rng.normal(size=(8, 5, 4)), rng.normal(size=(8, 5, 4)), rng.random((8, 5)) < 0.6
    mine = slice(0, 3) if ddl.rank() == 0 else slice(3, 8)
    whole = normalizing(keras.layers.BatchNormalization(), (5, 4), x, upstream, mask)
    part = normalizing(ddl.SyncBatchNormalization(), (5, 4), x[mine], upstream[mine], mask[mine])
    for i, (a, b) in enumerate(zip(whole, part)):
        a = a[mine] if i < 2 else a
        b = ddl.allreduce(b, op=ddl.Sum, name=f"masked.{i}") if i in (2, 3) else b
        np.testing.assert_allclose(a, b, atol=1e-6, err_msg=str(i))  # Keras adds 1e-7 to its count


@check()
def batch_norm_in_a_model() -> None:
    """The layer can be trained, saved and loaded; in inference it needs no other rank."""

    def deep(layer: Any) -> Any:
        keras.utils.set_random_seed(6)
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), layer, keras.layers.Dense(2)])

    plain = {"momentum": 0.5, **({"fused": False} if LEGACY else {})}  # tf_keras has momentum as float32
    alone = walk(sgd(), X, Y, 16, deep(keras.layers.BatchNormalization(**plain)))
    here = fit(DistributedOptimizer(sgd()), own(X), own(Y), 8, deep(ddl.SyncBatchNormalization(momentum=0.5)))
    assert apart(alone, here) <= 1e-10
    path = str(FOLDER / f"norm.{ddl.rank()}.keras")
    here.save(path)
    if ddl.rank() == 0:
        np.testing.assert_allclose(
            keras.models.load_model(path).predict(X, verbose=0), alone.predict(X, verbose=0), atol=1e-10
        )


# --- arguments


@check()
def wrong_arguments_are_named() -> None:
    wrapped = DistributedOptimizer(sgd())
    raises(ValueError, "already", lambda: DistributedOptimizer(wrapped))
    raises(ValueError, "already", lambda: DistributedOptimizer(scaled(wrapped)))
    raises(ValueError, "not str", lambda: DistributedOptimizer("sgd"))
    raises(ValueError, "only supports", lambda: DistributedOptimizer(sgd(), op=ddl.Max))
    raises(
        ValueError, "needs op=Average", lambda: DistributedOptimizer(sgd(), op=ddl.Sum, gradient_predivide_factor=2.0)
    )
    raises(ValueError, "1 or more", lambda: DistributedOptimizer(sgd(), backward_passes_per_step=0))
    raises(ValueError, "groups", lambda: DistributedOptimizer(sgd(), groups=-1))
    raises(ValueError, "compression", lambda: DistributedOptimizer(sgd(), compression=3))
    raises(ValueError, "local_layers", lambda: PartialDistributedOptimizer(sgd(), local_layers=[3]))
    raises(ValueError, "is a variable", lambda: wrapped.register_local_var(3))


@check(LEGACY_ONLY)
def the_slides_compile() -> None:
    model = network()
    fit(DistributedOptimizer(sgd()), own(X), own(Y), 8, model, experimental_run_tf_function=False)
    assert apart(walk(sgd(), X, Y, 16), model) <= 1e-10


@check()
def fit_ends_on_all_ranks_after_the_same_batch() -> None:
    """The last check: the job stays stopped."""
    model = network()
    model.compile(optimizer=DistributedOptimizer(sgd()), loss="mse")
    stop = ddl.callbacks.StopOnSignalCallback()

    class Asks(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if ddl.rank() == 1 and batch == 2:
                ddl.request_stop("wall time on rank 1")
            time.sleep(0.01)

    model.fit(own(X), own(Y), batch_size=8, epochs=1000, shuffle=False, verbose=0, callbacks=[Asks(), stop])
    assert stop.stopped
    steps = ddl.allgather(np.array([int(np.asarray(model.optimizer.iterations))]), name="stopped")
    assert steps[0] == steps[1] < 5000, steps


def main() -> None:
    ddl.init()
    assert ddl.size() == 2
    keras.backend.set_floatx("float64")
    chosen = sys.argv[2:]
    for function in CHECKS:
        if not chosen or function.__name__ in chosen:
            began = time.monotonic()
            function()
            print(f"held {function.__name__} {time.monotonic() - began:.2f} s", flush=True)


main()
