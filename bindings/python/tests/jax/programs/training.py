"""Trains a small network on all ranks and on one process, and compares the losses."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import ringtrain.jax as rj

ROWS, FEATURES, CLASSES = 96, 20, 5


def loss_of(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()


def make_step(optimizer):
    @jax.jit
    def step(params, state, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(jnp.add, params, updates), state, loss

    return step


def distances(inner, steps: int, compression: str | None = None) -> list[float]:
    """Returns the difference between the losses of the ranks and of one process in each step."""
    random = np.random.default_rng(1)
    params = {
        "w1": random.normal(size=(FEATURES, 16)).astype(np.float32) / 4,
        "b1": np.zeros(16, np.float32),
        "w2": random.normal(size=(16, CLASSES)).astype(np.float32) / 4,
    }
    optimizer = rj.distribute(inner, compression=compression)
    step, step_alone = make_step(optimizer), make_step(inner)
    own = alone = params
    state, state_alone = optimizer.init(params), inner.init(params)
    found = []
    for _ in range(steps):
        x = random.normal(size=(ROWS, FEATURES)).astype(np.float32)
        y = np.abs(x[:, :CLASSES]).argmax(1)
        own, state, loss = step(own, state, *rj.shard((x, y)))
        alone, state_alone, expected = step_alone(alone, state_alone, x, y)
        found.append(abs(float(rj.all_reduce(loss, "avg")) - float(expected)))
    return found


if __name__ == "__main__":
    import optax

    rj.init(timeout=60, transport="tcp" if sys.argv[1] != "none" else None)
    compression = None if sys.argv[1] == "none" else sys.argv[1]
    worst = max(distances(optax.adam(1e-2), 50, compression))
    assert worst < (1e-4 if compression is None else 0.1), worst
    print(f"the same losses: at most {worst:.1e} apart")
