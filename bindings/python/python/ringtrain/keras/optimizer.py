"""Horovod's `DistributedOptimizer` for Keras: averages gradients over the ranks before it applies them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from ringtrain._horovod.compression import Compression, Compressor, find_wire
from ringtrain._horovod.local import variables_of_layers
from ringtrain._horovod.operations import Average, Sum
from ringtrain._horovod.process_sets import ProcessSet, global_process_set
from ringtrain._horovod.reducer import BYTES, ReducerSettings
from ringtrain.keras.exchange import ExchangeSettings, GradientExchange

Optimizer = keras.optimizers.Optimizer
LossScaleOptimizer = keras.optimizers.LossScaleOptimizer


def DistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | str = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: str = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    bucket_bytes: int = BYTES,
) -> Optimizer:
    """Makes `optimizer` average the gradients over all ranks before it applies them, and returns the same object. It saves its
    configuration and state as the plain optimizer does, so that a saved model loads without ringtrain. `load_model` restores a
    model whose optimizer averages gradients.

    All ranks must train the same variables in the same order. Gradients are reduced in buckets of about `bucket_bytes` bytes.

    With `backward_passes_per_step`, the optimizer gets the setting `gradient_accumulation_steps` of Keras: it accumulates the
    gradients of this number of batches, and the ranks exchange the result. As in Horovod, the result is the sum over the batches,
    or with `average_aggregated_gradients` the average.

    With `Average`, each gradient is divided by `gradient_predivide_factor` before the sum, and multiplied by it afterwards.
    `compression` is an attribute of `Compression` or a name such as "topk:0.001". With the back end TensorFlow, sparse gradients
    are gathered, or with `sparse_as_dense` converted to dense ones. With `process_set`, only the ranks of this set average their
    gradients. `device_dense`, `device_sparse`, `num_groups` and `groups` have no effect.

    The optimizer does not average the gradients of variables that were passed to its method `register_local_var` before it is
    used. With `scale_local_gradients`, these are divided by the number of ranks.

    If the policy of Keras is "mixed_float16", and `optimizer` has no loss scaling, wraps it in a `LossScaleOptimizer` first. A
    `LossScaleOptimizer` must be inside: all ranks must skip the same steps.
    """
    if isinstance(optimizer, _DistributedMixin):
        raise ValueError("the optimizer is already a DistributedOptimizer")
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"DistributedOptimizer needs an optimizer of Keras 3, and not {optimizer!r}")
    if op not in (Average, Sum):
        raise NotImplementedError(f"DistributedOptimizer supports Average and Sum, not {op!r}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(optimizer, LossScaleOptimizer):
        optimizer = LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    if name is not None:
        optimizer.name = name
    has_loss_scale = isinstance(optimizer, LossScaleOptimizer)
    inner = optimizer.inner_optimizer if has_loss_scale else optimizer
    if backward_passes_per_step > 1:
        _set_passes(inner, backward_passes_per_step)
    factor = 1.0 if average_aggregated_gradients else float(max(backward_passes_per_step, 1))
    reducer = ReducerSettings(op, find_wire(compression), gradient_predivide_factor, bucket_bytes, skips_overflows=has_loss_scale)
    exchange = GradientExchange(ExchangeSettings(reducer, process_set, sparse_as_dense, factor, scale_local_gradients))
    return _make_distributed(optimizer, exchange)


def PartialDistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | str = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: str = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **options: Any,
) -> Optimizer:
    """Makes a `DistributedOptimizer` that does not average the gradients of `local_layers`: a layer of Keras or a list of
    layers. `options` are options of `DistributedOptimizer`."""
    variables = variables_of_layers(local_layers)
    optimizer = DistributedOptimizer(
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
    for variable in variables:
        optimizer.register_local_var(variable)
    return optimizer


def exchange_of(optimizer: Any) -> GradientExchange | None:
    """Returns the exchange of a DistributedOptimizer, or None for another optimizer."""
    return optimizer.ring_exchange if isinstance(optimizer, _DistributedMixin) else None


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type[Optimizer]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] | str = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Loads a model with `keras.models.load_model`, and makes its optimizer a DistributedOptimizer. `options` are options of
    `DistributedOptimizer`. `legacy_opts` has no effect."""
    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression, **options)
    return model


