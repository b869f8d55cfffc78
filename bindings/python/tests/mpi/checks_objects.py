"""Checks of messages and collectives of Python objects (methods in lower case)."""

import pickle
import warnings

from ringtrain.mpi import MPI

OBJECTS = [None, 7, 2.5, "words", b"", b"bytes", [1, [2]], {"a": 1, 2: (3,)}, "x" * 300_000]


def check_messages_around_a_ring(comm):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for tag, obj in enumerate(OBJECTS):
        status = MPI.Status()
        request = comm.isend((comm.rank, obj), after, tag)
        assert comm.recv(source=before, tag=tag, status=status) == (before, obj)
        assert (status.source, status.tag) == (before, tag)
        assert status.count > 0
        request.wait()


def check_any_source_and_tag(comm):
    if comm.rank == 0:
        got, status = {}, MPI.Status()
        for _ in range(comm.size - 1):
            obj = comm.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status)
            got[status.Get_source()] = (status.Get_tag(), obj)
        assert got == {rank: (10 + rank, rank * 2) for rank in range(1, comm.size)}
    else:
        comm.send(comm.rank * 2, dest=0, tag=10 + comm.rank)


def check_sendrecv(comm):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for obj in OBJECTS:
        assert comm.sendrecv(obj, after, 3, None, before, 3) == obj


def check_irecv(comm):
    requests = [comm.irecv(source=rank, tag=5) for rank in range(comm.size)]
    for rank in range(comm.size):
        comm.send(comm.rank + 100, rank, 5)
    assert MPI.Request.waitall(requests) == [rank + 100 for rank in range(comm.size)]
    assert not any(requests)


def check_proc_null(comm):
    status = MPI.Status()
    comm.send(1, MPI.PROC_NULL)
    assert comm.recv(source=MPI.PROC_NULL, status=status) is None
    assert (status.source, status.tag, status.count) == (MPI.PROC_NULL, MPI.ANY_TAG, 0)
    assert comm.irecv(source=MPI.PROC_NULL).wait() is None
    assert comm.sendrecv(1, MPI.PROC_NULL, source=MPI.PROC_NULL) is None


def check_probe(comm):
    comm.isend("hello", comm.rank, 9).wait()
    status = MPI.Status()
    assert comm.probe(tag=9, status=status)
    assert (status.source, status.tag) == (comm.rank, 9)
    assert comm.iprobe(comm.rank, 9)
    assert not comm.iprobe(comm.rank, 8)
    assert comm.recv(source=comm.rank, tag=9) == "hello"
    assert not comm.iprobe()


def check_matched_probe(comm):
    comm.isend({"a": 1}, comm.rank, 9).wait()
    message = comm.mprobe(comm.rank, 9)
    assert comm.improbe() is None
    assert message.recv() == {"a": 1}
    assert not message


def check_bcast(comm):
    for root in range(comm.size):
        for obj in OBJECTS:
            assert comm.bcast(obj if comm.rank == root else None, root=root) == obj


def check_gather_and_scatter(comm):
    for root in range(comm.size):
        gathered = comm.gather((comm.rank, "x" * comm.rank), root=root)
        assert gathered == ([(r, "x" * r) for r in range(comm.size)] if comm.rank == root else None)
        assert comm.scatter([r**2 for r in range(comm.size)] if comm.rank == root else None, root=root) == comm.rank**2
    assert comm.allgather(comm.rank) == list(range(comm.size))
    assert comm.alltoall([(comm.rank, r) for r in range(comm.size)]) == [(r, comm.rank) for r in range(comm.size)]


def check_reductions(comm):
    ranks = list(range(comm.size))
    for root in ranks:
        total = comm.reduce(comm.rank, root=root)
        assert total == (sum(ranks) if comm.rank == root else None)
    assert comm.allreduce(comm.rank) == sum(ranks)
    assert comm.allreduce([comm.rank]) == ranks, "lists must be added in rank order, because their sum is not commutative"
    assert comm.allreduce(str(comm.rank), op=lambda x, y: x + y) == "".join(map(str, ranks))
    assert comm.allreduce(comm.rank + 1, op=MPI.PROD) == __import__("math").factorial(comm.size)
    assert comm.allreduce(comm.rank, op=MPI.MAX) == comm.size - 1
    assert comm.allreduce(comm.rank, op=max) == comm.size - 1
    assert comm.allreduce((comm.rank % 2, comm.rank), op=MPI.MAXLOC) == (min(comm.size - 1, 1), min(comm.size - 1, 1))
    assert comm.allreduce((-comm.rank, comm.rank), op=MPI.MINLOC) == (1 - comm.size, comm.size - 1)
    assert comm.allreduce(comm.rank == 0, op=MPI.LOR) is True
    assert comm.scan([comm.rank]) == ranks[: comm.rank + 1]
    assert comm.exscan([comm.rank]) == (ranks[: comm.rank] or None)


def check_wrong_arguments(comm):
    for call, expected in (
        (lambda: comm.send(1, comm.size), MPI.ERR_RANK),
        (lambda: comm.send(1, 0, -5), MPI.ERR_TAG),
        (lambda: comm.recv(source=comm.size), MPI.ERR_RANK),
        (lambda: comm.isend(1, -9), MPI.ERR_RANK),
        (lambda: comm.bcast(1, root=comm.size), MPI.ERR_ROOT),
        (lambda: comm.gather(1, root=-1), MPI.ERR_ROOT),
    ):
        try:
            call()
        except MPI.Exception as error:
            assert error.Get_error_class() == expected, (error, expected)
        else:
            raise AssertionError(expected)


def check_a_buffer_for_an_object_is_deprecated(comm):
    sent = comm.isend("text", comm.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert comm.recv(bytearray(100), comm.rank) == "text"
    sent.wait()
    assert [str(warning.message) for warning in caught] == ["the 'buf' argument is deprecated"]


def check_communicators_are_isolated(comm):
    """A message waits for a receive on its own communicator: collectives of this communicator and receives on another
    communicator do not get it.
    """
    after = (comm.rank + 1) % comm.size
    other = comm.Dup()
    first = comm.isend("here", after, 1)
    second = other.isend("there", after, 1)
    assert comm.allgather(comm.rank) == list(range(comm.size))
    assert other.recv(tag=1) == "there"
    assert comm.recv(tag=1) == "here"
    MPI.Request.waitall([first, second])
    other.Free()


def check_all_ranks_fail_if_one_rank_cannot_pickle_its_object(comm):
    """Regression test: before the fix, the other ranks of such a collective waited forever."""
    size, culprit = comm.size, comm.size - 1
    is_culprit = comm.rank == culprit
    one = (lambda: 0) if is_culprit else "fine"
    for call in (
        lambda: comm.allgather(one),
        lambda: comm.gather(one),
        lambda: comm.bcast(one, root=culprit),
        lambda: comm.scatter([one] * size, root=culprit),
        lambda: comm.scatter([1] * (size + 1), root=culprit),
        lambda: comm.alltoall([1] * (size + is_culprit)),
        lambda: comm.allreduce(one),
    ):
        try:
            call()
        except MPI.Exception as error:
            assert not is_culprit
            assert error.__cause__.rank == culprit
            assert f"rank {culprit} did not contribute" in str(error)
        except Exception as error:
            assert is_culprit
            assert isinstance(error, ValueError | TypeError | AttributeError | pickle.PicklingError), repr(error)
        else:
            raise AssertionError("nothing was raised")
        assert comm.allreduce(1) == size
