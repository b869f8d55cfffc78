"""Checks of all collectives that take buffers and do not reduce. The checks call the blocking, nonblocking and persistent forms
of these collectives, with every element type."""

import numpy as np

from ringtrain.mpi import MPI

CODES = "?bBhHiIlLefdgFD"
COUNTS = (0, 1, 7, 5000)


def call_each_form(comm, name, *arguments, **options):
    """Calls the blocking, the nonblocking and the persistent form of a collective, one after the other."""
    getattr(comm, name)(*arguments, **options)
    yield name
    getattr(comm, "I" + name.lower())(*arguments, **options).Wait()
    yield "I" + name.lower()
    request = getattr(comm, name + "_init")(*arguments, **options)
    for _ in range(2):
        request.Start()
        request.Wait()
    request.Free()
    yield name + "_init"


def values_of_rank(count, rank, code):
    return ((np.arange(count) + rank) % 100).astype(code)


def check_barrier(comm):
    for _ in call_each_form(comm, "Barrier"):
        pass


def check_bcast(comm):
    for code in CODES:
        for count in COUNTS:
            for root in range(comm.size):
                a = values_of_rank(count, root, code) if comm.rank == root else np.zeros(count, code)
                for _ in call_each_form(comm, "Bcast", a, root=root):
                    assert (a == values_of_rank(count, root, code)).all()
    data = b"only to be read" if comm.rank == 0 else bytearray(15)
    comm.Bcast(data, 0)
    assert bytes(data) == b"only to be read"


def check_gather_and_scatter(comm):
    for code in CODES:
        for count in COUNTS:
            for root in range(comm.size):
                is_root = comm.rank == root
                whole = np.concatenate([values_of_rank(count, rank, code) for rank in range(comm.size)])
                own = values_of_rank(count, comm.rank, code)
                got = np.zeros(comm.size * count, code) if is_root else None
                for _ in call_each_form(comm, "Gather", own, got, root=root):
                    assert not is_root or (got == whole).all()
                part = np.zeros(count, code)
                for _ in call_each_form(comm, "Scatter", whole if is_root else None, part, root=root):
                    assert (part == own).all()


def check_in_place(comm):
    for root in range(comm.size):
        whole = np.arange(comm.size * 3.0)
        own = whole[comm.rank * 3 :][:3].copy()
        if comm.rank == root:
            got = np.zeros(comm.size * 3)
            got[root * 3 :][:3] = own
            comm.Gather(MPI.IN_PLACE, got, root)
            assert (got == whole).all()
            comm.Scatter(whole, MPI.IN_PLACE, root)
        else:
            comm.Gather(own, None, root)
            part = np.zeros(3)
            comm.Scatter(None, part, root)
            assert (part == own).all()
    got = np.zeros(comm.size * 3)
    got[comm.rank * 3 :][:3] = comm.rank
    for _ in call_each_form(comm, "Allgather", MPI.IN_PLACE, got):
        assert (got.reshape(-1, 3) == np.arange(comm.size)[:, None]).all()
    table = np.arange(comm.size) + 10 * comm.rank
    comm.Alltoall(MPI.IN_PLACE, table)
    assert (table == 10 * np.arange(comm.size) + comm.rank).all()


def check_allgather_and_alltoall(comm):
    for code in CODES:
        for count in COUNTS:
            got = np.zeros((comm.size, count), code)
            for _ in call_each_form(comm, "Allgather", values_of_rank(count, comm.rank, code), got):
                assert all((got[rank] == values_of_rank(count, rank, code)).all() for rank in range(comm.size))
            sent = np.concatenate([values_of_rank(count, 3 * comm.rank + rank, code) for rank in range(comm.size)])
            for _ in call_each_form(comm, "Alltoall", sent, got):
                assert all((got[rank] == values_of_rank(count, 3 * rank + comm.rank, code)).all() for rank in range(comm.size))


def check_block_counts(comm):
    """The count of a buffer is the number of elements in one rank's block."""
    got = np.zeros(comm.size * 2 + 3)
    comm.Allgather([np.full(5, float(comm.rank)), 2, MPI.DOUBLE], [got, 2, MPI.DOUBLE])
    assert got.tolist() == [float(rank) for rank in range(comm.size) for _ in range(2)] + [0, 0, 0]


