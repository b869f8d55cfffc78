"""PowerSGD for a bucket of gradients (Vogels et al., "PowerSGD: Practical low-rank gradient compression for distributed
optimization", NeurIPS 2019).

A gradient M of n x m elements is approximated by P Q^T, where P is n x r and Q is m x r. One step of the power method computes P
and Q: P = M Q, summed over the ranks and orthogonalised, and then Q = M^T P, averaged over the ranks. The Q of a step is the
start of the next step. The ranks exchange r(n + m) elements instead of n m.

The factors are stored transposed, as r x n and r x m, because torch then multiplies them several times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ringtrain import _core

Tensor = torch.Tensor
T = TypeVar("T")
BeginAverage = Callable[[Tensor], Any]
"""Begins to average a tensor over the ranks in place. The result has the method `wait`."""

# More than the number of parameter tensors of a model.
_POSITIONS_MAX = 1_000_003


@dataclass(frozen=True)
class PowerSgdSettings:
    """The settings of PowerSGD. `min_compression_rate` is the number of elements of a gradient divided by that of its factors.
    Gradients with a smaller rate are sent unchanged."""

    rank: int
    min_compression_rate: float = 2.0
    seed: int = 0


class PowerSgdBucket:
    """The errors and the factors Q of the gradients in a bucket, and the buffers in which the ranks exchange factors.

    `begin` starts the first exchange, `begin_second` waits for it and starts the second one, and `finish` replaces the gradients
    by the averages. The program may begin other buckets between these calls. All ranks must make these calls in the same order.
    """

    def __init__(self, parameters: Sequence[Tensor], positions: Sequence[int], settings: PowerSgdSettings) -> None:
        """`positions` identify the parameters of a model. They are the same on all ranks."""
        self.parameters = parameters
        self.positions = positions
        self._settings = settings
        self._is_matrix = [is_worth_compressing(p.shape, settings.rank, settings.min_compression_rate) for p in parameters]
        # The positions of the matrices. `_qs` has one factor for each of them.
        self._matrix_positions = _where(positions, self._is_matrix)
        shapes = [matrix_shape(p.shape) for p in _where(parameters, self._is_matrix)]
        ranks = [min(*shape, settings.rank) for shape in shapes]
        p_shapes = [(rank, rows) for (rows, _), rank in zip(shapes, ranks, strict=True)]
        q_shapes = [(rank, columns) for (_, columns), rank in zip(shapes, ranks, strict=True)]
        self._vector_sizes = [p.numel() for p in self._vectors_of(parameters)]
        # The first exchange has the factors P and the gradients that are sent unchanged.
        self._first = parameters[0].new_zeros(_count(p_shapes) + sum(self._vector_sizes))
        self._second = parameters[0].new_zeros(_count(q_shapes))
        self._ps, self._qs = _views(self._first, p_shapes), _views(self._second, q_shapes)
        self._error = parameters[0].new_zeros(sum(p.numel() for p in parameters))
        self._set_random_factors()

    def load(self, error: Tensor | None, result: Tensor | None, factors: Mapping[int, Tensor], steps: int) -> None:
        """Sets the errors, which are zeros if `error` is None, and those factors whose positions and shapes are found in
        `factors`. Raises `ringtrain.InvalidArgument` if there is a `result`, which only EF21 has."""
        if result is not None:
            raise _core.InvalidArgument(
                "the state is that of ef21, which powersgd cannot continue; use ef21 again, or begin with a new state"
            )
        if error is None:
            self._error.zero_()
        else:
            self._error.copy_(error)
        for position, q in zip(self._matrix_positions, self._qs, strict=True):
            if position in factors and factors[position].shape == q.shape:
                q.copy_(factors[position])

    def error_and_result(self) -> tuple[Tensor, None]:
        """Returns what was not sent of the gradients."""
        return self._error, None

    def factors(self) -> dict[int, Tensor]:
        """Returns the factors Q by the positions of their parameters."""
        return dict(zip(self._matrix_positions, self._qs, strict=True))

    def begin(self, flat: Tensor, gradients: Sequence[Tensor], begin_average: BeginAverage) -> None:
        """Computes the factors P and begins to average them. `gradients` are views into `flat`."""
        self._flat, self._gradients, self._begin_average = flat, gradients, begin_average
        flat.add_(self._error)
        # `finish` subtracts what was sent.
        self._error.copy_(flat)
        self._matrices = [gradient.view(matrix_shape(gradient.shape)) for gradient in _where(gradients, self._is_matrix)]
        for matrix, p, q in zip(self._matrices, self._ps, self._qs, strict=True):
            # The lengths of the columns of Q are singular values, which differ a lot. A Q of zeros becomes a part of the
            # identity.
            _orthogonalize(q)
            torch.matmul(q, matrix.t(), out=p)
        for gradient, part in zip(self._vectors_of(gradients), self._vector_parts(), strict=True):
            part.copy_(gradient.reshape(-1))
        self._work = begin_average(self._first)

    def begin_second(self) -> None:
        """Waits for the factors P, computes the factors Q and begins to average them."""
        self._work.wait()
        for matrix, p, q in zip(self._matrices, self._ps, self._qs, strict=True):
            _orthogonalize(p)
            torch.matmul(p, matrix, out=q)
        if self._qs:
            self._work = self._begin_average(self._second)

    def finish(self) -> Tensor:
        """Waits for the factors Q, and returns the bucket with the averages."""
        self._work.wait()
        for matrix, p, q in zip(self._matrices, self._ps, self._qs, strict=True):
            torch.matmul(p.t(), q, out=matrix)
        flat = self._flat
        self._error.sub_(flat)
        for gradient, part in zip(self._vectors_of(self._gradients), self._vector_parts(), strict=True):
            gradient.copy_(part.view_as(gradient))
        for error in self._vectors_of(self._error.split([p.numel() for p in self.parameters])):
            error.zero_()
        if not torch.isfinite(self._second).all():
            # The gradients of a rank were not finite. Without this, all later gradients would not be finite either.
            self._set_random_factors()
            self._error.zero_()
        del self._flat, self._gradients, self._begin_average, self._matrices, self._work
        return flat

    def _set_random_factors(self) -> None:
        """Sets the factors Q to normally distributed numbers, the same on all ranks."""
        for position, q in zip(self._matrix_positions, self._qs, strict=True):
            generator = torch.Generator().manual_seed(self._settings.seed * _POSITIONS_MAX + position)
            q.copy_(torch.randn(q.shape, generator=generator, dtype=q.dtype))

    def _vectors_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors of those parameters whose gradients are sent unchanged."""
        return _where(tensors, [not is_matrix for is_matrix in self._is_matrix])

    def _vector_parts(self) -> Sequence[Tensor]:
        return self._first[self._first.numel() - sum(self._vector_sizes) :].split(self._vector_sizes)


def is_worth_compressing(shape: torch.Size, rank: int, min_compression_rate: float) -> bool:
    """Returns whether a gradient of this shape has more than `min_compression_rate` times as many elements as its factors."""
    if len(shape) < 2 or shape.numel() == 0:
        return False
    rows, columns = matrix_shape(shape)
    return (rows + columns) * min(rows, columns, rank) * min_compression_rate < rows * columns


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Returns the shape of the matrix that a gradient is compressed as: the first dimension, and all others together."""
    return shape[0], shape.numel() // shape[0]


def _count(shapes: Sequence[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in shapes)


def _views(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Returns views of matrices, one after the other, at the beginning of `flat`."""
    count = _count(shapes)
    parts = flat[:count].split([rows * columns for rows, columns in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _where(values: Sequence[T], chosen: Sequence[bool]) -> list[T]:
    return [value for value, is_chosen in zip(values, chosen, strict=True) if is_chosen]


def _orthogonalize(factor: Tensor) -> None:
    """Replaces the rows of a transposed factor by orthonormal rows that span the same space."""
    factor.copy_(torch.linalg.qr(factor.t())[0].t())
