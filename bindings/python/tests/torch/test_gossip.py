"""Tests of `ringtrain.Gossip` on parameters of torch."""

from __future__ import annotations

import copy

import pytest

import ringtrain as ring
from ranks import run_in_threads

torch = pytest.importorskip("torch", reason="NOT TESTED: gossip with torch, because PyTorch cannot be imported")


def loss_of(module, rank: int, step: int):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(32, 4, generator=generator)
    return torch.nn.functional.mse_loss(module(inputs), inputs.sum(1, keepdim=True))


@pytest.mark.parametrize("form", ("module", "parameters"))
def test_a_module_learns(form: str):
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    module[0].bias.requires_grad_(False)
    modules = [copy.deepcopy(module) for _ in range(3)]

    def work(group: ring.Group) -> float:
        module = modules[group.rank]
        with torch.no_grad():
            module[0].bias.fill_(group.rank / 64)
        trained = [value for value in module.parameters() if value.requires_grad]
        with ring.Gossip(module if form == "module" else trained, every=2, group=group) as gossip:
            for step in range(80):
                module.zero_grad()
                loss_of(module, group.rank, step).backward()
                with torch.no_grad():
                    for value in trained:
                        value -= 0.05 * value.grad
                gossip.step()
        assert gossip.averages.done > 0
        assert (module[0].bias == group.rank / 64).all(), "a frozen parameter stays as it is"
        return loss_of(module, 9, 0).item()

    results = run_in_threads(3, work)
    assert not any(isinstance(result, BaseException) for result in results), results
    assert max(results) < 0.5, results
    for values in zip(*(module.parameters() for module in modules), strict=True):
        if values[0].requires_grad:
            assert all(torch.equal(value, values[0]) for value in values)
