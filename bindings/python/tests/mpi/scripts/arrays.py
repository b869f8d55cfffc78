"""Sends numpy arrays from one rank to another, with an explicit MPI datatype and without one."""

import numpy
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()

if rank == 0:
    for other in range(1, size):
        comm.Send([numpy.arange(1000, dtype="i"), MPI.INT], dest=other, tag=77)
        comm.Send(numpy.arange(100, dtype=numpy.float64), dest=other, tag=13)
else:
    data = numpy.empty(1000, dtype="i")
    comm.Recv([data, MPI.INT], source=0, tag=77)
    print(f"{rank}: {data.sum()}")
    data = numpy.empty(100, dtype=numpy.float64)
    comm.Recv(data, source=0, tag=13)
    print(f"{rank}: {data.mean()}")
