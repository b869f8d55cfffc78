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

from ringtrain._versions import is_older as _is_older

if _is_older(_torch.__version__, (2, 8)):
    raise ImportError(f"ringtrain.torch needs PyTorch 2.8 or later, and not {_torch.__version__}; upgrade PyTorch")
if not _torch.distributed.is_available():
    raise ImportError("ringtrain.torch needs torch.distributed, but the installed PyTorch was built without it")

from ringtrain._core import Error as HorovodInternalError
from ringtrain._horovod import missing
from ringtrain._horovod.builds import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    start_timeline,
    stop_timeline,
)
from ringtrain._horovod.job import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from ringtrain._horovod.objects import allgather_object, broadcast_object
from ringtrain._horovod.operations import Average, Max, Min, Product, Sum
from ringtrain._horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ringtrain.torch import backend as _backend
from ringtrain.torch import hooks
from ringtrain.torch.compression import Compression, Compressor
from ringtrain.torch.grouped import (
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
)
from ringtrain.torch.horovod import init
from ringtrain.torch.operations import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    metric_average,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from ringtrain.torch.optimizer import DistributedOptimizer
from ringtrain.torch.process_group import RingProcessGroup
from ringtrain.torch.reduction import Handle
from ringtrain.torch.sparse import sparse_allreduce_async
from ringtrain.torch.state import broadcast_optimizer_state, broadcast_parameters

_backend.register()

__all__ = [
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
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
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
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
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metric_average",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def __getattr__(name: str) -> object:
    """Raises NotImplementedError for the parts of Horovod that do not exist here."""
    raise missing.find_missing("ringtrain.torch", name)
