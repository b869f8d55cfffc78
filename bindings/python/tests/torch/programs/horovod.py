"""Checks ringtrain's versions of Horovod's functions and of `DistributedOptimizer`: the ranks together must get the results
that one process gets with the data of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import any_order
import checks
import torch
from checks import raised
from torch import nn

import ringtrain.torch as hvd
from ringtrain import _core as core
from ringtrain._horovod.missing import NOT_IMPLEMENTED


def tensor_of_rank(rank: int, rows: int = 3) -> torch.Tensor:
    """Returns the tensor that this rank contributes to a collective."""
    return torch.arange(rows * 4, dtype=torch.float32).reshape(rows, 4) + 100 * rank


def sum_of_tensors(n: int) -> torch.Tensor:
    """Returns the sum of `tensor_of_rank(rank)` over `n` ranks."""
    return torch.stack([tensor_of_rank(rank) for rank in range(n)]).sum(0)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected)


def check_init_and_ranks(rank: int, n: int) -> None:
    assert hvd.is_initialized() and (hvd.local_rank(), hvd.local_size()) == (rank, n)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert not hvd.nccl_built() and hvd.HorovodInternalError is core.Error
    for name in NOT_IMPLEMENTED:
        assert f"torch.{name} is not implemented" in str(raised(NotImplementedError, lambda: getattr(hvd, name)))
    hvd.init()
    hvd.barrier()


def check_allreduce(rank: int, n: int) -> None:
    assert_close(hvd.allreduce(tensor_of_rank(rank)), sum_of_tensors(n) / n)
    assert_close(hvd.allreduce(tensor_of_rank(rank), average=False, name="a"), sum_of_tensors(n))
    assert_close(hvd.allreduce(tensor_of_rank(rank), op=hvd.Max), tensor_of_rank(n - 1))
    scaled = hvd.allreduce(tensor_of_rank(rank), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert_close(scaled, 2 * sum_of_tensors(n))
    raised(ValueError, lambda: hvd.allreduce(tensor_of_rank(rank), average=True, op=hvd.Sum))
    assert_close(hvd.allreduce(torch.tensor([rank, 7])), torch.tensor([sum(range(n)) // n, 7]))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        for dtype in (torch.float32, torch.float64):
            found = hvd.allreduce(tensor_of_rank(rank).to(dtype), compression=compression)
            torch.testing.assert_close(found, (sum_of_tensors(n) / n).to(dtype), rtol=1e-2, atol=1e-2)
    mine = tensor_of_rank(rank)
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    assert_close(mine, sum_of_tensors(n))
    across = tensor_of_rank(rank).t()
    hvd.allreduce_(across, op=hvd.Sum)
    assert_close(across, sum_of_tensors(n).t())
    handles = [hvd.allreduce_async(tensor_of_rank(rank), op=hvd.Sum, name=str(index)) for index in range(5)]
    for handle in handles:
        assert_close(hvd.synchronize(handle), sum_of_tensors(n))
        assert hvd.poll(handle)
    for found in hvd.grouped_allreduce([tensor_of_rank(rank), tensor_of_rank(rank)], op=hvd.Sum):
        assert_close(found, sum_of_tensors(n))
    both = [tensor_of_rank(rank), tensor_of_rank(rank)]
    hvd.grouped_allreduce_(both, None, "both", hvd.Sum)
    assert_close(both[1], sum_of_tensors(n))


def check_collectives_except_allreduce(rank: int, n: int) -> None:
    everything = torch.cat([tensor_of_rank(other, other + 1) for other in range(n)])
    assert_close(hvd.allgather(tensor_of_rank(rank, rank + 1)), everything)
    assert_close(hvd.allgather(tensor_of_rank(rank, rank)), torch.cat([tensor_of_rank(other, other) for other in range(n)]))
    if n > 1:
        error = raised(core.InvalidArgument, lambda: hvd.allgather(torch.zeros(2, 4 + rank)))
        assert "rank 1" in str(error), error
    assert_close(hvd.broadcast(tensor_of_rank(rank), n - 1), tensor_of_rank(n - 1))
    mine = tensor_of_rank(rank)
    hvd.broadcast_(mine, 0)
    assert_close(mine, tensor_of_rank(0))
    assert_close(hvd.alltoall(tensor_of_rank(rank, n)), torch.stack([tensor_of_rank(other, n)[rank] for other in range(n)]))
    received, sizes = hvd.alltoall(tensor_of_rank(rank, n * (rank + 1)), torch.tensor([rank + 1] * n))
    assert sizes.tolist() == [other + 1 for other in range(n)]
    assert_close(received, torch.cat([tensor_of_rank(other, n * (other + 1)).split(other + 1)[rank] for other in range(n)]))
    assert_close(hvd.synchronize(hvd.alltoall_async(tensor_of_rank(rank, n), [1] * n))[0], hvd.alltoall(tensor_of_rank(rank, n)))
    sparse = torch.sparse_coo_tensor([[rank, n]], torch.ones(2, 3), (n + 1, 3), check_invariants=False)
    expected = torch.ones(n + 1, 3).index_fill(0, torch.tensor(n), n)
    assert_close(hvd.synchronize(hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)).to_dense(), expected)
    assert_close(hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average)().to_dense(), expected / n)
    rows = 2 * n + 1
    part = sum(tensor_of_rank(other, rows) for other in range(n)).tensor_split(n)[rank]
    assert_close(hvd.reducescatter(tensor_of_rank(rank, rows), op=hvd.Sum), part)
    assert hvd.metric_average(float(rank)) == sum(range(n)) / n
    assert hvd.broadcast_object({"from": rank}, 0) == {"from": 0}
    assert hvd.allgather_object(rank) == list(range(n))


def check_gradients_of_collectives(rank: int, n: int) -> None:
    mine = tensor_of_rank(rank).requires_grad_()
    hvd.allreduce(mine, op=hvd.Sum).sum().backward()
    assert_close(mine.grad, torch.full((3, 4), float(n)))
    mine = tensor_of_rank(rank, rank + 1).requires_grad_()
    (hvd.allgather(mine) * (rank + 1)).sum().backward()
    assert_close(mine.grad, torch.full((rank + 1, 4), sum(other + 1 for other in range(n)) / n))
    mine = tensor_of_rank(rank).requires_grad_()
    hvd.broadcast(mine, 0).sum().backward()
    assert_close(mine.grad, torch.ones(3, 4) if rank == 0 else torch.zeros(3, 4))
    mine = tensor_of_rank(rank, n).requires_grad_()
    (hvd.alltoall(mine) * (rank + 1)).sum().backward()
    assert_close(mine.grad, torch.arange(1.0, n + 1)[:, None].expand(n, 4))
    mine = [tensor_of_rank(rank, n).requires_grad_() for _ in range(3)]
    sums = hvd.grouped_allreduce(mine[:1], op=hvd.Sum), hvd.grouped_allgather(mine[1:2]), hvd.grouped_reducescatter(mine[2:])
    sum(found.sum() for (found,) in sums).backward()
    for tensor, expected in zip(mine, (n, 1, 1), strict=True):
        assert_close(tensor.grad, torch.full((n, 4), float(expected)))


class Network(nn.Module):
    """A network in which the layer `never` is never used, and the layers `left` and `right` are used only for some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.never, self.last = (nn.Linear(16, 16) for _ in range(5))

    def forward(self, batch: torch.Tensor, left: bool = True, right: bool = True) -> torch.Tensor:
        hidden = self.first(batch).tanh()
        if left:
            hidden = hidden + self.left(hidden)
        if right:
            hidden = hidden + self.right(hidden)
        return self.last(hidden)


MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def build_network() -> Network:
    """Returns a network with the same parameters on all ranks."""
    torch.manual_seed(11)
    return Network()


def batch_of_rank(rank: int, step: int) -> torch.Tensor:
    """Returns the random batch that this rank uses in this step."""
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * rank + step))


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_in_one_process(
    n: int, steps: int, make: MakeOptimizer, uses: Callable[[int, int], tuple[bool, bool]] = lambda *_: (True, True)
) -> Network:
    """Returns the model that one process trains on the batches of `n` ranks. `make` creates the optimizer. `uses(rank, step)`
    says whether the batch uses the layers `left` and `right`."""
    model = build_network()
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(n):
            (model(batch_of_rank(rank, step), *uses(rank, step)).square().mean() / n).backward()
        optimizer.step()
    return model


def assert_same_parameters(model: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    """Checks that the parameters of `model` are close to those of `expected`, and equal on all ranks."""
    for (name, found), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
        assert all(torch.equal(found, other) for other in hvd.allgather(found.detach().unsqueeze(0))), name


def check_optimizer(rank: int, n: int) -> None:
    for make in (make_sgd, lambda parameters: torch.optim.Adam(parameters, lr=0.01)):
        for options in ({}, {"bucket_bytes": 2000}, {"gradient_predivide_factor": 2.0}):
            model = build_network()
            plain = make(model.parameters())
            optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), **options)
            assert isinstance(optimizer, type(plain))
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
            for step in range(4):
                optimizer.zero_grad()
                model(batch_of_rank(rank, step)).square().mean().backward()
                optimizer.step()
                scheduler.step()
            assert model.never.weight.grad is None
            assert_same_parameters(model, train_in_one_process(n, 4, make))


