"""Collects gradients in flat buckets, which all ranks reduce in the same order during the backward pass."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringtrain import _core, _shutdown
from ringtrain._horovod import registry
from ringtrain._horovod.division import divide_into_buckets
from ringtrain.torch import bucket_memory, cuda, tensors
from ringtrain.torch.bucket_memory import CodecBucket, CompressedBucket
from ringtrain.torch.compression import WIRE_TYPES, Compressor
from ringtrain.torch.power_sgd import PowerSgdBucket, PowerSgdSettings

# The default size of a bucket in bytes. This size is large enough for the full bandwidth, and small enough that most
# buckets of a 25 MB model are sent before the backward pass ends.
BYTES = 4 << 20

Parameter = torch.nn.Parameter


@dataclass(frozen=True)
class ReducerSettings:
    """The settings of a `GradientReducer`."""

    op: str
    compression: type[Compressor]
    predivide: float
    """Gradients are divided by this number before the reduction, and multiplied by the same number after the reduction."""
    passes: int
    """The number of backward passes whose gradients are accumulated before the reduction."""
    sparse_as_dense: bool
    bucket_bytes: int


class GradientReducer:
    """Reduces the gradients of parameters in buckets. The reduction of a bucket begins as soon as the gradients of
    this bucket and of all earlier buckets have been computed.

    The first bucket holds the last parameters, because a backward pass computes gradients roughly from the last
    parameter to the first. All ranks begin the reductions in the order of the buckets, even if a later bucket is
    complete before an earlier one.
    """

    def __init__(
        self, group: _core.Group, parameters: Sequence[Parameter], names: dict[Parameter, str], settings: ReducerSettings
    ) -> None:
        self._resource = _shutdown.GroupResource(group)
        self._settings = settings
        self._passes = settings.passes
        self._names = names
        _require_same_everywhere(group, parameters, names)
        kinds_and_bytes = [((p.dtype, p.device), p.nbytes) for p in parameters]
        parts = divide_into_buckets(kinds_and_bytes, settings.bucket_bytes, from_last=True)
        self._buckets = []
        for index, positions in enumerate(parts):
            part = [parameters[position] for position in positions]
            self._buckets.append(Bucket(group, part, _new_memory(group, index, part, positions, settings.compression.wire)))
        self._place = {p: (bucket, index) for bucket in self._buckets for index, p in enumerate(bucket.parameters)}
        self._count = dict.fromkeys(parameters, 0)
        self._begun = 0
        # The number of reductions of all buckets.
        self._steps = 0
        registry.register_reducer(self)
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._take_gradient)

    def set_passes(self, passes: int) -> None:
        """Sets the number of backward passes whose gradients are accumulated before they are reduced."""
        self._passes = passes

    def is_reducing(self) -> bool:
        """Returns whether the reduction of a bucket has begun since `synchronize` last completed."""
        return self._begun > 0

    def is_closed(self) -> bool:
        """Returns whether the group of this reducer has been closed, for example because the job has ended."""
        return self._resource.group.is_closed

    def contribute_zeros(self) -> None:
        """Takes part in the reductions of the other ranks with zeros, until all ranks do so. Afterwards, all buckets are zero."""
        if self._begun:
            self.synchronize()
        group, is_training = self._resource.group, bool(self._buckets)
        timeout = group.timeout
        # The ranks that still train may use another optimizer, or compute something else, for any time.
        group.timeout = math.inf
        while is_training:
            for bucket in self._buckets:
                bucket.begin_all_reduce(self._settings, is_training=False)
            self._begin_second_exchanges()
            is_training = any([bucket.finish_with_zeros(self._settings) for bucket in self._buckets])
        group.timeout = timeout
        self._count = dict.fromkeys(self._count, 0)

    def synchronize(self) -> None:
        """Begins the reduction of the remaining buckets, waits for all buckets, and sets the parameters' gradients to the
        results."""
        for bucket in self._buckets[self._begun :]:
            for index, p in enumerate(bucket.parameters):
                if not bucket.taken[index] and p.grad is not None:
                    self._copy_to_bucket(bucket, index, p)
            bucket.begin_all_reduce(self._settings)
        self._begun = len(self._buckets)
        self._begin_second_exchanges()
        for bucket in self._buckets:
            bucket.finish_all_reduce(self._settings)
        self._begun = 0
        self._count = dict.fromkeys(self._count, 0)

    def memory(self) -> bucket_memory.Memory | None:
        """Returns a copy of what the compression remembers, and the rank that remembers it. Returns None if the compression has
        no memory."""
        found = {**bucket_memory.empty(), "steps": self._steps}
        memories = [bucket.memory for bucket in self._buckets if bucket.memory is not None]
        bucket_memory.collect(memories, found)
        return {**bucket_memory.copied(found), "rank": self._resource.group.rank} if memories else None

    def load_memory(self, state: Mapping[str, Any]) -> None:
        """Restores a result of `memory`. Ignores the errors of another rank, and the memory of EF21, which would need the
        memories of all ranks. Raises `ringtrain.InvalidArgument` if it is the memory of another model."""
        memory = bucket_memory.checked(state)
        if state.get("rank") != self._resource.group.rank or memory["results"]:
            memory |= {"errors": {}, "results": {}}
        for bucket in self._buckets:
            if bucket.memory is not None:
                bucket_memory.restore(bucket.memory, memory)
        self._steps = memory["steps"]

    def _begin_second_exchanges(self) -> None:
        """Begins the second exchange of each bucket that has one, after all buckets have begun, so that all ranks begin all
        exchanges in the same order."""
        for bucket in self._buckets:
            bucket.begin_second_exchange()
        self._steps += 1

    def _take_gradient(self, p: Parameter) -> None:
        """Copies the gradient of a parameter to its bucket. Autograd calls this hook after it has accumulated the
        gradient."""
        bucket, index = self._place[p]
        self._count[p] += 1
        if self._count[p] < self._passes:
            return
        if self._count[p] > self._passes:
            raise AssertionError(
                f"gradients of {self._names[p]} were computed more than backward_passes_per_step = {self._passes} times before "
                "optimizer.step(); raise backward_passes_per_step to accumulate gradients locally"
            )
        self._copy_to_bucket(bucket, index, p)
        # Begin only buckets on the CPU here. Copying buckets from a GPU would delay the backward pass, so `synchronize` begins
        # the buckets on a GPU.
        while p.is_cpu and self._begun < len(self._buckets) and all(self._buckets[self._begun].taken):
            self._buckets[self._begun].begin_all_reduce(self._settings)
            self._begun += 1

    def _copy_to_bucket(self, bucket: Bucket, index: int, p: Parameter) -> None:
        gradient = p.grad
        if gradient.is_sparse:
            if not self._settings.sparse_as_dense:
                raise _core.InvalidArgument(
                    f"the gradient of {self._names[p]} is sparse; pass sparse_as_dense=True, or sparse=False"
                )
            gradient = gradient.to_dense()
        bucket.take_gradient(index, gradient)


class NoReducer:
    """Takes the place of a `GradientReducer` on a rank that is not in the process set."""

    def set_passes(self, passes: int) -> None: ...

    def is_reducing(self) -> bool:
        return False

    def memory(self) -> None: ...

    def load_memory(self, state: Mapping[str, Any]) -> None: ...

    def synchronize(self) -> None: ...


class Bucket:
    """Gradients of one type, concatenated in one tensor. For gradients on a CPU, the memory of this tensor comes from
    `Group.alloc`.

    After the gradients, the bucket has one additional element for each parameter, called the parameter's mark. A rank
    sets the mark to 1 if it has the parameter's gradient, otherwise to 0. After the reduction, a parameter's mark is
    above zero if any rank had the parameter's gradient. One more mark says whether the rank still trains. This mark is 0 if
    the rank has called `join` and contributes zeros.
    """

    def __init__(self, group: _core.Group, parameters: Sequence[Parameter], memory: CompressedBucket | None) -> None:
        """`memory` is that of the compression, or None if the compression needs none."""
        self._group = group
        self.memory = memory
        self.parameters = parameters
        first = parameters[0]
        self._count = sum(p.numel() for p in parameters)
        mark_count = len(parameters) + 1
        total = self._count + mark_count
        name = tensors.ELEMENT_TYPES.get(first.dtype)
        if name is None or not first.dtype.is_floating_point:
            raise _core.Unsupported(f"gradients of type {first.dtype} cannot be reduced")
        # Ranks on one host share this memory, so they can reduce it in place.
        self._shared = group.alloc(total, name) if first.is_cpu else None
        if self._shared is not None:
            self._flat = torch.frombuffer(self._shared, dtype=first.dtype, count=total)
        else:
            self._flat = torch.empty(total, dtype=first.dtype, device=first.device)
        self._flat.zero_()
        parts = self._flat.split([p.numel() for p in parameters] + [mark_count])
        self._views = [part.view(p.shape) for part, p in zip(parts[:-1], parameters, strict=True)]
        self._marks = parts[-1]
        self.taken = [False] * len(parameters)
        self._handles: list[_core.Handle] = []
        self._context: Any = None
        self._packed: torch.Tensor | None = None

    def take_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Copies a gradient into the bucket, unless the gradient is already a view into the bucket."""
        view = self._views[index]
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient.detach())
        self.taken[index] = True

    def begin_all_reduce(self, settings: ReducerSettings, is_training: bool = True) -> None:
        """Begins the reduction. For parameters without a gradient, this rank contributes zeros."""
        for view, taken in zip(self._views, self.taken, strict=True):
            if not taken:
                view.zero_()
        self._marks.copy_(torch.tensor([*self.taken, is_training], dtype=self._flat.dtype))
        if settings.predivide != 1.0:
            self._flat[: self._count].div_(settings.predivide)
        if self.memory is not None:
            self._begin_compressed(settings)
            return
        packed, self._context = settings.compression.compress(self._flat)
        wire = settings.compression.wire if packed.dtype is torch.float32 and settings.compression.wire in WIRE_TYPES else None
        self._packed = packed
        if not packed.is_cpu:
            cuda.all_reduce_on_gpu(
                packed, lambda host: self._group.all_reduce(tensors.as_memory(host), settings.op, None, wire, async_op=True)
            )
            return
        memory = self._shared if packed is self._flat and self._can_pass_shared_memory() else tensors.as_memory(packed)
        self._handles = [self._group.all_reduce(memory, settings.op, None, wire, async_op=True)]

    def _begin_compressed(self, settings: ReducerSettings) -> None:
        """Begins the reduction with a compression that has a memory. The marks are not compressed."""
        gradients = self._flat[: self._count]
        if isinstance(self.memory, PowerSgdBucket):
            self.memory.begin(gradients, self._views, lambda factors: self._begin_exchange(factors, "avg", None))
        else:
            self._handles.append(self._begin_exchange(gradients, settings.op, self.memory.compressor))
        self._handles.append(self._begin_exchange(self._marks, settings.op, None))

    def _begin_exchange(self, tensor: torch.Tensor, op: str, compressor: _core.Compressor | None) -> _Exchange:
        host, back = tensors.writable_on_host(tensor)
        return _Exchange(self._group.all_reduce(tensors.as_memory(host), op, None, compressor, async_op=True), back)

    def begin_second_exchange(self) -> None:
        """Begins the second exchange of PowerSGD."""
        if isinstance(self.memory, PowerSgdBucket):
            self.memory.begin_second()

    def _can_pass_shared_memory(self) -> bool:
        """Returns whether the bucket is in shared memory and Python's buffer protocol has a format for its elements.
        The buffer protocol has no format for bfloat16."""
        return self._shared is not None and self._flat.dtype is not torch.bfloat16

    def finish_all_reduce(self, settings: ReducerSettings) -> None:
        """Waits for the reduction and sets the gradients of the parameters to the results."""
        marks = self._wait(settings)[:-1]
        if settings.predivide != 1.0:
            self._flat[: self._count].mul_(settings.predivide)
        for p, view, mark in zip(self.parameters, self._views, marks, strict=True):
            if mark > 0 and (p.grad is None or p.grad.data_ptr() != view.data_ptr() or p.grad.is_sparse):
                p.grad = view
        self.taken = [False] * len(self.parameters)

    def finish_with_zeros(self, settings: ReducerSettings) -> bool:
        """Waits for the reduction, and returns whether any rank still trains."""
        return self._wait(settings)[-1] > 0

    def _wait(self, settings: ReducerSettings) -> list[float]:
        """Waits for the reduction, and returns the marks."""
        for handle in self._handles:
            handle.wait()
        self._handles = []
        if isinstance(self.memory, PowerSgdBucket):
            average = self.memory.finish()
            if settings.op != "avg":
                average.mul_(self._group.size)
        if self._packed is not None and self._packed is not self._flat:
            self._flat.copy_(settings.compression.decompress(self._packed, self._context))
        self._packed = None
        return self._marks.tolist()


