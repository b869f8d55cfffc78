"""Sends messages around a ring with nonblocking calls."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
left, right = (rank - 1) % size, (rank + 1) % size

value, total = np.array([rank], dtype="d"), float(rank)
for _ in range(size - 1):
    incoming = np.empty(1)
    requests = [comm.Irecv(incoming, source=left, tag=1), comm.Isend(value, dest=right, tag=1)]
    MPI.Request.Waitall(requests)
    total += incoming[0]
    value = incoming
print(f"{rank}: {total}")

status = MPI.Status()
got = np.zeros(10, dtype="i")
comm.Sendrecv(np.full(4, rank, dtype="i"), right, 5, got, left, 5, status)
print(f"{rank}: {status.Get_source()} {status.Get_tag()} {status.Get_count(MPI.INT)} {got.tolist()}")

request = comm.Iallreduce(MPI.IN_PLACE, value)
request.Wait()
print(f"{rank}: {value.tolist()}")
