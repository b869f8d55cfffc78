"""Lists of named arrays that must be the same on all ranks, such as the variables of a model."""

from __future__ import annotations

import itertools
import math
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringtrain import _core
from ringtrain._horovod.operations import as_memory
from ringtrain._horovod.process_sets import Members


@dataclass(frozen=True)
class ArraySpec:
    """The name, the shape and the type of an array."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def kind(self) -> str:
        """What must be the same on all ranks. Keras numbers layers without names, so the numbers depend on how many models a rank
        has made before."""
        return f"{re.sub(r'_[0-9]+(?=/|$)', '', self.name)} {self.dtype} {self.shape}"

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}, shape {self.shape})"


def require_same_everywhere(members: Members, what: str, specs: Sequence[ArraySpec]) -> None:
    """Raises `ringtrain.InvalidArgument` on all ranks if the lists differ between ranks. The error names the first array that
    differs, and a rank that has another one than the first rank. `what` is the plural of what the arrays are."""
    mine = [(spec.kind, str(spec)) for spec in specs]
    gathered = [pickle.loads(data) for data in members.group.all_gather_bytes(pickle.dumps(mine))]
    for rank, other in zip(members.ranks, gathered, strict=True):
        pairs = itertools.zip_longest(gathered[0], other, fillvalue=("", "missing"))
        for position, ((first_kind, first), (second_kind, second)) in enumerate(pairs):
            if first_kind != second_kind:
                raise _core.InvalidArgument(
                    f"the ranks have different {what}: number {position} is {first} on rank {members.ranks[0]} and {second} on "
                    f"rank {rank}; build the same model on all ranks"
                )


def broadcast_arrays(
    members: Members, arrays: Sequence[tuple[str, NDArray]], root_rank: int, what: str = "variables"
) -> list[NDArray]:
    """Returns the root's arrays on every rank. Raises `ringtrain.InvalidArgument` on all ranks if names, shapes or types differ.
    The root is a rank of the job, not of the set."""
    root = members.rank_in_group(root_rank)
    require_same_everywhere(members, what, [ArraySpec(name, array.shape, array.dtype) for name, array in arrays])
    results = [np.array(array, order="C") for _, array in arrays]
    handles = [members.group.broadcast(as_memory(result), root, async_op=True) for result in results if result.size]
    for handle in handles:
        handle.wait()
    return results
