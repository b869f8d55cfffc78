"""Horovod's interface for TensorFlow 2.16 and later: `import ringtrain.tensorflow as hvd`.

    hvd.init()
    with tf.GradientTape() as tape:
        loss = ...
    tape = hvd.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

No operation is compiled: inside `tf.function`, `tf.numpy_function` calls the library. `docs/tensorflow.md` has a table of the
functions. `ringtrain.tensorflow.keras` is `ringtrain.keras`.
"""

try:
    import tensorflow as _tf
except ImportError as _error:
    raise ImportError(
        f"ringtrain.tensorflow needs TensorFlow 2.16 or later; importing TensorFlow failed with: {_error}; to install it: "
        "pip install tensorflow"
    ) from _error

from ringtrain._versions import is_older as _is_older

if _is_older(_tf.__version__, (2, 16)):
    raise ImportError(f"ringtrain.tensorflow needs TensorFlow 2.16 or later, and not {_tf.__version__}; upgrade TensorFlow")

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
from ringtrain._horovod.compression import Compression, Compressor
from ringtrain._horovod.job import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from ringtrain._horovod.operations import Average, Max, Min, Product, Sum
from ringtrain._horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ringtrain.tensorflow.operations import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from ringtrain.tensorflow.state import (
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
)
from ringtrain.tensorflow.tape import DistributedGradientTape, DistributedOptimizer, PartialDistributedGradientTape

__all__ = [
    "Average",
    "Compression",
    "Compressor",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> object:
    """Raises NotImplementedError for the parts of Horovod that do not exist here."""
    raise missing.find_missing("ringtrain.tensorflow", name)
