"""Averages a fixed list of gradients over the ranks, in flat buckets that all ranks reduce in the same order."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringtrain import _core, _shutdown
from ringtrain._horovod import registry
from ringtrain._horovod.compression import WIRE_TYPES
from ringtrain._horovod.division import divide_into_buckets
from ringtrain._horovod.operations import Average, Sum, as_memory, element_name
from ringtrain._horovod.process_sets import Members
from ringtrain._horovod.variables import ArraySpec, require_same_everywhere

BYTES = 4 << 20
"""The default size of a bucket in bytes. This size is large enough for the full bandwidth, and small enough that most buckets of
a 25 MB model are sent before the backward pass ends."""


@dataclass(frozen=True)
class ReducerSettings:
    """The settings of an `ArrayReducer`."""

    op: str = Average
    wire: str | None = None
    """The name of a compression."""
    predivide: float = 1.0
    """Gradients are divided by this number before the reduction, and multiplied by the same number after the reduction."""
    bucket_bytes: int = BYTES
    skips_overflows: bool = False
    """Whether the caller handles infinite results. Otherwise a float16 overflow raises OverflowError on all ranks."""


class ArrayReducer:
    """Averages or adds gradients over the ranks of a process set. All ranks create it, with the same gradients.

    The reduction of a bucket begins as soon as the gradients of this bucket and of all earlier buckets have been taken. The first
    bucket holds the last gradients, because a backward pass computes gradients roughly from the last layer to the first.
    A rank without a gradient contributes zeros for it.
    """

    def __init__(self, members: Members, specs: Sequence[ArraySpec], settings: ReducerSettings) -> None:
        if settings.op not in (Average, Sum):
            raise NotImplementedError(f"DistributedOptimizer supports Average and Sum, not {settings.op!r}")
        self.specs = list(specs)
        self.settings = settings
        self._members = members
        group = members.group.duplicate()
        self._resource = _shutdown.GroupResource(group)
        require_same_everywhere(members, "gradients", self.specs)
        kinds_and_bytes = [(spec.dtype, spec.nbytes) for spec in self.specs]
        parts = divide_into_buckets(kinds_and_bytes, settings.bucket_bytes, from_last=True)
        self._buckets = [
            _Bucket(group, index, [(position, self.specs[position]) for position in part], settings)
            for index, part in enumerate(parts)
        ]
        self._place = {position: (bucket, i) for bucket in self._buckets for i, position in enumerate(bucket.positions)}
        self.bucket_positions = [bucket.positions for bucket in self._buckets]
        """The positions of the gradients of each bucket, in the order in which the buckets are reduced."""
        self._marks = _Marks(group, len(self.specs))
        self._begun = 0
        self._lock = threading.Lock()
        registry.register_reducer(self)

    def is_closed(self) -> bool:
        """Returns whether the job has ended."""
        return self._resource.group.is_closed

    def take(self, position: int, gradient: NDArray | None) -> None:
        """Copies a gradient into its bucket, and begins the reductions of complete buckets. Any thread may call it, once per step
        for each gradient. None means that this rank has no such gradient."""
        bucket, index = self._place[position]
        bucket.take(index, gradient)
        with self._lock:
            while self._begun < len(self._buckets) and self._buckets[self._begun].is_complete():
                self._begin_next()

    def finish(self) -> list[NDArray | None]:
        """Waits for the reductions of all gradients, and returns new arrays with the results. The result of a gradient that no
        rank has is None. Gradients that have not been taken in this step count as missing.

        Raises `ringtrain.Error` on all ranks if the data of one rank have ended, and OverflowError after a float16 overflow."""
        self._exchange("trains")
        self._require_no_end()
        self._require_no_overflow()
        results: list[NDArray | None] = [None] * len(self.specs)
        for bucket in self._buckets:
            for position, view in zip(bucket.positions, bucket.views, strict=True):
                if self._marks.any_has(position):
                    results[position] = view.copy()
        return results

    def reduce(self, gradients: Sequence[NDArray | None]) -> list[NDArray | None]:
        """Reduces all gradients at once. See `finish`."""
        for position, gradient in enumerate(gradients):
            self.take(position, gradient)
        return self.finish()

    def end_data(self) -> None:
        """Declares that this rank has no more data in this epoch. All ranks call it after the same number of steps. Otherwise it
        raises `ringtrain.Error`, as does `finish` on the ranks that still train."""
        self._exchange("ended")
        self._require_no_end()

    def contribute_zeros(self) -> None:
        """Takes part in the reductions of the other ranks with zeros, until all ranks do so."""
        group, is_training = self._resource.group, True
        timeout = group.timeout
        # The ranks that still train may use another optimizer, or compute something else, for any time.
        group.timeout = math.inf
        while is_training:
            self._exchange("joined")
            is_training = bool(self._marks.ranks("trains"))
        group.timeout = timeout

    def _begin_next(self) -> None:
        bucket = self._buckets[self._begun]
        self._marks.has[bucket.positions] = bucket.begin()
        self._begun += 1

    def _exchange(self, status: str) -> None:
        """Begins the reduction of the remaining buckets, and waits for all buckets and the marks."""
        with self._lock:
            while self._begun < len(self._buckets):
                self._begin_next()
            self._begun = 0
        has_infinite = any(bucket.has_infinite for bucket in self._buckets)
        handle = self._marks.begin(status, has_infinite)
        for bucket in self._buckets:
            bucket.wait()
        handle.wait()

    def _require_no_end(self) -> None:
        trains, ended = (
            ", ".join(str(self._members.ranks[index]) for index in self._marks.ranks(status)) for status in ("trains", "ended")
        )
        if trains and ended:
            raise _core.Error(
                f"the ranks have different numbers of batches: the data of rank {ended} have ended, but not of rank {trains}; "
                "give all ranks the same number of batches (shard(..), steps_per_epoch), or call join() on the ranks without data"
            )

    def _require_no_overflow(self) -> None:
        if self.settings.skips_overflows or self._marks.has_infinite():
            return
        for bucket in self._buckets:
            name = bucket.first_overflow()
            if name is not None:
                raise OverflowError(
                    f"the sum of the gradients of {name} over the ranks exceeds the range of float16 (65504); use bf16, or "
                    "DistributedOptimizer(LossScaleOptimizer(..))"
                )


class _Marks:
    """Numbers that are added over the ranks after the buckets of a step: how many ranks have each gradient, which ranks train,
    are in `join` or have no more data, and how many ranks have an infinite gradient."""

    def __init__(self, group: _core.Group, gradient_count: int) -> None:
        self._group, self._gradient_count = group, gradient_count
        self._sums = np.zeros(gradient_count + 3 * group.size + 1, np.int32)
        self.has = np.zeros(gradient_count, np.int32)
        """Whether this rank has each gradient."""
        self._start = {status: gradient_count + k * group.size for k, status in enumerate(("trains", "joined", "ended"))}

    def begin(self, status: str, has_infinite: bool) -> _core.Handle:
        """Begins to add the marks of the ranks."""
        self._sums[:] = 0
        self._sums[: self._gradient_count] = self.has
        self._sums[self._start[status] + self._group.rank] = 1
        self._sums[-1] = has_infinite
        return self._group.all_reduce(self._sums, Sum, async_op=True)

    def any_has(self, position: int) -> bool:
        """Returns whether any rank has the gradient."""
        return bool(self._sums[position])

    def ranks(self, status: str) -> list[int]:
        """Returns the ranks of the group with this status."""
        start = self._start[status]
        return np.flatnonzero(self._sums[start : start + self._group.size]).tolist()

    def has_infinite(self) -> bool:
        """Returns whether a gradient of any rank was infinite or not a number before the reduction."""
        return bool(self._sums[-1])


class _Bucket:
    """Gradients of one type, one after another in one array, which the ranks of a host share."""

    def __init__(
        self, group: _core.Group, number: int, members: Sequence[tuple[int, ArraySpec]], settings: ReducerSettings
    ) -> None:
        self.positions = [position for position, _ in members]
        self._specs = [spec for _, spec in members]
        self._group, self._settings = group, settings
        dtype = self._specs[0].dtype
        name = element_name(dtype)
        if name is None or (dtype.kind != "f" and name != "bf16"):
            raise _core.Unsupported(f"gradients of type {dtype} ({self._specs[0].name}) cannot be reduced")
        sizes = [math.prod(spec.shape) for spec in self._specs]
        shared = group.alloc(max(sum(sizes), 1), name)
        self._flat = np.frombuffer(shared, np.uint8).view(dtype)[: sum(sizes)]
        # The buffer protocol has no format for bfloat16.
        self._memory: Any = as_memory(self._flat) if name == "bf16" or not self._flat.size else shared
        parts = np.split(self._flat, np.cumsum(sizes)[:-1])
        self.views = [part.reshape(spec.shape) for part, spec in zip(parts, self._specs, strict=True)]
        """The gradients."""
        wire = settings.wire if name == "f32" and group.transport not in ("none", "shm") else None
        self._compression = wire if wire is None or wire in WIRE_TYPES else _core.Compressor(wire, number)
        self._can_overflow = name == "f16" or wire == "fp16"
        self.has_infinite = False
        """Whether a gradient of this rank that could overflow was infinite already."""
        self._seen = [False] * len(members)
        self._taken = [False] * len(members)
        self._handle: _core.Handle | None = None

    def take(self, index: int, gradient: NDArray | None) -> None:
        """Copies a gradient into the bucket."""
        view = self.views[index]
        if gradient is not None:
            if gradient.shape != view.shape:
                name = self._specs[index].name
                raise _core.InvalidArgument(f"the gradient of {name} has the shape {gradient.shape} instead of {view.shape}")
            view[...] = gradient
        self._taken[index] = gradient is not None
        self._seen[index] = True

    def is_complete(self) -> bool:
        """Returns whether `take` has been called for all gradients."""
        return all(self._seen)

    def begin(self) -> list[bool]:
        """Begins the reduction, with zeros for the gradients that this rank does not have. Returns which gradients it has."""
        taken = self._taken
        for view, has in zip(self.views, taken, strict=True):
            if not has:
                view[...] = 0
        if self._settings.predivide != 1.0:
            self._flat /= np.asarray(self._settings.predivide, self._flat.dtype)
        self.has_infinite = self._can_overflow and not np.isfinite(self._flat).all()
        self._seen, self._taken = [False] * len(taken), [False] * len(taken)
        if self._flat.size:
            self._handle = self._group.all_reduce(self._memory, self._settings.op, None, self._compression, async_op=True)
        return taken

    def wait(self) -> None:
        """Waits for the reduction."""
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        if self._settings.predivide != 1.0:
            self._flat *= np.asarray(self._settings.predivide, self._flat.dtype)

    def first_overflow(self) -> str | None:
        """Returns the name of a gradient whose sum is not finite, if sums of this bucket can overflow."""
        if not self._can_overflow or np.isfinite(self._flat).all():
            return None
        return next(spec.name for spec, view in zip(self._specs, self.views, strict=True) if not np.isfinite(view).all())
