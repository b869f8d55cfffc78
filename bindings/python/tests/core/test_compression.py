"""Tests of compressed all-reduces. The ranks are threads of this process, with links over TCP, because ranks that share memory
exchange exact values."""

import numpy as np
import pytest

import ringtrain as ring
from ranks import raised, run_in_threads

# The codecs, and the largest part of the bytes of unchanged elements.
CODECS = {
    "fp16": 0.51,
    "bf16": 0.51,
    "fp8-e4m3": 0.27,
    "fp8-e5m2": 0.27,
    "int8": 0.27,
    "int8-stochastic": 0.27,
    "int4": 0.15,
    "int4-stochastic": 0.15,
    "qsgd": 0.15,
    "onebit": 0.05,
    "signsgd": 0.05,
    "topk": 0.05,
    "randomk": 0.05,
    "ef21": 0.15,
}

# The tests of the library cover every codec. The short tests use one codec of each kind.
SHORT = ("fp16", "int8-stochastic", "onebit", "topk", "ef21")
NAMES = [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.full]) for name in CODECS]


def run(n: int, work) -> list:
    """Runs each rank on a host of its own, because `auto` encodes nothing within a host."""
    results = run_in_threads(n, work, transport="tcp", host_id="host {}".format)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def values(rank: int, step: int = 0, count: int = 10_001) -> np.ndarray:
    return np.random.default_rng([12, rank, step]).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_every_codec_sends_fewer_bytes_and_gives_all_ranks_the_same_bits(name: str):
    def work(group: ring.Group) -> tuple:
        before = group.statistics()
        compressor = ring.Compressor(name, seed=3)
        results = []
        for step in range(4):
            own = values(group.rank, step)
            if step % 2:
                results.append(group.all_reduce_async(own, "avg", compression=compressor).wait())
            else:
                results.append(group.all_reduce(own, "avg", out=own, compression=compressor))
        after = group.statistics()
        sent = [after[key] - before[key] for key in ("encoded_elements", "encoded_bytes")]
        return np.concatenate(results), sent, compressor.state_dict()

    results = run(3, work)
    for result, (elements, encoded_bytes), _ in results:
        assert elements > 0 and encoded_bytes <= CODECS[name] * 4 * elements, (name, encoded_bytes / elements / 4)
        assert np.array_equal(result, results[0][0])
    if name == "ef21":
        # The last result is what all ranks have sent.
        sent = -sum(state["residual"] for _, _, state in results) / 3
        for result, _, state in results:
            assert np.array_equal(state["result"], result[-state["result"].size :]) and state["result"].size == 10_001
            assert np.allclose(state["result"], sent, atol=1e-4)
    elif ring.Compressor(name).has_memory and name != "signsgd":
        # What the results lack is the sum of all residuals.
        lacks = sum(np.mean([values(rank, step) for rank in range(3)], axis=0) for step in range(4))
        lacks = lacks - results[0][0].reshape(4, -1).sum(axis=0)
        residual = sum(state["residual"] for _, _, state in results) / 3
        if results[0][2]["residual"].size:
            assert np.allclose(lacks, residual, atol=1e-4), name


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_compressor_continues_with_the_same_results(name: str):
    def work(group: ring.Group) -> tuple:
        def reduce(compressor: ring.Compressor, steps: range) -> list:
            return [group.all_reduce(values(group.rank, step), compression=compressor) for step in steps]

        without = reduce(ring.Compressor(name, 7), range(6))
        first = ring.Compressor(name, 7)
        reduced = reduce(first, range(3))
        second = ring.Compressor(name, 7)
        second.load_state_dict(first.state_dict())
        return without, reduced + reduce(second, range(3, 6))

    for without, resumed in run(2, work):
        assert np.array_equal(without, resumed)


