"""Checks the operations of `ringtrain.jax` on all ranks, in one job. With the argument `short`, leaves out variants.

The inputs are numpy arrays, because JAX compiles each function that it calls, also `jnp.ones`.
"""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np

import ringtrain as ring
import ringtrain.jax as rj
from ranks import raised

IS_SHORT = "short" in sys.argv
TYPES = "bool int8 uint8 int16 uint16 int32 uint32 bfloat16 float16 float32 complex64".split()


def full(shape: tuple[int, ...], value: float, dtype: str = "float32") -> np.ndarray:
    return np.full(shape, value).astype(jnp.dtype(dtype))


def check_reductions(r: int, n: int) -> None:
    """A jitted function reduces a pytree of all types at once; one array is large enough for shared memory."""
    tree = {name: full((3, 2), r + 1, name) for name in TYPES}
    tree |= {"scalar": np.float32(r), "empty": np.zeros((0, 4), np.float32), "large": full((40_000,), r), "none": None}
    sums = jax.device_get(jax.jit(rj.all_reduce)(tree))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), sums) == jax.tree.map(lambda a: (a.shape, a.dtype), tree)
    for name in TYPES:
        assert (sums[name] == full((3, 2), n * (n + 1) // 2, name)).all(), (name, sums[name])
    assert sums["scalar"] == n * (n - 1) / 2 and (sums["large"] == n * (n - 1) / 2).all()

    # Buckets of 100 bytes: the arrays need several buckets.
    parts = jax.device_get(rj.all_reduce([full((20,), i + r) for i in range(5)], bucket_bytes=100))
    assert all((part == n * i + n * (n - 1) / 2).all() for i, part in enumerate(parts))
    for op, expected in [("max", n - 1), ("average", (n - 1) / 2), ("prod", 0)]:
        assert float(rj.all_reduce(np.float32(r), op)) == expected
        assert float(jax.jit(lambda x, op=op: rj.all_reduce(x, op))(np.float32(r))) == expected


def check_other_operations(r: int, n: int) -> None:
    def gather_and_scatter(inputs: dict) -> dict:
        return {
            "gather": rj.all_gather(inputs["gather"]),
            "gather_rows": rj.all_gather(inputs["gather_rows"]),
            "scatter": rj.reduce_scatter(inputs["scatter"]),
            "exchange": rj.all_to_all(inputs["exchange"]),
            "broadcast": rj.broadcast(inputs["broadcast"], root=n - 1),
        }

    inputs = {
        "gather": np.int32(r),
        "gather_rows": [full((2,), r, "bfloat16")],
        "scatter": np.arange(2 * n, dtype=np.int32),
        "exchange": np.arange(n, dtype=np.int32) + 10 * r,
        "broadcast": {"a": full((3,), r, "int8"), "b": full((5,), r, "float8_e4m3fn"), "c": np.complex64(r)},
    }
    for call in [jax.jit(gather_and_scatter)] if IS_SHORT else [gather_and_scatter, jax.jit(gather_and_scatter)]:
        found = jax.device_get(call(inputs))
        assert found["gather"].tolist() == list(range(n))
        assert (found["gather_rows"][0] == np.arange(n)[:, None]).all() and found["gather_rows"][0].shape == (n, 2)
        assert found["scatter"].tolist() == [n * 2 * r, n * (2 * r + 1)]
        assert found["exchange"].tolist() == [10 * i + r for i in range(n)]
        assert all((leaf.astype(np.complex64) == n - 1).all() for leaf in jax.tree.leaves(found["broadcast"]))
    batched = np.asarray(jax.jit(jax.vmap(rj.all_gather, in_axes=1, out_axes=2))(full((2, 3), r)))
    assert batched.shape == (n, 2, 3) and (batched == np.arange(n)[:, None, None]).all()


def check_gradients(r: int, n: int) -> None:
    """The sum over the ranks of the scalar products of results and cotangents is that of inputs and transposed cotangents."""
    operations = (rj.all_reduce, rj.all_gather, rj.reduce_scatter, rj.all_to_all, lambda x: rj.broadcast(x, root=n - 1))
    averages = (lambda x: rj.all_reduce(x, "avg"), lambda x: rj.reduce_scatter(x, "avg"))

    @jax.jit
    def products(x: jax.Array) -> list:
        found = []
        for operation in (*operations, *averages):
            y, vjp = jax.vjp(operation, x)
            cotangent = jnp.cos(jnp.arange(y.size) + r).reshape(y.shape)
            found.append((jnp.vdot(y, cotangent), jnp.vdot(x, vjp(cotangent)[0])))
        return rj.all_reduce(found)

    for own, transposed in jax.device_get(products(np.arange(2 * n, dtype=np.float32) + r)):
        np.testing.assert_allclose(own, transposed, rtol=1e-4, atol=1e-4)
    if IS_SHORT:
        return

    def loss(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, _: (rj.all_reduce(jnp.sin(carry), "avg"), None), x, None, length=3)[0].sum()

    gradient = jax.jit(jax.grad(jax.checkpoint(loss)))(jnp.ones(2))
    expected = jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))).sum())(jnp.ones(2))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    error = raised(NotImplementedError, jax.grad(lambda x: rj.all_reduce(x, "max")), 1.0)
    assert "'max' has no gradient" in str(error)


