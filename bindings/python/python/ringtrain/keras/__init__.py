"""Horovod's interface for Keras 3, on its back ends JAX, PyTorch and TensorFlow: `import ringtrain.keras as hvd`.

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
    x, y = hvd.shard((x, y))
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])

Set the back end with KERAS_BACKEND, as usual. `docs/keras.md` has a table of the functions.
"""

try:
    import keras as _keras
except ImportError as _error:
    raise ImportError(
        "ringtrain.keras needs Keras 3, and JAX, PyTorch or TensorFlow as its back end; importing Keras failed with: "
        f"{_error}; to install it: pip install keras jax"
    ) from _error

from ringtrain._versions import is_older as _is_older

if _is_older(_keras.__version__, (3, 0, 5)):
    raise ImportError(f"ringtrain.keras needs Keras 3.0.5 or later, and not {_keras.__version__}; upgrade Keras")
if _keras.backend.backend() not in ("jax", "torch", "tensorflow"):
    raise ImportError(
        f'ringtrain.keras works with the back ends "jax", "torch" and "tensorflow", and not with "{_keras.backend.backend()}"; '
        "set KERAS_BACKEND"
    )

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
from ringtrain.keras import callbacks
from ringtrain.keras.data import shard
from ringtrain.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from ringtrain.keras.values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)

__all__ = [
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shard",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> object:
    """Raises NotImplementedError for the parts of Horovod that do not exist here."""
    raise missing.find_missing("ringtrain.keras", name)
