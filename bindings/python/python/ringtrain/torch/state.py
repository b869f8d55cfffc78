"""Horovod's functions that send objects, parameters and optimizer states from one rank to all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ringtrain.torch import horovod, tensors


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Returns the root's object on every rank. Objects are sent as pickles. Only processes that know the job's secret
    can join the job and send pickles.
    """
    group = horovod.world()
    if group.rank == root_rank:
        group.broadcast_bytes(pickle.dumps(obj), root_rank)
        return obj
    return pickle.loads(group.broadcast_bytes(None, root_rank))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns every rank's object, in rank order."""
    return [pickle.loads(data) for data in horovod.world().all_gather_bytes(pickle.dumps(obj))]


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int) -> None:
    """Copies the root's parameters to every rank. `params` is a `state_dict()` or `named_parameters()`. The order of the
    parameters must be the same on all ranks. Values that are not tensors are ignored."""
    named = params.items() if isinstance(params, Mapping) else params
    found = [tensor for _, tensor in named if isinstance(tensor, torch.Tensor)]
    for handle in [horovod.broadcast_async_(tensor, root_rank) for tensor in found]:
        handle.wait()


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Copies the root's optimizer state and settings to every rank. The optimizers of other ranks may have no state yet.

    Raises ValueError for `torch.optim.LBFGS`, because its state contains objects that are not tensors.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    found: list[torch.Tensor] = []
    layout = _without_tensors(optimizer.state_dict(), found)
    is_root = horovod.rank() == root_rank
    layout = broadcast_object(layout, root_rank)
    if not is_root:
        found = []
        state = _with_tensors(layout, found)
    handles = [horovod.broadcast_async_(tensor, root_rank) for tensor in found]
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
