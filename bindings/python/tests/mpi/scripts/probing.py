"""Uses probes to receive messages whose length the receiver does not know."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
if comm.rank == 0:
    status = MPI.Status()
    for source in range(1, comm.size):
        comm.Probe(source=source, tag=MPI.ANY_TAG, status=status)
        data = np.empty(status.Get_count(MPI.DOUBLE))
        comm.Recv(data, source=status.Get_source(), tag=status.Get_tag())
        print(f"0: {status.Get_source()} {status.Get_tag()} {len(data)} {data.sum()}")
        try:
            comm.Recv(np.empty(1), source=source, tag=99)
        except MPI.Exception as error:
            print(f"0: {error.Get_error_class() == MPI.ERR_TRUNCATE}")
else:
    comm.Send(np.arange(comm.rank * 3, dtype="d"), dest=0, tag=comm.rank)
    comm.Send(np.zeros(2), dest=0, tag=99)
