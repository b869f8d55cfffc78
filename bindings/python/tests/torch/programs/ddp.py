"""Checks that DistributedDataParallel with the backend "ring" gives the same losses and parameters as with Gloo."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import checks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import ringtrain
from ringtrain.torch import hooks

STEPS = 4


class Network(nn.Module):
    """A network with two branches. A batch uses one branch or both branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 300)
        self.norm = nn.BatchNorm1d(300)
        self.left = nn.Linear(300, 300)
        self.right = nn.Linear(300, 300)
        self.last = nn.Linear(300, 5)

    def forward(self, batch: torch.Tensor, branch: str = "both") -> torch.Tensor:
        hidden = self.norm(self.first(batch)).relu()
        total = torch.zeros_like(hidden)
        if branch in ("both", "left"):
            total = total + self.left(hidden)
        if branch in ("both", "right"):
            total = total + self.right(hidden)
        return self.last(total.relu())


Step = Callable[[DistributedDataParallel, torch.Tensor, int], torch.Tensor]
Setup = Callable[[DistributedDataParallel, Any], None]


def plain_step(model: DistributedDataParallel, batch: torch.Tensor, step: int) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    return loss


def train(
    group: Any, rank: int, step: Step = plain_step, setup: Setup | None = None, **options: Any
) -> tuple[list[float], torch.Tensor]:
    """Trains on a process group. The bucket size is so small that the gradients fill several buckets. Returns the losses and
    the final parameters."""
    torch.manual_seed(3)
    model = DistributedDataParallel(Network(), process_group=group, **({"bucket_cap_mb": 0.2} | options))
    if setup is not None:
        setup(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for index in range(STEPS):
        optimizer.zero_grad()
        losses.append(step(model, torch.randn(8, 20, generator=generator), index).item())
        optimizer.step()
    return losses, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def compare_with_gloo(rank: int, n: int, gloo: Any, tolerance: float = 1e-5, **options: Any) -> None:
    losses, parameters = train(None, rank, **options)
    expected_losses, expected = train(gloo, rank, **options)
    torch.testing.assert_close(losses, expected_losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(parameters, expected, rtol=tolerance, atol=tolerance)
    require_identical(parameters, n)


def require_identical(parameters: torch.Tensor, n: int) -> None:
    gathered = [torch.zeros_like(parameters) for _ in range(n)]
    dist.all_gather(gathered, parameters)
    assert all(torch.equal(gathered[0], other) for other in gathered), "ranks have different parameters"


def check_default_options(rank: int, n: int, gloo: Any) -> None:
    compare_with_gloo(rank, n, gloo)


def check_static_graph(rank: int, n: int, gloo: Any) -> None:
    compare_with_gloo(rank, n, gloo, static_graph=True)


def check_gradient_as_bucket_view(rank: int, n: int, gloo: Any) -> None:
    compare_with_gloo(rank, n, gloo, gradient_as_bucket_view=True)


def check_unused_parameters(rank: int, n: int, gloo: Any) -> None:
    def step(model: DistributedDataParallel, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = model(batch, "left" if (rank + index) % 2 else "right").square().mean()
        loss.backward()
        return loss

    compare_with_gloo(rank, n, gloo, step=step, find_unused_parameters=True)


def check_no_sync(rank: int, n: int, gloo: Any) -> None:
    def step(model: DistributedDataParallel, batch: torch.Tensor, index: int) -> torch.Tensor:
        with model.no_sync():
            model(batch[:4]).square().mean().backward()
        loss = model(batch[4:]).square().mean()
        loss.backward()
        return loss

    compare_with_gloo(rank, n, gloo, step=step)


def check_join_with_uneven_batches(rank: int, n: int, gloo: Any) -> None:
    """Rank r has r more batches than rank 0."""

    def run(group: Any) -> torch.Tensor:
        torch.manual_seed(3)
        model = DistributedDataParallel(nn.Linear(20, 5), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with Join([model]):
            for index in range(3 + rank):
                optimizer.zero_grad()
                model(torch.full((4, 20), float(index))).square().mean().backward()
                optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    found = run(None)
    torch.testing.assert_close(found, run(gloo))
    require_identical(found, n)


def check_python_hook(rank: int, n: int, gloo: Any) -> None:
    compare_with_gloo(rank, n, gloo, setup=lambda model, group: model.register_comm_hook(group, default_hooks.allreduce_hook))


def check_compression_hook_of_torch(rank: int, n: int, gloo: Any) -> None:
    hook = default_hooks.fp16_compress_hook
    compare_with_gloo(rank, n, gloo, tolerance=1e-3, setup=lambda model, group: model.register_comm_hook(group, hook))


def register_power_sgd(model: DistributedDataParallel, group: Any) -> None:
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2, random_seed=5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def check_power_sgd(rank: int, n: int, gloo: Any) -> None:
    """Compares the training with PowerSGD on "ring" and on Gloo, with all gradients in one bucket. With several
    buckets, the comparison would fail: PowerSGD begins operations for several buckets at the same time, and Gloo
    mixes up these operations.
    """
    compare_with_gloo(rank, n, gloo, tolerance=1e-3, setup=register_power_sgd, bucket_cap_mb=25)


def check_power_sgd_in_buckets(rank: int, n: int, gloo: Any) -> None:
    """The continuation of a bucket's all-reduce begins other operations. At this time, the backward pass computes the
    gradients of the next buckets."""
    runs = [train(None, rank, setup=register_power_sgd)[1] for _ in range(5)]
    require_identical(runs[0], n)
    assert all(torch.equal(runs[0], run) for run in runs), "the order of operations differs between runs"


def check_hooks_of_ringtrain(rank: int, n: int, gloo: Any) -> None:
    expected_losses, expected = train(gloo, rank)
    states = {hooks.fp16: None, hooks.bf16: dist.group.WORLD, hooks.compress: hooks.CompressionState("powersgd")}
    for hook, state in states.items():
        losses, parameters = train(
            None, rank, setup=lambda model, _, hook=hook, state=state: model.register_comm_hook(state, hook)
        )
        torch.testing.assert_close(losses, expected_losses, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(parameters, expected, rtol=2e-2, atol=2e-2)
        require_identical(parameters, n)


def check_hooks_need_the_backend_ring(rank: int, n: int, gloo: Any) -> None:
    model = DistributedDataParallel(nn.Linear(3, 3), process_group=gloo)
    model.register_comm_hook(gloo, hooks.bf16)
    error = checks.raised(Exception, lambda: model(torch.ones(2, 3)).sum().backward())
    assert '"ring"' in str(error), error


def check_zero_redundancy(rank: int, n: int, gloo: Any) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def run(group: Any) -> torch.Tensor:
        torch.manual_seed(3)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5)), process_group=group)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
        for index in range(3):
            optimizer.zero_grad()
            model(torch.full((4, 20), float(index + rank))).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    torch.testing.assert_close(run(dist.group.WORLD), run(gloo))


def check_fsdp(rank: int, n: int, gloo: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))

    plain, sharded = build(), build()
    mesh = dist.init_device_mesh("cpu", (n,))
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (plain, sharded)]
    for index in range(3):
        batches = torch.randn(n, 4, 20, generator=torch.Generator().manual_seed(index))
        expected = plain(batches.reshape(-1, 20)).square().mean()
        loss = sharded(batches[rank]).square().mean()
        for value, optimizer in zip((expected, loss), optimizers, strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        average = loss.detach().clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        torch.testing.assert_close(average, expected.detach())
    for whole, part in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(part.full_tensor(), whole)


class SparseEmbeddingModel(nn.Module):
    """An embedding with sparse gradients, and a layer with dense gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(50, 8, mode="sum", sparse=True)
        self.last = nn.Linear(8, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding(words))


def check_sparse_gradients(rank: int, n: int, gloo: Any) -> None:
    """Regression test: before the fix, the backend refused sparse tensors, so this model could not be trained."""
    results = []
    for group in (None, gloo):
        torch.manual_seed(5)
        model = DistributedDataParallel(SparseEmbeddingModel(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(STEPS):
            torch.manual_seed(100 * step + rank)
            optimizer.zero_grad()
            model(torch.randint(50, (4 + rank, 6))).square().mean().backward()
            assert model.module.embedding.weight.grad.is_sparse
            optimizer.step()
        results.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    torch.testing.assert_close(*results)


def check_periodic_average(rank: int, n: int, gloo: Any) -> None:
    torch.manual_seed(rank)
    module = nn.Linear(3, 2)
    average = ringtrain.PeriodicAverage(module, every=2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        module(torch.full((4, 3), float(rank + step))).square().mean().backward()
        optimizer.step()
        assert average.step(4) == (step % 2 == 1)
    lowest, highest = module.weight.detach().clone(), module.weight.detach().clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    assert torch.equal(lowest, highest) and torch.isfinite(lowest).all()


def check_distributed_checkpoint(rank: int, n: int, gloo: Any) -> None:
    from torch.distributed import checkpoint

    directory = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(directory, 0)
    checkpoint.save({"weights": torch.arange(10.0)}, checkpoint_id=directory[0])
    found = {"weights": torch.zeros(10)}
    checkpoint.load(found, checkpoint_id=directory[0])
    assert torch.equal(found["weights"], torch.arange(10.0))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(directory[0])


if __name__ == "__main__":
    arguments = checks.parse_arguments()
    dist.init_process_group("ring")
    gloo_group = dist.new_group(backend="gloo")
    checks.run(globals(), dist.get_rank(), dist.get_world_size(), gloo_group, only=arguments.only)
    dist.destroy_process_group()
