"""The handles and the reductions of Horovod's operations on tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringtrain import _core
from ringtrain._horovod.operations import Average, Sum
from ringtrain._horovod.process_sets import ProcessSet
from ringtrain.torch import tensors
from ringtrain.torch.compression import WIRE_TYPES, Compression, Compressor, find_compression

Tensor = torch.Tensor


class Handle:
    """The handle of an operation that has begun. `synchronize(handle)` returns the operation's result."""

    def __init__(self, handles: Sequence[_core.Handle | Handle], finish: Callable[[list[Any]], Any]) -> None:
        self._handles = handles
        self._finish: Callable[[list[Any]], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Waits for the operation and returns its result, or raises its error."""
        results = [handle.wait() for handle in self._handles]
        if self._finish is not None:
            self._result = self._finish(results)
            self._finish = None
        return self._result

    def then(self, change: Callable[[Any], Any]) -> Handle:
        """Returns a handle whose result is the changed result of this handle."""
        return Handle([self], lambda results: change(results[0]))

    def test(self) -> bool:
        """Returns whether the operation has ended, with a result or an error."""
        return all(handle.test() for handle in self._handles)


class TensorReduction:
    """The options of an all-reduce or a reduce-scatter."""

    def __init__(
        self,
        process_set: ProcessSet,
        op: str,
        prescale: float = 1.0,
        postscale: float = 1.0,
        compression: type[Compressor] | str = Compression.none,
    ) -> None:
        self.process_set, self.op = process_set, op
        self._prescale, self._postscale, self._compression = prescale, postscale, find_compression(compression)
        wire = self._compression.wire
        if wire is not None and wire not in WIRE_TYPES:
            raise _core.Unsupported(
                f"the compression {wire} is for the gradients of a DistributedOptimizer; for a single tensor, use fp16 or bf16"
            )
        self.scale = prescale * postscale

    def begin(self, tensor: Tensor, into: Tensor | None, kind: str, name: str | None) -> Handle:
        """Begins an all-reduce. The result is in `into`, or in a new tensor."""
        members = self.process_set.members()
        source, op, restore = self._convert(tensor)
        host = source if into is not None and source.data_ptr() == into.data_ptr() else torch.empty_like(source)
        input_memory = None if host is source else tensors.as_memory(source, False)
        handle = members.named.all_reduce(members.tensor_name(kind, name), tensors.as_memory(host), op, input_memory)

        def finish(_: list[Any]) -> Tensor:
            result = restore(host)
            if into is None:
                return result.to(tensor.device)
            if result is not into:
                into.detach().copy_(result.view(into.shape))
            return into

        return Handle([handle], finish)

    def begin_scatter(self, tensor: Tensor, name: str | None) -> Handle:
        """Begins a reduce-scatter by rows."""
        members = self.process_set.members()
        source, op, restore = self._convert(tensor)
        if source.dim() == 0:
            raise _core.InvalidArgument("reducescatter needs a first dimension; a single number has none")
        n, rank = members.group.size, members.group.rank
        rows = [source.shape[0] // n + (index < source.shape[0] % n) for index in range(n)]
        if source.shape[0] % n:
            # The named tensors divide elements and not rows, so each rank's part gets the same number of rows.
            padded = source.new_zeros((n, rows[0], *source.shape[1:]))
            for part, values in zip(padded, source.split(rows), strict=True):
                part[: len(values)] = values
            source = padded.flatten(0, 1)
        result = torch.empty((rows[0], *source.shape[1:]), dtype=source.dtype)
        memory, input_memory = tensors.as_memory(result), tensors.as_memory(source, False)
        handle = members.named.reduce_scatter(members.tensor_name("reducescatter", name), memory, input_memory, op)
        return Handle([handle], lambda _: restore(result[: rows[rank]]).to(tensor.device))

    def _convert(self, tensor: Tensor) -> tuple[Tensor, str, Callable[[Tensor], Tensor]]:
        """Returns the tensor to send, which is on the host, the reduction, and the function that converts the result back."""
        packed, context = self._compression.compress(tensor.detach())
        source = tensors.readable_on_host(packed)
        # Averages of integers are rounded towards minus infinity, as in Horovod.
        divides = self.op == Average and not source.dtype.is_floating_point and not source.dtype.is_complex
        if self._prescale != 1.0:
            source = (source * self._prescale).to(source.dtype)
        if self._compression.wire is not None and source.dtype is torch.float32:
            source = source.to(WIRE_TYPES[self._compression.wire])

        def restore(result: Tensor) -> Tensor:
            result = result if result.dtype is packed.dtype else result.to(packed.dtype)
            if divides:
                result.div_(self.process_set.members().group.size, rounding_mode="floor")
            if self._postscale != 1.0:
                result.mul_(self._postscale)
            return self._compression.decompress(result, context)

        return source, Sum if divides else self.op, restore
