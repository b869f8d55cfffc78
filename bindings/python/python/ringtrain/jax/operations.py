"""Collectives on arrays and pytrees of JAX, inside and outside jitted functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringtrain import _core
from ringtrain.jax import elements, job
from ringtrain.jax.execution import (
    BUCKET_BYTES,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Compression,
    ReduceScatter,
    compression_state,
)
from ringtrain.jax.primitive import run_collective

Tree = Any
"""An array, or a pytree of arrays."""

# Names that other libraries have for reductions.
_OTHER_NAMES = {"average": "avg", "mean": "avg", "product": "prod"}


def all_reduce(tree: Tree, op: str = "sum", *, compression: Compression = None, bucket_bytes: int = BUCKET_BYTES) -> Tree:
    """Reduces the arrays of all ranks, and returns the result on every rank. `op` is a reduction of `ringtrain.Group`, for
    example "sum", "avg" or "max". Arrays of the same type share buckets of at most `bucket_bytes` bytes, so a pytree needs few
    operations.

    With `compression`, for example "bf16", arrays of the type float32 are compressed between hosts. With a `CompressionState`,
    errors of rounding are added to the arrays of the next call.

    The gradient of a sum is the sum of the cotangents of all ranks. The gradient of an average is their average.
    """
    op = reduction_name(op)
    if bucket_bytes < 1:
        raise _core.InvalidArgument(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
    state = compression_state(compression)
    return _for_leaves(AllReduce(op, state, bucket_bytes), tree, op)


def reduction_name(op: str) -> str:
    """Returns the compiled module's name for a reduction. Raises `ringtrain.InvalidArgument` if there is no such reduction."""
    name = _OTHER_NAMES.get(op, op)
    elements.require_reduction(np.dtype(np.int32), name)
    return name


def all_gather(tree: Tree) -> Tree:
    """Stacks the arrays of all ranks in rank order: an array of the shape `shape` becomes an array of the shape `(size,
    *shape)`. On all ranks, the arrays have the same shape. The gradient is this rank's part of the sum of all cotangents."""
    job.require_rank()
    return _for_leaves(AllGather(), jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree))


def reduce_scatter(tree: Tree, op: str = "sum") -> Tree:
    """Reduces the arrays of all ranks, and returns this rank's part of the rows. The number of rows must be a multiple of the
    number of ranks. The gradient of a sum has the rows of all cotangents. The gradient of an average is this gradient divided
    by `size`."""
    op = reduction_name(op)
    _require_equal_parts(tree, "reduce_scatter")
    return _for_leaves(ReduceScatter(op), tree, op)


def broadcast(tree: Tree, root: int = 0) -> Tree:
    """Returns the root's arrays on every rank. On all ranks, the arrays have the same shapes and types. The gradient is the sum
    of all cotangents on the root, and zero on the other ranks."""
    size = job.size()
    if not 0 <= root < size:
        raise _core.InvalidArgument(f"the root is {root}, but the ranks are 0 to {size - 1}")
    return _for_leaves(Broadcast(root), tree)


def all_to_all(tree: Tree) -> Tree:
    """Divides the rows into `size` equal parts, and sends the i-th part to rank i. Returns the received rows in rank order. The
    gradient sends each part of the cotangent back."""
    _require_equal_parts(tree, "all_to_all")
    return _for_leaves(AllToAll(), tree)


def barrier() -> None:
    """Waits until all ranks have called `barrier`, after all operations of the jitted functions that they have called before."""
    group = job.current_group()
    job.wait_for_operations()
    group.barrier()


def _for_leaves(collective: Collective, tree: Tree, op: str | None = None) -> Tree:
    """Executes a collective, which reduces with `op`, on the leaves of a tree."""
    job.require_rank()
    leaves, structure = jax.tree.flatten(tree)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    for array in arrays:
        if op is None:
            elements.require_whole_bytes(array.dtype)
        else:
            elements.require_reduction(array.dtype, op)
    return structure.unflatten(run_collective(collective, arrays))


def _require_equal_parts(tree: Tree, name: str) -> None:
    size = job.size()
    for leaf in jax.tree.leaves(tree):
        shape = np.shape(leaf)
        if not shape or shape[0] % size:
            raise _core.InvalidArgument(
                f"{name} divides the rows among {size} ranks, but an array has the shape {shape}; use a multiple of {size} rows"
            )
