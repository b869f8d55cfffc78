"""Starts persistent requests several times."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
outgoing, incoming = np.zeros(4, dtype="i"), np.zeros(4, dtype="i")
requests = [comm.Send_init([outgoing, MPI.INT], dest=right, tag=1), comm.Recv_init([incoming, MPI.INT], source=left, tag=1)]
for step in range(3):
    outgoing[:] = comm.rank + 10 * step
    MPI.Prequest.Startall(requests)
    MPI.Request.Waitall(requests)
    print(f"{comm.rank}: {step} {incoming.tolist()}")
for request in requests:
    request.Free()
