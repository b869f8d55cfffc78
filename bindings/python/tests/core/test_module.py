"""Tests of the package: its type stubs, its imports, jobs of one rank, and the end of programs."""

import ast
import inspect
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import ringtrain as ring
from ranks import Launcher, raised
from ringtrain import _core

STUB = Path(_core.__file__).with_name("_core.pyi")


def read_stub() -> dict:
    """Returns a dictionary with what each name in the stub stands for: "class", "attribute", or the parameters of a function."""
    names: dict = {}

    def parameters(function: ast.FunctionDef) -> list:
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults = [None] * (len(positional) - len(arguments.defaults)) + [ast.unparse(default) for default in arguments.defaults]
        found = [(one.arg, default, False) for one, default in zip(positional, defaults, strict=True)]
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            found.append((one.arg, None if default is None else ast.unparse(default), True))
        return found

    def visit(body, prefix) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                names[prefix + node.name] = "class"
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                names[prefix + node.name] = parameters(node)
            elif isinstance(node, ast.AnnAssign):
                names[f"{prefix}{node.target.id}"] = "attribute"

    visit(ast.parse(STUB.read_text()).body, "")
    return names


def find_in_core(name: str):
    """Returns the object with the dotted name `name`, such as "Group.rank", in the compiled module."""
    thing = _core
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


STUB_NAMES = read_stub()


@pytest.mark.parametrize("name", STUB_NAMES)
def test_the_module_has_every_name_of_the_stub(name: str):
    described = STUB_NAMES[name]
    if described == "class":
        assert isinstance(find_in_core(name), type)
    elif described == "attribute":
        owner = find_in_core(name.rpartition(".")[0])
        assert hasattr(owner, name.rpartition(".")[2]), f"{name} is missing"
    elif name.endswith("__buffer__"):
        pass
    else:
        thing = find_in_core(name.removesuffix(".__init__"))
        signature = inspect.signature(thing)
        actual = []
        for parameter in signature.parameters.values():
            default = None if parameter.default is inspect.Parameter.empty else repr(parameter.default).replace("'", '"')
            actual.append((parameter.name, default, parameter.kind is inspect.Parameter.KEYWORD_ONLY))
        expected = [
            (one, None if default is None else default.replace("'", '"'), is_named)
            for one, default, is_named in described
            if not (one == "self" and name.endswith(".__init__"))
        ]
        assert actual == expected


def test_the_stub_has_every_name_of_the_module():
    for name in vars(_core):
        assert name.startswith("__") or name in STUB_NAMES, f"{name} is not in {STUB.name}"
    for kind in ("ArrayGroup", "Gossip", "Group", "Handle", "Memory", "ParameterServer", "Rendezvous", "Shared"):
        for name in vars(getattr(_core, kind)):
            assert name.startswith("__") or f"{kind}.{name}" in STUB_NAMES, f"{kind}.{name} is not in {STUB.name}"
        assert getattr(_core, kind).__module__ == "ringtrain._core"


def test_every_public_name_exists_and_has_a_docstring():
    assert ring.__all__ == list(dict.fromkeys(ring.__all__)), "__all__ has duplicates"
    for name in ring.__all__:
        thing = getattr(ring, name)
        assert thing.__doc__, f"{name} has no docstring"
    for name, thing in vars(ring.Group).items():
        assert name.startswith("_") or thing.__doc__, f"Group.{name} has no docstring"
    operations = {name for name in dir(ring.Group) if not name.startswith("_") and callable(getattr(ring.Group, name))}
    assert operations - set(ring.__all__) <= {"close", "algorithm", "write_flight_record", "write_timeline"}
    for name in ("Error", "PeerLost", "StillRunning"):
        assert getattr(ring, name) is getattr(_core, name)


@pytest.mark.parametrize("kind", ("KeyboardInterrupt", "MemoryError"))
def test_an_error_while_numpy_is_imported_is_raised(tmp_path: Path, kind: str):
    """Regression test: before the fix, the first call discarded the error, and later calls took no array for an array."""
    (tmp_path / "numpy.py").write_text(f"raise {kind}('from numpy')")
    text = """
        import importlib.machinery, importlib.util, sys
        loader = importlib.machinery.ExtensionFileLoader("ringtrain._core", sys.argv[1])
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
        try:
            loader.exec_module(module)
        except BaseException as error:
            print(type(error).__name__, error)
    """
    command = [sys.executable, "-c", textwrap.dedent(text), _core.__file__]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.stdout == f"{kind} from numpy\n", done


