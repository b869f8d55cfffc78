"""Tests of ranks in processes that another engine has started, without the engine. `tools/engines/run` tests Ray and Dask."""

import multiprocessing
import os
import pickle
from concurrent.futures import ProcessPoolExecutor

import numpy as np

import ringtrain as ring
from ranks import WAIT_LIMIT_S, raised
from ringtrain import _workers


def test_two_processes_run_two_jobs_one_after_the_other():
    def sum_or_fail(factor, *, fail):
        world = ring.init()
        if fail and world.rank == 1:
            raise KeyError("what is missing")
        return factor * float(world.all_reduce(np.float32(world.rank + 1))), os.environ["LOCAL_RANK"], os.environ["RANK"]

    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as first, ProcessPoolExecutor(1, spawn) as second:
        for fail in (True, False):
            task = _workers.pickle_task(sum_or_fail, 2, (2,), {"fail": fail})
            shared = first.submit(_workers.serve_rendezvous, 2, "127.0.0.1", WAIT_LIMIT_S).result(WAIT_LIMIT_S)
            calls = [
                worker.submit(_workers.run_rank, task, _workers.rank_variables(shared, rank, ["a", "b"]))
                for rank, worker in enumerate((first, second))
            ]
            outcomes = [pickle.loads(call.result(WAIT_LIMIT_S)) for call in calls]
            if fail:
                assert isinstance(outcomes[0][1], ring.JobFailed) and isinstance(outcomes[1][1], KeyError)
            else:
                assert [outcome[:2] for outcome in outcomes] == [(True, (6.0, "0", "0")), (True, (6.0, "0", "1"))]


def test_local_ranks_are_counted_on_each_host():
    hosts = ["a", "a", "b", "a"]
    found = [_workers.rank_variables({"WORLD_SIZE": "4"}, rank, hosts) for rank in range(4)]
    assert [(one["RING_LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in found] == [
        ("0", "3"),
        ("1", "3"),
        ("0", "1"),
        ("2", "3"),
    ]
    assert [one["RING_RANK"] for one in found] == ["0", "1", "2", "3"]
    assert all(one["WORLD_SIZE"] == "4" for one in found)


def test_no_ranks_are_refused():
    raised(ring.InvalidArgument, _workers.pickle_task, os.getpid, 0, (), None)
