"""Checks of Horovod's functions that need named tensors: operations in any order, `join`, and process sets."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import torch
from checks import raised
from torch import nn

import ringtrain.torch as hvd
from ringtrain import _core as core


def check_operations_in_different_orders(rank: int, n: int) -> None:
    """Each rank begins the operations in another order, and the last rank from several threads."""
    results: dict[int, list] = {}

    def begin(index: int) -> None:
        mine = torch.full((index + 1,), float(rank + index))
        handles = [
            hvd.allreduce_async(mine, name=f"sum {index}", op=hvd.Sum),
            hvd.broadcast_async(mine, n - 1, name=f"copy {index}"),
            hvd.allgather_async(mine[:rank], name=f"rows {index}"),
            hvd.reducescatter_async(mine.repeat(2 * n + 1, 1), name=f"part {index}"),
            hvd.grouped_allreduce_async([mine, 2 * mine], name=f"group {index}", op=hvd.Max),
        ]
        results[index] = handles if rank % 2 else handles[::-1]

    threads = [threading.Thread(target=begin, args=(index,)) for index in range(10)]
    for thread in threads if rank % 2 else threads[::-1]:
        thread.start()
        if rank < n - 1:
            thread.join()
    for thread in threads:
        thread.join()
    for index, handles in results.items():
        found = [handle.wait() for handle in handles]
        total, copied, rows, part, group = found if rank % 2 else found[::-1]
        mean, largest = index + (n - 1) / 2, torch.full((index + 1,), float(n - 1 + index))
        assert torch.equal(total, torch.full((index + 1,), n * mean)), total
        assert torch.equal(copied, largest), copied
        assert torch.equal(rows, torch.cat([torch.full((min(other, index + 1),), float(other + index)) for other in range(n)])), (
            rows
        )
        assert torch.equal(part, torch.full((3 if rank == 0 else 2, index + 1), mean)), part
        assert torch.equal(group[0], largest) and torch.equal(group[1], 2 * largest), group


def check_long_names(rank: int, n: int) -> None:
    names = ["long" * 100 + letter for letter in "ab"]
    handles = [hvd.allreduce_async(torch.ones(1), name=name, op=hvd.Sum) for name in (names if rank else names[::-1])]
    assert all(handle.wait().item() == n for handle in handles)


def check_gradient_of_reducescatter(rank: int, n: int) -> None:
    for op, factor in ((hvd.Average, 1.0), (hvd.Sum, float(n))):
        mine = torch.ones(2 * n, 3).requires_grad_()
        (hvd.reducescatter(mine, op=op) * (rank + 1)).sum().backward()
        expected = torch.arange(1, n + 1, dtype=torch.float32).repeat_interleave(2).unsqueeze(1).expand(-1, 3) * factor
        assert torch.equal(mine.grad, expected), mine.grad
    raised(NotImplementedError, lambda: hvd.reducescatter(torch.ones(n, 1).requires_grad_(), op=hvd.Max).sum().backward())


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 1))


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Returns the loss of `model` on the batch of a rank in a step."""
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
    return (model(batch).squeeze(1) - batch.sum(1)).square().mean()


def train_in_one_process(seed: int, counts: list[int], divisor: int) -> nn.Module:
    """Returns the model that one process trains if rank r has `counts[r]` batches. The gradient of a step is the sum of the
    gradients of all ranks, divided by `divisor`, also when some ranks have no more batches."""
    model = make_model(seed)
    optimizer = make_sgd(model)
    for step in range(max(counts)):
        optimizer.zero_grad()
        for rank, count in enumerate(counts):
            if step < count:
                (batch_loss(model, rank, step) / divisor).backward()
        optimizer.step()
    return model


def assert_same_parameters(model: nn.Module, expected: nn.Module) -> None:
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def check_join_with_uneven_batches(rank: int, n: int) -> None:
    """The last rank has the most batches. It trains alone in the end, and its parameters then are those of all ranks."""
    # The garbage collector, which `join` runs, need not visit the objects that the modules of torch have created.
    gc.freeze()
    counts = [2 * other + 1 for other in range(n)]
    for options in ({}, {"bucket_bytes": 200}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}):
        model = make_model(5)
        optimizer = hvd.DistributedOptimizer(make_sgd(model), **options)
        for step in range(counts[rank]):
            active = [other for other in range(n) if step < counts[other]]
            losses = [batch_loss(model, other, step).item() for other in active]
            optimizer.zero_grad()
            batch_loss(model, rank, step).backward()
            optimizer.step()
            # Ranks that have joined contribute zeros to the average of the losses, and to operations without a name.
            mean_loss = hvd.metric_average(losses[active.index(rank)], "loss")
            assert abs(mean_loss - sum(losses) / n) < 1e-5 * mean_loss, (mean_loss, losses)
            assert hvd.allreduce(torch.tensor([6.0]), op=hvd.Sum).item() == 6.0 * len(active)
            assert hvd.allreduce(torch.tensor([6.0])).item() == 6.0 * len(active) / n
        assert hvd.join() == n - 1
        for p in model.parameters():
            assert p.grad is None or not p.grad.any()
        hvd.broadcast_parameters(model.state_dict(), root_rank=n - 1)
        assert_same_parameters(model, train_in_one_process(5, counts, 1 if "op" in options else n))
        assert hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item() == n