def check_unused_parameters(rank: int, n: int) -> None:
    def uses(rank: int, step: int) -> tuple[bool, bool]:
        return (rank + step) % 2 == 0, (rank + step) % 3 == 0

    model = build_network()
    optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), bucket_bytes=2000)
    for step in range(6):
        optimizer.zero_grad()
        model(batch_of_rank(rank, step), *uses(rank, step)).square().mean().backward()
        optimizer.step()
    assert_same_parameters(model, train_in_one_process(n, 6, make_sgd, uses))


def check_gradient_accumulation_and_clipping(rank: int, n: int) -> None:
    model, expected = build_network(), build_network()
    optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), backward_passes_per_step=2, op=hvd.Sum)
    plain = make_sgd(expected.parameters())
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        for half in range(2):
            model(batch_of_rank(rank, 2 * step + half)).square().mean().backward()
            for other in range(n):
                expected(batch_of_rank(other, 2 * step + half)).square().mean().backward()
        optimizer.synchronize()
        norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.5) for net in (model, expected)]
        torch.testing.assert_close(norms[0], norms[1])
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.step()
    assert_same_parameters(model, expected)


def check_misuse_is_refused(rank: int, n: int) -> None:
    model = build_network()
    optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()))
    model(batch_of_rank(rank, 0)).sum().backward()
    error = raised(AssertionError, lambda: model(batch_of_rank(rank, 0)).sum().backward())
    assert "backward_passes_per_step" in str(error), error
    optimizer.step()
    raised(ValueError, lambda: hvd.DistributedOptimizer(optimizer))
    raised(
        ValueError, lambda: hvd.DistributedOptimizer(make_sgd(model.parameters()), named_parameters=[("x", model.first.weight)])
    )
    raised(NotImplementedError, lambda: hvd.DistributedOptimizer(make_sgd(model.parameters()), op=hvd.Max))
    raised(NotImplementedError, lambda: optimizer.add_param_group({"params": []}))
    if n > 1:
        odd = nn.Linear(3 + rank, 2)
        error = raised(core.InvalidArgument, lambda: hvd.DistributedOptimizer(make_sgd(odd.parameters())))
        assert "different parameters" in str(error), error


def check_types_of_gradients(rank: int, n: int) -> None:
    """The gradient of rank r is r + 1. Every type and compression can represent this number, so the sums are exact."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
            for count in (3, 70_000):
                weight = nn.Parameter(torch.zeros(count, dtype=dtype))
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=compression, op=hvd.Sum)
                (weight * (rank + 1)).sum().backward()
                optimizer.step()
                assert torch.all(weight == -sum(range(1, n + 1))), (dtype, compression, weight)


def check_compression(rank: int, n: int) -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            model = build_network().to(dtype)
            optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), compression=compression)
            for step in range(3):
                optimizer.zero_grad()
                model(batch_of_rank(rank, step).to(dtype)).square().mean().backward()
                optimizer.step()
            assert_same_parameters(model.float(), train_in_one_process(n, 3, make_sgd), tolerance=5e-2)


def check_closures_and_zero_grad(rank: int, n: int) -> None:
    model = build_network()
    optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()))
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = model(batch_of_rank(rank, step)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same_parameters(model, train_in_one_process(n, 3, make_sgd))


def check_broadcasts_of_state(rank: int, n: int) -> None:
    torch.manual_seed(rank)
    model = Network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    hvd.broadcast_parameters(list(model.parameters()), root_rank=0)
    torch.manual_seed(0)
    assert_same_parameters(model, Network(), tolerance=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 0:
        model(batch_of_rank(0, 0)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    states = hvd.allgather_object(optimizer.state_dict()["state"])
    assert all(other.keys() == states[0].keys() and other for other in states)
    for key, values in states[0].items():
        for name, value in values.items():
            assert all(torch.equal(other[key][name], value) for other in states), (key, name)
    raised(ValueError, lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0))


def check_training_script(rank: int, n: int) -> None:
    """A typical script for Horovod."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16)
    losses = []
    for step in range(60):
        optimizer.zero_grad()
        batch = batch_of_rank(rank, step)
        loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(hvd.metric_average(loss.item(), "loss"))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert_same_parameters(model, model)


def initialize() -> None:
    """Calls `hvd.init`. Before this call, other functions must raise an error."""
    assert not hvd.is_initialized()
    assert "init()" in str(raised(core.Error, hvd.rank))
    hvd.init()


if __name__ == "__main__":
    arguments = checks.parse_arguments()
    initialize()
    checks.run(globals() | vars(any_order), hvd.rank(), hvd.size(), only=arguments.only)
    hvd.shutdown()