def check_order(r: int, n: int) -> None:
    """Jitted functions run asynchronously. Their operations, and those outside jitted functions, keep the order of the program on
    all ranks, although the ranks compute for different times."""
    first = jax.jit(lambda x: rj.all_reduce(x @ x)[:10] * 0 + rj.all_reduce(x[:10]))
    second = jax.jit(lambda x: rj.all_reduce(x[:10] * 2))
    x = full((300, 300), 1.0 + r)
    slow = jax.jit(lambda x: x @ x @ x)
    results = []
    for step in range(10):
        if step % n == r:
            x = x + 0 * slow(x)
        results += [(1, first(x)), (2, second(x))]
        if step % 5 == 4:
            results += [(1, rj.all_reduce(full((3,), 1.0 + r))), (2, second(x))]
    for index, (factor, result) in enumerate(results):
        assert (np.asarray(result) == factor * n * (n + 1) / 2).all(), (index, result)


def check_parameters_and_shards(r: int, n: int) -> None:
    params = {"w": full((3,), r), "layers": [np.int8(r), full((2, 2), r, "bfloat16")]}
    if not IS_SHORT:
        key = rj.broadcast_parameters({"key": jax.random.key(r)}, root=n - 1)["key"]
        assert (jax.random.key_data(key) == jax.random.key_data(jax.random.key(n - 1))).all()
    same = jax.device_get(rj.broadcast_parameters(params, root=n - 1))
    assert all((leaf.astype(float) == n - 1).all() for leaf in jax.tree.leaves(same))
    if n > 1:
        wrong = {"a": full((2,), 1), "b": [full((3 if r < n - 1 else 4,), 1)]}
        error = raised(ring.Mismatch, rj.broadcast_parameters, wrong)
        assert f"at params['b'][0], rank 0 has float32[3], and rank {n - 1} has float32[4]" in str(error), error
        assert error.ranks == (0, n - 1)
    raised(ring.InvalidArgument, jax.jit(rj.broadcast_parameters), params)

    rows = {"x": np.arange(2 * n + 1), "y": np.arange(2 * n + 1)[:, None]}
    if n > 1:
        assert "cannot be divided" in str(raised(ring.InvalidArgument, rj.shard, rows))
        assert rj.shard(rows, remainder="drop")["x"].tolist() == [2 * r, 2 * r + 1]
        repeated = rj.shard(rows, remainder="repeat")["y"][:, 0]
        assert repeated.tolist() == [i % (2 * n + 1) for i in range(3 * r, 3 * r + 3)]
    raised(ring.InvalidArgument, rj.shard, {"x": np.arange(n), "y": np.arange(2 * n)})
    raised(ring.InvalidArgument, rj.shard, np.float32(1))


def check_wrong_arguments(r: int, n: int) -> None:
    """A rank that finds a wrong argument when it traces a function sends nothing, so the job goes on."""
    wrong = [
        (ring.InvalidArgument, lambda: rj.all_reduce(1.0, "total")),
        (ring.Unsupported, lambda: rj.all_reduce(full((2,), 1, "complex64"), "max")),
        (ring.Unsupported, lambda: rj.all_reduce(full((2,), 1, "float8_e4m3fn"))),
        (ring.Unsupported, lambda: rj.broadcast(full((2,), 1, "int4"))),
        (ring.InvalidArgument, lambda: rj.broadcast(1.0, root=n)),
        (ring.InvalidArgument, lambda: rj.all_reduce(1.0, compression="zip")),
        (ring.InvalidArgument, lambda: rj.all_reduce(1.0, bucket_bytes=0)),
        (NotImplementedError, lambda: rj.all_reduce(1.0, compression="powersgd:2")),
    ]
    if not IS_SHORT:
        wrong.append((ring.Unsupported, lambda: rj.all_gather(jax.random.key(1))))
    if n > 1:
        wrong += [(ring.InvalidArgument, lambda f=f: f(full((n + 1,), 1))) for f in (rj.reduce_scatter, rj.all_to_all)]
    for kind, call in wrong:
        raised(kind, call)
        raised(kind, jax.jit(call))


def check_training(r: int, n: int) -> None:
    """Ranks that have parts of a batch take the same steps as one process with the whole batch."""
    if importlib.util.find_spec("optax") is None:
        return
    import optax
    import training

    optimizer = rj.distribute(optax.sgd(1.0))
    gradients = {"w": full((3,), r), "b": np.float32(2 * r)}
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(gradients))
    assert np.asarray(updates["w"]).tolist() == [(1 - n) / 2] * 3 and float(updates["b"]) == 1 - n
    if not IS_SHORT:
        assert max(training.distances(optax.sgd(0.1), 5)) < 1e-4


def main() -> None:
    rj.init(timeout=60)
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check(rj.rank(), rj.size())
            rj.barrier()
    print("all checks passed")


if __name__ == "__main__":
    main()
