"""Checks of predefined and derived datatypes."""

import numpy as np

from ringtrain.mpi import MPI


def send_around_ring(comm, sent, got):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.Sendrecv(sent, after, 0, got, before, 0)


def check_named_datatypes(comm):
    for code in "?bhilqBHILQefdgFDG":
        datatype = MPI.Datatype.fromcode(code)
        assert datatype.Get_size() == datatype.extent == np.dtype(code).itemsize
        assert datatype.is_predefined
        assert datatype.Get_envelope() == (0, 0, 0, 0, MPI.COMBINER_NAMED)
        assert np.dtype(datatype.typestr) == np.dtype(code)
    assert MPI.DOUBLE.name == "MPI_DOUBLE"
    assert MPI.DOUBLE_INT.Get_size() == 12
    assert MPI.DOUBLE_INT.extent == 16
    assert MPI.INT.tocode() == "i"
    assert MPI.Datatype.Match_size(MPI.TYPECLASS_REAL, 8) == MPI.DOUBLE
    assert not MPI.DATATYPE_NULL


def check_vector_datatype(comm):
    """Sends a column of a matrix, and receives the column as a row."""
    matrix = np.arange(20.0).reshape(4, 5) + 100 * comm.rank
    column = MPI.DOUBLE.Create_vector(4, 1, 5).Commit()
    assert column.Get_size() == 32
    assert column.Get_extent() == (0, 8 * 16)
    row, before = np.zeros(4), (comm.rank - 1) % comm.size
    send_around_ring(comm, [matrix, (1, 0), column], row)
    assert row.tolist() == [100 * before + x for x in (0, 5, 10, 15)]
    target = np.zeros((4, 5))
    send_around_ring(comm, row, [target, 1, column])
    assert target[:, 1:].sum() == 0
    assert target[:, 0].tolist() == [100 * ((before - 1) % comm.size) + x for x in (0, 5, 10, 15)]
    column.Free()
    assert column == MPI.DATATYPE_NULL


def check_scatter_of_matrix_columns(comm):
    """Scatters the columns of a matrix with a resized vector type."""
    size = comm.size
    column = MPI.DOUBLE.Create_vector(3, 1, size).Create_resized(0, 8).Commit()
    matrix = np.arange(3.0 * size).reshape(3, size)
    part = np.zeros(3)
    comm.Scatter([matrix, 1, column] if comm.rank == 0 else None, part)
    assert part.tolist() == matrix[:, comm.rank].tolist()
    back = np.zeros((3, size))
    comm.Gather(part, [back, 1, column] if comm.rank == 0 else None)
    assert comm.rank != 0 or (back == matrix).all()


def check_subarray_datatype(comm):
    whole = np.arange(24).reshape(4, 6) + 1000 * comm.rank
    inner = MPI.INT64_T.Create_subarray([4, 6], [2, 3], [1, 2]).Commit()
    got = np.zeros(6, int)
    send_around_ring(comm, [whole, 1, inner], got)
    before = (comm.rank - 1) % comm.size
    assert (got == (whole[1:3, 2:5] - 1000 * comm.rank + 1000 * before).ravel()).all()
    fortran = MPI.INT64_T.Create_subarray([6, 4], [3, 2], [2, 1], MPI.ORDER_FORTRAN).Commit()
    again = np.zeros(6, int)
    send_around_ring(comm, [whole, 1, fortran], again)
    assert (again == got).all()


def check_indexed_datatypes(comm):
    source = np.arange(20, dtype="i") + 100 * comm.rank
    before = 100 * ((comm.rank - 1) % comm.size)
    for made, expected in (
        (MPI.INT.Create_indexed([2, 1], [3, 9]), [3, 4, 9]),
        (MPI.INT.Create_indexed_block(2, [8, 0]), [8, 9, 0, 1]),
        (MPI.INT.Create_hindexed([1, 1], [40, 4]), [10, 1]),
        (MPI.INT.Create_contiguous(3), [0, 1, 2]),
        (MPI.INT.Create_hvector(2, 2, 40), [0, 1, 10, 11]),
    ):
        made.Commit()
        got = np.zeros(len(expected), "i")
        send_around_ring(comm, [source, 1, made], got)
        assert got.tolist() == [before + x for x in expected]
        back = np.full(20, -1, "i")
        send_around_ring(comm, got, [back, 1, made])
        assert [back[x] for x in expected] == [100 * ((comm.rank - 2) % comm.size) + x for x in expected]
        assert (back == -1).sum() == 20 - len(expected)
        made.Free()


def check_struct_datatype(comm):
    record = np.dtype([("a", "i4"), ("b", "f8"), ("c", "S3")], align=True)
    made = MPI.Datatype.Create_struct([1, 1, 3], [record.fields[n][1] for n in "abc"], [MPI.INT, MPI.DOUBLE, MPI.CHAR]).Commit()
    assert (made.extent, made.Get_size()) == (record.itemsize, 15)
    sent, got = np.zeros(3, record), np.zeros(3, record)
    sent["a"], sent["b"], sent["c"] = comm.rank, [1.5, 2.5, 3.5], b"abc"
    status = MPI.Status()
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.Sendrecv([sent, made], after, 0, [got, made], before, 0, status)
    assert (got["a"] == before).all()
    assert (got["b"] == sent["b"]).all()
    assert (got["c"] == b"abc").all()
    assert status.Get_count(made) == 3
    assert status.Get_elements(made) == 15
    assert made.decode()[1] == "STRUCT"


def check_count_of_a_short_message(comm):
    """The message has fewer elements than the buffer that receives it."""
    made = MPI.INT.Create_vector(2, 1, 2).Commit()
    request = comm.Isend(np.arange(6, dtype="i"), comm.rank)
    status, got = MPI.Status(), np.full(20, -1, "i")
    comm.Recv([got, 5, made], comm.rank, 0, status)
    request.Wait()
    assert status.Get_count(made) == 3
    assert got[:10].tolist() == [0, -1, 1, 2, -1, 3, 4, -1, 5, -1]


def check_pack_and_unpack(comm):
    made = MPI.INT.Create_vector(3, 1, 2).Commit()
    packed = bytearray(made.Pack_size(1, comm))
    assert made.Pack(np.arange(5, dtype="i"), packed, 0, comm) == 12
    got = np.full(5, -1, "i")
    assert made.Unpack(packed, 0, got, comm) == 12
    assert got.tolist() == [0, -1, 2, -1, 4]
