"""Checks of the methods that send and receive buffers, such as `Send` (with a capital letter). Also checks which
objects these methods accept as buffers."""

import array
import ctypes
import struct

import numpy as np

from ringtrain.mpi import MPI

CODES = "?bBhHiIlLqQefdgFDG"


def raised(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind}")


def check_messages_of_all_types(comm):
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

    def send_to_self(sent, received):
        request = comm.Isend(sent, me, 0)
        comm.Recv(received, me, 0)
        request.Wait()
        return received

    source = np.arange(6, dtype="d")
    for form in (
        source, [source, MPI.DOUBLE], [source, "d"], [source, 6], [source, 6, MPI.DOUBLE], (source, 6, MPI.DOUBLE),
        [source, (6, 0), MPI.DOUBLE], [source, 6, 0, MPI.DOUBLE], source.reshape(2, 3), memoryview(source),
        [source, None, MPI.DOUBLE], array.array("d", source), bytearray(source.tobytes()), source.tobytes(),
    ):  # fmt: skip
        assert send_to_self(form, np.zeros(6)).tolist() == source.tolist(), form
    assert send_to_self([source, 2, 3, MPI.DOUBLE], np.zeros(2)).tolist() == [3, 4]
    assert send_to_self([source, (2, 1), MPI.DOUBLE], [np.zeros(6), (2, 4), "d"])[0].tolist() == [0, 0, 0, 0, 1, 2]
    target = bytearray(48)
    send_to_self(source, target)
    assert np.frombuffer(target).tolist() == source.tolist()
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert (send_to_self(fortran, np.zeros((2, 3), order="F")) == fortran).all()
    assert send_to_self(np.array(4.0), np.zeros(1)).tolist() == [4]
    send_to_self([None, 0, MPI.INT], [None, 0, MPI.INT])


def check_invalid_buffers_are_refused(comm):
    me = comm.rank
    raised(TypeError, lambda: comm.Send("words", me))
    raised(TypeError, lambda: comm.Send(1.5, me))
    raised(KeyError, lambda: comm.Send(np.array([None]), me))
    raised(KeyError, lambda: comm.Bcast(np.array([None])))
    raised(KeyError, lambda: comm.Allgather(np.array([None]), np.array([None] * comm.size)))
    raised(BufferError, lambda: comm.Send(np.zeros(1, ">i4"), me))
    raised(BufferError, lambda: comm.Allreduce(np.zeros(1, ">i4"), np.zeros(1, ">i4")))
    raised(BufferError, lambda: comm.Send(np.arange(4)[::2], me))
    raised(BufferError, lambda: comm.Recv(b"read only", me))
    raised(ValueError, lambda: comm.Send([np.zeros(1), 2, MPI.DOUBLE], me))
    raised(ValueError, lambda: comm.Send([np.zeros(1), -1], me))
    raised(ValueError, lambda: comm.Send([bytearray(3), MPI.INT], me))
    raised(ValueError, lambda: comm.Send([1, 2, 3, 4, 5], me))
    assert not comm.Iprobe(), "no message must have been sent"


def check_messages_longer_than_the_buffer(comm):
    """If a message is longer than the receiver's buffer, only the receiver raises an error, and the job continues."""
    me = comm.rank
    for count in (10, 200_000):
        for receive in (
            lambda buf, status: comm.Recv(buf, me, 4, status),
            lambda buf, status: comm.Irecv(buf, me, 4).Wait(status),
            lambda buf, status: comm.Mprobe(me, 4).Recv(buf, status),
        ):
            status = MPI.Status()
            request = comm.Isend(np.zeros(count), me, 4)
            error = raised(MPI.Exception, lambda: receive(np.zeros(count - 1), status))
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


