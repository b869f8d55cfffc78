"""Compares the time of a training step with `ringtrain.jax` and with `jax.distributed`, whose collectives on CPUs are Gloo's.

    ringrun -n 2 python jax_compare.py

The model has 25 MB of parameters of the type float32. Both ways run alternately in the same processes, and take the same steps:
the program checks that the losses are equal. It prints the median of the rounds, and in brackets the quartiles.
"""

import argparse
import socket
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ringtrain.jax as rj

SIZES = (784, 2200, 2050, 10)
RATE = 0.01


def make_params() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    shapes = zip(SIZES[:-1], SIZES[1:], strict=True)
    return [(random.normal(size=shape) / shape[0] ** 0.5).astype(np.float32) for shape in shapes]


def loss_of(params: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    for weights in params[:-1]:
        x = jax.nn.relu(x @ weights)
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ params[-1]), y[:, None], 1).mean()


def ring_step(params: list[jax.Array], x: jax.Array, y: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    loss, gradients = rj.all_reduce(jax.value_and_grad(loss_of)(params, x, y), "avg")
    return [p - RATE * g for p, g in zip(params, gradients, strict=True)], loss


def plain_step(params: list[jax.Array], x: jax.Array, y: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    return [p - RATE * g for p, g in zip(params, gradients, strict=True)], loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="rows per rank and step (default: %(default)s)")
    options = parser.parse_args()
    world = rj.init()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(world.broadcast(server.getsockname()[1]))
    jax.distributed.initialize(f"127.0.0.1:{port}", world.size, world.rank)

    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, divided = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    random = np.random.default_rng(2)
    rows = options.batch * world.size
    x, y = random.normal(size=(rows, SIZES[0])).astype(np.float32), random.integers(SIZES[-1], size=rows)
    own = rj.shard((x, y))
    local = jax.local_devices()[0]
    arguments = {
        "ringtrain": jax.device_put(own, local),
        "gloo": tuple(jax.make_array_from_process_local_data(divided, part) for part in own),
        "without communication": jax.device_put(own, local),
    }
    params = {
        name: [jax.device_put(p, local) if name != "gloo" else jax.device_put(p, everywhere) for p in make_params()]
        for name in arguments
    }
    steps = {"ringtrain": jax.jit(ring_step), "gloo": jax.jit(plain_step), "without communication": jax.jit(plain_step)}
    times: dict[str, list[float]] = {name: [] for name in arguments}
    for index in range(options.rounds + 2):
        losses = {}
        for name, step in steps.items():
            world.barrier()
            start = time.perf_counter()
            params[name], loss = step(params[name], *arguments[name])
            jax.block_until_ready(params[name])
            seconds = float(world.all_reduce(time.perf_counter() - start, "max"))
            losses[name] = float(loss)
            if index > 1:
                times[name].append(1e3 * seconds)
        assert abs(losses["ringtrain"] - losses["gloo"]) < 1e-4, losses
    if world.rank == 0:
        ratios = np.array(times["gloo"]) / np.array(times["ringtrain"])
        for name, found in [*times.items(), ("gloo / ringtrain", ratios)]:
            low, median, high = np.percentile(found, [25, 50, 75])
            unit = "" if name.startswith("gloo /") else " ms"
            print(f"{world.size} ranks, {name}: {median:.2f}{unit} ({low:.2f} to {high:.2f})")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
