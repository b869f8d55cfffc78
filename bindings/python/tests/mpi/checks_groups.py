"""Checks of communicators and groups."""

import pickle

from ringtrain.mpi import MPI


def error_class_of(call):
    try:
        call()
    except MPI.Exception as error:
        return error.Get_error_class()
    raise AssertionError("no exception")


def check_split(comm):
    half = comm.Split(color=comm.rank % 2, key=-comm.rank)
    members = [r for r in range(comm.size) if r % 2 == comm.rank % 2][::-1]
    assert half.allgather(comm.rank) == members
    assert half.rank == members.index(comm.rank)
    half.Free()
    assert half == MPI.COMM_NULL
    assert error_class_of(half.Get_rank) == MPI.ERR_COMM
    some = comm.Split(0 if comm.rank == 0 else MPI.UNDEFINED)
    assert (some == MPI.COMM_NULL) is (comm.rank != 0)
    assert bool(some) is (comm.rank == 0)
    assert error_class_of(lambda: comm.Split(-3)) == MPI.ERR_ARG


def check_null_communicator(comm):
    null = MPI.COMM_NULL
    assert not null
    for call in (
        null.Get_rank,
        null.Get_size,
        null.Barrier,
        lambda: null.send(1, 0),
        lambda: null.bcast(1),
        lambda: null.rank,
        null.Free,
    ):
        assert error_class_of(call) == MPI.ERR_COMM


def check_duplicate(comm):
    copy = comm.Dup()
    assert copy != comm
    assert comm.Compare(copy) == MPI.CONGRUENT
    assert comm.Compare(comm) == MPI.IDENT
    assert (copy.rank, copy.size) == (comm.rank, comm.size)
    assert type(copy) is MPI.Intracomm
    again, request = comm.Idup()
    request.Wait()
    again.Free()
    copy.Free()


def check_predefined_constants(comm):
    assert MPI.COMM_SELF.size == 1
    assert MPI.COMM_SELF.allreduce(5) == 5
    assert MPI.COMM_WORLD.name == "MPI_COMM_WORLD"
    assert error_class_of(MPI.COMM_WORLD.Free) == MPI.ERR_COMM
    for constant in (
        MPI.COMM_WORLD,
        MPI.COMM_SELF,
        MPI.COMM_NULL,
        MPI.INT,
        MPI.SUM,
        MPI.REQUEST_NULL,
        MPI.INFO_NULL,
        MPI.GROUP_EMPTY,
    ):
        assert pickle.loads(pickle.dumps(constant)) == constant
    assert MPI.Intracomm(MPI.COMM_WORLD) == MPI.COMM_WORLD
    assert MPI.Is_initialized()
    assert not MPI.Is_finalized()
    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
    assert comm.Get_attr(MPI.TAG_UB) == 2**31 - 1


def check_subclass_of_a_communicator(comm):
    class CommunicatorWithTotal(MPI.Intracomm):
        def total(self):
            return self.allreduce(self.rank)

    mine = CommunicatorWithTotal(comm)
    assert mine == comm
    assert mine.total() == sum(range(comm.size))
    copy = mine.Dup()
    assert isinstance(copy, CommunicatorWithTotal)
    copy.Free()


def check_create_communicator(comm):
    evens = comm.group.Incl(range(0, comm.size, 2))
    made = comm.Create(evens)
    if comm.rank % 2:
        assert made == MPI.COMM_NULL
    else:
        assert made.allgather(comm.rank) == list(range(0, comm.size, 2))
        made.Free()
    backwards = comm.Create(comm.group.Incl(list(range(comm.size))[::-1]))
    assert backwards.rank == comm.size - 1 - comm.rank
    assert comm.Compare(backwards) == (MPI.SIMILAR if comm.size > 1 else MPI.CONGRUENT)
    backwards.Free()
    # Ranks may pass different groups, if no rank is in two of them.
    parts = comm.Create(comm.group.Incl([comm.rank]))
    assert parts.size == 1
    parts.Free()


def check_create_group(comm):
    """Creates two groups, one after the other. Only the members of a new group call `Create_group`."""
    for first in (0, 1):
        if first >= comm.size:
            continue
        members = comm.group.Incl(range(first, comm.size))
        if comm.rank >= first:
            made = comm.Create_group(members, tag=first)
            assert made.allgather(comm.rank) == list(range(first, comm.size))
            assert made.rank == comm.rank - first
            assert made.group.Translate_ranks(None, comm.group) == list(range(first, comm.size))
            inner = made.Split(0, -made.rank)
            assert inner.rank == made.size - 1 - made.rank
            inner.Free()
            made.Free()


def check_split_by_host(comm):
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert here.size == comm.size
    here.Free()
    assert comm.Split_type(MPI.UNDEFINED) == MPI.COMM_NULL


def check_group_arithmetic(comm):
    everyone = comm.group
    assert (everyone.size, everyone.rank) == (comm.size, comm.rank)
    first, rest = everyone.Incl([0]), everyone.Excl([0])
    assert rest.size == comm.size - 1
    G = MPI.Group
    assert G.Compare(G.Union(first, rest), everyone) == MPI.IDENT
    assert G.Compare(G.Union(rest, first), everyone) == (MPI.SIMILAR if comm.size > 1 else MPI.IDENT)
    assert G.Intersection(first, rest).size == 0
    assert G.Compare(G.Difference(everyone, first), rest) == MPI.IDENT
    assert everyone.Range_incl([(0, comm.size - 1, 1)]).size == comm.size
    assert everyone.Range_excl([(0, 0, 1)]).size == comm.size - 1
    assert first.rank == (0 if comm.rank == 0 else MPI.UNDEFINED)
    assert G.Translate_ranks(everyone, [0], rest) == [MPI.UNDEFINED]
    assert everyone.Translate_ranks([0, MPI.PROC_NULL], first) == [0, MPI.PROC_NULL]
    assert error_class_of(lambda: everyone.Incl([comm.size])) == MPI.ERR_RANK
    assert G.Compare(MPI.GROUP_EMPTY, first) == MPI.UNEQUAL
    assert MPI.GROUP_EMPTY.size == 0


def check_communicator_attributes(comm):
    key = MPI.Comm.Create_keyval(copy_fn=True)
    comm.Set_attr(key, "kept")
    copy = comm.Dup()
    assert copy.Get_attr(key) == "kept"
    copy.Delete_attr(key)
    assert copy.Get_attr(key) is None
    copy.Free()
    assert MPI.Comm.Free_keyval(key) == MPI.KEYVAL_INVALID
    comm.Set_name("mine")
    assert comm.name == "mine"


def check_comparison_of_errors(comm):
    error = MPI.Exception(MPI.ERR_TRUNCATE)
    assert error == MPI.ERR_TRUNCATE
    assert int(error) == error.Get_error_code() == error.Get_error_class()
    assert "truncated" in str(error)
    assert isinstance(error, RuntimeError)
    assert repr(MPI.Exception(7)) == "MPI.Exception(7)"
