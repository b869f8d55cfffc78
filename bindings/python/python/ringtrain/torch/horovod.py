"""Joins the job of Horovod's functions for PyTorch: `import ringtrain.torch as hvd` runs a Horovod script."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist

from ringtrain import _core, _world
from ringtrain._horovod import job
from ringtrain._horovod.process_sets import ProcessSet
from ringtrain.torch import rendezvous
from ringtrain.torch.backend import ring_group


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Joins the first job in this list that exists. Does nothing if this process has already joined a job.

    1. The job of torch.distributed's default group, if this group has the backend "ring".
    2. The job for which ringrun, torchrun or another launcher such as srun started this process.
    3. A new job of one rank.

    Then adds the process sets. Sets can also be added later, with and without Horovod's value "dynamic".
    """
    job.init_with(_join_job, comm, process_sets)


def _join_job() -> _core.Group:
    if dist.is_initialized() and dist.get_backend() == "ring":
        return ring_group().core.duplicate()
    if _world.is_joined() or "RING_RANK" in os.environ:
        return job.join_job_of_launcher(job.TIMEOUT_SECONDS)
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        store, env_rank, env_size = next(iter(dist.rendezvous("env://")))
        member = rendezvous.Membership(env_rank, env_size, job.TIMEOUT_SECONDS, started_by_ringrun=False)
        return rendezvous.join_through_store(dist.PrefixStore("ringtrain.torch", store), member)
    return job.join_job_of_launcher(job.TIMEOUT_SECONDS)
