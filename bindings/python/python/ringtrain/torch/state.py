"""Horovod's functions that send objects, parameters and optimizer states from one rank to all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ringtrain.torch import gathering, operations, tensors
from ringtrain.torch.process_sets import ProcessSet, global_process_set, world


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns the root's object on every rank. Objects are sent as pickles. Only processes that know the job's secret
    can join the job and send pickles.
    """
    members = process_set.members()
    is_root = members.rank_in_group(root_rank) == members.group.rank
    # Only the root contributes bytes to this all-gather.
    data = pickle.dumps(obj) if is_root else b""
    gathered = members.named.all_gather_bytes(members.tensor_name("broadcast_object", name), data).wait()
    return obj if is_root else pickle.loads(gathered)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns every rank's object, in rank order."""
    members = process_set.members()
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    handle = gathering.gather_parts(members, members.tensor_name("allgather_object", name), "", data)
    return [pickle.loads(part.numpy().tobytes()) for _, part in gathering.split_parts(handle.wait())]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Copies the root's parameters to every rank. `params` is a `state_dict()` or `named_parameters()`. The ranks may have the
    parameters in different orders. Values that are not tensors are ignored."""
    named = params.items() if isinstance(params, Mapping) else params
    found = [(name, tensor) for name, tensor in named if isinstance(tensor, torch.Tensor)]
    handles = [operations.broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in found]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Copies the root's optimizer state and settings to every rank. The optimizers of other ranks may have no state yet.

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
