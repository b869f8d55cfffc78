"""The names of Horovod that do not exist here."""

from __future__ import annotations

_SESSIONS = "it is for TensorFlow 1"
_ELASTIC = "start the job again from a checkpoint"

NOT_IMPLEMENTED = {
    "Adasum": "use Average",
    "BroadcastGlobalVariablesHook": f"{_SESSIONS}; use broadcast_variables",
    "DistributedAdasumOptimizer": "use DistributedOptimizer",
    "LocalGradientAggregationHelper": "use the argument backward_passes_per_step of DistributedOptimizer",
    "SyncBatchNorm": "use torch.nn.BatchNorm2d or a similar layer, whose statistics are those of one rank",
    "SyncBatchNormalization": "use keras.layers.BatchNormalization, whose statistics are those of one rank",
    "broadcast_object_fn": f"{_SESSIONS}; use broadcast_object",
    "elastic": _ELASTIC,
    "mpi_ops": "use the functions of this module",
}
"""For each name, what to do instead."""


def find_missing(module: str, name: str) -> AttributeError | NotImplementedError:
    """Returns the error for a name that a module does not have."""
    if name in NOT_IMPLEMENTED:
        return NotImplementedError(f"{module}.{name} is not implemented; {NOT_IMPLEMENTED[name]}")
    return AttributeError(f"module {module!r} has no attribute {name!r}")
