"""Horovod's `DistributedOptimizer`: averages gradients over the ranks during the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ringtrain._horovod.operations import Average, Sum
from ringtrain._horovod.process_sets import ProcessSet, global_process_set
from ringtrain.torch import buckets
from ringtrain.torch.compression import Compression, Compressor, find_compression

Parameter = torch.nn.Parameter


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: type[Compressor] | str = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    bucket_bytes: int = buckets.BYTES,
) -> torch.optim.Optimizer:
    """Returns an optimizer that averages gradients over all ranks before each step. The returned optimizer has the class, the
    state and the settings of `optimizer`.

    All ranks must call this function with the same parameters in the same order. Gradients are reduced in buckets of about
    `bucket_bytes` bytes. The reduction of a bucket starts when its gradients are ready, so communication overlaps with
    the backward pass. All ranks reduce the buckets in the same order. After a step, the `grad` of a parameter is a view into the
    group's memory, and the next backward pass overwrites this view.

    A rank on which a parameter has no gradient contributes zeros for this parameter. If a parameter has a gradient on
    none of the ranks, the `grad` of this parameter stays None. Each rank accumulates the gradients of
    `backward_passes_per_step` backward passes, and the ranks then reduce the accumulated gradients. With `Average`,
    each gradient is divided by `gradient_predivide_factor` before the sum. After the sum, the result is multiplied by
    `gradient_predivide_factor` and divided by the number of ranks. With `sparse_as_dense`, sparse gradients are
    converted to dense ones. Without `sparse_as_dense`, sparse gradients raise `ringtrain.InvalidArgument`.
    `num_groups` and `groups` have no effect. (They tell Horovod to fuse gradients.)

    `compression` is an attribute of `Compression`, or a name with a parameter, such as "topk:0.001". Codecs that round a lot keep
    what a rank could not send, and add it to the gradients of the next step. The optimizer's `state_dict` has these errors under
    the key "compression". Every rank has its own errors, so every rank must save its own state for an exact continuation;
    `load_state_dict` ignores the errors of another rank, and all errors of "ef21". Without such a compression, the format of
    `state_dict` does not change.

    With `process_set`, only the ranks of this set average their gradients. On other ranks, the optimizer averages nothing.

    Raises ValueError in the same cases as Horovod. Raises NotImplementedError if `op` is neither Average nor Sum.
    """
    _check_arguments(optimizer, op, gradient_predivide_factor)
    # The buckets use the order of the optimizer's parameters. The names are only for Horovod's checks and for error messages.
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    names = _parameter_names(optimizer, named_parameters)
    # The class is a subclass of the wrapped optimizer's class, because schedulers and scripts check it with isinstance.
    subclass = type(type(optimizer).__name__, (_DistributedOptimizerMixin, type(optimizer)), {})
    wrapped = subclass.__new__(subclass)
    # If a scheduler has patched the wrapped optimizer's `step`, then `step` is in its `__dict__`. Do not copy that method.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    scale = gradient_predivide_factor if op == Average else 1.0
    settings = buckets.ReducerSettings(
        op, find_compression(compression), scale, backward_passes_per_step, sparse_as_dense, bucket_bytes
    )
    if process_set.included() is False:
        wrapped._reducer = buckets.NoReducer()
    else:
        group = process_set.members().group.duplicate()
        wrapped._reducer = buckets.GradientReducer(group, parameters, names, settings)
    wrapped._should_synchronize = True
    return wrapped


class _DistributedOptimizerMixin:
    """The methods of a DistributedOptimizer that differ from those of the wrapped optimizer."""

    _reducer: buckets.GradientReducer | buckets.NoReducer
    _should_synchronize: bool

    def synchronize(self) -> None:
        """Waits until all gradients are averaged. If you want to change the averaged gradients, for example to clip them, call
        `synchronize`, change the gradients, and then call `step` within `skip_synchronize()`."""
        self._reducer.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Returns a context manager in which `step` does not call `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages the gradients, and then calls the wrapped optimizer's `step`."""
        if not self._should_synchronize:
            return super().step(closure)
        if closure is None:
            self._reducer.synchronize()
            return super().step()

        def closure_then_average() -> Any:
            loss = closure()
            self._reducer.synchronize()
            return loss

        return super().step(closure_then_average)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls the wrapped optimizer's `zero_grad`. Raises AssertionError while gradients are being averaged."""
        if self._reducer.is_reducing():
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(); "
                "gradients are being averaged"
            )
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state, and under the key "compression" what the compression remembers, if anything."""
        state, memory = super().state_dict(), self._reducer.memory()
        return state if memory is None else {**state, "compression": memory}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a result of `state_dict`."""
        super().load_state_dict(state_dict)
        if "compression" in state_dict:
            self._reducer.load_memory(state_dict["compression"])

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes whose gradients each rank accumulates before the ranks reduce them."""
        self._reducer.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Always raises NotImplementedError: add parameters before you make the DistributedOptimizer."""
        raise NotImplementedError("add_param_group is not implemented on a DistributedOptimizer; add parameters before making it")


def _check_arguments(optimizer: torch.optim.Optimizer, op: str, predivide: float) -> None:
    if isinstance(optimizer, _DistributedOptimizerMixin):
        raise ValueError("the optimizer is already a DistributedOptimizer")
    if op not in (Average, Sum):
        raise NotImplementedError(f"DistributedOptimizer supports Average and Sum, not {op!r}")
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")


def _parameter_names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Parameter]] | None) -> dict[Parameter, str]:
    """Returns a name for each parameter. Raises ValueError in the same cases as Horovod."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if named is None:
        return {p: f"parameter {index}" for index, p in enumerate(parameters)}
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()"
        )
    seen: set[str] = set()
    duplicates = {name for name, _ in pairs if name in seen or seen.add(name)}
    if duplicates:
        raise ValueError(f"parameter names in named_parameters must be unique; found duplicates: {', '.join(sorted(duplicates))}")
    names = {p: name for name, p in pairs}
    unnamed = sum(p not in names for p in parameters)
    if unnamed:
        raise ValueError(f"named_parameters was specified, but {unnamed} of the optimizer's parameters were not named")
    return names
