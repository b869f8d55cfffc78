"""Runs the programs in the package's README and in `docs/strategies.md`, and compares their output with these pages.

The default command is `ringrun -n 2`. A comment `<!-- run: COMMAND -->` before a program gives another command. A block of type
`text` after a program is the expected output; the lines may come in any order.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from pages import read_blocks
from ranks import Launcher

PACKAGE = Path(__file__).resolve().parents[2]
PAGES = [PACKAGE / "README.md", PACKAGE / "docs" / "strategies.md"]
WAIT_LIMIT_S = 240.0
pytestmark = pytest.mark.timeout(WAIT_LIMIT_S + 20)


class PageProgram(NamedTuple):
    """A program in a page. `place` is the name of the page and the line in which the program's block begins."""

    place: str
    command: list[str]
    code: str
    output: list[str]


def read_programs(page: Path) -> list[PageProgram]:
    found: list[PageProgram] = []
    for block in read_blocks(page):
        if block.language == "python":
            place = f"{page.name}-line-{block.line}"
            found.append(PageProgram(place, block.marks.get("run", "ringrun -n 2").split(), block.content, []))
        elif block.language == "text":
            assert found and not found[-1].output, f"{page.name}:{block.line}: no program for this output"
            found[-1].output.extend(block.content.splitlines())
    return found


@pytest.mark.parametrize(("page", "count_min"), [(PAGES[0], 6), (PAGES[1], 2)], ids=lambda value: getattr(value, "name", ""))
def test_every_program_is_found(page: Path, count_min: int) -> None:
    text, programs = page.read_text(), read_programs(page)
    assert len(programs) == text.count("```python\n") >= count_min
    assert text.count("<!-- run:") == sum(program.command != ["ringrun", "-n", "2"] for program in programs)


def modules_of(program: PageProgram) -> list[str]:
    """Returns the optional modules that a program imports."""
    return [name for name in ("torch", "jax", "optax") if f"import {name}\n" in program.code]


def program_parameters() -> list:
    """Returns the programs of the pages as parameters of a test. The gate leaves out the programs that import
    torch or jax, because programs in `torch/programs` and `jax/programs` cover them."""
    return [
        pytest.param(
            program,
            id=program.place,
            marks=[pytest.mark.full] if modules_of(program) else [],
        )
        for page in PAGES
        for program in read_programs(page)
    ]


@pytest.mark.parametrize("program", program_parameters())
def test_program(ringrun: Launcher, tmp_path: Path, program: PageProgram) -> None:
    for name in modules_of(program):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            pytest.skip(f"NOT TESTED: this program, because {name} cannot be imported")
    # The name of the file must not be that of a module that the program imports.
    script = tmp_path / "program.py"
    script.write_text(program.code)
    start, *flags = program.command
    if start == "python":
        # Run the program without a launcher, because the program itself starts ranks with `ringtrain.run`.
        done = subprocess.run(
            [sys.executable, script], env=program_environment(ringrun), capture_output=True, text=True, timeout=WAIT_LIMIT_S
        )
        assert done.returncode == 0, done
    else:
        assert start == "ringrun", program.command
        ranks = int(flags.pop())
        assert flags.pop() == "-n", program.command
        done = ringrun(ranks, script, flags=flags, timeout=WAIT_LIMIT_S)
    if program.output:
        assert sorted(done.stdout.splitlines()) == sorted(program.output), done


def program_environment(ringrun: Launcher) -> dict[str, str]:
    """Returns an environment in which a program finds the package and the launcher."""
    package = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": package, "PATH": f"{Path(ringrun.program).parent}{os.pathsep}{os.environ['PATH']}"}
