"""Compares the time of a training step with `ringtrain.tensorflow` and with `tf.distribute.MultiWorkerMirroredStrategy`, whose
collectives are a ring over gRPC.

    ringrun -n 2 python tf_compare.py

The model has 25 MB of parameters of the type float32. Both ways run alternately in the same processes, and take the same steps:
the program checks that the losses are equal. It prints the median of the rounds, and in brackets the quartiles.
"""

import argparse
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import ringtrain
import ringtrain.tensorflow as hvd

SIZES = (784, 2200, 2050, 10)
RATE = 0.01

Step = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def make_variables() -> list[tf.Variable]:
    random = np.random.default_rng(1)
    shapes = zip(SIZES[:-1], SIZES[1:], strict=True)
    return [tf.Variable((random.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)) for shape in shapes]


def loss_of(variables: list[tf.Variable], x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    for weights in variables[:-1]:
        x = tf.nn.relu(x @ weights)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ variables[-1]))


def make_step(wrap_tape: Callable[[tf.GradientTape], tf.GradientTape]) -> Step:
    """Returns a step that gets its gradients from the tape that `wrap_tape` returns."""
    variables = make_variables()

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x, y)
        for variable, gradient in zip(variables, wrap_tape(tape).gradient(loss, variables), strict=True):
            variable.assign_sub(RATE * gradient)
        return loss

    return step


def make_strategy_step(strategy: tf.distribute.Strategy) -> Step:
    """Returns the same step with the collectives of `strategy`."""
    with strategy.scope():
        variables = make_variables()

    def update(strategy: tf.distribute.Strategy, gradients: list[tf.Tensor]) -> None:
        for variable, gradient in zip(variables, gradients, strict=True):
            strategy.extended.update(variable, lambda v, g: v.assign_sub(RATE * g), args=(gradient,), group=False)

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x, y)
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(tf.distribute.ReduceOp.MEAN, tape.gradient(loss, variables))
        context.merge_call(update, args=(gradients,))
        return loss

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return strategy.run(replica_step, args=(x, y))

    return step


def start_strategy(world: ringtrain.Group) -> tf.distribute.Strategy:
    """Starts the servers of TensorFlow, each on a port that was free, and joins them."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        ports = world.all_gather(np.int64(server.getsockname()[1]))
    workers = [f"127.0.0.1:{port}" for port in ports]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": world.rank}})
    implementation = tf.distribute.experimental.CommunicationImplementation.RING
    communication = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="rows per rank and step (default: %(default)s)")
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    world = ringtrain.world()
    strategy = start_strategy(world)
    steps = {
        "ringtrain": make_step(hvd.DistributedGradientTape),
        "MultiWorkerMirroredStrategy": make_strategy_step(strategy),
        "without communication": make_step(lambda tape: tape),
    }
    random = np.random.default_rng(2 + world.rank)
    x = tf.constant(random.normal(size=(options.batch, SIZES[0])).astype(np.float32))
    y = tf.constant(random.integers(SIZES[-1], size=options.batch))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(options.rounds + 2):
        losses = {}
        for name, step in steps.items():
            world.barrier()
            start = time.perf_counter()
            losses[name] = float(step(x, y))
            seconds = float(world.all_reduce(time.perf_counter() - start, "max"))
            if index > 1:
                times[name].append(1e3 * seconds)
        assert abs(losses["ringtrain"] - losses["MultiWorkerMirroredStrategy"]) < 1e-4, losses
    if world.rank == 0:
        ratios = np.array(times["MultiWorkerMirroredStrategy"]) / np.array(times["ringtrain"])
        for name, found in [*times.items(), ("MultiWorkerMirroredStrategy / ringtrain", ratios)]:
            low, median, high = np.percentile(found, [25, 50, 75])
            unit = "" if "/" in name else " ms"
            print(f"{world.size} ranks, {name}: {median:.2f}{unit} ({low:.2f} to {high:.2f})", flush=True)
    world.barrier()


if __name__ == "__main__":
    main()
