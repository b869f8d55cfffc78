"""Computes pi with the midpoint rule."""

import math

import numpy
from mpi4py import MPI

comm = MPI.COMM_WORLD
n = numpy.array(100 if comm.rank == 0 else 0, dtype="i")
comm.Bcast([n, MPI.INT], root=0)
h = 1.0 / n
part = sum(4.0 / (1.0 + (h * (i + 0.5)) ** 2) for i in range(comm.rank, int(n), comm.size)) * h
mine, whole = numpy.array(part, dtype="d"), numpy.array(0.0, dtype="d")
comm.Reduce([mine, MPI.DOUBLE], [whole, MPI.DOUBLE], op=MPI.SUM, root=0)
if comm.rank == 0:
    print(f"0: {float(whole):.12f} {abs(float(whole) - math.pi) < 1e-4}")
