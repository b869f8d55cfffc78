"""Sends dictionaries from one rank to another, with blocking and nonblocking calls."""

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()

if rank == 0:
    for other in range(1, size):
        comm.send({"a": 7, "b": 3.14, "to": other}, dest=other, tag=11)
else:
    print(f"{rank}: {sorted(comm.recv(source=0, tag=11).items())}")

request = comm.isend({"from": rank}, dest=(rank + 1) % size, tag=12)
data = comm.irecv(source=(rank - 1) % size, tag=12).wait()
request.wait()
print(f"{rank}: {data}")
