"""Checks of `ringtrain.tensorflow`, in eager mode and inside `tf.function`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import runner
import tensorflow as tf

import ringtrain.keras.callbacks
import ringtrain.tensorflow as hvd
import ringtrain.tensorflow.keras.callbacks
from ringtrain._horovod.missing import NOT_IMPLEMENTED


def in_both_modes(check: Callable[[Callable[..., Any]], None]) -> None:
    """Calls `check` with a function that runs a function in eager mode, and then with one that runs it as a graph."""
    check(lambda function, *arguments: function(*arguments))
    check(lambda function, *arguments: tf.function(function)(*arguments))


def check_operations() -> None:
    rank, size = hvd.rank(), hvd.size()

    def check(run: Callable[..., Any]) -> None:
        for dtype in (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64):
            value = tf.cast(tf.fill([2, 3], rank), dtype)
            total = run(lambda x: hvd.allreduce(x, op=hvd.Sum), value)
            assert total.dtype == dtype and total.shape == (2, 3)
            assert float(total[0, 0]) == sum(range(size)), total
        value = tf.fill([rank + 1, 2], float(rank))
        whole = run(hvd.allgather, value)
        assert whole.shape[0] == sum(range(size + 1)) and float(whole[-1, 0]) == size - 1
        assert float(run(lambda x: hvd.broadcast(x, size - 1), value[0])[0]) == size - 1
        rows = run(hvd.alltoall, tf.fill([size, 2], rank))
        assert rows[:, 0].numpy().tolist() == list(range(size))
        rows, received = run(lambda x: hvd.alltoall(x, [1] * size), tf.fill([size, 2], rank))
        assert received.numpy().tolist() == [1] * size
        part = run(lambda x: hvd.reducescatter(x, op=hvd.Sum), tf.ones([2 * size, 3]))
        assert part.shape == (2, 3) and float(part[0, 0]) == size
        first, second = run(lambda x: hvd.grouped_allreduce([x, 2 * x], name="two"), tf.ones([3]) * rank)
        assert float(first[0]) == (size - 1) / 2 and float(second[0]) == size - 1
        assert float(run(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16), tf.constant(1.0))) == 1
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([size, 2]))
        dense = run(lambda: tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Sum)))
        assert np.array_equal(dense, np.ones((size, 2)))
        mixed = run(lambda x: hvd.grouped_allreduce([slices, x], op=hvd.Sum), tf.ones([2]))
        assert np.array_equal(tf.convert_to_tensor(mixed[0]), dense) and mixed[1].numpy().tolist() == [size] * 2
        (part,) = run(lambda x: hvd.grouped_reducescatter([x], "", hvd.Compression.none, hvd.Sum), tf.ones([size, 2]))
        assert part.numpy().tolist() == [[size] * 2]
        variable = tf.Variable(tf.fill([2], rank))
        assert run(lambda: hvd.broadcast_([variable], size - 1))[0].numpy().tolist() == [size - 1] * 2
        assert variable.numpy().tolist() == [size - 1] * 2

    in_both_modes(check)
    assert int(hvd.rank_op()) == rank and int(hvd.size_op()) == size and int(hvd.process_set_included_op()) == 1
    if size > 1:
        first = hvd.add_process_set([0])
        number = first.process_set_id
        assert int(hvd.size_op(number)) == 1 and int(hvd.process_set_included_op(number)) == (rank == 0)
        hvd.remove_process_set(first)
    assert "no process set 9" in runner.raised(ValueError, lambda: hvd.size_op(9))


def check_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()

    def gradient_of(function: Callable[..., Any], x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(function(x) * tf.cast(rank + 1, tf.float32))
        return tape.gradient(y, x)

    factors = sum(range(1, size + 1))

    def check(run: Callable[..., Any]) -> None:
        x = tf.ones([size, 2])
        expected = {
            "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum), factors),
            "average": (hvd.allreduce, factors / size),
            "group": (lambda x: hvd.grouped_allreduce([x])[0], factors / size),
            "allgather": (hvd.allgather, factors),
            "broadcast": (lambda x: hvd.broadcast(x, 0), factors if rank == 0 else 0),
            "alltoall": (hvd.alltoall, np.arange(1, size + 1)[:, None] * np.ones(2)),
            "reducescatter": (hvd.reducescatter, np.arange(1, size + 1)[:, None] * np.ones(2)),
        }
        for name, (function, result) in expected.items():
            found = run(lambda x, function=function: gradient_of(function, x), x)
            np.testing.assert_allclose(found, np.broadcast_to(result, found.shape), err_msg=name)

    in_both_modes(check)
    assert "max" in runner.raised(NotImplementedError, lambda: gradient_of(lambda x: hvd.allreduce(x, op=hvd.Max), tf.ones([1])))


def make_model() -> keras.Model:
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.layers.Input((5,), dtype="int32"), *layers])
    return model


def broadcast_state(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)


def train(is_distributed: bool, is_graph: bool, **options: Any) -> tuple[list[float], keras.Model]:
    """Trains with a loop of its own for 50 steps. The embedding has sparse gradients."""
    model, optimizer = make_model(), keras.optimizers.SGD(0.5, momentum=0.9)
    if is_distributed and hvd.rank() > 0:
        model.set_weights([weight + 1 for weight in model.get_weights()])
    words = np.random.default_rng(1).integers(0, 20, (50 * 16, 5)).astype(np.int32)
    labels = words.sum(1) % 3
    if is_distributed:
        words, labels = words[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]
    batch = 16 // hvd.size() if is_distributed else 16
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        if is_distributed:
            tape = hvd.DistributedGradientTape(tape, **options)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    optimizer.build(model.trainable_variables)
    if is_distributed:
        # Scripts for Horovod broadcast in the compiled function of the first step.
        (tf.function(broadcast_state) if is_graph else broadcast_state)(model, optimizer)
    run = tf.function(step) if is_graph else step
    losses = []
    for start in range(0, len(words), batch):
        loss = run(tf.constant(words[start : start + batch]), tf.constant(labels[start : start + batch]))
        losses.append(float(loss))
    return (hvd.allreduce(losses).numpy().tolist() if is_distributed else losses), model


def check_training_with_a_tape() -> None:
    losses, alone = train(False, True)
    for is_graph in (True, False):
        for options in ({}, {"sparse_as_dense": True, "gradient_predivide_factor": 2.0, "bucket_bytes": 64}):
            together, model = train(True, is_graph, **options)
            np.testing.assert_allclose(together, losses, atol=1e-4)
            for mine, other in zip(model.get_weights(), alone.get_weights(), strict=True):
                np.testing.assert_allclose(mine, other, atol=1e-4)


def check_local_variables() -> None:
    """A tape averages only the gradients of the variables that all ranks share."""
    rank, size = hvd.rank(), hvd.size()
    shared, own = keras.layers.Dense(2, use_bias=False), keras.layers.Dense(rank + 1, use_bias=False)
    layers = (shared, own)
    for layer in layers:
        layer.build((1, 3))

    def gradients(is_scaled: bool, finds_pairs: bool) -> list[tf.Tensor]:
        weights = [layer.trainable_weights[0] for layer in layers]
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(layer(tf.ones([1, 3]))) for layer in layers) * tf.cast(rank + 1, tf.float32)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=own, scale_local_gradients=is_scaled)
        if finds_pairs:
            [(_, second)], [(_, first)] = tape.get_local_and_global_gradients(loss, weights)
            return [first, second]
        return tape.gradient(loss, weights)

    def check(run: Callable[..., Any]) -> None:
        for is_scaled in (True, False):
            first, second = run(lambda is_scaled=is_scaled: gradients(is_scaled, not is_scaled))
            np.testing.assert_allclose(first, np.full((3, 2), (size + 1) / 2))
            np.testing.assert_allclose(second, np.full((3, rank + 1), (rank + 1) / (size if is_scaled else 1)), rtol=1e-6)

    in_both_modes(check)
    unbuilt = keras.layers.Dense(1)
    assert "build the model" in runner.raised(
        ValueError, lambda: hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=unbuilt)
    )


def check_bad_input() -> None:
    rank, size = hvd.rank(), hvd.size()
    for name in NOT_IMPLEMENTED:
        assert f"tensorflow.{name} is" in runner.raised(NotImplementedError, lambda: getattr(hvd, name))
    for name in ringtrain.tensorflow.keras.callbacks.__all__:
        assert getattr(ringtrain.tensorflow.keras.callbacks, name) is getattr(ringtrain.keras.callbacks, name)
    old = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    assert "DistributedOptimizer" in runner.raised(NotImplementedError, lambda: hvd.DistributedOptimizer(old))
    assert "start_timeline" in runner.raised(NotImplementedError, lambda: hvd.start_timeline("file"))
    if size == 1:
        return
    variables = [tf.Variable(1.0, name="same"), tf.Variable(1.0, name="kernel" if rank else "bias")]
    text = runner.raised(ValueError, lambda: hvd.broadcast_variables(variables, 0))
    assert "number 1 is bias:0 (float32, shape ()) on rank 0 and kernel:0" in text, text
    big = tf.fill([2], tf.constant(60000, tf.float16))
    with tf.GradientTape() as tape:
        tape.watch(big)
        y = big * tf.constant(60000, tf.float16)
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    assert "range of float16" in runner.raised(OverflowError, lambda: tape.gradient(y, big))
    text = runner.raised(Exception, lambda: tf.function(hvd.allgather)(tf.ones([1, 2 + rank])))
    assert "rank 0 has rows of float32|(2,), and rank 1 has rows of float32|(3,)" in text, text


if __name__ == "__main__":
    hvd.init()
    runner.run(globals())
    hvd.shutdown()
