"""Runs the commands in the pages of the guide, `docs/guide/src`, and compares their output with the pages.

`pages.py` describes the marks of blocks. The blocks of a page run in one directory, in their order. Blocks with different marks
`needs` run in tests of their own, because such a test may be skipped.
"""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest

import ranks
from pages import Block, find_difference, read_blocks
from ranks import Launcher

REPOSITORY = Path(__file__).resolve().parents[4]
GUIDE = REPOSITORY / "docs" / "guide"
PAGES = sorted(GUIDE.glob("src/*.md"))
GATE_PAGES = ["first-run", "table", "watching"]
"""The pages that the gate runs, except for their blocks with the mark `full`. `tools/test --full` runs all pages."""
WAIT_LIMIT_S = 240.0
pytestmark = pytest.mark.timeout(WAIT_LIMIT_S + 60)


def has_modules(*names: str) -> bool:
    # Python finds a test directory of this name as a namespace package, which has no origin.
    specs = [importlib.util.find_spec(name) for name in names]
    return all(spec is not None and spec.origin is not None for spec in specs)


def has_programs(*names: str) -> bool:
    return all(shutil.which(name) for name in names)


REQUIREMENTS: dict[str, tuple[Callable[[], bool], str]] = {
    "torch": (lambda: has_modules("torch"), "PyTorch"),
    "keras": (lambda: has_modules("keras", "jax", "optax"), "Keras, JAX or optax"),
    "ray": (lambda: has_modules("ray"), "Ray"),
    "dask": (lambda: has_modules("distributed"), "Dask"),
    "hosts": (lambda: os.geteuid() == 0 and has_programs("ip", "ssh", "/usr/sbin/sshd"), "root's rights, iproute2 and sshd"),
    "slurm": (lambda: os.geteuid() == 0 and has_programs("slurmctld", "slurmd", "munged"), "root's rights and Slurm"),
    "openmpi": (lambda: has_programs("mpirun.openmpi"), "Open MPI"),
    "hydra": (lambda: has_programs("mpiexec.hydra"), "MPICH"),
    "fashion": (lambda: Path("/usr/share/datasets/fashion-mnist").is_dir(), "Fashion-MNIST"),
}
"""For each mark `needs`: whether this machine has it, and what it is."""


class Step(NamedTuple):
    """A block of a page, and the output of its commands in the page."""

    block: Block
    output: str | None


class Session(NamedTuple):
    """The blocks of a page that run in one test."""

    page: Path
    needs: str
    steps: list[Step]


def is_run(block: Block) -> bool:
    return block.language == "sh" and "not run" not in block.marks


def is_full(page: Path, block: Block) -> bool:
    return page.stem not in GATE_PAGES or "full" in block.marks


def sessions() -> list[Session]:
    """Returns the tests of all pages. A block with the mark `file` belongs to each test of its page."""
    found = []
    for page in PAGES:
        blocks = read_blocks(page)
        outputs = [after.content if after.language == "text" and not after.marks else None for after in blocks[1:]]
        pairs = zip_longest(blocks, outputs)
        steps = [Step(block, output) for block, output in pairs if "file" in block.marks or is_run(block)]
        for needs in dict.fromkeys(step.block.marks.get("needs", "") for step in steps if is_run(step.block)):
            own = [step for step in steps if "file" in step.block.marks or step.block.marks.get("needs", "") == needs]
            found.append(Session(page, needs, own))
    return found


def parameters() -> list:
    def marks(session: Session) -> list:
        is_long = all(is_full(session.page, step.block) for step in session.steps if is_run(step.block))
        return [pytest.mark.full] if is_long else []

    return [
        pytest.param(session, id="-".join(filter(None, [session.page.stem, session.needs])), marks=marks(session))
        for session in sessions()
    ]


@contextmanager
def simulated_hosts(directory: Path) -> Iterator[dict[str, str]]:
    """Makes two hosts with sshd, `node1` and `node2`. Yields the environment, in which `ssh` reaches them, with the variables
    LAB_HOST_0 and LAB_HOST_1. Skips the test if this machine forbids network namespaces."""
    lab = [REPOSITORY / "tools" / "ssh-lab", "-n", "2", "--", "sh", "-c", "env; echo; exec cat"]
    with subprocess.Popen(lab, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as keeper:
        lines = list(iter(lambda: keeper.stdout.readline().rstrip("\n"), ""))
        if not lines:
            pytest.skip("NOT TESTED: the commands for several hosts, because tools/ssh-lab cannot simulate hosts here")
        found = dict(line.split("=", 1) for line in lines if line.startswith("LAB_"))
        wrapper = directory / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -i {found["LAB_KEY"]} {found["LAB_OPTIONS"]} "$@"\n')
        wrapper.chmod(0o755)
        yield found
        # `cat` ends at the end of its input, and the script then removes the hosts.
        keeper.stdin.close()


class Shell:
    """Runs blocks of a page in a directory."""

    def __init__(self, ringrun: Launcher, directory: Path, needs: str, hosts: dict[str, str]) -> None:
        self.directory = directory / "page"
        self.directory.mkdir()
        programs = [directory / "bin", Path(ringrun.program).resolve().parent, Path(sys.executable).parent]
        own = {
            "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            # Files of the user, and those that `ringrun top` reads, are in a directory of the test.
            "HOME": str(directory),
            "XDG_RUNTIME_DIR": str(directory),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            **ranks.own_mark(),
        }
        self.environment = {**os.environ, **own}
        self.prefix = [REPOSITORY / "tools" / "engines" / "slurm"] if needs == "slurm" else []
        self.addresses = {f"node{number + 1}": hosts[f"LAB_HOST_{number}"] for number in range(2)} if hosts else {}

    def start(self, block: Block) -> subprocess.Popen:
        content = block.content
        for name, address in self.addresses.items():
            content = content.replace(name, address)
        return subprocess.Popen(
            [*self.prefix, "bash", "-e", "-o", "pipefail", "-c", content],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen) -> tuple[int, str]:
        """Waits until a block has ended. Returns its exit code and its output, with the names of hosts as in the page."""
        try:
            output, _ = process.communicate(timeout=WAIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"the commands did not end within {WAIT_LIMIT_S:g} s:\n{process.communicate()[0]}")
        for name, text in [*self.addresses.items(), ("node1", socket.gethostname())]:
            output = output.replace(text, name)
        return process.returncode, output


@contextmanager
def in_background(shell: Shell, block: Block) -> Iterator[None]:
    """Runs the block until the page ends, and then presses Ctrl-C."""
    process = shell.start(block)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGINT)
        shell.finish(process)


