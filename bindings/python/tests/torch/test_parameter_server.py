"""Tests of `ringtrain.ParameterServer` on parameters of torch."""

from __future__ import annotations

import copy

import pytest

import ringtrain as ring
from ranks import raised, run_in_threads

torch = pytest.importorskip("torch", reason="NOT TESTED: the parameter server with torch, because PyTorch cannot be imported")


def run(n: int, work, module: torch.nn.Module, form=lambda module: module, **options) -> list:
    """Runs a job of `n` ranks, each with a copy of the module. Each rank passes `form(module)` to `ParameterServer`. Servers wait
    for the workers, and workers call `work(server, module)`."""

    def run_rank(group: ring.Group):
        module = modules[group.rank]
        with ring.ParameterServer(form(module), group=group, **{"lr": 0.1, **options}) as server:
            if server.is_server:
                assert server.wait_for_workers(30)
                return server.state_dict()["steps"]
            return work(server, module)

    modules = [copy.deepcopy(module) for _ in range(n)]
    results = run_in_threads(n, run_rank)
    assert not any(isinstance(result, BaseException) for result in results), results
    return results


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def loss_of(module, worker: int, step: int):
    generator = torch.Generator().manual_seed(1000 * worker + step)
    inputs = torch.randn(32, 4, generator=generator)
    return torch.nn.functional.mse_loss(module(inputs), inputs.sum(1, keepdim=True))


FORMS = {
    "module": lambda module: module,
    "parameters()": lambda module: module.parameters(),
    "dict": lambda module: dict(module.named_parameters()),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_module_learns(form: str):
    def work(server, module) -> float:
        # A worker may run alone, and a late gradient of the initial parameters may arrive at its end: its loss is then 0.12.
        for step in range(60):
            server.pull()
            module.zero_grad()
            loss_of(module, server.worker_index, step).backward()
            assert server.push()
        server.pull()
        return loss_of(module, 9, 0).item()

    losses = run(3, work, network(), FORMS[form], lr=0.05)[1:]
    assert max(losses) < 0.3, losses


def test_synchronous_steps_are_those_of_one_process():
    module = network()
    for step in range(10):
        module.zero_grad()
        (sum(loss_of(module, worker, step) for worker in range(2)) / 2).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * (parameter.grad + 0.01 * parameter)

    def work(server, module) -> list:
        server.pull()
        for step in range(10):
            module.zero_grad()
            loss_of(module, server.worker_index, step).backward()
            server.push_pull()
        return [parameter.detach() for parameter in module.parameters()]

    results = run(4, work, network(), servers=2, synchronous=True, weight_decay=0.01)
    for found in results[2:]:
        for expected, actual in zip(module.parameters(), found, strict=True):
            assert torch.allclose(expected, actual, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("synchronous", (False, True))
def test_sparse_gradients_are_pushed_as_rows(synchronous: bool):
    """A sparse gradient changes the parameters as a dense gradient does. A parameter without a gradient stays unchanged."""

    def embedding():
        torch.manual_seed(4)
        module = torch.nn.Module()
        module.table = torch.nn.Embedding(50, 3, sparse=True)
        module.unused = torch.nn.Parameter(torch.ones(5))
        module.frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        return module

    words = torch.tensor([4, 9, 4, 49, 0, 5])

    def work(server, module) -> None:
        server.pull()
        before = module.table.weight.detach().clone()
        (module.table(words) ** 2).sum().backward()
        assert module.table.weight.grad.is_sparse and server.push()
        server.pull_rows("table.weight", words)
        counts = torch.bincount(words, minlength=50)[:, None]
        assert torch.allclose(module.table.weight.detach(), before * (1 - 0.2 * counts), atol=1e-6)
        server.pull()
        assert torch.allclose(module.table.weight.detach(), before * (1 - 0.2 * counts), atol=1e-6)
        assert (module.unused == 1).all() and "frozen" not in server._parameters.keys

    run(2, work, embedding(), synchronous=synchronous)


def test_a_pull_between_forward_and_backward_is_an_error_of_autograd():
    def work(server, module) -> None:
        loss = loss_of(module, 0, 0)
        server.pull()
        raised(RuntimeError, loss.backward)

    run(2, work, network())


def test_wrong_tensors_are_refused():
    group = ring.solo()
    for wrong, text in (
        (torch.zeros(3, dtype=torch.float64), "float64, not float32"),
        (torch.zeros(3, device="meta"), "on meta"),
        (torch.zeros(3, 3).t()[:, :2], "not contiguous"),
        ([torch.zeros(3), "a"], "parameter 1 is a str"),
        (torch.zeros(3).to_sparse(), "a dense tensor"),
        (torch.nn.Linear(2, 2), "the number of ranks is 1"),
    ):
        assert text in str(raised(ring.InvalidArgument, ring.ParameterServer, wrong, 0.1, group=group)), wrong