def check_uneven_blocks(comm):
    size, rank = comm.size, comm.rank
    counts = [r + 1 for r in range(size)]
    starts = [sum(counts[:r]) for r in range(size)]
    whole = np.repeat(np.arange(size), counts).astype("d")
    own = np.full(rank + 1, float(rank))
    for root in range(size):
        got = np.zeros(sum(counts)) if rank == root else None
        for _ in call_each_form(comm, "Gatherv", own, [got, counts] if rank == root else None, root=root):
            assert rank != root or (got == whole).all()
        part = np.zeros(rank + 1)
        spec = [whole, counts, starts, MPI.DOUBLE] if rank == root else None
        for _ in call_each_form(comm, "Scatterv", spec, part, root=root):
            assert (part == own).all()
    got = np.zeros(sum(counts))
    for spec in ([got, counts], [got, (counts, starts)], [got, counts, starts, MPI.DOUBLE], [got, (counts, starts), "d"]):
        got[:] = -1
        for _ in call_each_form(comm, "Allgatherv", own, spec):
            assert (got == whole).all()


def check_blocks_with_gaps_in_any_order(comm):
    """Blocks may be in any order and have gaps between them. The elements in the gaps do not change."""
    size, rank = comm.size, comm.rank
    starts = [3 * (size - 1 - r) for r in range(size)]
    got = np.full(3 * size, -1)
    comm.Allgatherv(np.array([rank, rank]), [got, ([2] * size, starts)])
    assert got.tolist() == [value for r in reversed(range(size)) for value in (r, r, -1)]
    if rank == 0:
        got[:] = -1
        got[starts[0] :][:2] = 0
        comm.Gatherv(MPI.IN_PLACE, [got, ([2] * size, starts)])
        assert got.tolist() == [value for r in reversed(range(size)) for value in (r, r, -1)]
        comm.Scatterv([got, ([2] * size, starts)], MPI.IN_PLACE)
    else:
        comm.Gatherv(np.array([rank, rank]), None)
        part = np.zeros(2, int)
        comm.Scatterv(None, part)
        assert part.tolist() == [rank, rank]


def check_alltoallv(comm):
    size, rank = comm.size, comm.rank
    sent_counts = [(rank + r) % 3 for r in range(size)]
    got_counts = [(r + rank) % 3 for r in range(size)]
    sent = np.concatenate([np.full(n, 10 * rank + r) for r, n in enumerate(sent_counts)])
    expected = np.concatenate([np.full(n, 10 * r + rank) for r, n in enumerate(got_counts)])
    got = np.zeros(sum(got_counts), int)
    for _ in call_each_form(comm, "Alltoallv", [sent, sent_counts], [got, got_counts]):
        assert (got == expected).all()
    extent = 8
    displacements = [extent * sum(sent_counts[:r]) for r in range(size)]
    got_displacements = [extent * sum(got_counts[:r]) for r in range(size)]
    got[:] = 0
    types = [MPI.INT64_T] * size
    for _ in call_each_form(
        comm, "Alltoallw", [sent, (sent_counts, displacements), types], [got, (got_counts, got_displacements), types]
    ):
        assert (got == expected).all()


def check_wrong_lengths_and_roots(comm):
    for call, code in (
        (lambda: comm.Allgather(np.zeros(4), np.zeros(3 * comm.size)), MPI.ERR_TRUNCATE),
        (lambda: comm.Bcast(np.zeros(1), comm.size), MPI.ERR_ROOT),
        (lambda: comm.Bcast(np.zeros(1), -1), MPI.ERR_ROOT),
    ):
        try:
            call()
        except MPI.Exception as error:
            assert error.Get_error_class() == code
        else:
            raise AssertionError(code)
    try:
        comm.Allgatherv(np.zeros(1), [np.zeros(9), [1] * (comm.size + 1)])
    except ValueError as error:
        assert "expecting" in str(error)


def check_many_collectives_at_once(comm):
    a = [np.full(1000, float(comm.rank + i)) for i in range(8)]
    b = [np.zeros(1000) for _ in range(8)]
    requests = [comm.Iallreduce(x, y) for x, y in zip(a, b, strict=True)] + [comm.Ibarrier()]
    MPI.Request.Waitall(requests)
    assert all((y == sum(range(comm.size)) + comm.size * i).all() for i, y in enumerate(b))
