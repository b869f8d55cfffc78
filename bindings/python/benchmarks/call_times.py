"""Measures how long calls of a Python interface take, and checks their results. `compare_mpi4py.py` starts this program.

Prints one line for each case, `operation bytes microseconds`, from rank 0.
"""

import argparse
import time

import numpy as np

OPERATIONS = (
    "ping_pong", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all", "barrier",
    "broadcast_object",
)  # fmt: skip
DICTIONARY = {"step": 17, "loss": 0.25, "names": ["a", "b", "c"], "shape": (3, 4)}


class RingtrainCalls:
    """The calls of `ringtrain.Group`."""

    def __init__(self):
        import ringtrain

        self.group = ringtrain.init()
        self.rank, self.size = self.group.rank, self.group.size

    def barrier(self):
        self.group.barrier()

    def largest(self, value):
        return self.group.all_reduce(value, "max")

    def ping_pong(self, out, into):
        group = self.group
        if self.rank == 0:

            def call():
                group.send(out, 1, 0)
                group.receive(into, 1, 0)
        else:

            def call():
                group.receive(into, 0, 0)
                group.send(out, 0, 0)

        return call if self.rank < 2 else lambda: None

    def collective(self, operation, out, into):
        group = self.group
        return {
            "all_reduce": lambda: group.all_reduce(out, out=into),
            "broadcast": lambda: group.broadcast(into, 0, out=into),
            "all_gather": lambda: group.all_gather(out, out=into),
            "reduce_scatter": lambda: group.reduce_scatter(out, out=into),
            "gather": lambda: group.gather(out, 0, out=into),
            "scatter": lambda: group.scatter(out, 0, out=into),
            "all_to_all": lambda: group.all_to_all(out, out=into),
            "barrier": lambda: group.barrier(),
            "broadcast_object": lambda: group.broadcast_object(DICTIONARY),
        }[operation]


class MpiCalls:
    """The calls of mpi4py, or of ringtrain's interface of the same names."""

    def __init__(self):
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size

    def barrier(self):
        self.comm.Barrier()

    def largest(self, value):
        return self.comm.allreduce(value, self.mpi.MAX)

    def ping_pong(self, out, into):
        comm = self.comm
        if self.rank == 0:

            def call():
                comm.Send(out, 1, 0)
                comm.Recv(into, 1, 0)
        else:

            def call():
                comm.Recv(into, 0, 0)
                comm.Send(out, 0, 0)

        return call if self.rank < 2 else lambda: None

    def collective(self, operation, out, into):
        comm = self.comm
        return {
            "all_reduce": lambda: comm.Allreduce(out, into),
            "broadcast": lambda: comm.Bcast(into),
            "all_gather": lambda: comm.Allgather(out, into),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(out, into),
            "gather": lambda: comm.Gather(out, into),
            "scatter": lambda: comm.Scatter(out, into),
            "all_to_all": lambda: comm.Alltoall(out, into),
            "barrier": lambda: comm.Barrier(),
            "broadcast_object": lambda: comm.bcast(DICTIONARY),
        }[operation]


def make_buffers(operation, count, rank, n):
    """Returns the array that a rank passes, the array for its result, and the expected result.

    The longer of the two arrays has `count` elements. `None` means that the call of this rank has no such array.
    """
    values, part = np.arange(count, dtype=np.float32), max(count // n, 1)
    whole, own = np.arange(part * n, dtype=np.float32), slice(rank * part, (rank + 1) * part)
    zeros = np.zeros_like
    if operation == "ping_pong":
        return values + rank, zeros(values), values + 1 - rank
    if operation == "all_reduce":
        return values, zeros(values), values * n
    if operation == "broadcast":
        return None, values if rank == 0 else zeros(values), values
    if operation in ("all_gather", "gather"):
        is_receiver = operation == "all_gather" or rank == 0
        rows = whole.reshape(n, part)
        return whole[own].copy(), zeros(rows) if is_receiver else None, rows if is_receiver else None
    if operation == "reduce_scatter":
        return whole, zeros(whole[own]), whole[own] * n
    if operation == "scatter":
        return whole if rank == 0 else None, zeros(whole[own]), whole[own]
    if operation == "all_to_all":
        return whole + rank, zeros(whole), np.concatenate([whole[own] + peer for peer in range(n)])
    return None, None, None


def measure(calls, operation, nbytes, seconds):
    """Returns the microseconds of a call on the slowest rank: the median of 5 blocks of calls, which take `seconds` together."""
    dtype_bytes = 4
    out, into, expected = make_buffers(operation, max(nbytes // dtype_bytes, 1), calls.rank, calls.size)
    call = calls.ping_pong(out, into) if operation == "ping_pong" else calls.collective(operation, out, into)
    count, blocks = 2, []
    while True:
        calls.barrier()
        began = time.perf_counter()
        for _ in range(count):
            call()
        taken = calls.largest(time.perf_counter() - began)
        # All ranks know the same time, so all of them choose the same number of calls.
        if not blocks and taken < seconds / 10:
            count *= 2
            continue
        blocks.append(taken / count)
        if len(blocks) == 5:
            break
    if expected is not None and not (operation == "ping_pong" and calls.rank > 1):
        assert (into == expected).all(), f"{operation} of {nbytes} bytes has a wrong result"
    return sorted(blocks)[2] * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interface", choices=("ringtrain", "mpi4py"), required=True)
    parser.add_argument("--operation", action="append", choices=OPERATIONS, required=True)
    parser.add_argument("--size", action="append", type=int, required=True, help="a size in bytes")
    parser.add_argument("--seconds", type=float, required=True, help="how long to repeat the calls of a case")
    arguments = parser.parse_args()
    calls = RingtrainCalls() if arguments.interface == "ringtrain" else MpiCalls()
    for operation in arguments.operation:
        for nbytes in [0] if operation in ("barrier", "broadcast_object") else arguments.size:
            us = measure(calls, operation, nbytes, arguments.seconds)
            if calls.rank == 0:
                print(f"{operation} {nbytes} {us:.4f}", flush=True)
    calls.barrier()


main()