def test_calls_before_init_raise_an_error():
    text = """
        import ringtrain as ring
        assert not ring.is_initialized()
        for call in (ring.rank, ring.size, ring.world, ring.barrier, lambda: ring.all_reduce(1)):
            try:
                call()
            except ring.Error as error:
                assert "ringtrain.init()" in str(error)
            else:
                raise AssertionError(call)
        ring.shutdown()
        with ring.init() as world:
            assert ring.is_initialized() and ring.all_reduce(2) == 2
        assert not ring.is_initialized()
        ring.shutdown()
    """
    assert run_python(text).returncode == 0


def run_python(text: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry))
    command = [sys.executable, *arguments, "-c", textwrap.dedent(text)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, **options)
    print(done.stdout, done.stderr)
    return done


def test_importing_the_package_imports_no_frameworks_and_prints_nothing():
    done = run_python(
        "import sys, ringtrain; others = {'torch', 'mpi4py', 'ringtrain.torch', 'ringtrain.mpi', 'pytest'}; "
        "print(sorted(others & set(sys.modules)))",
        "-W",
        "error",
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_a_rank_prints_the_log_that_rust_log_selects(ringrun: Launcher):
    """Regression test: before the fix, ranks in Python printed no log messages, not even warnings."""
    command = ("-c", "import ringtrain; ringtrain.init()")
    assert "DEBUG ringtrain::" in ringrun(2, *command, env={"RUST_LOG": "debug"}).stderr
    assert "ringtrain::" not in ringrun(2, *command, env={"RUST_LOG": ""}).stderr


@pytest.mark.full
def test_a_rank_names_the_rank_for_which_it_waits(tmp_path: Path):
    """Regression test: before the fix, a rank in Python printed nothing during the 30 s before its start failed."""
    peers = tmp_path / "hosts.txt"
    peers.write_text("127.0.0.1:1\n127.0.0.1:2\n")
    program = (
        "import ringtrain, sys; ringtrain.init(rank=int(sys.argv[1]), peers=sys.argv[2], secret='a' * 16, start_timeout=2.2)"
    )

    def start(rank: int) -> subprocess.Popen:
        command = [sys.executable, "-c", program, str(rank), str(peers)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    rank_1 = start(1)
    assert "WARN  ringtrain::rendezvous::client] waiting for rank 0 at 127.0.0.1:1" in rank_1.communicate(timeout=60)[1]
    with socket.create_server(("127.0.0.1", 0)) as free:
        peers.write_text(f"127.0.0.1:{free.getsockname()[1]}\n127.0.0.1:2\n")
    rank_0 = start(0)
    assert "still waiting for rank 1 (127.0.0.1:2) to join the job, after 2 s" in rank_0.communicate(timeout=60)[1]


def test_subclasses_are_refused_and_array_like_objects_accepted():
    for final in (_core.Group, _core.Handle, _core.Shared, _core.Rendezvous):
        raised(TypeError, type, "Sub", (final,), {})
    for kind in (_core.Group, _core.Handle, _core.Shared):
        raised(TypeError, kind)
    group = ring.solo()

    class ArrayLike:
        def __array__(self, dtype=None, copy=None):
            return np.arange(3.0)

    assert group.all_reduce(ArrayLike()).tolist() == [0, 1, 2]
    assert group.all_reduce(np.ma.array([1.0, 2.0], mask=[0, 1])).tolist() == [1, 2]
    assert type(group.all_reduce(np.rec.array([(1.0,)], dtype=[("a", "f8")])["a"])) is np.ndarray

    class FailingIndex:
        def __index__(self):
            raise ZeroDivisionError

    raised(ZeroDivisionError, group.broadcast, np.zeros(3), FailingIndex())
    raised(ring.InvalidArgument, group.broadcast, np.zeros(3), True)  # True is the root 1, which does not exist
    handle = group.barrier_async()
    raised(TypeError, ring.wait_any, 5)
    raised((TypeError, AttributeError), ring.wait_any, [5])
    raised((TypeError, AttributeError), ring.wait_any, [handle, None])
    import copy
    import pickle

    raised(TypeError, pickle.dumps, group)
    raised(TypeError, copy.deepcopy, handle)


def test_collectives_of_one_rank_return_their_input():
    group = ring.solo()
    x = np.arange(12.0).reshape(4, 3)
    for call in (group.all_reduce, group.reduce, group.reduce_scatter, group.scan, group.broadcast, group.all_to_all):
        assert np.array_equal(call(x), x), call
    for op in ("sum", "avg", "min", "max", "prod"):
        assert np.array_equal(group.all_reduce(x, op), x)
        assert np.array_equal(group.all_reduce_async(x, op).wait(), x)
    assert np.array_equal(group.scatter(x), x)
    assert np.array_equal(group.all_gather(x), x[None]) and np.array_equal(group.gather(x), x[None])
    assert group.exscan(x) is None and group.barrier() is None
    assert group.all_gather_object("x") == ["x"] == group.gather_object("x")
    assert group.broadcast_object("x") == group.scatter_object(["x"]) == group.all_to_all_object(["x"])[0] == "x"
    assert group.split(0).size == group.duplicate().size == group.subgroup([0]).size == 1
    assert (group.rank, group.size, group.local_rank, group.local_size, group.members, group.transport) == (
        0,
        1,
        0,
        1,
        [0],
        "none",
    )
    with group:
        pass
    raised(ring.Error, group.all_reduce, x)


def test_sizes_that_exceed_memory_raise_an_error():
    """A size that does not fit into memory or into 64 bits raises an error, and does not overflow."""
    group = ring.solo()
    zeros = np.broadcast_to(np.float64(0), (2**40,))
    raised((MemoryError, ring.InvalidArgument), group.all_reduce, zeros)
    raised((MemoryError, ring.Error), group.alloc, 2**61)
    raised((MemoryError, ring.Error), group.alloc, (2**40, 2**40))
    raised(ring.InvalidArgument, group.all_gather, np.zeros((1, 2)), counts=[2**62])
    raised((ring.Error, OverflowError), group.core.alloc, 2**64, "u8")


def test_a_program_ends_while_daemon_threads_are_in_calls(ringrun: Launcher, tmp_path: Path):
    """The interpreter exits while daemon threads block in operations of the compiled module."""
    path = tmp_path / "daemons.py"
    path.write_text(
        textwrap.dedent("""
        import sys, threading
        import numpy as np
        import ringtrain as ring
        from ranks import write_atomically, wait_and_read, wait_until_asleep
        world = ring.init(timeout=40)
        twin = world.duplicate()
        other = 1 - world.rank
        calls = (
            lambda: world.barrier() if world.rank else world.receive(np.zeros(1), other),
            lambda: world.receive(np.zeros(1), other, 3),
            lambda: world.receive_object(other, 4),
            lambda: twin.all_reduce_async(1).wait() if world.rank else twin.receive_async(np.zeros(1)).wait(),
            lambda: world.probe(other, 5, 30),
        )
        threads = [threading.Thread(target=call, daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            wait_until_asleep(thread.native_id)
        # When the other rank ends, the calls of this rank's threads raise an error.
        write_atomically(f"{sys.argv[1]}/ready-{world.rank}", "")
        wait_and_read(f"{sys.argv[1]}/ready-{other}")
        print("ends", flush=True)
        sys.exit(0)
        """)
    )
    done = ringrun(2, path, tmp_path, code=None, timeout=20)
    assert "ends" in done.lines(0) and "ends" in done.lines(1)
    assert done.code == 0, done
    assert "panicked" not in str(done) and "Fatal" not in str(done), done


def test_a_program_ends_although_objects_are_still_referenced(ringrun: Launcher, tmp_path: Path):
    """At the end of the program, the interpreter drops groups, handles and arrays in any order, or not at all."""
    path = tmp_path / "keeps.py"
    path.write_text(
        textwrap.dedent("""
        import sys
        import numpy as np
        import ringtrain as ring
        world = ring.init(timeout=20)
        cycle = []
        cycle.append((cycle, world.duplicate(), world.split(0), world.alloc(1000), world.all_reduce_async(np.ones(10))))
        sys.modules["kept"] = cycle
        handles = [world.all_gather_async(np.ones(1000)) for _ in range(5)]
        receive = world.receive_async(np.ones(3), tag=3)
        solo = ring.solo()
        class Last:
            def __del__(self, world=world):
                try:
                    world.all_reduce(1)
                except Exception:
                    # Python may have cleared modules already, so an exception is allowed. The exception must not abort the
                    # process.
                    pass
        last = Last()
        world.barrier()
        """)
    )
    for n in (1, 3):
        done = ringrun(n, path)
        # On a busy machine, ringrun prints which ranks are late.
        assert not any(done.errors(rank) for rank in range(n)), done


@pytest.mark.parametrize("ending", ["sys.excepthook = print; raise ValueError('boom')", "raise ValueError('boom')"])
def test_other_ranks_get_the_exception_that_ended_a_program(ringrun: Launcher, ending: str):
    """Regression test: before the fix, if a program replaced `sys.excepthook` and then ended with an exception, the
    errors of the other ranks did not name this exception."""
    program = f"import sys, ringtrain as ring; ring.init()\nif ring.rank() == 1: {ending}\nring.barrier()"
    done = ringrun(2, "-c", program, code=None)
    assert done.code == 1, done
    assert any("its program ended with ValueError: boom" in line for line in done.errors(0)), done
