"""Checks of `ringtrain.keras`. The variable KERAS_BACKEND selects the back end."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import runner

import ringtrain.keras as hvd
from ringtrain._horovod.missing import NOT_IMPLEMENTED

BACKEND = keras.backend.backend()
BATCH, STEPS = 16, 50


def make_model(units: int = 12) -> keras.Model:
    # JAX takes a second to compile its random numbers.
    hidden = keras.layers.Dense(units, activation="tanh", kernel_initializer="zeros")
    scores = keras.layers.Dense(3, kernel_initializer="zeros", name="scores")
    model = keras.Sequential([keras.layers.Input((8,)), hidden, scores])
    random = np.random.default_rng(5)
    model.set_weights([random.normal(0, 0.3, weight.shape) for weight in model.get_weights()])
    return model


class BatchLosses(keras.callbacks.Callback):
    """Collects the running mean of the loss after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(float(logs["loss"]))


def train(
    optimizer: Any, is_distributed: bool, callbacks: Sequence[Any] = (), compile_options: dict[str, bool] | None = None
) -> tuple[list[float], Any]:
    """Trains for 50 steps, and returns the losses of all ranks together and the model."""
    model = make_model()
    if is_distributed and hvd.rank() > 0:
        # The broadcast must replace these weights by those of rank 0.
        model.set_weights([weight + 1 for weight in model.get_weights()])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **(compile_options or {}))
    data = runner.classes(BATCH * STEPS)
    points, labels = hvd.shard(data) if is_distributed else data
    batch = BATCH // hvd.size() if is_distributed else BATCH
    record = BatchLosses()
    model.fit(points, labels, batch_size=batch, shuffle=False, verbose=0, callbacks=[record, *callbacks])
    losses = hvd.allreduce(np.array(record.losses)) if is_distributed else np.array(record.losses)
    return losses.tolist(), model


def require_same_training(make: Any, compile_options: dict[str, bool] | None = None, **options: Any) -> Any:
    """Checks that the ranks train as a single process with the same global batch does. Returns the model."""
    losses, alone = train(make(), False, compile_options=compile_options)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    together, model = train(hvd.DistributedOptimizer(make(), **options), True, callbacks, compile_options)
    assert len(losses) == STEPS
    np.testing.assert_allclose(together, losses, atol=1e-4)
    for mine, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)
    history, expected = model.history.history, alone.history.history
    np.testing.assert_allclose(history["accuracy"], expected["accuracy"], atol=1e-6)
    return model


def check_training_and_saved_model() -> None:
    model = require_same_training(lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.keras"
        model.save(path)
        assert b"ring" not in zipfile.ZipFile(path).read("config.json")
        plain = keras.models.load_model(path)
        points, _ = runner.classes(10)
        predictions = [keras.ops.convert_to_numpy(one(points)) for one in (plain, model)]
        np.testing.assert_array_equal(*predictions)
        assert isinstance(plain.optimizer, keras.optimizers.SGD) and not hasattr(plain.optimizer, "ring_exchange")
        for mine, other in zip(model.optimizer.variables, plain.optimizer.variables, strict=True):
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(mine), keras.ops.convert_to_numpy(other))
        loaded = hvd.load_model(path)
        assert loaded.optimizer.ring_exchange.is_active() == (hvd.size() > 1)
    assert "already" in runner.raised(ValueError, lambda: hvd.DistributedOptimizer(loaded.optimizer))


def check_bad_input() -> None:
    if hvd.size() == 1:
        return
    rank, last = hvd.rank(), hvd.size() - 1
    model = make_model(13 if rank == last else 12)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "sparse_categorical_crossentropy")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    text = runner.raised(ValueError, callback.on_train_begin)
    assert "dense" in text and "/kernel (float32, shape (8, 12)) on rank 0" in text and f"(8, 13)) on rank {last}" in text, text
    average = hvd.callbacks.MetricAverageCallback()
    average.set_model(model)
    logs = {"loss": float("nan") if rank == last else 1.0}
    text = runner.raised(ValueError, lambda: average.on_epoch_end(0, logs))
    assert f"the metric loss is not a number (NaN) on rank {last}" in text, text
    text = runner.raised(ValueError, lambda: average.on_epoch_end(0, {"loss": 1.0, **({"more": 1} if rank == last else {})}))
    assert "different metrics: more" in text, text
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam())
    assert "LossScaleOptimizer(optimizer)" in runner.raised(ValueError, lambda: keras.optimizers.LossScaleOptimizer(optimizer))
    for name in NOT_IMPLEMENTED:
        assert f"keras.{name} is" in runner.raised(NotImplementedError, lambda: getattr(hvd, name))
    assert "max" in runner.raised(NotImplementedError, lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Max))
    assert "broadcast_global_variables" in runner.raised(NotImplementedError, lambda: hvd.broadcast_global_variables(0))


def check_uneven_batches() -> None:
    if hvd.size() == 1:
        return
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    points, labels = runner.classes(20 if hvd.rank() == 0 else 40)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    # The back ends convert an error in their callbacks to one of their own.
    text = runner.raised(Exception, lambda: model.fit(points, labels, batch_size=10, verbose=0, callbacks=callbacks))
    assert "different numbers of batches: the data of rank 0 have ended" in text, text


