"""Connects process groups through torch's store, under torchrun and without a launcher, several times in one process."""

from __future__ import annotations

import os
from datetime import timedelta

import checks
import numpy as np
import torch
import torch.distributed as dist

import ringtrain as ring
import ringtrain.torch as hvd
from ringtrain.torch import backend


def join_and_all_reduce(arguments: object) -> None:
    dist.init_process_group(
        "ring",
        init_method=arguments.init_method,
        rank=arguments.rank,
        world_size=arguments.world_size,
        timeout=timedelta(seconds=60),
    )
    mine = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(mine)
    assert torch.all(mine == sum(range(dist.get_world_size())))
    pair = dist.new_group([0, 1])
    mine = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(mine, group=pair)
    assert torch.all(mine == 1)
    assert not backend.ring_group().started_by_ringrun
    # Worker processes are forked from a rank and are not ranks.
    for batch in torch.utils.data.DataLoader(torch.arange(12.0).reshape(6, 2), num_workers=2, batch_size=2):
        dist.all_reduce(batch)
    # Ranks on one host use shared memory, also without ringrun.
    assert backend.ring_group().core.transport == "shm"


if __name__ == "__main__":
    arguments = checks.parse_arguments()
    assert "RING_RANK" not in os.environ
    join_and_all_reduce(arguments)
    hvd.init()
    assert hvd.metric_average(float(hvd.rank())) == 0.5
    hvd.shutdown()
    dist.destroy_process_group()
    if arguments.init_method is None:
        hvd.init()
        assert hvd.metric_average(float(hvd.rank())) == 0.5
        hvd.shutdown()
        # The launcher has one store, which the process groups use one after the other.
        for _ in range(2):
            join_and_all_reduce(arguments)
            dist.destroy_process_group()
        # Without torch's store, the ranks find each other through the variables of torchrun.
        assert ring.init().all_gather(np.int64(ring.rank())).tolist() == [0, 1]
    print("connected", flush=True)
