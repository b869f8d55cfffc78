"""Trains a small network in JAX on images of digits that the program draws itself. Each rank computes the gradients of its part
of every batch, and `ringtrain.jax.distribute` averages them.

    ringrun -n 4 python jax_mlp.py

The losses do not depend on the number of ranks, except for rounding.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ringtrain.jax as rj

SIDE = 12
# A digit is drawn on 3 x 5 points. Each number has the bits of the 5 rows of one digit.
DIGITS = [
    (7, 5, 5, 5, 7),
    (2, 6, 2, 2, 7),
    (7, 1, 7, 4, 7),
    (7, 1, 7, 1, 7),
    (5, 5, 7, 1, 1),
    (7, 4, 7, 1, 7),
    (7, 4, 7, 5, 7),
    (7, 1, 2, 2, 2),
    (7, 5, 7, 5, 7),
    (7, 5, 7, 1, 7),
]


def draw_digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns images of digits at random places with noise, as rows of SIDE x SIDE numbers, and their labels."""
    random = np.random.default_rng(seed)
    shapes = np.array([[[row >> bit & 1 for bit in (2, 1, 0)] for row in rows] for rows in DIGITS], np.float32)
    large = shapes.repeat(2, axis=1).repeat(2, axis=2)
    labels = random.integers(len(DIGITS), size=count)
    images = random.normal(0, 0.5, (count, SIDE, SIDE)).astype(np.float32)
    tops, lefts = random.integers(SIDE - 9, size=count), random.integers(SIDE - 5, size=count)
    for image, label, top, left in zip(images, labels, tops, lefts, strict=True):
        image[top : top + 10, left : left + 6] += large[label]
    return images.reshape(count, -1), labels.astype(np.int32)


def make_params(hidden: int, seed: int) -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(first, (SIDE * SIDE, hidden)) / SIDE,
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(second, (hidden, len(DIGITS))) / hidden**0.5,
        "b2": jnp.zeros(len(DIGITS)),
    }


def scores_of(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    return jax.nn.relu(images @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_of(params: dict[str, jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(scores_of(params, images), labels).mean()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="number of steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=240, help="images per step, summed over all ranks (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=64, help="size of the hidden layer (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of random numbers (default: %(default)s)")
    parser.add_argument("--compression", metavar="NAME", help='codec for gradients between hosts, such as "bf16" or "int8"')
    options = parser.parse_args()

    rj.init()
    if options.batch % rj.size():
        print(f"a batch of {options.batch} images cannot be divided among {rj.size()} ranks", file=sys.stderr)
        return 2
    images, labels = draw_digits(20 * options.batch, options.seed)
    # Each rank starts with different parameters, to show that the broadcast makes them the same.
    params = make_params(options.hidden, options.seed + rj.rank())
    params = rj.broadcast_parameters(params)
    optimizer = rj.distribute(optax.adam(options.rate), compression=options.compression)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, images, labels):
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, rj.all_reduce(loss, "avg")

    batches = np.random.default_rng(options.seed)
    with rj.job_errors():
        for number in range(options.steps):
            rows = batches.choice(len(images), options.batch, replace=False)  # the same on all ranks
            params, state, loss = step(params, state, *rj.shard((images[rows], labels[rows])))
            if rj.rank() == 0 and (number % 10 == 0 or number == options.steps - 1):
                print(f"step {number}: loss {float(loss):.6f}", flush=True)

        test_images, test_labels = rj.shard(draw_digits(2400, options.seed + 1), remainder="drop")
        correct = jnp.mean(scores_of(params, test_images).argmax(1) == test_labels)
        accuracy = float(rj.all_reduce(correct, "avg"))
    if rj.rank() == 0:
        print(f"final: ranks {rj.size()}, loss {float(loss):.6f}, test accuracy {accuracy:.4f}")
    rj.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
