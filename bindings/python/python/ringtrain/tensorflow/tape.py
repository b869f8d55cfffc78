"""Horovod's `DistributedGradientTape` and `DistributedOptimizer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain._horovod.compression import Compression, Compressor, find_wire
from ringtrain._horovod.local import LocalVariables, variables_of_layers
from ringtrain._horovod.operations import Average
from ringtrain._horovod.process_sets import ProcessSet, global_process_set
from ringtrain._horovod.reducer import BYTES, ArrayReducer, ReducerSettings
from ringtrain._horovod.variables import ArraySpec
from ringtrain.tensorflow import gradients as exchange

# The reducers of all tapes. In eager mode, a program makes a new tape in each step.
_reducers: dict[Any, ArrayReducer] = {}


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | str = Compression.none,
    sparse_as_dense: bool = False,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    bucket_bytes: int = BYTES,
) -> tf.GradientTape:
    """Returns a tape whose `gradient` averages the gradients over all ranks. All ranks must pass it the same sources in the same
    order. Inside `tf.function`, the reduction of a bucket begins while TensorFlow computes the gradients of earlier layers.

    The tape does not average the gradients of sources that were passed to its method `register_local_source`. With
    `scale_local_gradients`, these are divided by the number of ranks.

    `device_dense`, `device_sparse`, `num_groups` and `groups` have no effect. The other arguments are those of
    `ringtrain.keras.DistributedOptimizer`."""
    exchange.check_op(op, gradient_predivide_factor)
    settings = ReducerSettings(op, find_wire(compression), gradient_predivide_factor, bucket_bytes)
    members = {"ring_settings": settings, "ring_process_set": process_set, "ring_sparse_as_dense": sparse_as_dense}
    members["ring_local"] = LocalVariables(scale_local_gradients)
    subclass = type(type(gradtape).__name__, (_DistributedTape, type(gradtape)), members)
    tape = subclass.__new__(subclass)
    tape.__dict__.update(gradtape.__dict__)
    return tape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | str = Compression.none,
    sparse_as_dense: bool = False,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **options: Any,
) -> tf.GradientTape:
    """Returns a `DistributedGradientTape` that does not average the gradients of `local_layers`, which is a layer of Keras or a
    list of layers. `options` are options of `DistributedGradientTape`."""
    settings = {"compression": compression, "sparse_as_dense": sparse_as_dense, "op": op, "process_set": process_set, **options}
    tape = DistributedGradientTape(
        gradtape,
        gradient_predivide_factor=gradient_predivide_factor,
        scale_local_gradients=scale_local_gradients,
        **settings,
    )
    for variable in variables_of_layers(local_layers):
        tape.register_local_source(variable)
    return tape


class _DistributedTape:
    ring_settings: ReducerSettings
    ring_process_set: ProcessSet
    ring_sparse_as_dense: bool
    ring_local: LocalVariables

    def register_local_source(self, source: Any) -> None:
        """Declares that this rank keeps its own gradient of a source."""
        self.ring_local.add(source)

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **options: Any
    ) -> Any:
        """Returns the gradients, averaged over the ranks, in the structure of `sources`. `options` are options of
        `tf.GradientTape.gradient`. `use_generic_names` has no effect."""
        found = super().gradient(target, sources, output_gradients, **options)
        process_set = self.ring_process_set
        if process_set.included() is False or process_set.members().group.size == 1:
            return found

        def reduce(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
            return exchange.reduce_gradients(
                gradients, variables, self._find_reducer, self.ring_settings, process_set, self.ring_sparse_as_dense
            )

        size = process_set.members().group.size
        reduced = self.ring_local.reduce_others(tf.nest.flatten(found), tf.nest.flatten(sources), size, reduce)
        return tf.nest.pack_sequence_as(found, reduced)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Returns pairs of sources and gradients: first those of local sources, and then those that all ranks share."""
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients), strict=True))
        return [p for p in pairs if p[0] in self.ring_local], [p for p in pairs if p[0] not in self.ring_local]

    def _find_reducer(self, variables: Sequence[Any], types: Sequence[tf.DType]) -> ArrayReducer:
        members = self.ring_process_set.members()
        specs = tuple(
            ArraySpec(_name(variable, number), tuple(variable.shape), np.dtype(dtype.as_numpy_dtype))
            for number, (variable, dtype) in enumerate(zip(variables, types, strict=True))
        )
        key = (specs, self.ring_settings, self.ring_process_set.process_set_id)
        if key not in _reducers or _reducers[key].is_closed():
            _reducers[key] = ArrayReducer(members, specs, self.ring_settings)
        return _reducers[key]


def _name(source: Any, number: int) -> str:
    # In eager mode, a tensor has no name.
    return getattr(source, "path", None) or (source.name if hasattr(source, "assign") else f"source {number}")


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | str = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    **options: Any,
) -> Any:
    """Makes an optimizer of Keras 3 average gradients: see `ringtrain.keras.DistributedOptimizer`, which also explains the
    `options`. `use_locking` has no effect. Raises NotImplementedError for the optimizers of TensorFlow 1."""
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise NotImplementedError("DistributedOptimizer of tf.compat.v1.train.Optimizer is not implemented; use keras.optimizers")
    from ringtrain.keras import DistributedOptimizer as wrap

    return wrap(
        optimizer,
        name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        **options,
    )
