"""A job that fails, or a process that is no rank. The first argument says how."""

import os
import signal
import sys
import threading

import jax
import numpy as np

import ringtrain as ring
import ringtrain.jax as rj
from ranks import raised, wait_until_asleep


@jax.jit
def reduce_twice(x: jax.Array) -> jax.Array:
    return rj.all_reduce(rj.all_reduce(x @ x)) / x.shape[0] / 4


@rj.job_errors()
def step(x: np.ndarray) -> np.ndarray:
    return np.asarray(reduce_twice(x))


def fail(fault: str, x: np.ndarray) -> None:
    """Fails on rank 1. Rank 0 continues until its step fails."""
    is_rank_1 = rj.rank() == 1
    if fault == "mismatch" and is_rank_1:
        np.asarray(jax.jit(rj.all_gather)(x))
    elif fault == "raise" and is_rank_1:
        raise ValueError("bad data")
    elif fault != "mismatch" and is_rank_1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "unused result":
        reduce_twice(x)
        return
    try:
        while True:
            step(x)
    except ring.Error as error:
        print(f"caught {type(error).__name__} of rank {error.rank}")
    np.asarray(reduce_twice(x))  # the same error, which the program does not catch


def interrupt(rows: int) -> None:
    """Rank 0 gets Ctrl-C while it waits for rank 1, which waits for the end of the job."""
    x = np.ones((rows, rows), np.float32)
    if rj.rank() == 1:
        ring.world().barrier()
    compiled = reduce_twice.lower(x).compile()
    main = threading.get_native_id()

    def send_signal() -> None:
        wait_until_asleep(main)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send_signal, daemon=True).start()
    with rj.job_errors():
        np.asarray(compiled(x))


def use_processes_that_are_no_ranks(x: np.ndarray) -> None:
    step(x)
    reader, writer = os.pipe()
    if os.fork() == 0:
        errors = [raised(ring.Forked, call, x) for call in (rj.all_reduce, step)]
        os.write(writer, ", ".join(type(error).__name__ for error in errors).encode())
        os._exit(0)
    print(f"child: {os.read(reader, 100).decode()}")
    os.wait()
    print(f"parent: {step(x)[0, 0]}")
    rj.shutdown()
    print(f"closed: {', '.join(str(raised(ring.Error, call, x)) for call in (rj.all_reduce, step))}")


def main() -> None:
    rj.init(timeout=30)
    fault = sys.argv[1]
    x = np.ones((100, 100), np.float32)
    if fault.startswith("interrupt"):
        interrupt(int(fault.split()[1]))
    elif fault == "fork":
        use_processes_that_are_no_ranks(x)
    else:
        assert step(x)[0, 0] == 1
        fail(fault, x)


if __name__ == "__main__":
    main()
