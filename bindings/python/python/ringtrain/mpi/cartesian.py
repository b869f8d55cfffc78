"""Processes on a grid: `Cartcomm`."""

import math
from collections.abc import Sequence
from operator import index
from typing import Any

from . import constants as c
from .communicator import COMM_NULL, Comm, Intracomm, State
from .errors import Exception, to_mpi_exception
from .neighbours import Neighbours
from .runtime import with_mpi_timeout

from .. import _core  # isort: skip


class Topocomm(Intracomm, Neighbours):
    """A communicator whose processes have neighbours."""


class Cartcomm(Topocomm):
    """Processes on a grid of the shape `dims`, in row-major order. `periods` says which dimensions are periodic."""

    @property
    def _grid(self) -> "Grid":
        self._group.rank  # noqa: B018
        if not isinstance(self._state.topology, Grid):
            raise Exception(c.ERR_TOPOLOGY)
        return self._state.topology

    def Get_dim(self) -> int:
        """Returns the number of dimensions."""
        return len(self._grid.dims)

    dim = property(Get_dim)
    ndim = property(Get_dim)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        """Returns the dimensions, whether each dimension is periodic, and the coordinates of this process."""
        grid = self._grid
        return list(grid.dims), list(grid.periods), grid.coordinates(self._group.rank)

    topo = property(Get_topo)
    dims = property(lambda self: self.Get_topo()[0])
    periods = property(lambda self: self.Get_topo()[1])
    coords = property(lambda self: self.Get_topo()[2])

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """Returns the rank at coordinates. Raises `Exception` if a coordinate is outside the grid in a dimension that is not
        periodic."""
        return self._grid.rank(coords)

    def Get_coords(self, rank: int) -> list[int]:
        """Returns the coordinates of a rank."""
        grid = self._grid
        if not 0 <= rank < self._group.size:
            raise Exception(c.ERR_RANK, f"{rank} is not a rank of a communicator of size {self._group.size}")
        return grid.coordinates(rank)

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Returns the ranks from which to receive and to which to send, `disp` steps along a dimension. A rank beyond the edge
        of the grid is `PROC_NULL`."""
        return self._grid.shift(self._group.rank, direction, disp)

    def Sub(self, remain_dims: Sequence[bool]) -> "Cartcomm":
        """Returns the sub-grid that contains this process, with only the dimensions for which `remain_dims` is true. All ranks
        must call `Sub`."""
        grid = self._grid
        keep = [bool(remains) for remains in remain_dims]
        if len(keep) != len(grid.dims):
            raise Exception(c.ERR_ARG, f"expecting {len(grid.dims)} items, got {len(keep)}")
        colour = place = 0
        for size, at, remains in zip(grid.dims, grid.coordinates(self._group.rank), keep, strict=True):
            colour, place = (colour, place * size + at) if remains else (colour * size + at, place)
        remaining = Grid(
            [size for size, remains in zip(grid.dims, keep, strict=True) if remains],
            [period for period, remains in zip(grid.periods, keep, strict=True) if remains],
        )
        return _on_grid(self._form_group("split", colour, place), remaining)


class Grid:
    """A grid of ranks in row-major order."""

    def __init__(self, dims: Sequence[int], periods: Sequence[int]) -> None:
        self.dims = list(dims)
        self.periods = list(periods)

    def coordinates(self, rank: int) -> list[int]:
        """Returns the coordinates of a rank."""
        coordinates = []
        for size in reversed(self.dims):
            rank, at = divmod(rank, size)
            coordinates.append(at)
        return coordinates[::-1]

    def rank(self, coords: Sequence[int]) -> int:
        """Returns the rank at coordinates."""
        coords = [index(at) for at in coords]
        if len(coords) != len(self.dims):
            raise ValueError(f"expecting {len(self.dims)} items, got {len(coords)}")
        rank = 0
        for size, at, wraps in zip(self.dims, coords, self.periods, strict=True):
            if not wraps and not 0 <= at < size:
                raise Exception(c.ERR_ARG, f"{list(coords)} lie beyond the grid of {self.dims}")
            rank = rank * size + at % size
        return rank

    def shift(self, rank: int, direction: int, disp: int) -> tuple[int, int]:
        """Returns the ranks `disp` steps before and after a rank."""
        if not 0 <= direction < len(self.dims):
            raise Exception(c.ERR_DIMS, f"{direction} is not a dimension of a grid of {len(self.dims)} dimensions")
        return self._beside(rank, direction, -disp), self._beside(rank, direction, disp)

    def _beside(self, rank: int, direction: int, disp: int) -> int:
        coords = self.coordinates(rank)
        coords[direction] += disp
        if not self.periods[direction] and not 0 <= coords[direction] < self.dims[direction]:
            return c.PROC_NULL
        return self.rank(coords)

    def neighbours(self, rank: int) -> list[int]:
        """Returns the neighbours of a rank in MPI's order: for each dimension, the rank before and the rank after."""
        return [beside for direction in range(len(self.dims)) for beside in self.shift(rank, direction, 1)]


