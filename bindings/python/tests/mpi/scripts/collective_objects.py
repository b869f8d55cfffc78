"""Broadcasts, scatters, gathers, exchanges and reduces Python objects."""

from mpi4py import MPI

comm = MPI.COMM_WORLD
size, rank = comm.Get_size(), comm.Get_rank()

data = {"key1": [7, 2.72, 2 + 3j], "key2": ("abc", "xyz")} if rank == 0 else None
print(f"{rank}: bcast {comm.bcast(data, root=0)}")
data = [(i + 1) ** 2 for i in range(size)] if rank == 0 else None
data = comm.scatter(data, root=0)
print(f"{rank}: scatter {data}")
print(f"{rank}: gather {comm.gather(data, root=0)}")
print(f"{rank}: allgather {comm.allgather(rank * 'x')}")
print(f"{rank}: alltoall {comm.alltoall([rank * 10 + i for i in range(size)])}")
print(f"{rank}: reduce {comm.reduce(rank + 1, op=MPI.PROD, root=0)}")
print(f"{rank}: allreduce {comm.allreduce({rank}, op=lambda a, b: a | b)}")
print(f"{rank}: scan {comm.scan(rank)} exscan {comm.exscan(rank)}")
print(f"{rank}: maxloc {comm.allreduce(((rank * 7) % 5, rank), op=MPI.MAXLOC)}")
comm.barrier()
