"""All-reduce of sparse tensors in the COO format, such as the gradients of `torch.nn.EmbeddingBag(sparse=True)`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ringtrain import _core
from ringtrain._horovod.operations import Average, Sum
from ringtrain._horovod.process_sets import ProcessSet, global_process_set
from ringtrain.torch import operations, tensors


def all_reduce_sparse(group: _core.Group, tensor: torch.Tensor, op: str) -> None:
    """Adds or averages a sparse tensor over the ranks, in place. The result has every index that is in the tensor of
    at least one rank.

    Every rank gathers the indices and values of all ranks, as in Gloo, so the cost grows with the number of ranks.
    """
    if op not in ("sum", "avg"):
        raise _core.Unsupported(f"sparse tensors can be reduced with SUM and AVG, not {op}; call to_dense() first")
    if op == "avg" and not tensor.is_floating_point():
        raise _core.Unsupported(f"sparse tensors of {tensor.dtype} have no average; use SUM")
    mine = tensor.detach().coalesce().cpu()
    lengths = _index_counts(group, mine)
    indices = _gather_rows(group, mine.indices().t().contiguous(), lengths).t()
    values = _gather_rows(group, mine.values().contiguous(), lengths)
    # All ranks add the same values in the same order, so their results have the same bits.
    result = torch.sparse_coo_tensor(indices, values, mine.size(), check_invariants=False).coalesce()
    if op == "avg":
        result.values().div_(group.size)
    with torch.no_grad():
        tensor.copy_(result)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: str, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begins to add or to average sparse tensors. Returns a function, as Horovod does, that waits and returns a new sparse tensor
    with the indices and values of all ranks. `synchronize` also accepts this function."""
    if op not in (Average, Sum):
        raise NotImplementedError(f"the reduction {op!r} of sparse tensors is not implemented; use Average or Sum")
    coalesced = tensor.detach().coalesce()
    parts = {"indices": coalesced.indices().t().contiguous(), "values": coalesced.values()}
    handles = {part: operations.allgather_async(value, name and f"{name}.{part}", process_set) for part, value in parts.items()}

    def wait() -> torch.Tensor:
        indices, values = handles["indices"].wait().t(), handles["values"].wait()
        if op == Average:
            values = values / process_set.members().group.size
        return torch.sparse_coo_tensor(indices, values, tensor.size(), check_invariants=False)

    return wait


def _index_counts(group: _core.Group, mine: torch.Tensor) -> list[int]:
    """Returns the number of indices of each rank's tensor. Raises `ringtrain.InvalidArgument` on every rank if the
    shapes or types of the tensors differ."""
    kind = f"{mine.dtype} {tuple(mine.shape)} with {mine.sparse_dim()} sparse dimensions"
    descriptions = [data.decode().split("|", 1) for data in group.all_gather_bytes(f"{mine.values().shape[0]}|{kind}".encode())]
    for rank, (_, other) in enumerate(descriptions):
        if other != descriptions[0][1]:
            raise _core.InvalidArgument(f"all_reduce of sparse tensors: rank 0 has {descriptions[0][1]}, rank {rank} has {other}")
    return [int(length) for length, _ in descriptions]


def _gather_rows(group: _core.Group, rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Returns the rows of all ranks, in rank order."""
    result = torch.empty((sum(lengths), *rows.shape[1:]), dtype=rows.dtype)
    per_row = rows.shape[1:].numel() * tensors.values_per_element(rows)
    group.all_gather(tensors.as_memory(result), tensors.as_memory(rows, False), [length * per_row for length in lengths])
    return result
