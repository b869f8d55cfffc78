"""Calls that run several collectives of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringtrain.torch.work import CompletedWork, PendingWork

Tensors = list[torch.Tensor]


class CoalescedCollectives:
    """The methods of a process group that take several tensors. Each tensor is a separate operation. All operations begin at
    once, and the returned `Work` ends when the last operation has ended."""

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist._Work:
        """All-reduces each tensor in place."""
        return self._combined_work([self.allreduce([tensor], _async_options(opts)) for tensor in tensors], tensors, opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist._Work:
        """Gathers each input separately: `outputs[r][i]` gets input i of rank r."""
        by_input = [[of_rank[index] for of_rank in outputs] for index in range(len(inputs))]
        works = [self.allgather([parts], [mine], _async_options(opts)) for parts, mine in zip(by_input, inputs, strict=True)]
        return self._combined_work(works, outputs, opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist._Work:
        """Gathers input i of all ranks into output i."""
        works = [self.all_gather_single(output, mine, _async_options(opts)) for output, mine in zip(outputs, inputs, strict=True)]
        return self._combined_work(works, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist._Work:
        """Reduces input i of all ranks and scatters the result into output i."""
        works = [
            self.reduce_scatter_single(output, mine, _async_options(opts)) for output, mine in zip(outputs, inputs, strict=True)
        ]
        return self._combined_work(works, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def start_coalescing(self, device: torch.device) -> None:
        """Does nothing: even without coalescing, several operations run at the same time."""

    def end_coalescing(self, device: torch.device) -> dist._Work:
        return CompletedWork()

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    def _combined_work(self, works: Sequence[dist._Work], outputs: Sequence[Any], opts: Any) -> dist._Work:
        work = CoalescedWork(works, outputs, self._completer)
        if opts is not None and not opts.asyncOp:
            work.wait()
        return work


class CoalescedWork(PendingWork):
    """One `Work` for several operations. `works` has the work of each operation, in the order in which they began."""

    def __init__(self, works: Sequence[dist._Work], tensors: Sequence[Any], completer: Any) -> None:
        handles = [_WorkHandle(work) for work in works]
        super().__init__(handles, tensors, (), lambda error: error, completer)


class _WorkHandle:
    """Makes a `Work` usable as one of the handles of a `PendingWork`."""

    def __init__(self, work: dist._Work) -> None:
        self._work = work

    def wait(self, limit: float | None = None) -> None:
        if isinstance(self._work, PendingWork):
            self._work.wait_seconds(limit)

    def test(self) -> bool:
        return self._work.is_completed()


class _AsyncOptions:
    """The options for one operation of a coalesced call: the options of the call, except that `asyncOp` is always true."""

    asyncOp = True

    def __init__(self, opts: Any) -> None:
        self.timeout = opts.timeout
        self.reduceOp = getattr(opts, "reduceOp", None)


def _async_options(opts: Any) -> Any:
    return None if opts is None else _AsyncOptions(opts)
