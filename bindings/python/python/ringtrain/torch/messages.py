"""Messages between two ranks, and the barrier that names who is missing."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringtrain import _core
from ringtrain.torch import tensors
from ringtrain.torch.works import Pending

# Tags of our own lie at the upper end, out of the way of programs'. One for each monitored barrier, so that a rank that comes too
# late for one is not taken for early at the next.
_BARRIER_TAGS = 1 << 16
_BARRIER_TAG_FIRST = (1 << 32) - 1 - _BARRIER_TAGS
_PASSED = b"+"


class Messages:
    """The methods of a process group that concern two ranks at a time."""

    _barriers = 0

    def send(self, tensor: list[torch.Tensor], to: int, tag: int = 0) -> dist._Work:
        """Begins to send. The tensor may be changed after `wait`."""
        [source] = tensor
        memory = tensors.memory(tensors.readable(source), False)
        return self._message(lambda: self._group.send_async(memory, to, _checked(tag)), tensor)

    def recv(self, tensor: list[torch.Tensor], source: int, tag: int = 0) -> dist._Work:
        """Begins to receive a message of as many elements at most."""
        return self._receive(tensor, source, tag)

    def recv_anysource(self, tensor: list[torch.Tensor], tag: int = 0) -> dist._Work:
        """Begins to receive a message from whoever sends one; `Work.source_rank` says who did."""
        return self._receive(tensor, None, tag)

    recvAnysource = recv_anysource

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Waits until all ranks have come. Raises on every rank, naming who is missing after `timeout`: the first such rank, or
        all with `wait_all_ranks`. Unlike an operation that times out, this does not end the job."""
        tag = _BARRIER_TAG_FIRST + self._barriers % _BARRIER_TAGS
        self._barriers += 1
        limit = self._timeout if timeout is None else timeout.total_seconds()
        try:
            if self.rank() == 0:
                self._gather_at_barrier(tag, limit, wait_all_ranks)
            else:
                self._come_to_barrier(tag, limit)
        except _core.JobFailed as error:
            raise self._explain(error) from None

    def _gather_at_barrier(self, tag: int, limit: float, wait_all_ranks: bool) -> None:
        deadline = time.monotonic() + limit
        arrivals = {rank: self._group.receive_bytes_async(rank, tag) for rank in range(1, self.size())}
        missing: list[int] = []
        for rank, arrival in arrivals.items():
            # Who came in time counts, though it is looked at after the deadline.
            left = 0.0 if missing and not wait_all_ranks else max(0.0, deadline - time.monotonic())
            try:
                arrival.wait(left)
            except _core.StillRunning:
                arrival.cancel()
                missing.append(rank)
        named = missing if wait_all_ranks else missing[:1]
        answer = _PASSED if not missing else self._missing_sentence(named, limit).encode()
        for told in [self._group.send_bytes_async(answer, rank, tag) for rank in range(1, self.size())]:
            if not missing:
                told.wait()
        if missing:
            raise RuntimeError(answer.decode())

    def _come_to_barrier(self, tag: int, limit: float) -> None:
        self._group.send_bytes(b"", 0, tag)
        # Rank 0 may begin as late as `limit` after this rank, and then wait as long for others.
        answer = self._group.receive_bytes_async(0, tag)
        try:
            data, _, _ = answer.wait(2 * limit)
        except _core.StillRunning:
            answer.cancel()
            raise RuntimeError(self._missing_sentence([0], 2 * limit)) from None
        if data != _PASSED:
            raise RuntimeError(data.decode())

    def _missing_sentence(self, missing: list[int], limit: float) -> str:
        ranks = ", ".join(str(self._global_ranks[rank]) for rank in missing)
        return f"rank {ranks} did not reach monitored_barrier within {limit:g} s"

    def _receive(self, tensor: list[torch.Tensor], source: int | None, tag: int) -> dist._Work:
        [target] = tensor
        host, back = tensors.writable(target, keep=False)
        memory = tensors.memory(host)
        return self._message(lambda: self._group.receive_async(memory, source, _checked(tag)), tensor, back)

    def _message(self, begin: Any, outputs: list[torch.Tensor], back: Any = None) -> dist._Work:
        try:
            handle = begin()
        except _core.Error as error:
            raise self._explain(error) from None
        return Pending([handle], outputs, [back] if back is not None else (), self._explain, None)


def _checked(tag: int) -> int:
    if not 0 <= tag < _BARRIER_TAG_FIRST:
        raise _core.InvalidArgument(f"tags are 0 to {_BARRIER_TAG_FIRST - 1}, not {tag}")
    return tag
