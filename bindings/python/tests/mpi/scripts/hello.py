"""Prints the rank and the size on every rank."""

from mpi4py import MPI

comm = MPI.COMM_WORLD
print(
    f"{comm.Get_rank()}: rank {comm.rank} of {comm.Get_size()}, {'with' if MPI.Get_processor_name() else 'without'} a host's name"
)
