"""Checks whether the compiled module can send and reduce elements of a type."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from ringtrain import _core, arrays


def require_whole_bytes(dtype: np.dtype) -> None:
    """Raises `ringtrain.Unsupported` for types whose elements JAX packs, such as int4, and for keys of random numbers."""
    if jnp.issubdtype(dtype, jnp.bool_) or jnp.issubdtype(dtype, jnp.complexfloating):
        return
    if not jnp.issubdtype(dtype, jnp.number):
        raise _core.Unsupported(f"arrays of {dtype} cannot be sent; pass keys of random numbers as jax.random.key_data(key)")
    if (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits < 8:
        raise _core.Unsupported(f"arrays of {dtype} cannot be sent; convert them to a type of at least 8 bits")


@functools.lru_cache(maxsize=1024)
def require_reduction(dtype: np.dtype, op: str) -> None:
    """Raises `ringtrain.Unsupported` if the reduction `op` is not defined on the type, and `ringtrain.InvalidArgument` if there
    is no such reduction."""
    require_whole_bytes(dtype)
    one = np.ones(1, np.float32 if dtype == jnp.bfloat16 else dtype)
    group = _core.solo()
    group.all_reduce(arrays.as_reducible(one, op), op)
    group.close()
