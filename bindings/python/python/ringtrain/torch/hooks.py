"""Communication hooks for DistributedDataParallel: gradients as float16 or bfloat16 on the wire.

::

    ddp.register_comm_hook(None, ringtrain.torch.hooks.bf16_hook)                        # the world, no memory
    ddp.register_comm_hook(hooks.Compression("bf16", error_feedback=True), hooks.compress_hook)

Unlike torch's `fp16_compress_hook`, which also adds in float16, gradients are float32 at both ends, and on one host, where ranks
share memory, nothing is rounded on the way.
"""

# DistributedDataParallel compares the annotations of hooks with types, so they are not to be postponed here.
import torch
import torch.distributed as dist

from ringtrain import _core
from ringtrain.torch.backend import ring_group

_WIRE_TYPES = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}


class Compression:
    """The state of `compress_hook`.

    `wire` is "bf16", "fp16" or None. With `error_feedback` a rank keeps what rounding took from its gradients and adds it to the
    next ones (Seide et al., "1-bit Stochastic Gradient Descent", 2014), at the cost of one float32 for each parameter.
    `process_group` is the one that DistributedDataParallel was given, and has the backend "ring".
    """

    def __init__(
        self, wire: str | None = "bf16", error_feedback: bool = False, process_group: dist.ProcessGroup | None = None
    ) -> None:
        if wire not in _WIRE_TYPES:
            raise _core.InvalidArgument(f'wire is "fp16", "bf16" or None, not {wire!r}')
        self.wire = wire
        self.error_feedback = error_feedback
        self.process_group = process_group
        # By the bucket's place; DistributedDataParallel lays its buckets out anew after the first step.
        self._residuals: dict[int, torch.Tensor] = {}

    def feed_back(self, index: int, gradients: torch.Tensor) -> None:
        """Adds what is left of earlier steps to the gradients of a bucket, and keeps what rounding them to the wire's type
        leaves."""
        if not self.error_feedback or self.wire is None:
            return
        residual = self._residuals.get(index)
        if residual is not None and residual.shape == gradients.shape:
            gradients.add_(residual)
        rounded = gradients.to(_WIRE_TYPES[self.wire]).to(gradients.dtype)
        # A gradient too large for float16 leaves no residual: infinity would stay for ever.
        self._residuals[index] = torch.nan_to_num_(gradients - rounded, nan=0.0, posinf=0.0, neginf=0.0)
        gradients.copy_(rounded)


def compress_hook(state: Compression, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients over the ranks as `state` says. Other types than float32 go as they are."""
    gradients = bucket.buffer()
    wire = state.wire if gradients.dtype is torch.float32 else None
    if wire is not None:
        state.feed_back(bucket.index(), gradients)
    work = ring_group(state.process_group).all_reduce_compressed(gradients, dist.ReduceOp.AVG, wire)
    return work.overlapping_future().then(lambda future: future.value()[0])


def fp16_hook(process_group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients, as float16 on the wire. The state is the process group, or None for the world."""
    return compress_hook(Compression("fp16", process_group=process_group), bucket)


def bf16_hook(process_group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients, as bfloat16 on the wire. The state is the process group, or None for the world."""
    return compress_hook(Compression("bf16", process_group=process_group), bucket)
