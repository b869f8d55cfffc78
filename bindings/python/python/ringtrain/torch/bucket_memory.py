"""What a rank remembers of a compressed bucket of gradients: the errors that it has not sent, and the factors of PowerSGD.

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
"""The memory of a model: "errors" and "factors", both by position, and the number of "steps"."""


class CodecBucket:
    """A bucket that the library encodes."""

    def __init__(self, parameters: Sequence[Tensor], positions: Sequence[int], compression: str, seed: int) -> None:
        self.parameters = parameters
        self.positions = positions
        self.compressor = _core.Compressor(compression, seed)

    def load(self, error: Tensor | None, factors: Mapping[int, Tensor], steps: int) -> None:
        """Sets the errors of all parameters. If `error` is None, there are none."""
        residual = torch.empty(0) if error is None else error.cpu()
        self.compressor.load_state_dict({"residual": residual.numpy(), "calls": steps})

    def error(self) -> Tensor | None:
        """Returns the errors of all parameters, or None if there are none."""
        residual = torch.from_numpy(self.compressor.state_dict()["residual"])
        return residual if residual.numel() else None

    def factors(self) -> dict[int, Tensor]:
        return {}


CompressedBucket = CodecBucket | PowerSgdBucket


def collect(buckets: Iterable[CompressedBucket], memory: Memory) -> None:
    """Adds what the buckets remember to `memory`. The tensors may be views of the memory of the buckets."""
    for bucket in buckets:
        memory["factors"].update(bucket.factors())
        error = bucket.error()
        if error is not None:
            parts = error.split([parameter.numel() for parameter in bucket.parameters])
            memory["errors"].update(zip(bucket.positions, parts, strict=True))


def restore(bucket: CompressedBucket, memory: Memory) -> None:
    """Sets what a bucket remembers. Raises `ringtrain.InvalidArgument` if `memory` is that of another model."""
    errors = [memory["errors"].get(position) for position in bucket.positions]
    if all(error is None for error in errors):
        return bucket.load(None, memory["factors"], memory["steps"])
    parts = []
    for error, parameter in zip(errors, bucket.parameters, strict=True):
        if error is not None and error.numel() != parameter.numel():
            raise _core.InvalidArgument(
                f"the state of the compression has {error.numel()} errors for a parameter of {parameter.numel()} elements, so it "
                "belongs to another model"
            )
        parts.append(parameter.new_zeros(parameter.numel()) if error is None else error.to(parameter.device))
    bucket.load(torch.cat(parts), memory["factors"], memory["steps"])


def copied(memory: Memory) -> Memory:
    """Returns a copy of a memory."""
    return {name: {p: t.clone() for p, t in part.items()} if isinstance(part, dict) else part for name, part in memory.items()}


def redistribute(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> Memory:
    """Returns the state for rank `rank` of `size` ranks, if `states` are the states of all ranks of an earlier run with another
    number of ranks. The average of the errors over the ranks stays the same."""
    errors: dict[int, Tensor] = {}
    for state in states[rank::size]:
        for position, error in state["errors"].items():
            errors[position] = errors.get(position, 0) + error * (size / len(states))
    return {**states[0], "errors": errors, "rank": rank}


def checked(state: Mapping[str, Any]) -> Memory:
    """Returns the memory in a checkpoint. Raises `ringtrain.InvalidArgument` if a part of it is missing."""
    if missing := [name for name in ("steps", "errors", "factors") if name not in state]:
        raise _core.InvalidArgument(f"the state of the compression has no {', '.join(missing)}")
    return {"steps": int(state["steps"]), "errors": dict(state["errors"]), "factors": dict(state["factors"])}