def test_auto_makes_the_same_choice_on_all_ranks():
    def work(group: ring.Group) -> tuple:
        compressor = ring.Compressor("auto:0.05")
        assert compressor.report() == {"compression": "none", "is_trial": True, "relative_error": 0.0, "seconds": None}
        used, results = [], []
        for step in range(45):
            results.append(group.all_reduce(values(group.rank, step), "avg", compression=compressor))
            used.append(compressor.report()["compression"])
        return used, compressor.report(), np.concatenate(results)

    results = run(3, work)
    used, report, first = results[0]
    assert used.count("bf16") >= 6 and used.count("int8") >= 6 and used.count("int4") == 1, used
    assert not report["is_trial"] and report["relative_error"] <= 0.05 and report["seconds"] > 0
    for others, other_report, result in results:
        assert others == used and other_report == report and np.array_equal(result, first)
    assert ring.Compressor("int8").report() is None


def test_ranks_that_share_memory_exchange_exact_values():
    def work(group: ring.Group) -> bool:
        own = values(group.rank)
        compressor = ring.Compressor("bf16")
        equal = np.array_equal(group.all_reduce(own, compression=compressor), group.all_reduce(own))
        return equal and group.statistics()["encoded_bytes"] == 0

    assert run_in_threads(2, work) == [True, True]


def test_wrong_names_types_and_states_are_refused():
    with pytest.raises(ring.InvalidArgument, match="`int9` is not one of none, fp16, bf16"):
        ring.Compressor("int9")
    with pytest.raises(ring.InvalidArgument, match="`2` is not a fraction"):
        ring.Compressor("topk:2")
    compressor = ring.Compressor("topk:0.02", seed=2**64 - 1)
    assert compressor.compression == "topk:0.02" and repr(compressor) == 'Compressor("topk:0.02")'
    assert compressor.has_memory and not ring.Compressor("bf16").has_memory
    state = compressor.state_dict()
    assert state["calls"] == 0 and state["residual"].dtype == np.float32 and state["residual"].size == 0
    compressor.load_state_dict({"residual": np.arange(3, dtype=np.float32), "calls": 5})
    state = compressor.state_dict()
    assert state["calls"] == 5 and state["residual"].tolist() == [0, 1, 2]
    for wrong, expected in [
        ({"calls": 5}, 'needs the key "residual"'),
        ({"residual": state["residual"]}, 'needs the key "calls"'),
        ({**state, "result": np.arange(3)}, "not f32"),
        ({"residual": np.arange(3), "calls": 5}, "not f32"),
    ]:
        with pytest.raises(ring.InvalidArgument, match=expected):
            compressor.load_state_dict(wrong)
    raised((OverflowError, TypeError), compressor.load_state_dict, {**state, "calls": -1})
    assert compressor.state_dict()["calls"] == 5

    def work(group: ring.Group) -> None:
        x = values(group.rank)
        for call in (group.all_reduce, group.all_reduce_async):
            assert "`zip` is not one of none" in str(raised(ring.InvalidArgument, call, x, compression="zip"))
            assert "not <class 'int'>" in str(raised(ring.InvalidArgument, call, x, compression=8))
            for dtype in (np.float64, np.int32, np.float16):
                error = raised(ring.Unsupported, call, x.astype(dtype), compression=ring.Compressor("bf16"))
                assert "bf16 compresses f32" in str(error)
            error = raised(ring.InvalidArgument, call, x, compression="powersgd")
            assert "powersgd:4 is for the gradients of a model" in str(error)
        assert np.array_equal(group.all_reduce(x, compression="none"), group.all_reduce(x))

    run(2, work)


@pytest.mark.parametrize("name", [name for name in CODECS if ring.Compressor(name).has_memory])
def test_a_compressor_is_for_one_array(name: str):
    def work(group: ring.Group) -> None:
        compressor = ring.Compressor(name)
        group.all_reduce(values(group.rank), compression=compressor)
        if compressor.state_dict()["residual"].size:
            error = raised(ring.InvalidArgument, group.all_reduce, values(group.rank, count=10), compression=compressor)
            assert "of 10001 elements, but this buffer has 10" in str(error)

    run(2, work)
