"""PyTorch on ringtrain: a backend for `torch.distributed`, communication hooks for DistributedDataParallel, and Horovod's
functions.

Importing this module registers the backend::

    import torch.distributed as dist
    import ringtrain.torch

    dist.init_process_group("ring")

`ringtrain.torch.hooks` has communication hooks that compress gradients. To run a Horovod script, import this module
with `import ringtrain.torch as hvd`.
"""

try:
    import torch as _torch
except ImportError as _error:
    raise ImportError("ringtrain.torch needs PyTorch 2.8 or later, which is not installed here: pip install torch") from _error

if not _torch.distributed.is_available():
    raise ImportError("ringtrain.torch needs torch.distributed, but the installed PyTorch was built without it")

from ringtrain._horovod.job import is_initialized, join, local_rank, local_size, rank, shutdown, size
from ringtrain._horovod.objects import allgather_object, broadcast_object
from ringtrain._horovod.operations import Average, Max, Min, Product, Sum
from ringtrain._horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ringtrain.torch import backend as _backend
from ringtrain.torch import hooks
from ringtrain.torch.compression import Compression, Compressor
from ringtrain.torch.horovod import init
from ringtrain.torch.operations import (
    Handle,
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
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    metric_average,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from ringtrain.torch.optimizer import DistributedOptimizer
from ringtrain.torch.process_group import RingProcessGroup
from ringtrain.torch.state import broadcast_optimizer_state, broadcast_parameters

_backend.register()

__all__ = [
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "RingProcessGroup",
    "Sum",
    "add_process_set",
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
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
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
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "synchronize",
]
