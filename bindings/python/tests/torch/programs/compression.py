"""Checks the compression of gradients between hosts, with the hooks of DistributedDataParallel and with DistributedOptimizer.
Every rank has a host of its own, because the ranks of one host send exact values."""

from __future__ import annotations

import copy
import functools
import gc
import os
from collections.abc import Callable
from typing import Any

import checks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ringtrain.torch as hvd
from ringtrain import InvalidArgument, Unsupported, _world
from ringtrain.torch import hooks

# For each compression: how many times as many bytes a rank sends without compression, at least, and which part of what a run
# without compression learns in 40 steps is learnt, at least. The model has 8,000 parameters in matrices and 160 in vectors.
EXPECTED: dict[str, tuple[float, float]] = {
    "fp16": (1.9, 0.99),
    "bf16": (1.9, 0.99),
    "fp8": (3.5, 0.99),
    "int8": (3.5, 0.99),
    "int8_stochastic": (3.5, 0.99),
    "int4": (6.0, 0.99),
    "int4_stochastic": (6.0, 0.99),
    "qsgd": (6.0, 0.95),
    "onebit": (18.0, 0.7),
    "topk": (26.0, 0.3),
    "randomk": (30.0, 0.05),
    "powersgd": (5.0, 0.75),
    # On a fast link it chooses exact gradients, and each check of a bucket sends a sample.
    "auto": (0.8, 0.99),
    "ef21": (6.0, 0.95),
}
STEPS = 40
IS_FULL = bool(os.environ.get("TEST_FULL"))
# The short tests train with one codec of each kind. Tests without torch cover every codec.
HOOKS = list(EXPECTED) if IS_FULL else ["int8", "powersgd", "auto"]
OPTIMIZERS = list(EXPECTED) if IS_FULL else ["onebit", "powersgd"]
# "ef21" starts without errors, so it continues in another way.
RESUMED = ["bf16", "int8_stochastic", "topk", "randomk", "powersgd"] if IS_FULL else ["topk"]

Register = Callable[[DistributedDataParallel], Any]


def bytes_sent() -> int:
    return dist.group.WORLD.core.statistics()["bytes_sent"]


def build_model(register: Register | None = None, bucket_cap_mb: float = 0.01) -> DistributedDataParallel:
    """Returns a model whose gradients fill several buckets."""
    torch.manual_seed(3)
    layers = (
        nn.Linear(32, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 32),
    )
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=bucket_cap_mb)
    if register is not None:
        register(model)
    return model


def parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, seed: int = 0) -> list[float]:
    """Trains towards a fixed linear map with noise, a batch of its own on each rank and in each step. Returns the losses,
    averaged over the ranks."""
    teacher = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)) / 6
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10_000 * seed + 100 * step + dist.get_rank())
        batch = torch.randn(16, 32, generator=generator)
        optimizer.zero_grad()
        loss = (model(batch) - batch @ teacher).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total, dist.ReduceOp.AVG)
    return total.tolist()


def train_with(register: Register | None, steps: int = STEPS, seed: int = 0) -> tuple[list[float], torch.Tensor, int]:
    """Returns the losses, the parameters, and the number of bytes that this rank has sent for gradients."""
    model = build_model(register)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = bytes_sent()
    losses = train(model, optimizer, range(steps), seed)
    return losses, parameters_of(model), bytes_sent() - before


def require_identical(tensor: torch.Tensor, n: int) -> None:
    gathered = [torch.empty_like(tensor) for _ in range(n)]
    dist.all_gather(gathered, tensor)
    assert all(torch.equal(gathered[0], other) for other in gathered), "ranks have different parameters"


def state_for(name: str, **options: Any) -> hooks.CompressionState:
    return hooks.CompressionState(min_compression_rate=1, **options) if name == "powersgd" else hooks.CompressionState(**options)


