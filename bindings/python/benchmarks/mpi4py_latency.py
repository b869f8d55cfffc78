"""Measures how long calls of the mpi4py interface take. The same script runs with mpi4py and with `ringrun --mpi4py`.

Prints one line for each measurement, `name bytes microseconds`, from rank 0. Every result is checked.
"""

import argparse

import numpy as np
from mpi4py import MPI

FLOAT_BYTES = 4
SIZES = (8, 1 << 10, 16 << 10, 256 << 10, 4 << 20, 16 << 20)
DICTIONARY = {"step": 17, "loss": 0.25, "names": ["a", "b", "c"], "shape": (3, 4)}


def repetition_count(nbytes: int, budget: int) -> int:
    """Returns how often to repeat a call: `budget` times for a short message, less often for a long message, and always
    at least 5 times."""
    return max(5, min(budget, (256 << 20) // max(nbytes, 1)))


def time_call(comm: MPI.Comm, count: int, call) -> float:
    """Returns the seconds per call on the slowest rank. Makes some calls as a warm-up before the measurement."""
    for _ in range(max(count // 10, 2)):
        call()
    comm.Barrier()
    begin = MPI.Wtime()
    for _ in range(count):
        call()
    return comm.allreduce((MPI.Wtime() - begin) / count, op=MPI.MAX)


def time_ping_pong(comm: MPI.Comm, nbytes: int, budget: int) -> float:
    """Returns the seconds for a message between ranks 0 and 1: half the time of a message and its answer."""
    out, into = np.full(nbytes, comm.rank + 1, "u1"), np.zeros(nbytes, "u1")

    def call() -> None:
        if comm.rank == 0:
            comm.Send(out, 1, 0)
            comm.Recv(into, 1, 0)
        elif comm.rank == 1:
            comm.Recv(into, 0, 0)
            comm.Send(out, 0, 0)

    seconds = time_call(comm, repetition_count(nbytes, budget), call) / 2
    assert comm.rank > 1 or (into == 2 - comm.rank).all()
    return seconds


def time_all_reduce(comm: MPI.Comm, nbytes: int, budget: int) -> float:
    """Returns the seconds for an all-reduce of 32-bit floats."""
    out, into = np.full(nbytes // FLOAT_BYTES, 1.0, "f"), np.zeros(nbytes // FLOAT_BYTES, "f")
    seconds = time_call(comm, repetition_count(nbytes * 4, budget), lambda: comm.Allreduce(out, into))
    assert (into == comm.size).all()
    return seconds


def time_broadcast(comm: MPI.Comm, nbytes: int, budget: int) -> float:
    """Returns the seconds for a broadcast of a buffer."""
    data = np.full(nbytes, 7 if comm.rank == 0 else 0, "u1")
    seconds = time_call(comm, repetition_count(nbytes, budget), lambda: comm.Bcast(data))
    assert (data == 7).all()
    return seconds


def time_broadcast_object(comm: MPI.Comm, _nbytes: int, budget: int) -> float:
    """Returns the seconds for a broadcast of a dictionary."""
    assert comm.bcast(DICTIONARY if comm.rank == 0 else None) == DICTIONARY
    return time_call(comm, budget, lambda: comm.bcast(DICTIONARY if comm.rank == 0 else None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=int, default=2000, help="repetitions of a short call (default: %(default)s)")
    budget = parser.parse_args().budget
    comm = MPI.COMM_WORLD
    benchmarks = [("ping_pong", time_ping_pong, size) for size in SIZES] if comm.size > 1 else []
    benchmarks += [("allreduce", time_all_reduce, size) for size in SIZES] + [
        ("bcast", time_broadcast, size) for size in SIZES[:4]
    ]
    benchmarks.append(("bcast_dict", time_broadcast_object, 0))
    for name, measure, nbytes in benchmarks:
        seconds = measure(comm, nbytes, budget)
        if comm.rank == 0:
            print(f"{name} {nbytes} {seconds * 1e6:.3f}", flush=True)


main()
