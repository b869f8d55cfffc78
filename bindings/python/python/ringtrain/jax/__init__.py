"""JAX on ringtrain: collectives on arrays and pytrees, inside and outside `jax.jit`, and averaged gradients for optax.

>>> import jax.numpy as jnp
>>> import ringtrain.jax as rj
>>> world = rj.init()  # one of N ranks under `ringrun -n N python ...`, otherwise the only rank of its job
>>> float(rj.all_reduce(jnp.float32(1.0))) == rj.size()
True

Each rank is a process of its own, with its own JAX runtime: a jitted function has no mesh and no other devices. `distribute`
wraps an optimizer of optax, `shard` selects this rank's rows, and `broadcast_parameters` gives all ranks the same start.
"""

try:
    import jax as _jax
except ImportError as _error:
    raise ImportError("ringtrain.jax needs JAX 0.7.2 or later, which is not installed here: pip install jax") from _error

from ringtrain._versions import is_older as _is_older

# With 0.7.0 and 0.7.1, XLA aborts while it compiles some functions with operations. Older versions do not have all functions of
# JAX that this package calls.
if _is_older(_jax.__version__, (0, 7, 2)):
    raise ImportError(f"ringtrain.jax needs JAX 0.7.2 or later, and not {_jax.__version__}; upgrade JAX")

from ringtrain._horovod.compression import Compression
from ringtrain.jax.execution import CompressionState
from ringtrain.jax.job import (
    init,
    is_initialized,
    job_errors,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from ringtrain.jax.operations import all_gather, all_reduce, all_to_all, barrier, broadcast, reduce_scatter
from ringtrain.jax.optimizer import distribute
from ringtrain.jax.parameters import broadcast_parameters, shard

__all__ = [
    "Compression",
    "CompressionState",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_parameters",
    "distribute",
    "init",
    "is_initialized",
    "job_errors",
    "local_rank",
    "local_size",
    "rank",
    "reduce_scatter",
    "shard",
    "shutdown",
    "size",
]
