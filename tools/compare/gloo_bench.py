"""One rank of an all-reduce benchmark with PyTorch's Gloo backend; tools/compare/run starts it.

Takes its place in the job from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 prints one JSON object a line.
"""

import argparse
import datetime
import json
import time

import torch
import torch.distributed as dist


def measure(count, iterations, warm_up):
    """Each iteration's time on the slowest rank, in microseconds, and how many elements came out wrong."""
    buffer = torch.zeros(count, dtype=torch.float32)
    for _ in range(warm_up):
        dist.all_reduce(buffer)
    times = torch.zeros(iterations, dtype=torch.float64)
    dist.barrier()
    last = time.perf_counter()
    for index in range(iterations):
        dist.all_reduce(buffer)
        now = time.perf_counter()
        times[index] = (now - last) * 1e6
        last = now
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    ranks = dist.get_world_size()
    index = torch.arange(count, dtype=torch.int64)
    buffer.copy_((index + dist.get_rank()) % 8191 % 64)
    dist.all_reduce(buffer)
    expected = sum(((index + rank) % 8191 % 64).to(torch.float32) for rank in range(ranks))
    wrong = torch.tensor([int((buffer != expected).sum())], dtype=torch.int64)
    dist.all_reduce(wrong)
    return times, int(wrong)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", action="append", nargs=2, type=int, metavar=("BYTES", "ITERATIONS"), required=True)
    parser.add_argument("--warm-up", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    for size, iterations in args.size:
        times, wrong = measure(size // 4, iterations, args.warm_up)
        if dist.get_rank() == 0:
            print(json.dumps({"bytes": size, "time_us": float(times.quantile(0.5)), "wrong": wrong}), flush=True)
    # The version after the sizes, on a line of its own.
    if dist.get_rank() == 0:
        print(json.dumps({"version": f"Gloo of PyTorch {torch.__version__}"}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
