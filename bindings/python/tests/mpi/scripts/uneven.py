"""Scatters, gathers and exchanges parts of different lengths."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
size, rank = comm.size, comm.rank

counts = np.array([i + 2 for i in range(size)])
displacements = np.concatenate([[0], np.cumsum(counts)[:-1]])
whole = np.arange(counts.sum(), dtype="d") if rank == 0 else None
part = np.zeros(counts[rank])
comm.Scatterv([whole, counts, displacements, MPI.DOUBLE], part, root=0)
print(f"{rank}: Scatterv {part.tolist()}")

part *= 10
gathered = np.zeros(counts.sum()) if rank == 0 else None
comm.Gatherv(sendbuf=part, recvbuf=(gathered, counts), root=0)
if rank == 0:
    print(f"{rank}: Gatherv {gathered.tolist()}")

everything = np.zeros(counts.sum())
comm.Allgatherv([part, MPI.DOUBLE], [everything, counts, displacements, MPI.DOUBLE])
print(f"{rank}: Allgatherv {everything.tolist()}")

sent_counts = [i + 1 for i in range(size)]
sent = np.concatenate([np.full(i + 1, rank * 100 + i, dtype="i") for i in range(size)])
got = np.zeros(size * (rank + 1), dtype="i")
comm.Alltoallv([sent, sent_counts], [got, [rank + 1] * size])
print(f"{rank}: Alltoallv {got.tolist()}")