def create_cart(comm: Intracomm, dims: Sequence[int], periods: Any) -> Comm:
    """Returns a communicator of the first processes of `comm` on a grid, or `COMM_NULL` on processes that do not fit on the
    grid."""
    grid = _grid_of(comm, dims, periods)
    count = math.prod(grid.dims)
    is_in = comm.rank < count
    group = comm._form_group("split", 0 if is_in else None, comm.rank)
    return _on_grid(group, grid) if is_in else COMM_NULL


def cart_map(comm: Intracomm, dims: Sequence[int]) -> int:
    """Returns the rank of this process on the grid, or `UNDEFINED` if this process does not fit on the grid."""
    count = math.prod(_grid_of(comm, dims, None).dims)
    return comm.rank if comm.rank < count else c.UNDEFINED


def _grid_of(comm: Intracomm, dims: Any, periods: Any) -> Grid:
    sizes = [index(size) for size in dims] if hasattr(dims, "__iter__") else [index(dims)]
    if periods is None:
        wraps = [False] * len(sizes)
    elif hasattr(periods, "__iter__"):
        wraps = [bool(period) for period in periods]
    else:
        wraps = [bool(periods)] * len(sizes)
    if len(wraps) != len(sizes):
        raise ValueError(f"expecting {len(sizes)} items, got {len(wraps)}")
    if any(size < 1 for size in sizes):
        raise Exception(c.ERR_DIMS, f"{sizes} is not the shape of a grid: each size must be at least 1")
    if math.prod(sizes) > comm.size:
        raise Exception(c.ERR_ARG, f"a grid of {sizes} has more places than the {comm.size} processes")
    return Grid(sizes, [int(period) for period in wraps])


def _on_grid(group: Any, grid: Grid) -> Cartcomm:
    state = State()
    state.topology = grid
    try:
        # Neighbours exchange messages in a separate group, so that no receive of the program matches these messages.
        state.neighbour_group = with_mpi_timeout(group.duplicate())
    except _core.Error as error:
        raise to_mpi_exception(error) from error
    return Cartcomm._of(group, state)


def Compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """Returns the shape of a grid of `nnodes` places, with sizes that are close to each other, in descending order. Sizes in
    `dims` that are not 0 stay the same."""
    given = [0] * index(dims) if isinstance(dims, int) else [index(size) for size in dims]
    fixed = math.prod(size for size in given if size > 0)
    if any(size < 0 for size in given) or nnodes < 1 or nnodes % fixed:
        raise Exception(c.ERR_DIMS, f"{nnodes} places cannot be arranged in {given}")
    free = given.count(0)
    if free == 0:
        if fixed != nnodes:
            raise Exception(c.ERR_DIMS, f"{given} have {fixed} places and not {nnodes}")
        return given
    sizes = iter(_balanced(nnodes // fixed, free))
    return [size or next(sizes) for size in given]


def _balanced(count: int, parts: int) -> list[int]:
    """Returns `parts` factors of `count` in descending order, with the smallest possible difference between the largest factor
    and the smallest."""
    best: tuple[int, list[int]] | None = None

    def search(rest: int, left: int, largest: int, chosen: list[int]) -> None:
        nonlocal best
        if left == 1:
            if rest <= largest:
                spread = (chosen[0] if chosen else rest) - rest
                if best is None or spread < best[0]:
                    best = (spread, [*chosen, rest])
            return
        for factor in _divisors(rest):
            if factor <= largest and factor**left >= rest:
                search(rest // factor, left - 1, factor, [*chosen, factor])

    search(count, parts, count, [])
    assert best is not None, "count, 1, 1, .. is always found"
    return best[1]


def _divisors(count: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(count) + 1) if count % d == 0]
    return sorted({*small, *(count // d for d in small)})