def _set_passes(optimizer: Optimizer, passes: int) -> None:
    if optimizer.gradient_accumulation_steps not in (None, passes):
        raise ValueError(
            f"backward_passes_per_step is {passes}, and gradient_accumulation_steps of the optimizer is "
            f"{optimizer.gradient_accumulation_steps}; set only one of them"
        )
    if optimizer.built and optimizer.gradient_accumulation_steps != passes:
        raise ValueError("backward_passes_per_step needs an optimizer that has not been built yet")
    optimizer.gradient_accumulation_steps = passes


def _make_distributed(optimizer: Optimizer, exchange: GradientExchange) -> Optimizer:
    """Changes the class of an optimizer to a subclass that exchanges gradients. The subclass belongs to this optimizer only, and
    holds the exchange, because Keras tracks and saves attributes of the object."""
    plain = type(optimizer)
    # The class under which Keras saves the optimizer. On PyTorch, Keras replaces its optimizers by subclasses.
    public = next((cls for cls in plain.__mro__ if cls.__module__.startswith("keras.src.optimizers.")), plain)
    saved_as = public if plain.__module__.startswith("keras.") else plain
    mixin = _DistributedLossScale if isinstance(optimizer, LossScaleOptimizer) else _DistributedPlain
    members = {"ring_exchange": exchange, "ring_saved_as": saved_as, "__doc__": plain.__doc__, "__module__": plain.__module__}
    object.__setattr__(optimizer, "__class__", type(plain.__name__, (mixin, plain), members))
    return optimizer


class _DistributedMixin:
    """The attributes of every DistributedOptimizer."""

    ring_exchange: GradientExchange
    ring_saved_as: type

    @property
    def __class__(self) -> type:
        """The class of the plain optimizer: Keras saves the optimizer under its name."""
        return self.ring_saved_as

    def register_local_var(self, var: Any) -> None:
        """Declares that this rank keeps its own gradient of a variable."""
        self.ring_exchange.local.add(var)

    def __reduce__(self) -> Any:
        raise TypeError("a DistributedOptimizer cannot be pickled or copied; save the model instead")


class _DistributedPlain(_DistributedMixin):
    """Exchanges gradients before an optimizer clips and applies them."""

    ring_applied: Sequence[Any] = ()

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        grads = list(grads)
        if grads and not self.gradient_accumulation_steps:
            variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
            grads = self.ring_exchange.reduce(grads, variables)
        super().apply(grads, trainable_variables)

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        object.__setattr__(self, "ring_applied", tuple(trainable_variables))
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Keras clips the accumulated gradients, before the optimizer uses them."""
        if self.gradient_accumulation_steps:
            grads = self._exchange_accumulated(list(grads))
        return super()._clip_gradients(grads)

    def _exchange_accumulated(self, grads: list[Any]) -> list[Any]:
        variables = self.ring_applied
        if keras.backend.backend() != "jax":
            return self.ring_exchange.reduce(grads, variables)
        # On JAX, Keras clips gradients in every step, and ignores the result unless this step updates the variables.
        import jax

        is_update_step = (self._iterations + 1) % self.gradient_accumulation_steps == 0
        return jax.lax.cond(is_update_step, lambda: self.ring_exchange.reduce(grads, variables), lambda: grads)

    def __setattr__(self, name: str, value: Any) -> None:
        # The constructor of LossScaleOptimizer sets this attribute of its inner optimizer to None.
        if name == "loss_scale_factor" and value is None:
            raise ValueError(
                "a LossScaleOptimizer around a DistributedOptimizer would let each rank skip other steps; use "
                "DistributedOptimizer(LossScaleOptimizer(optimizer)), or set the policy of Keras before you make the optimizer"
            )
        super().__setattr__(name, value)


class _DistributedLossScale(_DistributedMixin):
    """Exchanges gradients before a `LossScaleOptimizer` looks for values that are not finite, so that all ranks skip the same
    steps."""

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        super().apply(self.ring_exchange.reduce(list(grads), variables), trainable_variables)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        reduced = self.ring_exchange.reduce(list(grads), self._trainable_variables)
        return super().stateless_apply(optimizer_variables, reduced, trainable_variables)
