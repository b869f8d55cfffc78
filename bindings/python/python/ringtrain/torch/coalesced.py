"""Several collectives of a kind in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringtrain.torch.works import Finished, Pending

Tensors = list[torch.Tensor]


class Coalesced:
    """The methods of a process group that take several tensors. Each becomes an operation of its own, begun one after the other
    without waiting; the work that is given ends with the last."""

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist._Work:
        """All-reduces each tensor in place."""
        return self._together([self.allreduce([tensor], _begun(opts)) for tensor in tensors], tensors, opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist._Work:
        """Gathers each input. `outputs` has a list for each rank, with a tensor for each input."""
        by_input = [[of_rank[index] for of_rank in outputs] for index in range(len(inputs))]
        works = [self.allgather([parts], [mine], _begun(opts)) for parts, mine in zip(by_input, inputs, strict=True)]
        return self._together(works, outputs, opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist._Work:
        """Gathers each input into its output."""
        works = [self.all_gather_single(output, mine, _begun(opts)) for output, mine in zip(outputs, inputs, strict=True)]
        return self._together(works, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist._Work:
        """Reduces and scatters each input into its output."""
        works = [self.reduce_scatter_single(output, mine, _begun(opts)) for output, mine in zip(outputs, inputs, strict=True)]
        return self._together(works, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def start_coalescing(self, device: torch.device) -> None:
        """Does nothing: operations that were begun are under way together."""

    def end_coalescing(self, device: torch.device) -> dist._Work:
        return Finished()

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    def _together(self, works: Sequence[dist._Work], outputs: Sequence[Any], opts: Any) -> dist._Work:
        together = All(works, outputs, self._completer)
        if opts is not None and not opts.asyncOp:
            together.wait()
        return together


class All(Pending):
    """The end of several operations, begun in this order."""

    def __init__(self, works: Sequence[dist._Work], tensors: Sequence[Any], completer: Any) -> None:
        handles = [_Waited(work) for work in works]
        super().__init__(handles, tensors, (), lambda error: error, completer)


class _Waited:
    """A work as a handle."""

    def __init__(self, work: dist._Work) -> None:
        self._work = work

    def wait(self, limit: float | None = None) -> None:
        if isinstance(self._work, Pending):
            self._work.wait_seconds(limit)

    def test(self) -> bool:
        return self._work.is_completed()


class _Begun:
    """Options for one of several operations: begun, and not waited for."""

    asyncOp = True

    def __init__(self, opts: Any) -> None:
        self.timeout = opts.timeout
        self.reduceOp = getattr(opts, "reduceOp", None)


def _begun(opts: Any) -> Any:
    return None if opts is None else _Begun(opts)
