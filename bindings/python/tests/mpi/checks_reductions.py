"""Checks of reductions of buffers. The compiled module computes some of the reductions. Python computes the others,
either in `ringtrain.mpi` or in a function that the caller passes.
"""

import functools

import numpy as np
from checks_collectives import call_each_form

from ringtrain.mpi import MPI

INTEGERS, FLOATS, COMPLEX = "bBhHiIlLqQ", "efdg", "FDG"
CASES = [
    (MPI.SUM, np.add, INTEGERS + FLOATS + COMPLEX), (MPI.PROD, np.multiply, INTEGERS + FLOATS + COMPLEX),
    (MPI.MAX, np.maximum, INTEGERS + FLOATS), (MPI.MIN, np.minimum, INTEGERS + FLOATS),
    (MPI.LAND, np.logical_and, "?" + INTEGERS), (MPI.LOR, np.logical_or, "?" + INTEGERS),
    (MPI.LXOR, np.logical_xor, "?" + INTEGERS),
    (MPI.BAND, np.bitwise_and, INTEGERS), (MPI.BOR, np.bitwise_or, INTEGERS), (MPI.BXOR, np.bitwise_xor, INTEGERS),
]  # fmt: skip


def values_of_rank(rank, code, count=5):
    return ((np.arange(count) * 2 + rank) % 3).astype(code)


def expected_reduction(function, code, ranks, count=5):
    return functools.reduce(lambda x, y: function(x, y).astype(code), [values_of_rank(rank, code, count) for rank in ranks])


def is_equal(op, got, expected):
    # With one rank, MPI does not define whether a logical reduction changes a true value such as 2 to 1.
    logical = op in (MPI.LAND, MPI.LOR, MPI.LXOR)
    return (got.astype(bool) == expected.astype(bool)).all() if logical else np.allclose(got, expected)


def check_all_operations(comm):
    for op, function, codes in CASES:
        for code in codes:
            expected = expected_reduction(function, code, range(comm.size))
            got = np.zeros(5, code)
            comm.Allreduce(values_of_rank(comm.rank, code), got, op=op)
            assert is_equal(op, got, expected), (op, code)
            comm.Allreduce(values_of_rank(comm.rank, code), got, op)
            assert is_equal(op, got, expected), (op, code, "repeated call")
            got = values_of_rank(comm.rank, code)
            comm.Allreduce(MPI.IN_PLACE, got, op=op)
            assert is_equal(op, got, expected), (op, code, "in place")
            for root in range(comm.size):
                is_root = comm.rank == root
                got = np.zeros(5, code)
                comm.Reduce(values_of_rank(comm.rank, code), got if is_root else None, op, root)
                assert not is_root or is_equal(op, got, expected)


def check_blocking_nonblocking_and_persistent_forms(comm):
    for code in "dF":
        for op, function in ((MPI.SUM, np.add), (MPI.PROD, np.multiply)):
            got = np.zeros(5, code)
            for _ in call_each_form(comm, "Allreduce", values_of_rank(comm.rank, code), got, op=op):
                assert np.allclose(got, expected_reduction(function, code, range(comm.size)))
            for _ in call_each_form(comm, "Scan", values_of_rank(comm.rank, code), got, op=op):
                assert np.allclose(got, expected_reduction(function, code, range(comm.rank + 1)))
            before = np.full(5, 42, code)
            for _ in call_each_form(comm, "Exscan", values_of_rank(comm.rank, code), before, op=op):
                assert np.allclose(before, expected_reduction(function, code, range(comm.rank)) if comm.rank else 42)
            for root in range(comm.size):
                target = np.zeros(5, code) if comm.rank == root else None
                for _ in call_each_form(comm, "Reduce", values_of_rank(comm.rank, code), target, op=op, root=root):
                    assert target is None or np.allclose(target, expected_reduction(function, code, range(comm.size)))


def check_in_place(comm):
    expected = expected_reduction(np.add, "d", range(comm.size))
    for root in range(comm.size):
        values = values_of_rank(comm.rank, "d")
        if comm.rank == root:
            comm.Reduce(MPI.IN_PLACE, values, root=root)
            assert np.allclose(values, expected)
        else:
            comm.Reduce(values, None, root=root)
            assert (values == values_of_rank(comm.rank, "d")).all(), "the input must not change"
    values = values_of_rank(comm.rank, "d")
    comm.Scan(MPI.IN_PLACE, values)
    assert np.allclose(values, expected_reduction(np.add, "d", range(comm.rank + 1)))


