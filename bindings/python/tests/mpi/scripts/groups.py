"""Splits the world into smaller communicators."""

from mpi4py import MPI

world = MPI.COMM_WORLD
half = world.Split(color=world.rank % 2, key=-world.rank)
print(f"{world.rank}: half {half.rank} of {half.size}, {half.allgather(world.rank)}")
half.Free()

first = world.Split(0 if world.rank == 0 else MPI.UNDEFINED)
print(f"{world.rank}: {first == MPI.COMM_NULL}")

group = world.Get_group()
evens = group.Incl(range(0, world.size, 2))
odds = group.Difference(group, evens)
comm = world.Create(evens)
if comm != MPI.COMM_NULL:
    print(f"{world.rank}: evens {comm.allreduce(world.rank)} {evens.Translate_ranks([0], group)}")
    comm.Free()
print(
    f"{world.rank}: {evens.Get_size()} {odds.Get_size()} {MPI.Group.Compare(group, group.Dup()) == MPI.IDENT} {odds.Get_rank()}"
)

if evens.Get_rank() != MPI.UNDEFINED:
    comm = world.Create_group(evens, tag=3)
    print(f"{world.rank}: created {comm.rank} of {comm.size}, {comm.allgather(world.rank)}")
    comm.Free()

copy = world.Dup()
print(f"{world.rank}: {MPI.Comm.Compare(world, copy) == MPI.CONGRUENT} {copy == world}")
copy.Free()
try:
    copy.Get_rank()
except MPI.Exception as error:
    print(f"{world.rank}: {error.Get_error_class() == MPI.ERR_COMM}")
