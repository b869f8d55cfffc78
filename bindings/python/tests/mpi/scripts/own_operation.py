"""Reduces buffers and objects with an operation that the program defines."""

import numpy as np
from mpi4py import MPI


def largest_magnitude(inbuf, inoutbuf, datatype):
    a, b = np.frombuffer(inbuf, dtype="d"), np.frombuffer(inoutbuf, dtype="d")
    b[:] = np.where(np.abs(a) >= np.abs(b), a, b)


comm = MPI.COMM_WORLD
op = MPI.Op.Create(largest_magnitude, commute=True)
values = np.array([(-1.0) ** comm.rank * comm.rank, 1.0 / (comm.rank + 1)])
result = np.zeros(2)
comm.Allreduce(values, result, op=op)
print(f"{comm.rank}: {result.tolist()}")
comm.Scan(values, result, op=op)
print(f"{comm.rank}: {result.tolist()}")
op.Free()
print(f"{comm.rank}: {comm.allreduce([comm.rank], op=lambda a, b: a + b)}")

best = np.zeros(1, dtype=np.dtype([("value", "d"), ("rank", "i")], align=True))
mine = best.copy()
mine["value"], mine["rank"] = (comm.rank * 3) % 4, comm.rank
comm.Allreduce([mine, MPI.DOUBLE_INT], [best, MPI.DOUBLE_INT], op=MPI.MAXLOC)
print(f"{comm.rank}: {best['value'][0]} {best['rank'][0]}")
