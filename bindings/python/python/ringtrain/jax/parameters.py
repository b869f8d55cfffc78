"""Gives all ranks the same parameters, and each rank its part of the data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringtrain import _core
from ringtrain._text import counted
from ringtrain.group import Group
from ringtrain.jax import job
from ringtrain.jax.operations import Tree, broadcast


def broadcast_parameters(params: Tree, root: int = 0) -> Tree:
    """Returns the root's parameters on every rank. `params` is a pytree, for example the parameters of a model or the state of an
    optimizer. Call this function outside jitted functions.

    Raises `ringtrain.Mismatch` on every rank if the ranks do not have the same tree structure, shapes and types. The error
    names the first leaf that differs. The job goes on.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    if any(isinstance(leaf, jax.core.Tracer) for _, leaf in paths):
        raise _core.InvalidArgument("broadcast_parameters compares the ranks' trees; call it outside jitted functions")
    arrays = [jnp.asarray(leaf) for _, leaf in paths]
    own = [(jax.tree_util.keystr(path), f"{a.dtype}{list(a.shape)}") for (path, _), a in zip(paths, arrays, strict=True)]
    job.wait_for_operations()
    _require_same(Group(job.current_group()).all_gather_object(own))
    return _with_key_data(params, lambda tree: broadcast(tree, root))


def _require_same(trees: list[list[tuple[str, str]]]) -> None:
    """Raises `ringtrain.Mismatch` if the leaves of two ranks differ. `trees` has the path and the type of each leaf of each
    rank."""
    first = dict(trees[0])
    for rank, tree in enumerate(trees):
        other = dict(tree)
        for path in (*first, *other):
            types = first.get(path), other.get(path)
            if types[0] != types[1]:
                has = [f"has {kind}" if kind is not None else "has no such leaf" for kind in types]
                error = _core.Mismatch(
                    f"the ranks have different parameters: at params{path}, rank 0 {has[0]}, and rank {rank} {has[1]}"
                )
                error.ranks = (0, rank)
                raise error


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)


def _with_key_data(tree: Tree, change: Any) -> Tree:
    """Calls `change` with the tree, in which keys of random numbers are replaced by their data."""
    changed = change(jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, tree))
    return jax.tree.map(
        lambda leaf, new: jax.random.wrap_key_data(new, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else new, tree, changed
    )


def shard(tree: Tree, *, remainder: str = "error") -> Tree:
    """Returns this rank's rows of an array, or of each array of a pytree. With n ranks, the rows are divided into n parts of
    the same length, in order: rank r gets the r-th part. All arrays must have the same number of rows.

    If the rows cannot be divided equally, `remainder` says what to do: "error" raises `ringtrain.InvalidArgument`, "drop"
    leaves out the last rows, and "repeat" appends rows from the beginning. All ranks get equally many rows, so they take
    equally many steps.
    """
    if remainder not in ("error", "drop", "repeat"):
        raise _core.InvalidArgument(f"remainder is {remainder!r}; it must be 'error', 'drop' or 'repeat'")
    size, rank = job.size(), job.rank()
    counts = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(tree)}
    if len(counts) > 1 or () in counts:
        raise _core.InvalidArgument(f"shard needs arrays with the same number of rows; the first dimensions are {sorted(counts)}")
    if not counts:
        return tree
    ((count,),) = counts
    if count % size and remainder == "error":
        raise _core.InvalidArgument(
            f"{counted(count, 'row')} cannot be divided into {size} equal parts; pass remainder='drop' or remainder='repeat'"
        )
    if remainder == "repeat" and not count:
        return tree
    length = -(-count // size) if remainder == "repeat" else count // size
    rows = slice(rank * length, (rank + 1) * length)
    if rows.stop <= count:
        return jax.tree.map(lambda leaf: leaf[rows], tree)
    wrapped = np.arange(rows.start, rows.stop) % count
    return jax.tree.map(lambda leaf: leaf[wrapped], tree)
