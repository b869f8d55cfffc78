"""Horovod's functions that send parameters and optimizer states from one rank to all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ringtrain._horovod.objects import broadcast_object
from ringtrain._horovod.process_sets import ProcessSet, global_process_set, world
from ringtrain.torch import operations, tensors


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Copies the root's parameters to every rank. `params` is a `state_dict()` or `named_parameters()`. The ranks may have the
    parameters in different orders. Values that are not tensors are ignored. `params` can also be a list of parameters without
    names, in the same order on all ranks."""
    values = params.items() if isinstance(params, Mapping) else params
    named = [value if isinstance(value, tuple) else (None, value) for value in values]
    found = [(name, tensor) for name, tensor in named if isinstance(tensor, torch.Tensor)]
    handles = [operations.broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in found]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies the root's optimizer state and settings to every rank. The optimizers of other ranks may have no state yet. `model`
    has no effect.

    Raises ValueError for `torch.optim.LBFGS`, because its state contains objects that are not tensors.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    found: list[torch.Tensor] = []
    # Every rank keeps its own errors of the compression.
    shared = {name: part for name, part in optimizer.state_dict().items() if name != "compression"}
    layout = _without_tensors(shared, found)
    is_root = world().rank == root_rank
    layout = broadcast_object(layout, root_rank, process_set=process_set)
    if not is_root:
        found = []
        state = _with_tensors(layout, found)
    handles = [operations.broadcast_async_(tensor, root_rank, process_set=process_set) for tensor in found]
    for handle in handles:
        handle.wait()
    if not is_root:
        optimizer.load_state_dict(state)


class _TensorSlot:
    """A placeholder for a tensor in an optimizer's state."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _without_tensors(state: Any, found: list[torch.Tensor]) -> Any:
    """Returns `state` with a `_TensorSlot` in the place of each tensor. Appends the tensors to `found`."""
    if isinstance(state, torch.Tensor):
        found.append(tensors.readable_on_host(state.detach()))
        return _TensorSlot(state)
    if isinstance(state, dict):
        return {key: _without_tensors(value, found) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_without_tensors(value, found) for value in state)
    return state


def _with_tensors(layout: Any, made: list[torch.Tensor]) -> Any:
    """Returns `layout` with a new tensor in the place of each `_TensorSlot`. Appends the new tensors to `made`, in the order in
    which `_without_tensors` finds tensors."""
    if isinstance(layout, _TensorSlot):
        made.append(torch.empty(layout.shape, dtype=layout.dtype))
        return made[-1]
    if isinstance(layout, dict):
        return {key: _with_tensors(value, made) for key, value in layout.items()}
    if isinstance(layout, (list, tuple)):
        return type(layout)(_with_tensors(value, made) for value in layout)
    return layout