def check_join_with_two_optimizers(rank: int, n: int) -> None:
    """The optimizers take different numbers of steps, and rank 0 has more batches than the others."""
    counts = [(6, 3)] + [(2, 1)] * (n - 1)
    models, expected = [[make_model(seed) for seed in (1, 2)] for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05)) for model in models]
    plain = [torch.optim.SGD(model.parameters(), lr=0.05) for model in expected]
    for epoch in range(2):
        # Two steps of the first optimizer come before each step of the second optimizer.
        for step in range(counts[rank][0]):
            for which in (0, 1) if step % 2 else (0,):
                optimizers[which].zero_grad(set_to_none=False)
                batch_loss(models[which], rank, 10 * epoch + (step, step // 2)[which]).backward()
                optimizers[which].step()
        assert hvd.join() == 0
        for which in (0, 1):
            for step in range(counts[0][which]):
                plain[which].zero_grad()
                for other in range(n):
                    if step < counts[other][which]:
                        (batch_loss(expected[which], other, 10 * epoch + step) / n).backward()
                plain[which].step()
            hvd.broadcast_parameters(models[which].state_dict(), root_rank=0)
            assert_same_parameters(models[which], expected[which])


def check_join_after_an_odd_number_of_passes(rank: int, n: int) -> None:
    """With two passes for each step, `join` discards the gradients of a single pass."""
    model = make_model(7)
    optimizer = hvd.DistributedOptimizer(make_sgd(model), backward_passes_per_step=2)
    for step in range(2):
        for half in range(2):
            batch_loss(model, rank, 2 * step + half).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        before = [p.detach().clone() for p in model.parameters()]
        batch_loss(model, rank, 9).backward()
        hvd.join()
        assert all(torch.equal(p, old) and not p.grad.any() for p, old in zip(model.parameters(), before, strict=True))
    expected = make_model(7)
    plain = make_sgd(expected)
    for step in range(2):
        plain.zero_grad()
        for other in range(n):
            for half in range(2):
                (batch_loss(expected, other, 2 * step + half) / n).backward()
        plain.step()
    assert_same_parameters(model, expected)


def check_operations_that_need_joined_ranks(rank: int, n: int) -> None:
    calls: list[Callable] = [
        lambda: hvd.allreduce(torch.ones(3), op=hvd.Max),
        lambda: hvd.allgather(torch.ones(3)),
        lambda: hvd.broadcast(torch.ones(3), 0, name="late"),
        lambda: hvd.alltoall(torch.ones(n)),
        lambda: hvd.broadcast_object(3),
        hvd.barrier,
    ]
    if rank == 0:
        for call in calls if n > 1 else []:
            error = raised(core.Error, call)
            assert "joined" in str(error) and ("rank 1" in str(error) or "ranks 1" in str(error)), error
    assert hvd.join() == 0
    hvd.barrier()


def check_process_sets(rank: int, n: int) -> None:
    first, rest = hvd.ProcessSet([0]), hvd.ProcessSet(range(1, n))
    assert (first.size(), first.rank(), first.included(), first.ranks) == (None, None, None, [0])
    assert "has not been added" in str(raised(ValueError, lambda: hvd.barrier(first)))
    if n == 1:
        assert "exists already" in str(raised(ValueError, lambda: hvd.add_process_set(first)))
        return
    assert hvd.add_process_set(first) is first and hvd.add_process_set(rest) is rest
    assert (rest.process_set_id, rest.size(), rest.included()) == (2, n - 1, rank > 0)
    assert str(hvd.global_process_set) == f"ProcessSet(process_set_id=0, ranks={list(range(n))})"
    for ranks in ([0], [n], [0, 0], [], list(range(n)), [rank]):
        raised(ValueError, lambda: hvd.add_process_set(ranks))
    raised(ValueError, lambda: hvd.ProcessSet(["a"]))
    own, other = (first, rest) if rank == 0 else (rest, first)
    ranks = own.ranks
    assert own.rank() == ranks.index(rank)
    assert f"rank {rank} is not part of" in str(raised(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=other)))
    raised(ValueError, lambda: hvd.broadcast(torch.ones(1), 1 if rank == 0 else 0, process_set=own))
    mine = torch.tensor([float(rank)])
    assert hvd.allreduce(mine, process_set=own).item() == sum(ranks) / len(ranks)
    assert hvd.allgather(mine, process_set=own).tolist() == ranks
    assert hvd.broadcast(mine, ranks[-1], process_set=own).item() == ranks[-1]
    assert hvd.alltoall(mine.repeat(len(ranks)), process_set=own).tolist() == ranks
    assert hvd.allgather_object(rank, process_set=own) == ranks
    assert hvd.reducescatter(torch.ones(len(ranks)), op=hvd.Sum, process_set=own).item() == len(ranks)
    counts = [step + 1 for step in range(len(ranks))]
    model, outside = make_model(3), make_model(3)
    optimizer = hvd.DistributedOptimizer(make_sgd(model), process_set=own)
    unused = hvd.DistributedOptimizer(make_sgd(outside), process_set=other)
    for step in range(counts[own.rank()]):
        optimizer.zero_grad()
        batch_loss(model, own.rank(), step).backward()
        optimizer.step()
    batch_loss(outside, rank, 0).backward()
    unused.step()
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), ranks[-1], process_set=own)
    assert_same_parameters(model, train_in_one_process(3, counts, len(ranks)))
    hvd.barrier(own)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.remove_process_set(rest) and hvd.remove_process_set(first) and not hvd.remove_process_set(first)
    assert own.size() is None and "has not been added" in str(raised(ValueError, lambda: hvd.barrier(own)))
