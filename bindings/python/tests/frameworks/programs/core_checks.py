"""Checks of the part of Horovod's interface that all frameworks share, on numpy arrays."""

from __future__ import annotations

import os

import numpy as np
import runner

from ringtrain import Error, _world
from ringtrain._horovod import job, objects, operations
from ringtrain._horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ringtrain._horovod.reducer import ArrayReducer, ReducerSettings
from ringtrain._horovod.variables import ArraySpec, broadcast_arrays

FLOAT = np.dtype(np.float32)
SPECS = [
    ArraySpec("dense/kernel", (3, 4), FLOAT),
    ArraySpec("dense/bias", (), FLOAT),
    ArraySpec("half", (5,), np.dtype(np.float16)),
]


def make_reducer(**settings: object) -> ArrayReducer:
    return ArrayReducer(global_process_set.members(), SPECS, ReducerSettings(bucket_bytes=40, **settings))


def check_places() -> None:
    """With three ranks, the second rank is on another host."""
    expected = {3: [(0, 2, False), (1, 2, False), (0, 1, False)]}.get(job.size(), [(0, 1, True)] * 4)
    assert (job.cross_rank(), job.cross_size(), job.is_homogeneous()) == expected[job.rank()]


def check_operations() -> None:
    rank, size = job.rank(), job.size()
    types: list = [np.float32, np.float64, np.float16, np.int32, np.complex64]
    try:
        import ml_dtypes
    except ImportError:
        print("NOT TESTED: bfloat16, because ml_dtypes cannot be imported")
    else:
        types.append(ml_dtypes.bfloat16)
    for dtype in types:
        values = (np.arange(6).reshape(2, 3) + rank).astype(dtype)
        average = operations.begin_all_reduce(values).wait()
        expected = np.arange(6).reshape(2, 3) + sum(range(size)) / size
        assert average.dtype == values.dtype
        np.testing.assert_allclose(average.astype(complex), np.floor(expected) if dtype is np.int32 else expected)
        whole, rows = operations.begin_all_gather(values[: 1 + rank % 2]).wait()
        assert rows == [1 + other % 2 for other in range(size)] and len(whole) == sum(rows)
        assert (operations.begin_broadcast(values, size - 1).wait() == values + values.dtype.type(size - 1 - rank)).all()
        received, counts = operations.all_to_all(np.full((size, 2), rank, dtype))
        assert received[:, 0].real.tolist() == list(range(size)) and counts == [1] * size
    part = operations.begin_reduce_scatter(np.ones((5, 2)), operations.Reduction(operations.Sum, postscale=2)).wait()
    assert part.tolist() == [[2 * size] * 2] * (5 // size + (rank < 5 % size))
    assert objects.allgather_object(rank) == list(range(size)) and objects.broadcast_object(rank, size - 1) == size - 1
    assert "max" in runner.raised(NotImplementedError, lambda: make_reducer(op="max"))


def check_reducer_and_join() -> None:
    rank, size = job.rank(), job.size()
    for settings in ({}, {"wire": "fp16"}, {"predivide": 2.0}):
        reducer = make_reducer(**settings)
        for _ in range(2):
            kernel, bias, half = reducer.reduce([np.full((3, 4), rank), np.array(1) if rank == 0 else None, None])
            # Between hosts, elements are sent as float16.
            tolerance = 1e-3 if "wire" in settings else 1e-7
            np.testing.assert_allclose(kernel, (size - 1) / 2, tolerance)
            np.testing.assert_allclose(bias, 1 / size, tolerance)
            assert half is None
        reducer.end_data()
        if rank == 0:
            (kernel, *_) = reducer.reduce([np.ones((3, 4)), None, None])
            np.testing.assert_allclose(kernel, 1 / size, tolerance)
        job.join()
        del reducer


def check_bad_input() -> None:
    rank, size = job.rank(), job.size()
    reducer = make_reducer(op="sum")
    big = np.full(5, 60_000, np.float16)
    if size > 1:
        text = runner.raised(OverflowError, lambda: reducer.reduce([None, None, big]))
        assert "gradients of half over the ranks exceeds the range of float16" in text, text
        call = reducer.end_data if rank == 0 else lambda: reducer.reduce([None, None, None])
        assert "the data of rank 0 have ended" in runner.raised(Error, call)
        arrays = [("layer_3/kernel" if rank else "layer/kernel", np.ones(2)), ("scale" if rank else "bias", np.ones(3))]
        text = runner.raised(ValueError, lambda: broadcast_arrays(global_process_set.members(), arrays, 0))
        assert "number 1 is bias (float64, shape (3,)) on rank 0 and scale" in text, text
    # An infinite gradient of one rank is not an overflow of the sum.
    assert np.isinf(reducer.reduce([None, None, np.full(5, np.inf, np.float16)])[2]).all()
    assert "shape (4,)" in runner.raised(ValueError, lambda: reducer.take(2, np.ones(4)))


def check_process_sets() -> None:
    for call in (lambda: job.init(comm=[0]), lambda: job.init(comm=object()), lambda: ProcessSet(object())):
        assert "is not implemented; pass" in runner.raised(NotImplementedError, call)
    if job.size() == 1:
        return
    first = add_process_set(ProcessSet([0]))
    if job.rank() == 0:
        assert operations.begin_all_reduce(np.ones(2), process_set=first).wait().tolist() == [1, 1]
    assert first.included() == (job.rank() == 0)
    assert remove_process_set(first)


if __name__ == "__main__":
    if os.environ["RING_WORLD_SIZE"] == "3":
        _world.join_world(host_id="b" if os.environ["RING_RANK"] == "1" else "a")
    job.init()
    runner.run(globals())
    job.shutdown()
