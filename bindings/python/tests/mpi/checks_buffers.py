"""Upper case messages, and what may stand for a buffer."""

import array

import numpy as np

from ringtrain.mpi import MPI

CODES = "?bBhHiIlLqQefdgFDG"


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind}")


def check_all_types(comm):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for code in CODES:
        for count in (0, 1, 1000, 100_000):
            sent, got = np.full(count, comm.rank + 1, code), np.zeros(count, code)
            status = MPI.Status()
            comm.Sendrecv(sent, after, 2, got, before, 2, status)
            assert (got == np.full(count, before + 1, code)).all()
            assert status.Get_count(MPI.Datatype.fromcode(code)) == count
            assert status.Get_elements(MPI._typedict[code]) == count


def check_buffer_forms(comm):
    me = comm.rank

    def exchanged(sent, got):
        request = comm.Isend(sent, me, 0)
        comm.Recv(got, me, 0)
        request.Wait()
        return got

    source = np.arange(6, dtype="d")
    for form in (
        source, [source, MPI.DOUBLE], [source, "d"], [source, 6], [source, 6, MPI.DOUBLE], (source, 6, MPI.DOUBLE),
        [source, (6, 0), MPI.DOUBLE], [source, 6, 0, MPI.DOUBLE], source.reshape(2, 3), memoryview(source),
        [source, None, MPI.DOUBLE], array.array("d", source), bytearray(source.tobytes()), source.tobytes(),
    ):  # fmt: skip
        assert exchanged(form, np.zeros(6)).tolist() == source.tolist(), form
    assert exchanged([source, 2, 3, MPI.DOUBLE], np.zeros(2)).tolist() == [3, 4]
    assert exchanged([source, (2, 1), MPI.DOUBLE], [np.zeros(6), (2, 4), "d"])[0].tolist() == [0, 0, 0, 0, 1, 2]
    target = bytearray(48)
    exchanged(source, target)
    assert np.frombuffer(target).tolist() == source.tolist()
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert (exchanged(fortran, np.zeros((2, 3), order="F")) == fortran).all()
    assert exchanged(np.array(4.0), np.zeros(1)).tolist() == [4]
    exchanged([None, 0, MPI.INT], [None, 0, MPI.INT])


def check_what_is_no_buffer(comm):
    me = comm.rank
    raises(TypeError, lambda: comm.Send("words", me))
    raises(TypeError, lambda: comm.Send(1.5, me))
    raises(KeyError, lambda: comm.Send(np.array([None]), me))
    raises(KeyError, lambda: comm.Bcast(np.array([None])))
    raises(KeyError, lambda: comm.Allgather(np.array([None]), np.array([None] * comm.size)))
    raises(BufferError, lambda: comm.Send(np.zeros(1, ">i4"), me))
    raises(BufferError, lambda: comm.Allreduce(np.zeros(1, ">i4"), np.zeros(1, ">i4")))
    raises(BufferError, lambda: comm.Send(np.arange(4)[::2], me))
    raises(BufferError, lambda: comm.Recv(b"read only", me))
    raises(ValueError, lambda: comm.Send([np.zeros(1), 2, MPI.DOUBLE], me))
    raises(ValueError, lambda: comm.Send([np.zeros(1), -1], me))
    raises(ValueError, lambda: comm.Send([bytearray(3), MPI.INT], me))
    raises(ValueError, lambda: comm.Send([1, 2, 3, 4, 5], me))
    assert not comm.Iprobe(), "nothing of all this was sent"