def train_distributed_optimizer(
    compression: Any,
    steps: range = range(STEPS),
    saved: dict[str, Any] | None = None,
    lr: float = 0.1,
    **options: Any,
) -> tuple[list[float], dict[str, Any], int]:
    """Returns the losses, the states of the model and the optimizer, and the number of bytes that this rank has sent."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=compression, bucket_bytes=17_000, **options)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    before = optimizer._reducer._resource.group.statistics()["bytes_sent"]
    losses = train(model, optimizer, steps)
    sent = optimizer._reducer._resource.group.statistics()["bytes_sent"] - before
    require_identical(parameters_of(model), dist.get_world_size())
    return (
        losses,
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        sent,
    )


@functools.cache
def losses_without_training() -> list[float]:
    model = build_model()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.0), range(STEPS))


def require_learning(found: list[float], losses: list[float], part: float, name: str) -> None:
    """Checks that a run has learnt at least `part` of what a run without compression learns. `losses` are those without
    compression."""
    untrained = losses_without_training()
    learnt = (sum(untrained) - sum(found)) / (sum(untrained) - sum(losses))
    assert part < learnt < 2 - part, (name, learnt)


def check_distributed_optimizer(rank: int, n: int) -> None:
    """With each compression, the model learns, and the ranks send fewer bytes."""
    losses, states, plain_bytes = train_distributed_optimizer(hvd.Compression.none)
    assert set(states["optimizer"]) == {"state", "param_groups"}
    for name in OPTIMIZERS:
        ratio, part = EXPECTED[name]
        found, states, sent = train_distributed_optimizer(getattr(hvd.Compression, name))
        assert sent * ratio < plain_bytes, (name, plain_bytes / sent)
        require_learning(found, losses, part, name)
        assert ("compression" in states["optimizer"]) == (name not in ("fp16", "bf16"))


def check_resumed_distributed_optimizer(rank: int, n: int) -> None:
    for name in RESUMED:
        compression = getattr(hvd.Compression, name)
        expected = train_distributed_optimizer(compression)[1]["model"]
        states = train_distributed_optimizer(compression, range(5))[1]
        found = train_distributed_optimizer(compression, range(5, STEPS), states)[1]["model"]
        for key, value in expected.items():
            assert torch.equal(found[key], value), (name, key)
    # The errors of another rank are ignored.
    other = copy.deepcopy(states)
    other["optimizer"]["compression"]["rank"] = rank + 1
    train_distributed_optimizer(compression, range(5, STEPS), other)
    other["optimizer"]["compression"]["rank"] = rank
    other["optimizer"]["compression"]["errors"][0] = torch.zeros(3)
    error = checks.raised(
        InvalidArgument,
        lambda: train_distributed_optimizer(compression, range(1), other),
    )
    assert "3 elements for a parameter of 2048 elements" in str(error), error


def check_sums_of_distributed_optimizer(rank: int, n: int) -> None:
    """A sum is n times the average."""
    for name in ("int8", "powersgd"):
        average = train_distributed_optimizer(name, range(3))[0]
        total = train_distributed_optimizer(name, range(3), lr=0.1 / n, op=hvd.Sum)[0]
        torch.testing.assert_close(total, average, rtol=1e-3, atol=0)


def check_join_with_compressed_gradients(rank: int, n: int) -> None:
    """Rank r has r more batches than rank 0."""
    gc.freeze()  # join collects garbage
    for name in ("topk", "powersgd"):
        model = nn.Linear(64, 64)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=name)
        for step in range(2 + rank):
            optimizer.zero_grad()
            model(torch.full((4, 64), float(step))).square().mean().backward()
            optimizer.step()
        assert hvd.join() == n - 1, name
        assert torch.isfinite(parameters_of(model)).all()
        del optimizer, model
    gc.unfreeze()


def check_compression_of_single_tensors(rank: int, n: int) -> None:
    error = checks.raised(
        Unsupported,
        lambda: hvd.allreduce(torch.ones(3), compression=hvd.Compression.int8),
    )
    assert "the compression int8 is for the gradients of a DistributedOptimizer" in str(error)
    assert torch.equal(hvd.allreduce(torch.ones(3), compression="bf16"), torch.ones(3))
    error = checks.raised(InvalidArgument, lambda: hvd.allreduce(torch.ones(3), compression="int9"))
    assert "`int9` is not one of none" in str(error)


def check_every_hook(rank: int, n: int) -> None:
    """With each hook, the model learns, all ranks have the same parameters, and the ranks send fewer bytes."""
    losses, _, plain_bytes = train_with(None)
    for name in HOOKS:
        ratio, part = EXPECTED[name]
        hook = getattr(hooks, name)
        found, parameters, sent = train_with(lambda model, name=name, hook=hook: model.register_comm_hook(state_for(name), hook))
        require_identical(parameters, n)
        assert sent * ratio < plain_bytes, (name, plain_bytes / sent)
        require_learning(found, losses, part, name)


def check_hooks_without_a_state(rank: int, n: int) -> None:
    """A hook without error feedback accepts a process group or None as its state. The others refuse it."""
    with_state = train_with(lambda model: model.register_comm_hook(hooks.CompressionState(), hooks.bf16))[1]
    for group in (None, dist.group.WORLD):
        parameters = train_with(lambda model: model.register_comm_hook(group, hooks.bf16))[1]
        assert torch.equal(parameters, with_state)
    model = build_model(lambda model: model.register_comm_hook(None, hooks.topk))
    error = checks.raised(Exception, lambda: model(torch.ones(2, 32)).sum().backward())
    assert "hooks.CompressionState()" in str(error), error


def check_wrong_arguments(rank: int, n: int) -> None:
    for call, expected in [
        (lambda: hooks.CompressionState("int9"), "`int9` is not one of none, fp16"),
        (lambda: hooks.CompressionState("topk:2"), "`2` is not a fraction"),
        (lambda: hooks.CompressionState("int8", start_step=-1), "start_step is -1"),
        (
            lambda: hooks.CompressionState("powersgd", min_compression_rate=0),
            "min_compression_rate is 0",
        ),
        (
            lambda: hooks.CompressionState("int8").load_state_dict({"steps": 3}),
            "has no errors, factors",
        ),
        (
            lambda: hooks.CompressionState("ef21").load_state_dict(
                {"steps": 3, "errors": {}, "results": {0: torch.ones(3)}, "factors": {}, "rank": rank + 1}
            ),
            "every rank must save and load its own state",
        ),
    ]:
        error = checks.raised(InvalidArgument, call)
        assert expected in str(error), error
    for state, hook, expected in [
        (
            hooks.CompressionState("int8"),
            hooks.topk,
            'the state has the compression "int8"',
        ),
        (hooks.CompressionState(), hooks.compress, "needs a state with a compression"),
    ]:
        model = build_model(lambda model: model.register_comm_hook(state, hook))
        error = checks.raised(Exception, lambda: model(torch.ones(2, 32)).sum().backward())
        assert expected in str(error), error


def check_a_state_belongs_to_one_model(rank: int, n: int) -> None:
    state = hooks.CompressionState("bf16")
    train_with(lambda model: model.register_comm_hook(state, hooks.compress), steps=1)
    model = build_model(lambda model: model.register_comm_hook(state, hooks.compress))
    error = checks.raised(Exception, lambda: model(torch.ones(2, 32)).sum().backward())
    assert "belongs to one model" in str(error), error


def check_other_types_are_exact(rank: int, n: int) -> None:
    """Gradients of float64 are averaged exactly."""
    model = DistributedDataParallel(nn.Linear(8, 8, bias=False).double())
    model.register_comm_hook(hooks.CompressionState(), hooks.powersgd)
    model(torch.full((1, 8), 1 / 3 + rank, dtype=torch.float64)).sum().backward()
    mean = sum(1 / 3 + r for r in range(n)) / n
    torch.testing.assert_close(
        model.module.weight.grad,
        torch.full((8, 8), mean, dtype=torch.float64),
        rtol=1e-15,
        atol=0,
    )


def check_exact_start(rank: int, n: int) -> None:
    """Before `start_step`, the gradients are those without compression."""
    register = lambda model: model.register_comm_hook(hooks.CompressionState("powersgd", start_step=5), hooks.compress)  # noqa: E731
    expected, found = train_with(None)[0], train_with(register)[0]
    assert found[:6] == expected[:6]
    assert found[7:] != expected[7:]


def resumed_parameters(name: str, between: int) -> torch.Tensor:
    """Trains, interrupts the training after `between` steps, and continues with a new model and a state that was saved to a
    file."""
    state, model = state_for(name), build_model()
    model.register_comm_hook(state, getattr(hooks, name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, range(between))
    path = f"/tmp/ringtrain-{os.getpid()}-{name}.pt"
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "state": state.state_dict(),
        },
        path,
    )
    saved = torch.load(path)
    os.remove(path)
    state, model = state_for(name), build_model()
    model.load_state_dict(saved["model"])
    state.load_state_dict(saved["state"])
    model.register_comm_hook(state, getattr(hooks, name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, range(between, STEPS))
    return parameters_of(model)


def check_resumed_power_sgd(rank: int, n: int) -> None:
    """PowerSGD compresses each gradient separately, so a resumed run has the same bits, even though DistributedDataParallel
    starts with other buckets."""
    register = lambda model: model.register_comm_hook(state_for("powersgd"), hooks.powersgd)  # noqa: E731
    expected = train_with(register)[1]
    assert torch.equal(resumed_parameters("powersgd", 5), expected)


def check_errors_follow_their_parameters(rank: int, n: int) -> None:
    """DistributedDataParallel changes its buckets after the first step. The errors of all ranks are then still what the averages
    of all steps lack."""
    for compression in ("topk:0.1", "powersgd:1"):
        state = hooks.CompressionState(compression, min_compression_rate=1)
        model = build_model()
        inputs = []

        def hook(state, bucket):
            inputs.append({p: g.clone() for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)})
            return hooks.compress(state, bucket)

        model.register_comm_hook(state, hook)
        lacks: dict[nn.Parameter, torch.Tensor] = {p: torch.zeros_like(p) for p in model.parameters()}
        layouts = []
        for step in range(4):
            inputs.clear()
            model(torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank))).square().sum().backward()
            layouts.append([[id(p) for p in bucket] for bucket in inputs])
            for bucket in inputs:
                for p, gradient in bucket.items():
                    lacks[p] += gradient - p.grad
            model.zero_grad()
        assert layouts[0] != layouts[1] == layouts[2], "the buckets have not changed"
        errors = state.state_dict()["errors"]
        for position, p in enumerate(reversed(list(model.parameters()))):
            total = torch.stack([errors[position].view_as(p), lacks[p]])
            dist.all_reduce(total)
            torch.testing.assert_close(total[0], total[1], rtol=1e-4, atol=1e-3)
            if p.dim() == 2 or compression.startswith("topk"):
                assert total[0].abs().max() > 0.1, "nothing was left out"
            else:
                assert not errors[position].any(), "PowerSGD sends vectors exactly"


def check_states_for_another_number_of_ranks(rank: int, n: int) -> None:
    """The average of the errors of 3 ranks stays the same on 2 ranks and on 5."""
    states = [
        {
            "steps": 7,
            "errors": {0: torch.arange(4.0) + r},
            "factors": {0: torch.ones(2)},
            "rank": r,
        }
        for r in range(3)
    ]
    for size in (2, 5):
        parts = [hooks.redistribute(states, r, size) for r in range(size)]
        mean = sum(part["errors"].get(0, torch.zeros(4)) for part in parts) / size
        torch.testing.assert_close(mean, torch.arange(4.0) + 1)
        assert [part["rank"] for part in parts] == list(range(size))
        assert all(part["steps"] == 7 and torch.equal(part["factors"][0], torch.ones(2)) for part in parts)
    assert torch.equal(states[0]["errors"][0], torch.arange(4.0)), "the arguments are unchanged"


def check_power_sgd_recovers_from_infinite_gradients(rank: int, n: int) -> None:
    """An infinite gradient, as with a loss scale that is too large, spoils one step and not the next ones."""
    model = build_model()
    model.register_comm_hook(hooks.CompressionState(min_compression_rate=1), hooks.powersgd)
    for step in range(4):
        batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        if step == 1 and rank == 0:
            batch[0, 0] = float("inf")
        model(batch).square().sum().backward()
        finite = all(torch.isfinite(p.grad).all() for p in model.parameters())
        assert finite == (step != 1), step
        model.zero_grad()


def check_power_sgd_of_torch(rank: int, n: int) -> None:
    """Torch's own hook gives the same losses as ours, but for noise. The noise is the difference between two seeds of torch's
    hook."""

    def register_torch(model: DistributedDataParallel, seed: int) -> None:
        options = {
            "matrix_approximation_rank": 2,
            "start_powerSGD_iter": 2,
            "min_compression_rate": 1,
        }
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, random_seed=seed, **options)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def register_ours(model: DistributedDataParallel) -> None:
        model.register_comm_hook(
            state_for("powersgd", compression="powersgd:2", start_step=2),
            hooks.powersgd,
        )

    for seed in range(2 if IS_FULL else 1):
        exact = torch.tensor(train_with(None, 60, seed)[0])
        torchs = [torch.tensor(train_with(lambda model, s=s: register_torch(model, s), 60, seed)[0]) for s in (1, 2)]
        ours = torch.tensor(train_with(register_ours, 60, seed)[0])
        distance, noise, effect = [((curve - torchs[0]).abs() / torchs[0]).max().item() for curve in (ours, torchs[1], exact)]
        case = f"seed {seed}: distance {distance:.4f}, noise {noise:.4f}, effect of compression {effect:.4f}"
        assert distance < 3 * noise, case
        assert 10 * noise < effect, f"the comparison would not notice an error; {case}"


if __name__ == "__main__":
    arguments = checks.parse_arguments()
    _world.join_world(host_id=f"host {os.environ['RING_RANK']}")
    dist.init_process_group("ring")
    hvd.init()
    checks.run(globals(), dist.get_rank(), dist.get_world_size(), only=arguments.only)
    dist.destroy_process_group()
