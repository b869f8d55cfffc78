"""Horovod's `DistributedOptimizer`: averages gradients over the ranks during the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ringtrain.torch import buckets, horovod
from ringtrain.torch.compression import Compression, Compressor

Parameter = torch.nn.Parameter


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    *,
    bucket_bytes: int = buckets.BYTES,
) -> torch.optim.Optimizer:
    """Wraps `optimizer` in one that averages gradients over all ranks before each step. The result has the class, the state and
    the settings of `optimizer`.

    This is a collective call: all ranks make it with the same parameters in the same order. Gradients are reduced in buckets of
    about `bucket_bytes`. A bucket's reduction starts when its gradients are ready, in the same order on all ranks, so that
    communication overlaps with the backward pass. After a step `p.grad` is a view into the group's memory, and the next backward
    pass overwrites it.

    If a parameter has no gradient on some ranks, it counts as zero there; if it has none on any rank, its `grad` stays None.
    `backward_passes_per_step` gradients are accumulated before they are reduced. With `Average`, gradients are divided by
    `gradient_predivide_factor` before the sum, and by the number of ranks over that factor after it. `num_groups` and `groups`,
    with which Horovod fuses gradients, are accepted and have no effect. Raises ValueError where Horovod does, and
    NotImplementedError for reductions other than Average and Sum and for process sets.
    """
    _check(optimizer, op, gradient_predivide_factor, process_set)
    # In the order of the optimizer's parameters. The names serve only Horovod's checks and errors.
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    names = _names(optimizer, named_parameters)
    # A subclass of the wrapped optimizer's class: schedulers and scripts check with isinstance.
    made = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    wrapped = made.__new__(made)
    # A scheduler made earlier has patched the old optimizer's `step`, which is then in its `__dict__`.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    scale = gradient_predivide_factor if op == horovod.Average else 1.0
    settings = buckets.Settings(op, compression, scale, backward_passes_per_step, sparse_as_dense, bucket_bytes)
    wrapped._reducer = buckets.Reducer(horovod.world().duplicate(), parameters, names, settings)
    wrapped._should_synchronize = True
    return wrapped


class _Distributed:
    """The methods that differ from the wrapped optimizer's."""

    _reducer: buckets.Reducer
    _should_synchronize: bool

    def synchronize(self) -> None:
        """Waits until all gradients are averaged. Call it to clip gradients, for example, and then call `step` within
        `skip_synchronize()`."""
        self._reducer.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step` does not call `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages gradients and takes a step of the wrapped optimizer."""
        if not self._should_synchronize:
            return super().step(closure)
        if closure is None:
            self._reducer.synchronize()
            return super().step()

        def averaged() -> Any:
            loss = closure()
            self._reducer.synchronize()
            return loss

        return super().step(averaged)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls the wrapped optimizer's `zero_grad`. Raises AssertionError while gradients are being averaged."""
        if self._reducer.is_under_way():
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(); "
                "gradients are being averaged"
            )
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets how many gradients are accumulated before they are averaged."""
        self._reducer.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises NotImplementedError. Add parameters before you make the DistributedOptimizer."""
        raise NotImplementedError("add_param_group is not implemented on a DistributedOptimizer; add parameters before making it")


def _check(optimizer: torch.optim.Optimizer, op: str, predivide: float, process_set: Any) -> None:
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is already a DistributedOptimizer")
    if op not in (horovod.Average, horovod.Sum):
        raise NotImplementedError(f"DistributedOptimizer supports Average and Sum, not {op!r}")
    if predivide != 1.0 and op != horovod.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if process_set is not None:
        raise NotImplementedError("process sets are not implemented; use torch.distributed.new_group and DistributedDataParallel")


def _names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Parameter]] | None) -> dict[Parameter, str]:
    """A name for each parameter. Raises ValueError as Horovod does."""
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    if named is None:
        return {p: f"parameter {index}" for index, p in enumerate(everything)}
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()"
        )
    seen: set[str] = set()
    doubles = {name for name, _ in pairs if name in seen or seen.add(name)}
    if doubles:
        raise ValueError(f"parameter names in named_parameters must be unique; found duplicates: {', '.join(sorted(doubles))}")
    names = {p: name for name, p in pairs}
    unnamed = sum(p not in names for p in everything)
    if unnamed:
        raise ValueError(f"named_parameters was specified, but {unnamed} of the optimizer's parameters were not named")
    return names
