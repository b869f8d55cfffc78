"""Fits a linear regression on numpy arrays in two data-parallel ways: by averaging models, and by averaging gradients.

    ringrun -n 4 python linear_regression.py

Rank 0 scatters the data. The program then fits the model in two ways:

- Every rank fits a model to its part of the data. Rank 0 gathers the models and averages them. Each rank sends one message.
- All ranks run gradient descent and average their gradients at every step. Except for rounding, one process with all the data
  would get the same result.
"""

import argparse

import numpy as np
from numpy.typing import NDArray

import ringtrain as ring

Array = NDArray[np.float64]


def make_data(rows: int, features: int, seed: int) -> tuple[Array, Array]:
    """Returns two arrays. The rows of the first array contain the features and, in the last column, the target. The second array
    contains the weights from which the targets are computed. The targets have noise."""
    random = np.random.default_rng(seed)
    weights = random.normal(size=features)
    inputs = random.normal(size=(rows, features))
    targets = inputs @ weights + 0.5 * random.normal(size=rows)
    return np.column_stack([inputs, targets]), weights


def fit(data: Array) -> Array:
    """Returns the weights with the smallest squared error."""
    return np.linalg.lstsq(data[:, :-1], data[:, -1], rcond=None)[0]


def descend(world: ring.Group, data: Array, all_rows: int, steps: int, rate: float) -> Array:
    """Returns the weights that gradient descent finds for the mean squared error over the rows of all ranks. `data` contains
    the rows of this rank, and `all_rows` is the number of rows of all ranks together."""
    inputs, targets = data[:, :-1], data[:, -1]
    weights = np.zeros(inputs.shape[1])
    for _ in range(steps):
        # Ranks can have different numbers of rows, so each rank divides by the number of all rows before the sum.
        gradient = 2 / all_rows * inputs.T @ (inputs @ weights - targets)
        weights -= rate * world.all_reduce(gradient)
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4001, help="rows of data on rank 0 (default: %(default)s)")
    parser.add_argument("--features", type=int, default=8, help="features of a row (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="steps of gradient descent (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.2, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of random numbers (default: %(default)s)")
    options = parser.parse_args()

    world = ring.init()
    data, truth = make_data(options.rows, options.features, options.seed) if world.rank == 0 else (None, None)

    # If the number of rows is not a multiple of the number of ranks, the first ranks get one row more.
    counts = [len(part) for part in np.array_split(np.arange(options.rows), world.size)]
    own = world.scatter(data, root=0, counts=counts)

    models = world.gather(fit(own), root=0)
    descent_weights = descend(world, own, options.rows, options.steps, options.rate)
    is_same = (world.all_gather(descent_weights) == descent_weights).all()

    if world.rank == 0:
        reference = fit(data)
        for name, weights in [
            ("all data, one process", reference),
            ("averaged models", models.mean(axis=0)),
            ("averaged gradients", descent_weights),
        ]:
            error, difference = np.abs(weights - truth).max(), np.abs(weights - reference).max()
            print(f"{name}: largest error of a weight {error:.6f}, largest difference from the fit of all data {difference:.2e}")
        print(f"final: ranks {world.size}, the weights from gradient descent are the same on all of them: {is_same}")


if __name__ == "__main__":
    main()
