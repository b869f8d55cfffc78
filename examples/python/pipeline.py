"""Combines model parallelism and data parallelism. The network has two stages. Half of the ranks have the first
stage, and the other half have the second stage.

    ringrun -n 4 python pipeline.py

With n ranks, ranks 0 to n/2-1 have the first layers, and ranks n/2 to n-1 have the last layers. Rank r and rank n/2+r
form one copy of the model. The two ranks exchange activations and gradients in micro-batches, so that both ranks
compute at the same time (Huang et al., "GPipe", 2019). All ranks with the same stage average the gradients of that
stage. At the end the program compares the model with the same network trained in one process.
"""

import argparse
import sys

import torch
from torch import Tensor, nn

import ringtrain as ring

FEATURES, WIDTH = 16, 64
FORWARD, BACKWARD = 1, 2


def make_stages(seed: int) -> list[nn.Sequential]:
    """Returns the two stages of the network, with the same parameters on every rank."""
    torch.manual_seed(seed)
    first = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    return [first, last]


def make_batch(rows: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Returns the inputs of one training step for all ranks, and the targets of these inputs."""
    inputs = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(seed * 100_003 + step))
    return inputs, torch.sin(inputs[:, :1]) * inputs[:, 1:2]


def run_first_stage(world: ring.Group, partner: int, stage: nn.Module, parts: tuple[Tensor, ...]) -> None:
    """Sends the activations of each micro-batch to the partner, and then receives the gradients of the activations."""
    outputs, sends = [], []
    for part in parts:
        outputs.append(stage(part))
        # `send_async` does not wait, so this rank computes the next micro-batch while the partner computes the current one.
        sends.append(world.send_async(outputs[-1].detach().numpy(), partner, FORWARD))
    for output in outputs:
        slope = torch.empty_like(output)
        world.receive(slope.numpy(), partner, BACKWARD)
        output.backward(slope)
    ring.wait_all(sends)


def run_last_stage(world: ring.Group, partner: int, stage: nn.Module, targets: tuple[Tensor, ...]) -> Tensor:
    """Receives activations, and sends back the gradients of the loss with respect to the activations. Returns the
    mean loss."""
    total = torch.zeros(())
    sends = []
    for target in targets:
        activations = torch.empty(len(target), WIDTH)
        world.receive(activations.numpy(), partner, FORWARD)
        activations.requires_grad_()
        # The sum of the micro-batches' gradients is the gradient of the whole batch's mean loss.
        loss = nn.functional.mse_loss(stage(activations), target) / len(targets)
        loss.backward()
        sends.append(world.send_async(activations.grad.numpy(), partner, BACKWARD))
        total += loss.detach()
    ring.wait_all(sends)
    return total


def average_gradients(group: ring.Group, stage: nn.Module) -> None:
    """Averages the gradients over all ranks that have this stage. Begins to reduce every gradient
    before it waits for the first result."""
    gradients = [parameter.grad.numpy() for parameter in stage.parameters()]
    ring.wait_all([group.all_reduce_async(gradient, "avg", out=gradient) for gradient in gradients])


def train_in_one_process(options: argparse.Namespace, rows: int) -> list[nn.Sequential]:
    """Trains the network of the pipeline in one process, and returns the two stages of the network. Except for
    rounding, the ranks of the pipeline get the same parameters."""
    stages = make_stages(options.seed)
    model = nn.Sequential(*stages)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)
    for step in range(options.steps):
        inputs, targets = make_batch(rows, options.seed, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return stages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="number of steps (default: %(default)s)")
    parser.add_argument(
        "--micro-batches", type=int, default=4, help="micro-batches per step in each copy of the model (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, default=16, help="rows of a micro-batch (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of random numbers (default: %(default)s)")
    options = parser.parse_args()

    world = ring.init()
    if world.size % 2:
        # All ranks return here, so no rank waits for another rank.
        print(f"two stages need an even number of ranks, and there are {world.size}", file=sys.stderr)
        return 2
    copies = world.size // 2
    index, copy = divmod(world.rank, copies)
    partner = world.rank + copies if index == 0 else world.rank - copies
    group = world.split(index, key=copy)
    stage = make_stages(options.seed)[index]
    optimizer = torch.optim.Adam(stage.parameters(), lr=options.rate)

    copy_rows = options.rows * options.micro_batches
    for step in range(options.steps):
        inputs, targets = (
            tensor.split(copy_rows)[copy].split(options.rows) for tensor in make_batch(copy_rows * copies, options.seed, step)
        )
        optimizer.zero_grad()
        if index == 0:
            run_first_stage(world, partner, stage, inputs)
        else:
            loss = run_last_stage(world, partner, stage, targets)
            mean = group.all_reduce(loss.numpy(), "avg")
            if copy == 0 and step % 50 == 0:
                print(f"step {step}: loss {mean:.6f}", flush=True)
        average_gradients(group, stage)
        optimizer.step()

    expected = train_in_one_process(options, copy_rows * copies)[index]
    pairs = zip(stage.parameters(), expected.parameters(), strict=True)
    difference = world.all_reduce(max(float((own - other).detach().abs().max()) for own, other in pairs), "max")
    if world.rank == copies:
        print(f"final: ranks {world.size}, loss {mean:.6f}, largest difference from one process {difference:.2e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
