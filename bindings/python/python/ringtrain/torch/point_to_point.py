"""Messages between two ranks, and `monitored_barrier`, whose errors name the missing ranks."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringtrain import _core
from ringtrain.torch import profiling, tensors
from ringtrain.torch.work import PendingWork

# The highest tags are reserved for monitored barriers. Each barrier has its own tag, so that a late message of one barrier is not
# mistaken for a message of the next barrier.
_BARRIER_TAGS = 1 << 16
_BARRIER_TAG_FIRST = (1 << 32) - 1 - _BARRIER_TAGS
_PASSED = b"+"


class PointToPoint:
    """The methods of a process group that send or receive messages, and `monitored_barrier`."""

    _barriers = 0

    def send(self, tensor: list[torch.Tensor], to: int, tag: int = 0) -> dist._Work:
        """Begins to send a tensor. Do not change the tensor before `wait` returns."""
        [source] = tensor
        memory = tensors.as_memory(tensors.readable_on_host(source), False)
        return self._begin_message("send", lambda: self._group.send(memory, to, _check_tag(tag), async_op=True), tensor)

    def recv(self, tensor: list[torch.Tensor], source: int, tag: int = 0) -> dist._Work:
        """Begins to receive a message, which must not have more elements than the tensor."""
        return self._begin_receive("recv", tensor, source, tag)

    def recv_anysource(self, tensor: list[torch.Tensor], tag: int = 0) -> dist._Work:
        """Begins to receive a message from any rank; `Work.source_rank` is the sender."""
        return self._begin_receive("recvAnySource", tensor, None, tag)

    recvAnysource = recv_anysource

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Waits until all ranks have called `monitored_barrier`. If a rank does not call `monitored_barrier` within
        `timeout`, every other rank raises RuntimeError. The error names all missing ranks if `wait_all_ranks` is
        true, otherwise only the first one. A missing rank does not end the job, unlike the timeout of an operation.
        """
        tag = _BARRIER_TAG_FIRST + self._barriers % _BARRIER_TAGS
        self._barriers += 1
        limit = self._timeout if timeout is None else timeout.total_seconds()
        try:
            if self.rank() == 0:
                self._gather_at_barrier(tag, limit, wait_all_ranks)
            else:
                self._enter_barrier(tag, limit)
        except _core.JobFailed as error:
            raise self._with_global_rank(error) from None

    def _gather_at_barrier(self, tag: int, limit: float, wait_all_ranks: bool) -> None:
        """The part of rank 0 in a monitored barrier: waits for a message of every other rank, and answers with a message that
        says whether a rank is missing."""
        deadline = time.monotonic() + limit
        arrivals = {rank: self._group.receive_bytes(rank, tag, async_op=True) for rank in range(1, self.size())}
        missing: list[int] = []
        for rank, arrival in arrivals.items():
            # With a limit of 0, `wait` still finds a rank that arrived before the deadline.
            left = 0.0 if missing and not wait_all_ranks else max(0.0, deadline - time.monotonic())
            try:
                arrival.wait(left)
            except _core.StillRunning:
                arrival.cancel()
                missing.append(rank)
        named = missing if wait_all_ranks else missing[:1]
        answer = _PASSED if not missing else self._missing_sentence(named, limit).encode()
        for sent in [self._group.send_bytes(answer, rank, tag, async_op=True) for rank in range(1, self.size())]:
            if not missing:
                sent.wait()
        if missing:
            raise RuntimeError(answer.decode())

    def _enter_barrier(self, tag: int, limit: float) -> None:
        """The part of every rank except rank 0 in a monitored barrier: sends a message to rank 0, and waits for the
        answer.
        """
        self._group.send_bytes(b"", 0, tag)
        # Wait for up to 2 * `limit` seconds. Rank 0 may enter the barrier up to `limit` seconds after this rank, and then waits
        # up to `limit` seconds for other ranks.
        answer = self._group.receive_bytes(0, tag, async_op=True)
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

    def _begin_receive(self, name: str, tensor: list[torch.Tensor], source: int | None, tag: int) -> dist._Work:
        [target] = tensor
        host, back = tensors.writable_on_host(target, keep=False)
        memory = tensors.as_memory(host)
        return self._begin_message(
            name, lambda: self._group.receive(memory, source, _check_tag(tag), async_op=True), tensor, back
        )

    def _begin_message(self, name: str, begin: Any, outputs: list[torch.Tensor], back: Any = None) -> dist._Work:
        """Calls `begin`, which begins to send or receive, and returns the `Work` of the message. Torch's profiler shows the
        message under `name`. After a receive, `back` copies the elements to the tensors `outputs`, if a copy is needed."""
        event = profiling.begin_event(name)
        try:
            handle = begin()
        except _core.Error as error:
            profiling.end_event(event)
            raise self._with_global_rank(error) from None
        return PendingWork([handle], outputs, [back] if back is not None else (), self._with_global_rank, None, event)


def _check_tag(tag: int) -> int:
    """Returns `tag`. Raises `ringtrain.InvalidArgument` if the tag is negative or reserved for monitored barriers."""
    if not 0 <= tag < _BARRIER_TAG_FIRST:
        raise _core.InvalidArgument(f"tags are 0 to {_BARRIER_TAG_FIRST - 1}, not {tag}")
    return tag