@pytest.mark.parametrize("session", parameters())
def test_page(ringrun: Launcher, tmp_path: Path, session: Session) -> None:
    is_there, what = REQUIREMENTS.get(session.needs, (lambda: True, ""))
    if not is_there():
        pytest.skip(f"NOT TESTED: commands of {session.page.name}, because there is no {what}")
    (tmp_path / "bin").mkdir()
    with ExitStack() as stack:
        hosts = stack.enter_context(simulated_hosts(tmp_path)) if session.needs == "hosts" else {}
        shell = Shell(ringrun, tmp_path, session.needs, hosts)
        for block, expected in session.steps:
            if "file" in block.marks:
                (shell.directory / block.marks["file"]).write_text(block.content)
            elif is_full(session.page, block) and not os.environ.get("TEST_FULL"):
                continue
            elif "background" in block.marks:
                stack.enter_context(in_background(shell, block))
            else:
                check_block(shell, session.page, block, expected)


def check_block(shell: Shell, page: Path, block: Block, expected: str | None) -> None:
    def problem() -> str:
        code, output = shell.finish(shell.start(block))
        if code != int(block.marks.get("code", 0)):
            return f"the exit code is {code}, and the output is:\n{output}"
        return "" if expected is None else find_difference(expected, output)

    place = f"{page.name}:{block.line}"
    until = time.monotonic() + (WAIT_LIMIT_S if "retry" in block.marks else 0)
    while found := problem():
        if time.monotonic() >= until:
            pytest.fail(f"{place}: {found}", pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_checked(page: Path) -> None:
    """A test runs each shell command, or the page says why it does not. Each program can be compiled."""
    known = {"file", "needs", "full", "code", "background", "retry", "not run"}
    blocks = read_blocks(page)
    assert len(blocks) == page.read_text().count("\n```") / 2, f"a block of {page.name} has no language, or is indented"
    for block in blocks:
        place = f"{page.name}:{block.line}"
        assert set(block.marks) <= known, f"{place} has unknown marks"
        assert block.marks.get("needs", "") in {"", *REQUIREMENTS}, f"{place} needs something unknown"
        assert block.marks.get("not run") != "", f"{place} does not say why no test runs it"
        if block.language == "python":
            compile(block.content, place, "exec")
            assert {"file", "not run"} & set(block.marks), f"no test runs {place}"


@pytest.mark.parametrize(
    ("expected", "output", "is_same"),
    [
        ("a 1.5\nb", "b\na 2.25\n", True),
        ("a 1.5\nb", "a 2.25\n", False),
        ("a", "a\nb", False),
        ("a\n...", "a\nb", True),
        ("rank 1 (pid 4711)", "rank 1 (pid 12)", True),
        ("rank 1 (pid 4711)", "rank 2 (pid 4711)", False),
        ("accuracy 0.95", "accuracy 0.94", True),
        ("accuracy 0.95", "accuracy 0.85", False),
        ("hash 0123456789abcdef", "hash fedcba9876543210", True),
        ("lost: ...", "lost: because", True),
    ],
)
def test_differences_are_found(expected: str, output: str, is_same: bool) -> None:
    assert (find_difference(expected, output) == "") == is_same


@pytest.mark.full
def test_mdbook_builds_the_guide_and_its_links_lead_to_files(tmp_path: Path) -> None:
    mdbook = shutil.which("mdbook", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mdbook is None:
        pytest.skip("NOT TESTED: the book of the guide, because there is no mdbook")
    built = tmp_path / "book"
    done = subprocess.run([mdbook, "build", GUIDE, "--dest-dir", built], capture_output=True, text=True, timeout=WAIT_LIMIT_S)
    assert done.returncode == 0, done
    assert {page.stem for page in PAGES} - {"SUMMARY"} <= {page.stem for page in built.glob("*.html")}
    outside, broken = set(), []
    for page in built.glob("*.html"):
        for link in re.findall(r'<a href="([^"#]+)[^"]*"', page.read_text()):
            path = Path(os.path.normpath(GUIDE / "book" / unquote(link)))
            if "://" in link:
                continue
            if path.is_relative_to(GUIDE / "book"):
                path = built / path.relative_to(GUIDE / "book")
            else:
                outside.add(path)
            broken += [] if path.exists() else [f"{page.name}: {link}"]
    assert not broken, broken
    assert GUIDE.parent / "hosts.md" in outside
