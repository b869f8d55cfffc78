"""Joins the job of the engine that has started this process, and checks a sum. The argument is the expected number of ranks."""

import sys

import numpy as np

import ringtrain as ring

world = ring.init()
assert world.size == int(sys.argv[1]), f"{world.size} ranks"
total = world.all_reduce(np.float32(world.rank))
assert total == sum(range(world.size)), total
print(f"rank {world.rank} of {world.size}, local rank {world.local_rank} of {world.local_size}", flush=True)
