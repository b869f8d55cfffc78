"""Runs jobs on workers of Ray or Dask, and checks their results and errors: `check_workers.py ray` or `check_workers.py dask`."""

import os
import sys
import tempfile

import cloudpickle
import numpy as np

import ringtrain as ring

# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def total_of_ranks(factor, *, shift=0):
    world = ring.init()
    total = float(world.all_reduce(np.float32(world.rank)))
    return world.rank * factor + shift, total, os.environ["LOCAL_RANK"], os.getpid()


def fail_on_rank_1():
    world = ring.init()
    if world.rank == 1:
        raise KeyError("what is missing")
    world.barrier()


def check(run):
    # The second job runs in the same worker processes of Dask.
    for _ in range(2):
        results = run(total_of_ranks, 3, args=(2,), kwargs={"shift": 1})
        assert [one[:3] for one in results] == [(1, 3.0, "0"), (3, 3.0, "1"), (5, 3.0, "2")], results
        assert len({one[3] for one in results}) == 3, "ranks share a process"
        try:
            run(fail_on_rank_1, 3)
        except ring.RunError as error:
            assert error.rank == 1 and isinstance(error.__cause__, KeyError), error
        else:
            raise AssertionError("a failed rank is no error")
    try:
        run(os.getpid, 1000, start_timeout=1)
    except ring.RunError as error:
        print(f"1000 ranks: {error}")
    else:
        raise AssertionError("there are not 1000 workers")


def main() -> None:
    if sys.argv[1] == "ray":
        import ray

        import ringtrain.ray

        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
        check(ringtrain.ray.run)
    else:
        import functools

        from distributed import Client, LocalCluster

        import ringtrain.dask

        with (
            tempfile.TemporaryDirectory() as folder,
            LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=None, local_directory=folder) as cluster,
            Client(cluster) as client,
        ):
            check(functools.partial(ringtrain.dask.run, client))
    print(f"{sys.argv[1]}: 3 ranks")


if __name__ == "__main__":
    main()
