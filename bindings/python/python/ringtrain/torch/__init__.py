"""PyTorch on ringtrain: a backend for `torch.distributed`, communication hooks for DistributedDataParallel, and Horovod's
functions.

Importing this module registers the backend::

    import torch.distributed as dist
    import ringtrain.torch

    dist.init_process_group("ring")

`ringtrain.torch.hooks` has communication hooks that send gradients as 16-bit floats. To run a Horovod script, import this module
with `import ringtrain.torch as hvd`.
"""

try:
    import torch as _torch
except ImportError as _error:
    raise ImportError("ringtrain.torch needs PyTorch 2.8 or later, which is not installed here: pip install torch") from _error

if not _torch.distributed.is_available():
    raise ImportError("ringtrain.torch needs torch.distributed, but the installed PyTorch was built without it")

from ringtrain.torch import backend as _backend
from ringtrain.torch import hooks
from ringtrain.torch.compression import Compression, Compressor
from ringtrain.torch.horovod import (
    Average,
    Handle,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    init,
    is_initialized,
    join,
    local_rank,
    local_size,
    metric_average,
    poll,
    rank,
    reducescatter,
    shutdown,
    size,
    synchronize,
)
from ringtrain.torch.optimizer import DistributedOptimizer
from ringtrain.torch.process_group import RingProcessGroup
from ringtrain.torch.state import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters

_backend.register()

__all__ = [
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
    "Product",
    "RingProcessGroup",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "hooks",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metric_average",
    "poll",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
    "synchronize",
]
