"""Trains asynchronously: every rank trains a local model at its own speed, and the models are averaged in the background.

    ringrun -n 4 python local_sgd.py --every 20

When gradients are averaged, every rank waits for the slowest rank at every step. In this program, a rank continues to
train while the models are averaged. When the average is ready, the rank replaces its model by the average plus the
changes that the rank has made in the meantime (Stich, "Local SGD Converges Fast and Communicates Little", 2019; Wang
et al., "Overlap Local-SGD", 2020).

Each rank has data of different classes, so no rank can learn all classes without the other ranks. For comparison, the
program also trains models that are never averaged. The number of steps that a rank makes while the models are averaged
depends on the speed of the machine, so the last digits of the result differ from run to run. With `--ahead 0`, every
run gives the same result.
"""

import argparse
import time

import numpy as np
from numpy.typing import NDArray

import ringtrain as ring

Array = NDArray[np.float32]
FEATURES, HIDDEN, CLASSES = 16, 32, 8


class Network:
    """A network with two layers. All parameters are in one flat array, so that one all-reduce averages them."""

    def __init__(self, random: np.random.Generator) -> None:
        shapes = [(FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]
        ends = np.cumsum([np.prod(shape) for shape in shapes])
        self.flat = random.normal(scale=0.2, size=ends[-1]).astype(np.float32)
        self.layers = [part.reshape(shape) for part, shape in zip(np.split(self.flat, ends[:-1]), shapes, strict=True)]

    def scores(self, inputs: Array) -> tuple[Array, Array]:
        """Returns the values of the hidden layer and the scores of the classes."""
        first, shift, second, bias = self.layers
        hidden = np.maximum(inputs @ first + shift, 0)
        return hidden, hidden @ second + bias

    def learn(self, inputs: Array, labels: NDArray[np.int64], rate: float) -> None:
        """Makes one step of gradient descent on the cross entropy."""
        first, shift, second, bias = self.layers
        hidden, scores = self.scores(inputs)
        slope = np.exp(scores - scores.max(1, keepdims=True))
        slope /= slope.sum(1, keepdims=True)
        slope[np.arange(len(labels)), labels] -= 1
        slope *= rate / len(labels)
        below = (slope @ second.T) * (hidden > 0)
        second -= hidden.T @ slope
        bias -= slope.sum(0)
        first -= inputs.T @ below
        shift -= below.sum(0)

    def accuracy(self, inputs: Array, labels: NDArray[np.int64]) -> float:
        return float((self.scores(inputs)[1].argmax(1) == labels).mean())


class Learner:
    """A rank's model, its data and its delay per step."""

    def __init__(self, rank: int, data: tuple[Array, NDArray[np.int64]], options: argparse.Namespace, delay: float) -> None:
        self.network = Network(np.random.default_rng(options.seed))  # All ranks start with the same model.
        self.random = np.random.default_rng([options.seed, rank])  # Each rank draws different batches.
        self.inputs, self.labels = data
        self.rate, self.delay = options.rate, delay
        self.steps = 0

    def step(self) -> None:
        chosen = self.random.integers(len(self.labels), size=32)
        self.network.learn(self.inputs[chosen], self.labels[chosen], self.rate)
        self.steps += 1
        time.sleep(self.delay)


def train_with_averaging(world: ring.Group, learner: Learner, options: argparse.Namespace) -> None:
    flat = learner.network.flat
    for _ in range(options.rounds):
        # Average a copy, because the training changes the model during the operation.
        before = flat.copy()
        average = world.all_reduce_async(before, "avg")
        for step in range(options.every + options.ahead):
            # A fast rank continues while it waits for slow ranks, but only for `--ahead` steps, so that the models stay similar.
            if step >= options.every and average.test():
                break
            learner.step()
        flat += average.wait() - before
    # All ranks end with the same model.
    world.all_reduce(flat, "avg", out=flat)


def make_data(count: int, seed: int) -> tuple[Array, NDArray[np.int64]]:
    """Makes points around a centre for each class. Returns the points, sorted by class, and their classes."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(CLASSES, FEATURES))
    labels = np.sort(random.integers(CLASSES, size=count))
    return (centres[labels] + 0.7 * random.normal(size=(count, FEATURES))).astype(np.float32), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="number of averages of the models (default: %(default)s)")
    parser.add_argument(
        "--every", type=int, default=10, help="minimum number of steps between two averages (default: %(default)s)"
    )
    parser.add_argument(
        "--ahead", type=int, default=10, help="maximum number of further steps during an average (default: %(default)s)"
    )
    parser.add_argument(
        "--straggle", type=float, default=1.0, help="additional milliseconds per step on the last rank (default: %(default)s)"
    )
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of random numbers (default: %(default)s)")
    options = parser.parse_args()

    world = ring.init()
    inputs, labels = make_data(4000, options.seed)
    part = np.array_split(np.arange(len(labels)), world.size)[world.rank]
    own = inputs[part], labels[part]
    delay = options.straggle / 1000 if world.rank == world.size - 1 else 0.0

    alone = Learner(world.rank, own, options, delay=0.0)
    for _ in range(options.rounds * options.every):
        alone.step()
    together = Learner(world.rank, own, options, delay)
    train_with_averaging(world, together, options)

    results = world.gather_object(
        (alone.network.accuracy(inputs, labels), together.network.accuracy(inputs, labels), together.steps)
    )
    models = world.gather(together.network.flat)
    if results is not None and models is not None:
        separate, averaged, steps = zip(*results, strict=True)
        print(f"steps of each rank: {' '.join(map(str, steps))}")
        print(f"without averaging: accuracy on all data {np.mean(separate):.4f}, mean of {world.size} models")
        is_same = bool((models == models[0]).all())
        print(f"final: ranks {world.size}, accuracy on all data {averaged[0]:.4f}, the same model on all of them: {is_same}")


if __name__ == "__main__":
    main()
