"""Tests of `ringtrain.PeriodicAverage`."""

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

import ringtrain as ring
from ranks import run_in_threads

TRUTH = np.arange(1.0, 9.0, dtype=np.float32)


def run(n: int, work, **options) -> list:
    results = run_in_threads(n, work, **options)
    assert not any(isinstance(result, BaseException) for result in results), results
    return results


def gradient(w: np.ndarray, rank: int, step: int) -> np.ndarray:
    features = np.random.default_rng([5, rank, step]).standard_normal((16, 8)).astype(np.float32)
    return features.T @ (features @ (w - TRUTH)) / 16


def reference(n: int, steps: int, every: int, delay: int, lr: float, momentum: float, samples) -> tuple[list, NDArray]:
    """Computes the parameters in float64 and in a single process: those of each rank after `steps` steps, and those after a
    last average."""
    start, velocity = np.zeros(8), np.zeros(8)
    w = [np.zeros(8) for _ in range(n)]
    changes = [np.zeros(8) for _ in range(n)]
    """For each rank, its changes in this round."""
    counts = np.zeros(n)
    """For each rank, its number of samples in this round."""
    pending: tuple | None = None

    def outer_step(mean: NDArray) -> tuple:
        new_velocity = momentum * velocity + mean
        return start + lr * (mean + momentum * new_velocity), new_velocity

    def weighted_mean() -> NDArray:
        return sum(change * count for change, count in zip(changes, counts / counts.sum(), strict=True))

    for step in range(1, steps + 1):
        for rank in range(n):
            change = -0.1 * gradient(w[rank], rank, step - 1)
            w[rank] = w[rank] + change
            changes[rank] = changes[rank] + change
            counts[rank] += samples(rank, step - 1)
        if pending and step == pending[0] + delay:
            _, mean, estimates = pending
            start, velocity = outer_step(mean)
            w = [own + start - estimate for own, estimate in zip(w, estimates, strict=True)]
            pending = None
        if step % every == 0:
            if delay:
                estimates = [outer_step(change)[0] for change in changes]
                pending = step, weighted_mean(), estimates
                w = list(estimates)
            else:
                start, velocity = outer_step(weighted_mean())
                w = [start.copy() for _ in range(n)]
            changes, counts = [np.zeros(8) for _ in range(n)], np.zeros(n)
    if pending:
        start, velocity = outer_step(pending[1])
    return w, outer_step(weighted_mean())[0] if counts.any() else start


@pytest.mark.parametrize(
    ("n", "every", "options"),
    [
        (3, 4, {}),
        (2, 1, {}),
        (3, 5, {"outer_lr": 0.7, "outer_momentum": 0.9}),
        (1, 5, {"outer_lr": 0.7, "outer_momentum": 0.9}),
        (3, 5, {"delay": 5, "outer_lr": 0.7, "outer_momentum": 0.9}),
        (3, 4, {"delay": 1}),
    ],
)
def test_averages_are_those_of_the_formulas(n: int, every: int, options: dict):
    steps, delay = 6 * every + 1, options.get("delay", 0)

    def samples(rank: int, step: int) -> float:
        return 3.0 + rank + step % 2

    def work(group: ring.Group) -> tuple:
        w = np.full(8, 0.0 if group.rank == 0 else 99.0, np.float32)
        average = ring.PeriodicAverage(w, every=every, group=group, **options)
        assert not w.any(), "the parameters of rank 0 are the initial parameters"
        for step in range(steps):
            w -= np.float32(0.1) * gradient(w, group.rank, step)
            done = step + 1
            is_changed = done % every == 0 or (done > delay and (done - delay) % every == 0)
            assert average.step(samples(group.rank, step)) == is_changed
        before = w.copy()
        average.average()
        return before, w

    results = run(n, work)
    assert all(np.array_equal(w, results[0][1]) for _, w in results), "all ranks have the same bits"
    before, after = reference(n, steps, every, delay, options.get("outer_lr", 1.0), options.get("outer_momentum", 0.0), samples)
    for rank in range(n):
        np.testing.assert_allclose(results[rank][0], before[rank], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(results[0][1], after, rtol=2e-5, atol=2e-5)


def test_ranks_take_steps_while_they_average():
    ahead = threading.Event()

    def work(group: ring.Group) -> float:
        w = np.zeros(2, np.float32)
        average = ring.PeriodicAverage(w, every=3, delay=2, group=group)
        for step in range(8):
            if group.rank == 1 and step == 5:
                # The second average cannot end before this rank takes its sixth step.
                assert ahead.wait(60), "rank 0 takes its seventh step during the second average"
            w += 1 + group.rank
            average.step()
            if group.rank == 0 and step == 6:
                with pytest.raises(ring.InvalidArgument, match="an average is in progress"):
                    average.state_dict()
                ahead.set()
        return w[0]

    assert run(2, work) == [9 + 2, 9 + 4]


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


@pytest.mark.parametrize("compression", [None, "bf16", "topk:0.3", "int4-stochastic"])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_saved_state_continues_the_run(delay: int, compression: str | None):
    options = {"every": 3, "delay": delay, "outer_lr": 0.7, "outer_momentum": 0.9, "compression": compression}

    def train(group: ring.Group, average: ring.PeriodicAverage, w: np.ndarray, steps: range) -> None:
        for step in steps:
            w -= np.float32(0.1) * gradient(w, group.rank, step)
            average.step()

    def work(group: ring.Group) -> tuple:
        w = np.zeros(8, np.float32)
        average = ring.PeriodicAverage(w, group=group, **options)
        train(group, average, w, range(8))
        state, saved = average.state_dict(), w.copy()
        assert ("residual" in state) == (compression in ("topk:0.3", "int4-stochastic"))
        assert (group.statistics()["encoded_bytes"] > 0) == (compression is not None)
        train(group, average, w, range(8, 16))
        resumed_w = saved.copy()
        resumed = ring.PeriodicAverage(resumed_w, group=group, **options)
        # The constructor has given all ranks the parameters of rank 0.
        resumed_w[:] = saved
        resumed.load_state_dict(state)
        train(group, resumed, resumed_w, range(8, 16))
        with pytest.raises(ring.InvalidArgument, match="velocity of the state"):
            resumed.load_state_dict({**state, "velocity": np.zeros(3)})
        with pytest.raises(ring.InvalidArgument, match="the state has no samples"):
            resumed.load_state_dict({key: value for key, value in state.items() if key != "samples"})
        return w, resumed_w

    # Ranks that share memory exchange exact values.
    for w, resumed in run(2, work, transport="tcp"):
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
        ({"every": 3, "delay": 4}, "delay is 4; it must be at least 0 and at most every, which is 3"),
        ({"delay": 1}, "delay is 1"),
        ({"outer_lr": 0.0}, "outer_lr is 0.0"),
        ({"outer_momentum": 1.0}, "outer_momentum is 1.0"),
        ({"compression": "int9"}, "`int9` is not one of none, fp16"),
    ]:
        with pytest.raises(ring.InvalidArgument, match=expected):
            ring.PeriodicAverage(np.zeros(2, np.float32), group=alone, **options)
    average = ring.PeriodicAverage(np.zeros(2, np.float32), group=alone)
    with pytest.raises(ring.InvalidArgument, match="samples is -1"):
        average.step(-1)
