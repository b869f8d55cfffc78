"""Failures of one rank, and the errors that the other ranks then raise. `--only` selects the failure."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import checks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringtrain.torch as hvd
from ringtrain import _core as core
from ringtrain._horovod import process_sets


def print_line(text: str) -> None:
    """Prints a line with one write, so that the lines of several ranks do not mix."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def kill_last_rank(rank: int, static_graph: bool = False, hook: bool = False) -> None:
    """Kills the last rank between two steps. The other ranks catch the error that `backward` raises, and end."""
    last = dist.get_world_size() - 1
    model = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(200, 200) for _ in range(8)]), bucket_cap_mb=0.3, static_graph=static_graph
    )
    if hook:
        model.register_comm_hook(None, hvd.hooks.bf16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1000):
        if rank == last and step == 5:
            print_line(f"killed at {time.time():.3f}")
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = model(torch.randn(16, 200)).square().mean()
        try:
            loss.backward()
        except RuntimeError as error:
            when = time.time()
            assert f"rank {last}" in str(error) and "lost" in str(error), error
            again = checks.raised(core.PeerLost, dist.barrier)
            assert again.rank == last, again.rank
            checks.raised(core.PeerLost, lambda: dist.all_reduce(torch.ones(3), async_op=True).wait())
            dist.destroy_process_group()
            print_line(f"rank {rank} raised at {when:.3f} in step {step}: {str(error).splitlines()[0]}")
            return
        optimizer.step()


def kill_last_rank_with_static_graph(rank: int) -> None:
    kill_last_rank(rank, static_graph=True)


def kill_last_rank_with_hook(rank: int) -> None:
    kill_last_rank(rank, hook=True)


def give_barrier_its_own_timeout(rank: int) -> None:
    """Rank 1 does not call a barrier in time. Rank 0 passes a timeout to the barrier, and its call fails after this timeout,
    and not after the timeout of the group."""
    if rank == 1:
        time.sleep(2.5)
        # Rank 0 began the first barrier, which reached its timeout.
        checks.raised(core.JobFailed, lambda: [dist.barrier() for _ in range(2)])
        return
    start = time.monotonic()
    late = dist.irecv(torch.zeros(3), 1)
    checks.raised(core.StillRunning, lambda: late.wait(timedelta(seconds=0.2)))
    error = checks.raised(core.Timeout, lambda: dist.barrier(timeout=timedelta(seconds=1)))
    assert time.monotonic() - start < 3.5, time.monotonic() - start
    print_line(f"timed out: {error}")


def raise_exception_on_rank_1(rank: int) -> None:
    """Rank 1 ends with an uncaught exception. The errors of the other ranks, which wait for rank 1, contain the message of
    the exception."""
    dist.barrier()
    if rank == 1:
        raise ValueError("the data of this rank is broken")
    error = checks.raised(core.Aborted, lambda: dist.all_reduce(torch.ones(3)))
    assert "the data of this rank is broken" in str(error) and error.rank == 1, error
    print_line(f"rank {rank} raised: {error}")


def kill_rank_of_subgroup(rank: int) -> None:
    """An error of an operation in a subgroup names the lost rank by its number in the default group."""
    group = dist.new_group([1, 2])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        error = checks.raised(core.PeerLost, lambda: dist.all_reduce(torch.ones(3), group=group))
        assert error.rank == 2 and "global rank 2" in str(error), error
        print_line(f"rank 1 raised: {error}")
    checks.raised(core.PeerLost, dist.barrier)


def kill_last_rank_in_distributed_optimizer(rank: int) -> None:
    """Kills a rank while `DistributedOptimizer` averages gradients."""
    hvd.init()
    model = nn.Sequential(*[nn.Linear(200, 200) for _ in range(8)])
    distributed = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), bucket_bytes=200_000)
    for step in range(1000):
        if rank == hvd.size() - 1 and step == 5:
            print_line(f"killed at {time.time():.3f}")
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.zero_grad()
        try:
            model(torch.randn(16, 200)).square().mean().backward()
            distributed.step()
        except RuntimeError as error:
            when = time.time()
            assert f"rank {hvd.size() - 1}" in str(error), error
            print_line(f"rank {rank} raised at {when:.3f} in step {step}: {error}")
            return


def leave_during_training(rank: int) -> None:
    """Rank 0 leaves while rank 1 waits for it in a step of a `DistributedOptimizer`, which uses no named tensors."""
    process_sets._CLOSE_SECONDS = 0.1
    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.01))
    if rank == 0:
        hvd.shutdown()
        assert not hvd.is_initialized()
        return
    error = checks.raised(core.Aborted, optimizer.step)
    assert error.rank == 0 and "this rank ended, and the other ranks still ran 0.1 s later" in str(error), error
    print_line("rank 1 raised the error")


def kill_last_rank_in_allreduce(rank: int) -> None:
    """Kills a rank while the other ranks wait for its tensor. The errors name the rank and the tensor."""
    hvd.init()
    for step in range(1000):
        if rank == hvd.size() - 1 and step == 5:
            print_line(f"killed at {time.time():.3f}")
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            hvd.allreduce(torch.ones(3), name="loss")
        except RuntimeError as error:
            when = time.time()
            assert error.rank == hvd.size() - 1 and error.__notes__ == ["in the all-reduce of tensor `allreduce.loss`"], error
            print_line(f"rank {rank} raised at {when:.3f} in step {step}: {error}")
            return


def run_until_interrupt(rank: int) -> None:
    """Runs until SIGINT: rank 1 waits in a collective, and rank 0 computes."""
    dist.all_reduce(torch.ones(3))
    print_line("ready")
    while rank == 0:
        torch.randn(100, 100).square().sum()
    dist.all_reduce(torch.ones(3))


if __name__ == "__main__":
    arguments = checks.parse_arguments()
    dist.init_process_group("ring", timeout=timedelta(seconds=60))
    globals()[arguments.only](dist.get_rank())
