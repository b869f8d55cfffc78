"""Tests of `ringtrain.PeriodicAverage`."""

import numpy as np
import pytest

import ringtrain as ring
from ranks import run_in_threads

TRUTH = np.arange(1.0, 9.0, dtype=np.float32)


def run(n: int, work) -> list:
    results = run_in_threads(n, work)
    assert not any(isinstance(result, BaseException) for result in results), results
    return results


def gradient(w: np.ndarray, rank: int, step: int) -> np.ndarray:
    features = np.random.default_rng([5, rank, step]).standard_normal((16, 8)).astype(np.float32)
    return features.T @ (features @ (w - TRUTH)) / 16


def reference(n: int, rounds: int, every: int, lr: float, momentum: float, samples) -> np.ndarray:
    """Computes the parameters in float64 and in a single process."""
    start, velocity = np.zeros(8), np.zeros(8)
    step = 0
    for _ in range(rounds):
        change, total = np.zeros(8), 0.0
        for rank in range(n):
            w = start.copy()
            for offset in range(every):
                w -= 0.1 * gradient(w, rank, step + offset)
            change += (w - start) * samples(rank)
            total += samples(rank)
        step += every
        mean = change / total
        velocity = momentum * velocity + mean
        start = start + lr * (mean + momentum * velocity)
    return start


@pytest.mark.parametrize(
    ("n", "every", "options"),
    [(3, 4, {}), (2, 1, {}), (3, 5, {"outer_lr": 0.7, "outer_momentum": 0.9}), (1, 5, {"outer_lr": 0.7, "outer_momentum": 0.9})],
)
def test_averages_are_those_of_the_formulas(n: int, every: int, options: dict):
    rounds = 6

    def samples(rank: int) -> float:
        return 3.0 + rank

    def work(group: ring.Group) -> np.ndarray:
        w = np.full(8, 0.0 if group.rank == 0 else 99.0, np.float32)
        average = ring.PeriodicAverage(w, every=every, group=group, **options)
        assert not w.any(), "the parameters of rank 0 are the initial parameters"
        for step in range(rounds * every):
            w -= np.float32(0.1) * gradient(w, group.rank, step)
            assert average.step(samples(group.rank)) == ((step + 1) % every == 0)
        return w

    results = run(n, work)
    assert all(np.array_equal(w, results[0]) for w in results), "all ranks have the same bits"
    expected = reference(n, rounds, every, options.get("outer_lr", 1.0), options.get("outer_momentum", 0.0), samples)
    np.testing.assert_allclose(results[0], expected, rtol=2e-5, atol=2e-5)


def test_ranks_without_samples_have_no_weight():
    def work(group: ring.Group) -> list:
        w = {"a": np.zeros(2, np.float32), "b": np.zeros((1, 1), np.float32)}
        average = ring.PeriodicAverage(w, group=group)
        found = []
        # If no rank has counted samples, all ranks have the same weight.
        w["a"][:] = group.rank
        average.average()
        found.append(w["a"].tolist())
        w["b"][:] = 7.0 if group.rank == 1 else np.inf
        average.step(3 if group.rank == 1 else 0)
        average.average()
        return [*found, w["b"].item()]

    assert run(3, work) == [[[1.0, 1.0], 7.0]] * 3


def test_a_saved_state_continues_the_run():
    options = {"every": 3, "outer_lr": 0.7, "outer_momentum": 0.9, "compression": "bf16"}

    def train(group: ring.Group, average: ring.PeriodicAverage, w: np.ndarray, steps: range) -> None:
        for step in steps:
            w -= np.float32(0.1) * gradient(w, group.rank, step)
            average.step()

    def work(group: ring.Group) -> tuple:
        w = np.zeros(8, np.float32)
        average = ring.PeriodicAverage(w, group=group, **options)
        train(group, average, w, range(8))
        state, saved = average.state_dict(), w.copy()
        train(group, average, w, range(8, 15))
        resumed_w = saved.copy()
        resumed = ring.PeriodicAverage(resumed_w, group=group, **options)
        # The constructor has given all ranks the parameters of rank 0.
        resumed_w[:] = saved
        resumed.load_state_dict(state)
        train(group, resumed, resumed_w, range(8, 15))
        with pytest.raises(ring.InvalidArgument, match="velocity of the state"):
            resumed.load_state_dict({**state, "velocity": np.zeros(3)})
        with pytest.raises(ring.InvalidArgument, match="the state has no samples"):
            resumed.load_state_dict({key: value for key, value in state.items() if key != "samples"})
        return w, resumed_w

    for w, resumed in run(2, work):
        assert np.array_equal(w, resumed)


def test_wrong_options_are_errors_on_all_ranks():
    def create(group: ring.Group, every: int) -> str:
        with pytest.raises(ring.Mismatch) as error:
            ring.PeriodicAverage(np.zeros(2, np.float32), every=every, group=group)
        return str(error.value)

    messages = run(3, lambda group: create(group, 4 if group.rank == 2 else 5))
    assert all("rank 2 and rank 0 passed different options" in message for message in messages), messages
    alone = ring.solo()
    for options, expected in [
        ({"every": 0}, "every is 0"),
        ({"outer_lr": 0.0}, "outer_lr is 0.0"),
        ({"outer_momentum": 1.0}, "outer_momentum is 1.0"),
        ({"compression": "int8"}, "compression is 'int8'"),
    ]:
        with pytest.raises(ring.InvalidArgument, match=expected):
            ring.PeriodicAverage(np.zeros(2, np.float32), group=alone, **options)
    average = ring.PeriodicAverage(np.zeros(2, np.float32), group=alone)
    with pytest.raises(ring.InvalidArgument, match="samples is -1"):
        average.step(-1)
