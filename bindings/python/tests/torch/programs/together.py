"""Runs the checks of `horovod.py`, `collectives.py` and `ddp.py` in one job, because importing torch takes seconds."""

from __future__ import annotations

import any_order
import checks
import collectives
import ddp
import horovod
import torch.distributed as dist

import ringtrain.torch as hvd

if __name__ == "__main__":
    horovod.initialize()
    rank, n = hvd.rank(), hvd.size()
    checks.run(vars(horovod) | vars(any_order), rank, n)
    dist.init_process_group("ring")
    checks.run(vars(collectives), rank, n)
    checks.run(vars(ddp), rank, n, dist.new_group(backend="gloo"))
    dist.destroy_process_group()
    hvd.shutdown()
