"""Runs one rank of a benchmark of PyTorch's Gloo backend. peers.py starts this script.

The script reads its rank and the job's address from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 prints a JSON object
on each line: first the version, and then the results of each size as soon as this size is measured.
"""

import argparse
import datetime
import json
import resource
import time

import torch
import torch.distributed as dist

DTYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}


class BenchmarkedCollective:
    """A collective with its buffer. `size` is the number of bytes in the whole buffer, as in ringbench."""

    def __init__(self, name, dtype, size):
        self.name, self.dtype = name, DTYPES[dtype]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        count = size // self.dtype.itemsize
        if name in ("all_gather", "reduce_scatter"):
            count -= count % self.ranks
        self.buffer = torch.zeros(count, dtype=self.dtype)
        part = count // self.ranks
        self.own = slice(self.rank * part, (self.rank + 1) * part)
        self.part = torch.zeros(part, dtype=self.dtype) if name == "reduce_scatter" else None
        # The number of different values. The 16-bit types have few digits, so their values must be small to make sums exact.
        self.values = 64 if dtype in ("f32", "f64") else 16

    def run_once(self):
        if self.name == "all_reduce":
            dist.all_reduce(self.buffer)
        elif self.name == "broadcast":
            dist.broadcast(self.buffer, 0)
        elif self.name == "all_gather":
            dist.all_gather_into_tensor(self.buffer, self.buffer[self.own])
        else:
            dist.reduce_scatter_tensor(self.part, self.buffer)

    def rewrite_input(self):
        """Writes to every cache line of the buffer. Afterwards, no other processor has the line in its cache."""
        self.buffer[:: max(1, 64 // self.dtype.itemsize)] = 0

    def contributed_elements(self, rank):
        """Returns the elements that the rank contributes to a checked operation."""
        index = torch.arange(len(self.buffer), dtype=torch.int64)
        return ((index + rank) % 8191 % self.values).to(self.dtype)

    def count_wrong_elements(self):
        """Runs one more operation, and returns the number of wrong elements on all ranks together."""
        mine = self.contributed_elements(self.rank)
        self.buffer.fill_(-1)
        if self.name in ("all_reduce", "reduce_scatter"):
            self.buffer.copy_(mine)
            expected = sum(self.contributed_elements(rank) for rank in range(self.ranks))
        elif self.name == "broadcast":
            expected = self.contributed_elements(0)
            if self.rank == 0:
                self.buffer.copy_(expected)
        else:
            self.buffer[self.own] = mine[self.own]
            length = max(1, self.own.stop - self.own.start)
            parts = [slice(rank * length, (rank + 1) * length) for rank in range(self.ranks)]
            expected = torch.cat([self.contributed_elements(rank)[part] for rank, part in enumerate(parts)])
        self.run_once()
        found = self.buffer
        if self.name == "reduce_scatter":
            found, expected = self.part, expected[self.own]
        wrong = torch.tensor([int((found != expected).sum())], dtype=torch.int64)
        dist.all_reduce(wrong)
        return int(wrong)


def processor_time_s():
    """Returns the processor time that all threads of this process have used."""
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime


def time_collective(operation, iterations, warm_up, rewrites_input):
    """Times the operation. The results are the median over all iterations of the time on the slowest rank, the mean time of the
    slowest rank, and the processor time of all ranks together."""
    for _ in range(warm_up):
        operation.run_once()
    times = torch.zeros(iterations, dtype=torch.float64)
    dist.barrier()
    used, last = processor_time_s(), time.perf_counter()
    for index in range(iterations):
        if rewrites_input:
            operation.rewrite_input()
            last = time.perf_counter()
        operation.run_once()
        now = time.perf_counter()
        times[index] = (now - last) * 1e6
        last = now
    used = torch.tensor([processor_time_s() - used], dtype=torch.float64)
    dist.all_reduce(used)
    mean = times.mean().reshape(1)
    dist.all_reduce(mean, op=dist.ReduceOp.MAX)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    times_us = {"time_us_median": float(times.quantile(0.5)), "time_us_mean": float(mean)}
    return {"iterations": iterations, **times_us, "cpu_s": float(used)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operation", default="all_reduce")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--size", action="append", nargs=2, type=int, metavar=("BYTES", "ITERATIONS"), required=True)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--input", choices=("rewritten", "unchanged"), default="unchanged")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    speaks = dist.get_rank() == 0
    if speaks:
        print(json.dumps({"version": f"Gloo of PyTorch {torch.__version__}"}), flush=True)
    for size, iterations in args.size:
        operation = BenchmarkedCollective(args.operation, args.dtype, size)
        times = time_collective(operation, iterations, args.warm_up, args.input == "rewritten")
        row = {"bytes": size, **times, "wrong": operation.count_wrong_elements()}
        if speaks:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
