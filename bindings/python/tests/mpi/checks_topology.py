"""Checks of Cartesian grids and of exchanges between neighbours."""

import pickle

import numpy as np

from ringtrain.mpi import MPI


def check_compute_dims(comm):
    for nodes, dims, expected in (
        (6, 2, [3, 2]), (12, [0, 3], [4, 3]), (12, 3, [3, 2, 2]), (24, [0, 0, 0], [4, 3, 2]), (16, 3, [4, 2, 2]),
        (60, 3, [5, 4, 3]), (36, 3, [4, 3, 3]), (7, 2, [7, 1]), (1, 3, [1, 1, 1]), (4, [2, 2], [2, 2]),
    ):  # fmt: skip
        assert MPI.Compute_dims(nodes, dims) == expected
    for nodes, dims in ((7, [2, 0]), (4, [3]), (4, [-1, 0])):
        try:
            MPI.Compute_dims(nodes, dims)
        except MPI.Exception as error:
            assert error.Get_error_class() == MPI.ERR_DIMS
        else:
            raise AssertionError((nodes, dims))


def check_grid_coordinates(comm):
    dims = MPI.Compute_dims(comm.size, 2)
    grid = comm.Create_cart(dims, periods=[True, False], reorder=True)
    assert isinstance(grid, MPI.Cartcomm)
    assert (grid.dim, grid.ndim, grid.dims, grid.periods) == (2, 2, dims, [1, 0])
    assert grid.coords == [grid.rank // dims[1], grid.rank % dims[1]]
    assert grid.Get_topo() == (dims, [1, 0], grid.coords)
    assert [grid.Get_cart_rank(grid.Get_coords(r)) for r in range(grid.size)] == list(range(grid.size))
    row, column = grid.coords
    before, after = grid.Shift(0, 1)
    assert before == (row - 1) % dims[0] * dims[1] + column
    assert after == (row + 1) % dims[0] * dims[1] + column
    before, after = grid.Shift(1, 1)
    assert before == (grid.rank - 1 if column > 0 else MPI.PROC_NULL)
    assert after == (grid.rank + 1 if column < dims[1] - 1 else MPI.PROC_NULL)
    assert grid.Get_topology() == MPI.CART
    assert comm.Get_topology() == MPI.UNDEFINED
    copy = grid.Dup()
    assert isinstance(copy, MPI.Cartcomm)
    assert copy.dims == dims
    copy.Free()
    grid.Free()


def check_ranks_outside_the_grid(comm):
    grid = comm.Create_cart([max(comm.size - 1, 1)])
    if comm.size > 1 and comm.rank == comm.size - 1:
        assert grid == MPI.COMM_NULL
    else:
        assert grid.size == max(comm.size - 1, 1)
        grid.Free()
    try:
        comm.Create_cart([comm.size + 1])
    except MPI.Exception as error:
        assert error.Get_error_class() == MPI.ERR_ARG


def check_rows_and_columns_of_a_grid(comm):
    dims = MPI.Compute_dims(comm.size, 2)
    grid = comm.Create_cart(dims)
    row = grid.Sub([False, True])
    assert row.dims == [dims[1]]
    assert row.rank == grid.coords[1]
    assert row.allreduce(grid.coords[0]) == grid.coords[0] * dims[1]
    column = grid.Sub([True, False])
    assert (column.size, column.rank) == (dims[0], grid.coords[0])
    for made in (row, column, grid):
        made.Free()


def check_neighbours_of_a_rank_that_cannot_pickle_its_object_fail(comm):
    """Regression test: before the fix, the neighbours of a rank that could not pickle its object waited forever."""
    grid = comm.Create_cart([comm.size], [True])
    culprit = grid.size - 1
    is_culprit, is_neighbour = grid.rank == culprit, culprit in grid.inedges
    one = (lambda: 0) if is_culprit else "fine"
    for call in (
        lambda: grid.neighbor_allgather(one),
        lambda: grid.neighbor_alltoall([one, one]),
        lambda: grid.neighbor_alltoall([1] * (2 + is_culprit)),
    ):
        try:
            received = call()
        except MPI.Exception as error:
            assert is_neighbour and not is_culprit
            assert f"rank {culprit} did not contribute to this collective: " in str(error), error
        except Exception as error:
            assert is_culprit, repr(error)
            assert isinstance(error, ValueError | TypeError | AttributeError | pickle.PicklingError), repr(error)
        else:
            assert len(received) == 2 and not is_neighbour and not is_culprit
        assert grid.neighbor_allgather(grid.rank) == grid.inedges
    grid.Free()


def check_neighbour_collectives(comm):
    dims = MPI.Compute_dims(comm.size, 2)
    for periods in ([True, True], [False, True], [False, False]):
        grid = comm.Create_cart(dims, periods)
        around = [*grid.Shift(0, 1), *grid.Shift(1, 1)]
        assert grid.inedges == grid.outedges == around
        assert grid.neighbor_allgather(grid.rank) == [None if r == MPI.PROC_NULL else r for r in around]
        # The object that arrives from a direction has the index of the opposite direction in the list of the neighbour that
        # sent it.
        got = grid.neighbor_alltoall([(grid.rank, index) for index in range(4)])
        assert got == [None if r == MPI.PROC_NULL else (r, index ^ 1) for index, r in enumerate(around)]
        a, b = np.full(3, float(grid.rank)), np.full((4, 3), -1.0)
        grid.Neighbor_allgather(a, b)
        assert b.tolist() == [[-1.0 if r == MPI.PROC_NULL else r] * 3 for r in around]
        out, into = np.arange(4) + 10 * grid.rank, np.full(4, -1)
        request = grid.Ineighbor_alltoall(out, into)
        request.Wait()
        assert into.tolist() == [-1 if r == MPI.PROC_NULL else 10 * r + (index ^ 1) for index, r in enumerate(around)]
        into[:] = -1
        grid.Neighbor_alltoallv([out, [1] * 4], [into, [1] * 4])
        assert into.tolist() == [-1 if r == MPI.PROC_NULL else 10 * r + (index ^ 1) for index, r in enumerate(around)]
        grid.Free()
