"""Multiplies a matrix, whose rows are distributed over the ranks, by a vector."""

import numpy
from mpi4py import MPI


def matvec(comm, rows, x):
    m = rows.shape[0]
    p = comm.Get_size()
    whole = numpy.zeros(m * p, dtype="d")
    comm.Allgather([x, MPI.DOUBLE], [whole, MPI.DOUBLE])
    return numpy.dot(rows, whole)


comm = MPI.COMM_WORLD
m = 3
n = m * comm.size
rows = numpy.fromfunction(lambda i, j: (i + m * comm.rank) * n + j, (m, n))
print(f"{comm.rank}: {matvec(comm, rows, numpy.arange(m, dtype='d') + comm.rank).tolist()}")
