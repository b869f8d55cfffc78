"""Communication hooks for DistributedDataParallel that send gradients as float16 or bfloat16.

::

    ddp.register_comm_hook(None, ringtrain.torch.hooks.bf16_hook)                        # the default group
    ddp.register_comm_hook(hooks.Compression("bf16", error_feedback=True), hooks.compress_hook)

The sums of gradients are computed in float32, unlike with torch's `fp16_compress_hook`. Without error feedback, ranks
of one host that share memory exchange unrounded gradients.
"""

# DistributedDataParallel compares the annotations of hooks with types. Therefore this file must not import
# `annotations` from `__future__`, which would turn the annotations into strings.
import torch
import torch.distributed as dist

from ringtrain import _core
from ringtrain.torch.backend import ring_group

_WIRE_TYPES = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}


class Compression:
    """The state of `compress_hook`.

    `wire` is the format in which gradients are sent: "bf16", "fp16" or None (unchanged). With `error_feedback`, a
    rank adds the rounding errors of each step to its gradients of the next step (Seide et al., "1-bit Stochastic
    Gradient Descent", 2014). For each parameter, error feedback stores one float32. `process_group` is the process
    group of the DistributedDataParallel, or None for the default group. The backend of this process group must be
    "ring".
    """

    def __init__(
        self, wire: str | None = "bf16", error_feedback: bool = False, process_group: dist.ProcessGroup | None = None
    ) -> None:
        if wire not in _WIRE_TYPES:
            raise _core.InvalidArgument(f'wire is "fp16", "bf16" or None, not {wire!r}')
        self.wire = wire
        self.error_feedback = error_feedback
        self.process_group = process_group
        # The rounding errors of each bucket, by the bucket's index.
        self._residuals: dict[int, torch.Tensor] = {}

    def feed_back(self, index: int, gradients: torch.Tensor) -> None:
        """Adds the rounding errors of the previous step to a bucket's gradients, rounds the gradients, and stores the new
        errors."""
        if not self.error_feedback or self.wire is None:
            return
        residual = self._residuals.get(index)
        # DistributedDataParallel changes its buckets, and so the shapes of their gradients, after the first step.
        if residual is not None and residual.shape == gradients.shape:
            gradients.add_(residual)
        rounded = gradients.to(_WIRE_TYPES[self.wire]).to(gradients.dtype)
        # The rounding error of a gradient that is too large for float16 is infinite. Replace this error by 0, because it would
        # make all later residuals infinite too.
        self._residuals[index] = torch.nan_to_num_(gradients - rounded, nan=0.0, posinf=0.0, neginf=0.0)
        gradients.copy_(rounded)


def compress_hook(state: Compression, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients over the ranks and sends them in the format `state.wire`. Gradients of other types than
    float32 are sent unchanged."""
    gradients = bucket.buffer()
    wire = state.wire if gradients.dtype is torch.float32 else None
    if wire is not None:
        state.feed_back(bucket.index(), gradients)
    work = ring_group(state.process_group).all_reduce_compressed(gradients, dist.ReduceOp.AVG, wire)
    return work.overlapping_future().then(lambda future: future.value()[0])


def fp16_hook(process_group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients over `process_group` and sends them as float16. None means the default group."""
    return compress_hook(Compression("fp16", process_group=process_group), bucket)


def bf16_hook(process_group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients over `process_group` and sends them as bfloat16. None means the default group."""
    return compress_hook(Compression("bf16", process_group=process_group), bucket)