def check_reduce_scatter(comm):
    size, rank = comm.size, comm.rank
    for code in "idF":
        for op, function in ((MPI.SUM, np.add), (MPI.PROD, np.multiply)):
            everything = expected_reduction(function, code, range(size), 3 * size)
            got = np.zeros(3, code)
            for _ in call_each_form(comm, "Reduce_scatter_block", values_of_rank(rank, code, 3 * size), got, op=op):
                assert np.allclose(got, everything[3 * rank :][:3])
            counts = [r + 1 for r in range(size)]
            whole = expected_reduction(function, code, range(size), sum(counts))
            own = whole[sum(counts[:rank]) :][: rank + 1]
            got = np.zeros(rank + 1, code)
            for given in (counts, None):
                for _ in call_each_form(comm, "Reduce_scatter", values_of_rank(rank, code, sum(counts)), got, given, op=op):
                    assert np.allclose(got, own)
    values = values_of_rank(rank, "d", 3 * size)
    comm.Reduce_scatter_block(MPI.IN_PLACE, values)
    assert np.allclose(values[:3], expected_reduction(np.add, "d", range(size), 3 * size)[3 * rank :][:3])
    counts = [other + 1 for other in range(size)]
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    for send_values in (lambda values: values, lambda values: None):  # the same buffer twice means in place
        values = values_of_rank(rank, "d", sum(counts))
        comm.Reduce_scatter(send_values(values), values, counts)
        assert np.allclose(values[: rank + 1], expected_reduction(np.add, "d", range(size), sum(counts))[own])


def check_minloc_and_maxloc(comm):
    for datatype in (MPI.FLOAT_INT, MPI.DOUBLE_INT, MPI.LONG_INT, MPI.INT_INT, MPI.SHORT_INT, MPI.LONG_DOUBLE_INT):
        mine, got = np.zeros(2, datatype.dtype), np.zeros(2, datatype.dtype)
        mine["value"], mine["index"] = (comm.rank % 2, 5), comm.rank
        comm.Allreduce([mine, datatype], [got, datatype], op=MPI.MAXLOC)
        top = min(comm.size - 1, 1)
        assert (got["value"].tolist(), got["index"].tolist()) == ([top, 5], [top, 0])
        comm.Allreduce([mine, datatype], [got, datatype], op=MPI.MINLOC)
        assert (got["value"].tolist(), got["index"].tolist()) == ([0, 5], [0, 0])


def check_user_defined_operation(comm):
    def multiply_matrices(left, right, datatype):
        assert datatype == MPI.DOUBLE
        a, b = np.frombuffer(left).reshape(2, 2), np.frombuffer(right).reshape(2, 2)
        b[...] = a @ b

    def matrix_of_rank(rank):
        return np.array([[1.0, rank + 1], [0.5, rank]])

    product = MPI.Op.Create(multiply_matrices, commute=False)
    ranks = range(comm.size)
    expected = functools.reduce(np.matmul, map(matrix_of_rank, ranks))
    got = np.zeros((2, 2))
    for _ in call_each_form(comm, "Allreduce", matrix_of_rank(comm.rank), got, op=product):
        assert np.allclose(got, expected), "the operands must be combined in rank order"
    comm.Reduce(matrix_of_rank(comm.rank), got, op=product, root=comm.size - 1)
    comm.Scan(matrix_of_rank(comm.rank), got, op=product)
    assert np.allclose(got, functools.reduce(np.matmul, map(matrix_of_rank, range(comm.rank + 1))))
    assert not product.Is_commutative()
    product.Free()
    assert product == MPI.OP_NULL


def check_undefined_reductions_are_refused(comm):
    for code, op in (("d", MPI.BAND), ("d", MPI.MAXLOC), ("D", MPI.MAX), ("?", MPI.SUM), ("f", MPI.LAND)):
        try:
            comm.Allreduce(np.zeros(2, code), np.zeros(2, code), op=op)
        except MPI.Exception as error:
            assert error.Get_error_class() == MPI.ERR_OP
        else:
            raise AssertionError((code, op))
    for sent, got in ((np.zeros(2), np.zeros(3)), (np.zeros(2), np.zeros(2, int))):
        try:
            comm.Allreduce(sent, got)
        except ValueError as error:
            assert "mismatch" in str(error)
        else:
            raise AssertionError


def check_local_reductions(comm):
    a, b = np.arange(4.0), np.ones(4)
    MPI.SUM.Reduce_local(a, b)
    assert b.tolist() == [1, 2, 3, 4]
    assert MPI.SUM(1, 2) == 3
    assert MPI.LXOR(1, 2) is False
    assert MPI.MAXLOC((1, 3), (1, 2)) == (1, 2)
    assert MPI.REPLACE(1, 2) == 2
    assert MPI.NO_OP(1, 2) == 1