class _Exchange:
    """An all-reduce of a tensor that may be on a GPU."""

    def __init__(self, handle: _core.Handle, back: Callable[[], None] | None) -> None:
        self._handle, self._back = handle, back

    def wait(self) -> None:
        """Waits for the all-reduce, and copies the result back to the tensor."""
        self._handle.wait()
        if self._back is not None:
            self._back()


def _new_memory(
    group: _core.Group, index: int, parameters: Sequence[Parameter], positions: Sequence[int], compression: str | None
) -> CompressedBucket | None:
    """Returns the memory for the compression of a bucket. Returns None if the bucket needs none: 16-bit floats have no memory,
    and ranks that share memory exchange exact values."""
    is_exact = compression is None or parameters[0].dtype is not torch.float32 or group.transport in ("none", "shm")
    if is_exact or compression in WIRE_TYPES:
        return None
    memory = CodecBucket(parameters, positions, compression, index)
    name, _, rank = memory.compressor.compression.partition(":")
    return PowerSgdBucket(parameters, positions, PowerSgdSettings(int(rank))) if name == "powersgd" else memory


def _require_same_everywhere(group: _core.Group, parameters: Sequence[Parameter], names: dict[Parameter, str]) -> None:
    """Raises `ringtrain.InvalidArgument` on all ranks if the parameters differ between ranks."""
    lines = [f"{names[p]} {p.dtype} {tuple(p.shape)}" for p in parameters]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    for index, other in enumerate(group.all_gather_bytes(digest)):
        if other != digest:
            raise _core.InvalidArgument(
                f"rank {group.rank} and rank {index} have different parameters, or the same ones in a different order; "
                "pass DistributedOptimizer the same parameters in the same order on all ranks"
            )
