"""Checks that torch's own tensor parallelism and pipelines run on the backend "ring", and match a single process."""

from __future__ import annotations

import checks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Network(nn.Module):
    """A network with one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(batch).relu())


def two_equal_networks() -> tuple[Network, Network]:
    divided, whole = Network(), Network()
    whole.load_state_dict(divided.state_dict())
    return divided, whole


def check_tensor_parallel(_: int, n: int) -> None:
    divided, whole = two_equal_networks()
    parallelize_module(divided, init_device_mesh("cpu", (n,)), {"first": ColwiseParallel(), "last": RowwiseParallel()})
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (divided, whole)]
    for step in range(10):
        batch = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        for network, optimizer in zip((divided, whole), optimizers, strict=True):
            optimizer.zero_grad()
            network(batch).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(divided.first.weight.full_tensor(), whole.first.weight)
    torch.testing.assert_close(divided.last.weight.full_tensor(), whole.last.weight)


def check_pipeline(rank: int, n: int) -> None:
    whole = nn.Sequential(*[nn.Linear(8, 8) for _ in range(n)])
    own = nn.Linear(8, 8)
    own.load_state_dict(whole[rank].state_dict())
    schedule = Schedule1F1B(
        PipelineStage(own, rank, n, torch.device("cpu")), 4, loss_fn=lambda output, target: (output - target).square().mean()
    )
    batch, target = torch.randn(16, 8), torch.zeros(16, 8)
    inputs = (batch,) if rank == 0 else ()
    schedule.step(*inputs, **({"target": target} if rank == n - 1 else {}))
    (whole(batch) - target).square().mean().backward()
    torch.testing.assert_close(own.weight.grad, whole[rank].weight.grad)


def check_data_and_tensor_parallel(rank: int, n: int) -> None:
    """Divides the model over two ranks, and the batch over n / 2 such pairs."""
    mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("data", "tensor"))
    divided, whole = two_equal_networks()
    parallelize_module(divided, mesh["tensor"], {"first": ColwiseParallel(), "last": RowwiseParallel()})
    batch = torch.randn(4 * (n // 2), 8)
    start = 4 * (rank // 2)
    divided(batch[start : start + 4]).square().mean().backward()
    gradient = divided.first.weight.grad.full_tensor()
    dist.all_reduce(gradient, dist.ReduceOp.AVG, group=mesh["data"].get_group())
    replicas = DistributedDataParallel(whole, process_group=mesh["data"].get_group())
    replicas(batch[start : start + 4]).square().mean().backward()
    torch.testing.assert_close(gradient, whole.first.weight.grad)


if __name__ == "__main__":
    arguments = checks.parse_arguments()
    dist.init_process_group("ring")
    checks.run(globals(), dist.get_rank(), dist.get_world_size(), only=arguments.only)
    dist.destroy_process_group()
