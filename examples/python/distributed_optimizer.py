"""Trains with the interface of Horovod: `DistributedOptimizer` averages gradients, and the rest is an ordinary training loop.

    ringrun -n 4 python distributed_optimizer.py --compression bf16

A Horovod script needs one line changed: `import ringtrain.torch as hvd` instead of `import horovod.torch as hvd`.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ringtrain.torch as hvd


def make_moons(count: int, seed: int) -> TensorDataset:
    """Makes points on two interleaving half circles, with the number of the half circle as label. All ranks get the same
    points."""
    random = torch.Generator().manual_seed(seed)
    angle = math.pi * torch.rand(count, generator=random)
    label = torch.randint(2, (count,), generator=random)
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    points = torch.where(label[:, None] == 0, upper, lower)
    return TensorDataset(points + 0.1 * torch.randn(count, 2, generator=random), label)


def evaluate(model: nn.Module, data: TensorDataset) -> tuple[float, float]:
    """Returns the loss and the accuracy on this rank's part of the data, averaged over the ranks."""
    points, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in data.tensors)
    with torch.no_grad():
        scores = model(points)
        loss = nn.functional.cross_entropy(scores, labels)
        accuracy = (scores.argmax(1) == labels).float().mean()
    return hvd.metric_average(loss, "loss"), hvd.metric_average(accuracy, "accuracy")


def checksum(model: nn.Module) -> Tensor:
    """Returns the sum of all parameters, which must be the same on every rank."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).double().sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=4096, help="number of points (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="points per step on each rank (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.02, help="learning rate for one rank (default: %(default)s)")
    parser.add_argument(
        "--compression", choices=["none", "fp16", "bf16"], default="none", help="type in which gradients are sent"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of random numbers (default: %(default)s)")
    options = parser.parse_args()

    hvd.init()
    # Each rank starts with different parameters, to show that the broadcast below makes the parameters the same.
    torch.manual_seed(options.seed + hvd.rank())
    data = make_moons(options.points, options.seed)
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed)
    loader = DataLoader(data, batch_size=options.batch, sampler=sampler)

    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    # With n ranks, a step averages over n times as many points, so the learning rate can be n times as large.
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=getattr(hvd.Compression, options.compression)
    )

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(points), labels).backward()
            optimizer.step()
        loss, accuracy = evaluate(model, data)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{options.epochs}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)

    sums = hvd.allgather(checksum(model)[None])
    if hvd.rank() == 0:
        is_same = bool((sums == sums[0]).all())
        print(
            f"final: ranks {hvd.size()}, loss {loss:.4f}, accuracy {accuracy:.4f}, the same parameters on all of them: {is_same}"
        )
    hvd.shutdown()


if __name__ == "__main__":
    main()