def check_shards_of_data() -> None:
    rank, size = hvd.rank(), hvd.size()
    numbers = np.arange(4 * size + size - 1)
    expected = numbers[rank::size][:4]
    np.testing.assert_array_equal(hvd.shard(numbers), expected)
    first, (second, nothing) = hvd.shard((numbers, [numbers * 2, None]))
    np.testing.assert_array_equal(first * 2, second)
    assert nothing is None and hvd.shard({"x": numbers})["x"].tolist() == expected.tolist()
    assert list(hvd.shard(iter(numbers.tolist()))) == expected.tolist()

    class Batches(keras.utils.PyDataset):
        num_batches = len(numbers)

        def __getitem__(self, index: int) -> int:
            return int(numbers[index])

    part = hvd.shard(Batches())
    assert part.num_batches == 4 and [part[index] for index in range(4)] == expected.tolist()
    assert "cannot divide a function" in runner.raised(TypeError, lambda: hvd.shard(runner.run))
    if size > 1:
        assert "cannot be divided" in runner.raised(ValueError, lambda: hvd.shard(numbers[:1]))
    if BACKEND == "tensorflow":
        import tensorflow as tf

        known = tf.data.Dataset.from_tensor_slices((numbers, numbers * 2))
        for dataset in (known, known.filter(lambda x, y: x >= 0)):
            assert [int(x) for x, _ in hvd.shard(dataset)] == expected.tolist()


def check_values_and_objects() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert float(hvd.allreduce(float(rank))) == (size - 1) / 2
    assert float(hvd.allreduce(rank, op=hvd.Max)) == size - 1
    tensor = keras.ops.ones((2, 3)) * rank
    np.testing.assert_array_equal(hvd.broadcast(tensor, size - 1), np.full((2, 3), size - 1))
    assert hvd.allgather(tensor).shape == (2 * size, 3)
    assert hvd.reducescatter(np.ones((size, 2)), op=hvd.Sum).tolist() == [[size, size]]
    assert hvd.broadcast_object({"rank": rank}, 0) == {"rank": 0} and hvd.allgather_object(rank) == list(range(size))


def check_eager_training() -> None:
    require_same_training(lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5), {"run_eagerly": True})


def check_accumulated_gradients() -> None:
    def make() -> Any:
        return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)

    require_same_training(make, backward_passes_per_step=2, average_aggregated_gradients=True)
    # Horovod adds the gradients of the batches.
    require_same_training_of_sums()


def require_same_training_of_sums() -> None:
    _, alone = train(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), False)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2)
    _, model = train(optimizer, True, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    if hvd.size() == 1:
        return
    for mine, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)


def check_predivision_and_small_buckets() -> None:
    require_same_training(lambda: keras.optimizers.Adam(0.01), gradient_predivide_factor=2.0, bucket_bytes=100)


def check_local_layers() -> None:
    """Each rank trains a layer of its own, with its own number of units, between layers that all ranks share."""
    rank, size = hvd.rank(), hvd.size()
    layers = [keras.layers.Dense(4, name="first"), keras.layers.Dense(3 + rank, name="own"), keras.layers.Dense(1, name="last")]
    model = keras.Sequential([keras.layers.Input((8,)), *layers[:2], keras.layers.Lambda(lambda x: x[:, :3]), layers[2]])
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=layers[1])
    model.compile(optimizer, "mse")
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=layers[1].weights[:1])
    broadcast.register_local_var(layers[1].weights[1])
    points, labels = runner.classes(32 * size)
    model.fit(points[rank::size], labels[rank::size], batch_size=16, verbose=0, callbacks=[broadcast])
    everywhere = hvd.allgather_object([layer.get_weights()[0] for layer in layers])
    for first, own, last in everywhere[1:]:
        np.testing.assert_array_equal(first, everywhere[0][0])
        np.testing.assert_array_equal(last, everywhere[0][2])
        assert own.shape[1] > 3


def check_overflow_of_one_rank_skips_the_step_on_all() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    points, labels = runner.classes(16)
    before = model.get_weights()
    data = np.full_like(points, np.inf) if hvd.rank() == hvd.size() - 1 else points
    model.fit(data, labels, batch_size=16, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)) == 2.0**14
    model.fit(points, labels, batch_size=16, verbose=0)
    assert not np.array_equal(before[0], model.get_weights()[0])
    keras.config.set_dtype_policy("mixed_float16")
    try:
        wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        assert isinstance(wrapped, keras.optimizers.LossScaleOptimizer)
        low = make_model()
        low.compile(wrapped, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        assert low.optimizer is wrapped
    finally:
        keras.config.set_dtype_policy("float32")


def check_learning_rates_and_checkpoints() -> None:
    rates: list[float] = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size(), momentum=0.9))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    points, labels = hvd.shard(runner.classes(40 * hvd.size()))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"best-{hvd.rank()}.keras"
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(0.1 * hvd.size(), warmup_epochs=2, verbose=1),
            hvd.callbacks.LearningRateScheduleCallback(0.1 * hvd.size(), 0.1, start_epoch=3),
            hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=path),
            Rates(),
        ]
        history = model.fit(points, labels, batch_size=20, epochs=4, verbose=0, callbacks=callbacks).history
        assert path.exists() == (hvd.rank() == 0)
    full = 0.1 * hvd.size()
    warm = [full / hvd.size() * ((step + 1) / 2 * (hvd.size() - 1) / 2 + 1) for step in range(4)]
    np.testing.assert_allclose(rates, [*warm, full, full, 0.1 * full, 0.1 * full], rtol=1e-5)
    np.testing.assert_allclose(history["lr"], [warm[1], full, full, 0.1 * full], rtol=1e-5)
    assert hvd.allgather_object(history["loss"]) == [history["loss"]] * hvd.size()
    missing = hvd.callbacks.BestModelCheckpoint()
    assert "filepath" in runner.raised(ValueError, missing.on_train_begin)


if __name__ == "__main__":
    hvd.init()
    runner.run(globals())
    hvd.shutdown()
