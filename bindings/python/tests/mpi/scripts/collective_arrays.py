"""Broadcasts, scatters, gathers and reduces arrays."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
size, rank = comm.Get_size(), comm.Get_rank()

data = np.arange(100, dtype="i") if rank == 0 else np.empty(100, dtype="i")
comm.Bcast(data, root=0)
print(f"{rank}: Bcast {all(data[i] == i for i in range(100))}")

sendbuf = None
if rank == 0:
    sendbuf = np.empty([size, 10], dtype="i")
    sendbuf.T[:, :] = range(size)
recvbuf = np.empty(10, dtype="i")
comm.Scatter(sendbuf, recvbuf, root=0)
print(f"{rank}: Scatter {recvbuf.tolist()}")

recvbuf = np.empty([size, 10], dtype="i") if rank == 0 else None
comm.Gather(np.zeros(10, dtype="i") + rank, recvbuf, root=0)
if rank == 0:
    print(f"{rank}: Gather {recvbuf.tolist()}")

total = np.zeros(3)
comm.Allreduce(np.arange(3.0) + rank, total, op=MPI.SUM)
print(f"{rank}: Allreduce {total.tolist()}")
largest = np.zeros(3, dtype="l") if rank == size - 1 else None
comm.Reduce(np.array([rank, -rank, 5]), largest, op=MPI.MAX, root=size - 1)
print(f"{rank}: Reduce {None if largest is None else largest.tolist()}")
part = np.zeros(2)
comm.Reduce_scatter_block(np.arange(2.0 * size) * (rank + 1), part)
print(f"{rank}: Reduce_scatter_block {part.tolist()}")
