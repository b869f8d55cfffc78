"""What a rank remembers of a compressed bucket of gradients: what it adds to the next gradients ("errors"), the last results of
EF21, and the factors of PowerSGD.

Buckets may change while a model trains and between runs. Therefore checkpoints have the memory by parameter. The position of a
parameter in the model identifies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ringtrain import _core
from ringtrain.torch.power_sgd import PowerSgdBucket

Tensor = torch.Tensor
Memory = dict[str, Any]
"""The memory of a model: "errors", "results" and "factors", all by position, and the number of "steps"."""


def empty() -> Memory:
    """Returns the memory of a model before the first step."""
    return {"steps": 0, "errors": {}, "results": {}, "factors": {}}


class CodecBucket:
    """A bucket that the library encodes."""

    def __init__(self, parameters: Sequence[Tensor], positions: Sequence[int], compression: str, seed: int) -> None:
        self.parameters = parameters
        self.positions = positions
        self.compressor = _core.Compressor(compression, seed)

    def load(self, error: Tensor | None, result: Tensor | None, factors: Mapping[int, Tensor], steps: int) -> None:
        """Sets the errors and the last results of all parameters. None means that there are none."""
        residual, result = (torch.empty(0) if tensor is None else tensor.cpu() for tensor in (error, result))
        self.compressor.load_state_dict({"residual": residual.numpy(), "result": result.numpy(), "calls": steps})

    def error_and_result(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the errors and the last results of all parameters, or None if there are none."""
        state = self.compressor.state_dict()
        error, result = (torch.from_numpy(state[name]) for name in ("residual", "result"))
        return error if error.numel() else None, result if result.numel() else None

    def factors(self) -> dict[int, Tensor]:
        return {}


CompressedBucket = CodecBucket | PowerSgdBucket


def collect(buckets: Iterable[CompressedBucket], memory: Memory) -> None:
    """Adds what the buckets remember to `memory`. The tensors may be views of the memory of the buckets."""
    for bucket in buckets:
        memory["factors"].update(bucket.factors())
        for name, tensor in zip(("errors", "results"), bucket.error_and_result(), strict=True):
            if tensor is not None:
                parts = tensor.split([parameter.numel() for parameter in bucket.parameters])
                memory[name].update(zip(bucket.positions, parts, strict=True))


def restore(bucket: CompressedBucket, memory: Memory) -> None:
    """Sets what a bucket remembers. Raises `ringtrain.InvalidArgument` if `memory` is that of another model."""
    error, result = (_concatenated(bucket, memory[name]) for name in ("errors", "results"))
    bucket.load(error, result, memory["factors"], memory["steps"])


def _concatenated(bucket: CompressedBucket, saved: Mapping[int, Tensor]) -> Tensor | None:
    """Returns the saved vectors of the parameters of a bucket in one tensor, or None if there are none."""
    vectors = [saved.get(position) for position in bucket.positions]
    if all(vector is None for vector in vectors):
        return None
    parts = []
    for vector, parameter in zip(vectors, bucket.parameters, strict=True):
        if vector is not None and vector.numel() != parameter.numel():
            raise _core.InvalidArgument(
                f"the state of the compression has {vector.numel()} elements for a parameter of {parameter.numel()} elements, so "
                "it belongs to another model"
            )
        parts.append(parameter.new_zeros(parameter.numel()) if vector is None else vector.to(parameter.device))
    return torch.cat(parts)


def copied(memory: Memory) -> Memory:
    """Returns a copy of a memory."""
    return {name: {p: t.clone() for p, t in part.items()} if isinstance(part, dict) else part for name, part in memory.items()}


def redistribute(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> Memory:
    """Returns the state for rank `rank` of `size` ranks, if `states` are the states of all ranks of an earlier run with another
    number of ranks. The average of the errors over the ranks stays the same, and so do the results."""
    errors: dict[int, Tensor] = {}
    for state in states[rank::size]:
        for position, error in state["errors"].items():
            errors[position] = errors.get(position, 0) + error * (size / len(states))
    return {**states[0], "errors": errors, "rank": rank}


def checked(state: Mapping[str, Any]) -> Memory:
    """Returns the memory in a checkpoint. Raises `ringtrain.InvalidArgument` if a part of it is missing."""
    if missing := [name for name in ("steps", "errors", "factors") if name not in state]:
        raise _core.InvalidArgument(f"the state of the compression has no {', '.join(missing)}")
    results = dict(state.get("results", {}))  # states of earlier versions have none
    return {"steps": int(state["steps"]), "errors": dict(state["errors"]), "results": results, "factors": dict(state["factors"])}