def check_truncation(comm):
    """A message that is too long is an error of its receiver's alone, and the job goes on."""
    me = comm.rank
    for count in (10, 200_000):
        for receive in (
            lambda buf, status: comm.Recv(buf, me, 4, status),
            lambda buf, status: comm.Irecv(buf, me, 4).Wait(status),
            lambda buf, status: comm.Mprobe(me, 4).Recv(buf, status),
        ):
            status = MPI.Status()
            request = comm.Isend(np.zeros(count), me, 4)
            error = raises(MPI.Exception, lambda: receive(np.zeros(count - 1), status))
            assert error.Get_error_class() == MPI.ERR_TRUNCATE
            assert error == MPI.ERR_TRUNCATE
            request.Wait()
        request = comm.Isend(np.ones(count), me, 4)
        got = np.zeros(count + 5)
        comm.Recv(got, me, 4, status)
        request.Wait()
        assert status.Get_count(MPI.DOUBLE) == count
        assert got.sum() == count
    assert comm.allreduce(1) == comm.size


def check_truncation_between_ranks(comm):
    if comm.size == 1:
        return
    if comm.rank == 0:
        comm.Send(np.zeros(1 << 18), 1, 1)
        comm.Send(np.ones(1 << 18), 1, 1)
    elif comm.rank == 1:
        raises(MPI.Exception, lambda: comm.Recv(np.zeros(10), 0, 1))
        got = np.zeros(1 << 18)
        comm.Recv(got, 0, 1)
        assert got.all()


def check_status(comm):
    status = MPI.Status()
    assert (status.source, status.tag, status.error, status.count) == (MPI.ANY_SOURCE, MPI.ANY_TAG, 0, 0)
    request = comm.Isend(np.zeros(5, "b"), comm.rank, 1)
    comm.Recv(np.zeros(20, "b"), status=status)
    request.Wait()
    assert status.Get_count() == status.count == 5
    assert status.Get_count(MPI.INT) == MPI.UNDEFINED
    assert status.Get_elements(MPI.SHORT) == MPI.UNDEFINED


def check_replace_and_no_process(comm):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    a = np.full(1000, comm.rank)
    comm.Sendrecv_replace(a, after, 0, before, 0)
    assert (a == before).all()
    comm.Send(a, MPI.PROC_NULL)
    status = MPI.Status()
    comm.Recv(a, MPI.PROC_NULL, status=status)
    assert status.source == MPI.PROC_NULL
    assert (a == before).all()
    comm.Sendrecv(a, MPI.PROC_NULL, recvbuf=a, source=MPI.PROC_NULL)
    assert comm.Isend(a, MPI.PROC_NULL).Wait()
    request = comm.Isendrecv_replace(a, before, 0, after, 0)
    request.Wait()
    assert (a == comm.rank).all()


def check_other_ways_to_send(comm):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    a, b = np.full(10, comm.rank), np.zeros(10, int)
    for send in (comm.Isend, comm.Issend, comm.Ibsend, comm.Irsend):
        received = comm.Irecv(b, before, 7)
        sent = send(a, after, 7)
        MPI.Request.Waitall([sent, received])
        assert (b == before).all()
    received = comm.Irecv(b, before, 7)
    comm.Bsend(a, after, 7)
    received.Wait()


def check_matched_probe(comm):
    request = comm.Isend(np.arange(4.0), comm.rank, 6)
    status = MPI.Status()
    message = comm.Mprobe(comm.rank, 6, status)
    assert status.Get_count(MPI.DOUBLE) == 4
    assert not comm.Iprobe(comm.rank, 6)
    got = np.zeros(4)
    message.Recv(got)
    request.Wait()
    assert got.tolist() == [0, 1, 2, 3]
    assert message == MPI.MESSAGE_NULL
    assert comm.Improbe() is None


def check_memory(comm):
    memory = MPI.Alloc_mem(64)
    assert memory.nbytes == len(memory) == 64
    values = np.frombuffer(memory, "d")
    values[:] = comm.rank
    out = np.zeros(8)
    comm.Allreduce([memory, MPI.DOUBLE], out)
    assert (out == sum(range(comm.size))).all()
    MPI.Free_mem(memory)
    assert isinstance(memory, MPI.memory)
    assert MPI.memory is MPI.buffer
