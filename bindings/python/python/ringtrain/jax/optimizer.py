"""Reduces gradients over the ranks before an optimizer of optax uses them."""

from __future__ import annotations

from typing import Any

from ringtrain._versions import is_older
from ringtrain.jax.execution import BUCKET_BYTES, Compression, compression_state
from ringtrain.jax.operations import all_reduce, reduction_name


def distribute(inner: Any, op: str = "average", *, compression: Compression = None, bucket_bytes: int = BUCKET_BYTES) -> Any:
    """Returns a gradient transformation that reduces the gradients over all ranks, and then calls `inner`, a transformation of
    optax:

        optimizer = ringtrain.jax.distribute(optax.adam(1e-3))

    All ranks get the same gradients. If they start with the same parameters (`broadcast_parameters`), the parameters stay the
    same. `op` is "average", "sum" or another reduction. Gradients of the same type share buckets of at most `bucket_bytes`
    bytes, so a step needs one operation for each type, not one for each array.

    With `compression`, for example "int8", gradients of the type float32 are compressed between hosts. Codecs that round a lot
    add what they could not send to the gradients of the next step. To save these errors in checkpoints, pass a
    `CompressionState`.
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError("ringtrain.jax.distribute needs optax, which is not installed here: pip install optax") from error
    if is_older(optax.__version__, (0, 2, 4)):
        raise ImportError(f"ringtrain.jax.distribute needs optax 0.2.4 or later, and not {optax.__version__}; upgrade optax")
    inner = optax.with_extra_args_support(inner)
    state = compression_state(compression)
    name = reduction_name(op)

    def update(updates: Any, inner_state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        reduced = all_reduce(updates, name, compression=state, bucket_bytes=bucket_bytes)
        return inner.update(reduced, inner_state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)