def check_messages_between_ranks_longer_than_the_buffer(comm):
    if comm.size == 1:
        return
    if comm.rank == 0:
        comm.Send(np.zeros(1 << 18), 1, 1)
        comm.Send(np.ones(1 << 18), 1, 1)
    elif comm.rank == 1:
        raised(MPI.Exception, lambda: comm.Recv(np.zeros(10), 0, 1))
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


def check_sendrecv_replace_and_proc_null(comm):
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


def check_send_modes(comm):
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


def check_allocated_memory(comm):
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


class ArrayOfDlpackVersion0:
    """Exports an array by DLPack version 0. When the capsule is destroyed, its `DLManagedTensor` becomes invalid."""

    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.argtypes, new_capsule.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object

    def __init__(self, array, code=2, device=1):
        self.array, self.code, self.device = array, code, device

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, stream=None):
        array, managed = self.array, (ctypes.c_ubyte * 128)()
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        fields = (array.ctypes.data, self.device, 0, array.ndim, self.code, array.itemsize * 8, 1, ctypes.addressof(shape), 0, 0)
        struct.pack_into("@PiiiBBHPPQPP", managed, 0, *fields, 0, 0)

        def destroy(_capsule):
            ctypes.memset(managed, 0xFF, len(managed))

        self.kept = managed, shape, ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(destroy)
        destructor = ctypes.cast(self.kept[2], ctypes.c_void_p)
        return self.new_capsule(ctypes.addressof(managed), b"dltensor", destructor)


def check_tensors_of_dlpack_version_0(comm):
    """Regression test: before the fix, numpy used the exporter's structures after the capsule had freed them (a segmentation
    fault)."""
    for count in (0, 1, 1000):
        own, total = np.full(count, comm.rank + 1.0), np.zeros(count)
        comm.Allreduce(ArrayOfDlpackVersion0(own), ArrayOfDlpackVersion0(total))
        assert (total == sum(range(1, comm.size + 1))).all()
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        comm.Sendrecv(ArrayOfDlpackVersion0(own), after, recvbuf=ArrayOfDlpackVersion0(total), source=before)
        assert (total == before + 1).all()
        request = comm.Ibcast([ArrayOfDlpackVersion0(own), MPI.DOUBLE], root=0)
        request.Wait()
        assert (own == 1).all()


def check_tensors_that_cannot_be_imported(comm):
    def text_of_error(kind, buffer, call=lambda buffer: comm.Bcast(buffer, root=comm.size - 1 - comm.rank)):
        try:
            call(buffer)
        except kind as error:
            return str(error)
        raise AssertionError("nothing was raised")

    class OnlyCuda:
        __cuda_array_interface__ = {"shape": (1,), "typestr": "<f4", "data": (np.zeros(1).ctypes.data, False), "version": 2}

    class ArrayOfDlpackVersion1:
        def __init__(self, array):
            self.array = array

        __dlpack_device__ = ArrayOfDlpackVersion0.__dlpack_device__
        device = 1

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

    half = ArrayOfDlpackVersion0(np.zeros(4, np.uint16), code=4)
    assert "bfloat16" in text_of_error(NotImplementedError, half)
    comm.Bcast([half, MPI.BYTE])
    assert "GPU memory" in text_of_error(NotImplementedError, ArrayOfDlpackVersion0(np.zeros(4), device=2))
    assert "__cuda_array_interface__" in text_of_error(NotImplementedError, OnlyCuda())
    frozen = np.arange(4.0)
    frozen.setflags(write=False)
    assert "not writable" in text_of_error(BufferError, ArrayOfDlpackVersion1(frozen), lambda given: comm.Recv(given))
    got = np.zeros(4)
    comm.Sendrecv(ArrayOfDlpackVersion1(frozen), comm.rank, recvbuf=ArrayOfDlpackVersion1(got), source=comm.rank)
    assert (got == frozen).all()
    assert "not contiguous" in text_of_error(BufferError, ArrayOfDlpackVersion1(np.zeros((4, 4))[::2]))
    assert comm.allreduce(1) == comm.size
