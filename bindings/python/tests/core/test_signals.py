"""Tests that Ctrl-C and other signals interrupt every blocking call: the signal's handler runs at once, an exception of the
handler ends the call, and the errors of the other ranks name the interrupted rank."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ringtrain as ring
from ranks import Launcher, RunningProgram, raised, wait_and_read, wait_until, wait_until_asleep, write_atomically

HERE = Path(__file__)
LATENCY_MAX_S = 2.0
"""The maximum time in seconds from a signal to the exception that the signal's handler raises. Usually this time is about
0.05 s; the tests print it."""


class HandlerError(Exception):
    """The exception that a signal handler of these tests raises."""


def blocking_call(what: str, world: ring.Group) -> Callable[[], object]:
    """Returns a function that blocks until the deadline of its operation, because rank 1 does not take part in the operation."""
    if what == "a group that another thread is in":
        return blocked_by_another_thread(world)
    if what == "a handle that another thread waits for":
        return shared_handle_wait(world)
    return {
        "a small collective": lambda: world.all_reduce(np.zeros(4)),
        "a large collective": lambda: world.all_reduce(np.zeros(3_000_000)),
        "a barrier": world.barrier,
        "a gather": lambda: world.gather(np.zeros(4)),
        "a reduction in shared memory": lambda: (lambda x: world.all_reduce(x, out=x))(world.alloc(100_000)),
        "a collective of a duplicate": lambda: world.duplicate().barrier(),
        "a collective of objects": lambda: world.all_gather_object(1),
        "a split": lambda: world.split(0),
        "a receive": lambda: world.receive(np.zeros(4), 1),
        "a receive from any rank": lambda: world.receive(np.zeros(4)),
        "a receive of bytes": lambda: world.core.receive_into_bytes(np.zeros(4), 1),
        "an exchange": lambda: world.send_receive(np.zeros(4), 1, np.zeros(4), 1, send_tag=5),
        "a receive of an object": lambda: world.receive_object(1),
        "a long send": lambda: world.send(np.zeros(30_000_000), 1, 5),
        "a probe": lambda: world.probe(1, timeout=60),
        "Handle.wait": lambda: world.all_reduce_async(np.zeros(4)).wait(),
        "Handle.wait with a timeout": lambda: world.receive_async(np.zeros(4), 1).wait(60),
        "wait_any": lambda: ring.wait_any([world.receive_async(np.zeros(4), 1), world.barrier_async()]),
        "wait_all": lambda: ring.wait_all([world.receive_async(np.zeros(4), 1), world.barrier_async()]),
    }[what]


def blocked_by_another_thread(world: ring.Group) -> Callable[[], object]:
    """Starts a collective in another thread. Returns a function that has to wait until this collective has ended."""
    thread = threading.Thread(target=lambda: raised(ring.Error, world.barrier), daemon=True)
    thread.start()
    wait_until_asleep(thread.native_id)
    return lambda: world.all_reduce(1)


def shared_handle_wait(world: ring.Group) -> Callable[[], object]:
    """Returns a function that waits for a handle for which two other threads already wait."""
    handle = world.all_reduce_async(np.zeros(4))
    for _ in range(2):
        threading.Thread(target=lambda: raised(ring.Error, handle.wait), daemon=True).start()
    return handle.wait


def signal_when_blocked(number: int, sent: list) -> None:
    """Starts a thread that sends signal `number` to this process when the main thread blocks. The thread appends the time of
    the signal to `sent`."""
    main = threading.main_thread().native_id

    def send() -> None:
        wait_until_asleep(main)
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


# The programs of the ranks


def interrupted_by_exception(directory: Path, what: str, name: str) -> None:
    if what == "the start":
        if os.environ["RING_RANK"] == "1":
            wait_until("the end of rank 0", lambda: (directory / "interrupted").exists())
            return
    else:
        world = ring.init(timeout=40, transport=os.environ.get("TEST_TRANSPORT"))
        world.barrier()
        if world.rank == 1:
            error = raised(ring.JobFailed, world.receive, np.zeros(1), 0, 99)
            write_atomically(directory / "error", f"{type(error).__name__} {error.rank} {error}")
            return

    def handler(number, frame) -> None:
        raise HandlerError("the handler has had enough")

    if name == "SIGALRM":
        signal.signal(signal.SIGALRM, handler)
    sent: list[float] = []
    call = (lambda: ring.init(start_timeout=60)) if what == "the start" else blocking_call(what, world)
    signal_when_blocked(getattr(signal, name), sent)
    try:
        call()
    except (KeyboardInterrupt, HandlerError) as error:
        write_atomically(directory / "interrupted", f"{time.monotonic() - sent[0]} {type(error).__name__}")
        raise


def not_interrupted(directory: Path, *calls: str) -> None:
    """Runs a signal handler that raises no exception, in each of these calls."""
    world = ring.init(timeout=40, transport=os.environ.get("TEST_TRANSPORT"))
    for what in calls:
        (directory / what).mkdir(exist_ok=True)
        check_not_interrupted(world, directory / what, what)


def check_not_interrupted(world: ring.Group, directory: Path, what: str) -> None:
    handled = []

    def handler(number, frame) -> None:
        # A handler may read properties of the group and send messages. A collective in a handler raises an error.
        handled.append((world.statistics(), world.timeout, world.rank))
        world.send_async(np.full(2, len(handled)), 0, 50)
        if what == "handlers that call collectives":
            handled.append(raised(ring.Error, world.barrier))
            assert not isinstance(handled[-1], ring.JobFailed)
        write_atomically(directory / "handled", len(handled))

    world.barrier()
    if world.rank == 0:
        signal.signal(signal.SIGALRM, handler)
        signal_when_blocked(signal.SIGALRM, [])
    else:
        wait_and_read(directory / "handled")
    x = np.full(1000, 1.0)
    if what == "a receive":
        world.receive(x, 1) if world.rank == 0 else world.send(x + 1, 0)
    elif what == "Handle.wait":
        x = world.all_reduce_async(x).wait()
    elif what == "a probe":
        if world.rank == 0:
            assert world.probe(1, timeout=60).count == 1000
            world.receive(x, 1)
        else:
            world.send(x + 1, 0)
    else:
        x = world.all_reduce(x)
    if world.rank == 0 or what not in ("a receive", "a probe"):
        assert np.all(x == 2)
    if world.rank == 0:
        assert handled
        got = np.zeros(2, np.int64)
        world.receive(got, 0, 50)
        assert got[0] == 1
    world.barrier()
    if world.rank == 0:
        write_atomically(directory / "passed", "")


def handler_aborts(directory: Path) -> None:
    world = ring.init(timeout=40)
    world.barrier()
    if world.rank == 1:
        error = raised(ring.Aborted, world.receive, np.zeros(1), 0, 99)
        write_atomically(directory / "error", error)
        return
    # Other operations of the group have begun and not ended.
    pending = [world.all_reduce_async(np.zeros(10)), world.receive_async(np.zeros(3), 1)]
    signal.signal(signal.SIGTERM, lambda number, frame: world.abort("there is no more time"))
    signal_when_blocked(signal.SIGTERM, [])
    raised(ring.Aborted, world.all_reduce, np.zeros(100))
    for handle in pending:
        raised(ring.Aborted, handle.wait)
    write_atomically(directory / "passed", "")


def repeated_after_interrupt(directory: Path, *calls: str) -> None:
    """Interrupts each of these waits for a message with Ctrl-C, and then repeats this wait. The interrupt must not end the job,
    and the interrupted wait must not take the message."""
    world = ring.init(timeout=40)
    for what in calls:
        (directory / what).mkdir(exist_ok=True)
        repeat_after_interrupt(world, directory / what, what)


def repeat_after_interrupt(world: ring.Group, directory: Path, what: str) -> None:
    world.barrier()
    if world.rank == 1:
        wait_and_read(directory / "interrupted")
        world.send_object("the message", 0)
        world.barrier()
        return
    signal_when_blocked(signal.SIGINT, [])
    if what == "Handle.wait":
        handle = world.receive_object_async(1)
        raised(KeyboardInterrupt, handle.wait)
        write_atomically(directory / "interrupted", "")
        assert handle.wait()[0] == "the message"
    elif what == "a probe":
        raised(KeyboardInterrupt, world.probe, 1, timeout=60)
        write_atomically(directory / "interrupted", "")
        assert world.receive_object(1)[0] == "the message"
    else:
        raised(KeyboardInterrupt, world.receive_object, 1)
        write_atomically(directory / "interrupted", "")
        received = world.receive_object_async(1)
        assert received.wait(20)[0] == "the message", "the interrupted receive must not take the message"
    world.barrier()
    write_atomically(directory / "passed", "")


def interrupted_early(directory: Path) -> None:
    """Sends a signal after a blocking call has begun, but before this call first checks for signals."""
    world = ring.init(timeout=40)
    world.barrier()
    if world.rank == 1:
        raised(ring.Aborted, world.receive, np.zeros(1), 0, 99)
        return
    calling, sent = threading.Event(), []

    def send() -> None:
        assert calling.wait(30)
        # After 10 ms, the call has usually begun. The first check for signals comes only after 50 ms.
        begun = time.monotonic()
        wait_until("10 ms pass", lambda: time.monotonic() > begun + 0.01)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()
    try:
        calling.set()
        world.receive(np.zeros(1), 1)
    except KeyboardInterrupt as error:
        write_atomically(directory / "interrupted", f"{time.monotonic() - sent[0]} {type(error).__name__}")
        raise


def all_ranks_block(directory: Path) -> None:
    world = ring.init(timeout=60)
    world.barrier()
    write_atomically(directory / f"blocks-{world.rank}", threading.get_native_id())
    try:
        world.receive(np.zeros(1))
    except BaseException as error:
        write_atomically(directory / f"saw-{world.rank}", type(error).__name__)
        raise


# The tests

OVER_SHARED_MEMORY = (
    "a small collective",
    "a large collective",
    "a barrier",
    "a gather",
    "a reduction in shared memory",
    "a collective of a duplicate",
    "a collective of objects",
    "a split",
    "a receive",
    "a receive from any rank",
    "a receive of bytes",
    "an exchange",
    "a receive of an object",
    "a long send",
    "a probe",
    "Handle.wait",
    "Handle.wait with a timeout",
    "wait_any",
    "wait_all",
    "a group that another thread is in",
    "a handle that another thread waits for",
)
# The gate does not run these calls, because each waits in the same way as another call above.
SIMILAR_TO_OTHERS = (
    "a small collective",  # see WITH_OWN_EXCEPTION
    "a collective of objects",
    "a handle that another thread waits for",
    "a probe",
    "a reduction in shared memory",
    "a split",
    "an exchange",
    "a barrier",
    "a gather",
    "a collective of a duplicate",
    "a receive from any rank",
    "a receive of bytes",
    "a receive of an object",
    "Handle.wait with a timeout",
    "wait_all",
)
OVER_TCP = ("a small collective", "a large collective", "Handle.wait", "a group that another thread is in")
WITH_OWN_EXCEPTION = ("a small collective", "a receive", "a probe", "Handle.wait")
BLOCKING = [
    *(
        pytest.param(what, "auto", "SIGINT", marks=[pytest.mark.full] if what in SIMILAR_TO_OTHERS else [])
        for what in OVER_SHARED_MEMORY
    ),
    *(pytest.param(what, "tcp", "SIGINT", marks=pytest.mark.full) for what in OVER_TCP),
    (WITH_OWN_EXCEPTION[0], "auto", "SIGALRM"),
    *(pytest.param(what, "auto", "SIGALRM", marks=pytest.mark.full) for what in WITH_OWN_EXCEPTION[1:]),
]


def check_signal_latency(job: RunningProgram, directory: Path) -> tuple[str, str]:
    """Waits until the job has ended, and checks the time from the signal to the exception of its handler. Returns this time and
    the name of the exception."""
    done = job.finish()
    path = directory / "interrupted"
    assert path.exists(), done
    latency, name = path.read_text().split()
    assert float(latency) < LATENCY_MAX_S, done
    return f"{1000 * float(latency):.0f} ms", name


@pytest.mark.parametrize(("what", "transport", "name"), BLOCKING)
def test_a_signal_ends_a_blocking_call(ringrun: Launcher, tmp_path: Path, what: str, transport: str, name: str, record_property):
    job = ringrun.start(
        2, HERE, "interrupted_by_exception", tmp_path, what, name, env={"TEST_TRANSPORT": transport}, flags=("--grace", "10")
    )
    latency, kind = check_signal_latency(job, tmp_path)
    print(f"{what}, {transport}, {name}: {latency}")
    record_property("latency", latency)
    assert kind == ("KeyboardInterrupt" if name == "SIGINT" else "HandlerError")
    assert (tmp_path / "error").read_text().startswith("Aborted 0 "), "the other rank's error must name rank 0"


def test_a_signal_interrupts_joining_a_job(ringrun: Launcher, tmp_path: Path):
    job = ringrun.start(2, HERE, "interrupted_by_exception", tmp_path, "the start", "SIGINT")
    latency, kind = check_signal_latency(job, tmp_path)
    print(f"the start: {latency}")
    assert kind == "KeyboardInterrupt"


def test_a_signal_before_the_first_check_ends_the_call(ringrun: Launcher, tmp_path: Path):
    """Regression test: before the fix, the exception of a signal's handler was lost if the signal came before the call's first
    check for signals."""
    latency, kind = check_signal_latency(ringrun.start(2, HERE, "interrupted_early", tmp_path), tmp_path)
    print(f"right after the start: {latency}")
    assert kind == "KeyboardInterrupt"


@pytest.mark.parametrize("transport", ("auto", pytest.param("tcp", marks=pytest.mark.full)))
def test_a_call_goes_on_after_a_handler_that_raises_no_exception(ringrun: Launcher, tmp_path: Path, transport: str):
    calls = ("a collective", "a receive", "a probe", "Handle.wait", "handlers that call collectives")
    done = ringrun(2, HERE, "not_interrupted", tmp_path, *calls, env={"TEST_TRANSPORT": transport})
    for what in calls:
        assert (tmp_path / what / "passed").exists(), (what, done)


@pytest.mark.full
def test_a_handler_may_abort_the_job(ringrun: Launcher, tmp_path: Path):
    done = ringrun(2, HERE, "handler_aborts", tmp_path, code=None)
    assert (tmp_path / "passed").exists(), done
    assert "there is no more time" in (tmp_path / "error").read_text()


@pytest.mark.full
def test_an_interrupted_wait_can_be_repeated(ringrun: Launcher, tmp_path: Path):
    calls = ("Handle.wait", "a probe", "a receive of an object")
    done = ringrun(2, HERE, "repeated_after_interrupt", tmp_path, *calls)
    for what in calls:
        assert (tmp_path / what / "passed").exists(), (what, done)


@pytest.mark.parametrize("name", ("SIGINT", pytest.param("SIGTERM", marks=pytest.mark.full)))
def test_a_signal_to_ringrun_ends_all_ranks(ringrun: Launcher, tmp_path: Path, name: str):
    job = ringrun.start(3, HERE, "all_ranks_block", tmp_path)
    for rank in range(3):
        wait_and_read(tmp_path / f"blocks-{rank}")
    started = time.monotonic()
    job.signal(getattr(signal, name))
    done = job.finish()
    assert done.code == (130 if name == "SIGINT" else 143), done
    assert time.monotonic() - started < 5, done
    if name == "SIGINT":
        # The first rank that gets the signal ends the job, perhaps before the other ranks get it. A rank that gets the signal
        # while it writes its file may leave no file.
        saw = [tmp_path / f"saw-{rank}" for rank in range(3)]
        seen = {path.read_text() for path in saw if path.exists()}
        assert "KeyboardInterrupt" in seen and seen <= {"KeyboardInterrupt", "Aborted"}


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
