"""Process groups that meet through torch's store: under torchrun, and by an address alone. Several times in one process."""

from __future__ import annotations

import os
from datetime import timedelta

import checks
import torch
import torch.distributed as dist

import ringtrain.torch as hvd
from ringtrain.torch import backend


def meet(arguments: object) -> None:
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
    assert not backend.ring_group().of_launcher
    # Workers are forked from a rank, and are none.
    for batch in torch.utils.data.DataLoader(torch.arange(12.0).reshape(6, 2), num_workers=2, batch_size=2):
        dist.all_reduce(batch)
    # Ranks of one host find each other's memory, however they were started.
    assert backend.ring_group().core.transport == "shm"


if __name__ == "__main__":
    arguments = checks.parse()
    assert "RING_RANK" not in os.environ
    meet(arguments)
    hvd.init()
    assert hvd.metric_average(float(hvd.rank())) == 0.5
    hvd.shutdown()
    dist.destroy_process_group()
    if arguments.init_method is None:
        hvd.init()
        assert hvd.metric_average(float(hvd.rank())) == 0.5
        hvd.shutdown()
        # The store is the launcher's, and is the same the second time.
        for _ in range(2):
            meet(arguments)
            dist.destroy_process_group()
    print("met", flush=True)
