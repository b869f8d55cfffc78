"""Reads the blocks of code in Markdown pages, runs their shell commands, and compares the output with the page.

A comment in the line before a block may have marks: `<!-- file: train.py; needs: torch -->`. In the pages of the package,
`run: COMMAND` gives the command of a program. The marks of the guide are:

- `file: NAME`: the block is the content of this file. The commands of the page run in the directory of the file.
- `needs: NAME`: the block runs only if this machine has what `REQUIREMENTS` in `test_guide.py` describes under this name.
- `full`: only `tools/test --full` runs the block, although the gate runs other blocks of the page.
- `code: N`: the exit code of the block. Without this mark, it is 0.
- `background`: the block runs until the page ends.
- `retry`: the block is repeated until its output is as in the page, because a block in the background needs time, or because the
  ranks may write to the same line: torchrun runs `python -u`, which writes the end of a line by itself.
- `not run: REASON`: no test runs the block.

A block of type `text` after a block of type `sh` is the output of its commands.
"""

import re
from pathlib import Path
from typing import NamedTuple

BLOCK = re.compile(r"(?:^<!-- (?P<marks>[^>]*) -->\n)?^```(?P<language>\w+)\n(?P<content>.*?)^```\n", re.DOTALL | re.MULTILINE)
ACCURACY_DIFFERENCE_MAX = 0.05
"""How far an accuracy in the output may be from the accuracy in the page."""


class Block(NamedTuple):
    """A block of code in a page. `line` is the line in which its content begins."""

    line: int
    language: str
    content: str
    marks: dict[str, str]


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            text.count("\n", 0, block.start("content")) + 1,
            block["language"],
            block["content"],
            read_marks(block["marks"] or ""),
        )
        for block in BLOCK.finditer(text)
    ]


def read_marks(text: str) -> dict[str, str]:
    """Returns the marks of a comment: `{"needs": "torch", "full": ""}` for `needs: torch; full`."""
    marks = (mark.partition(":") for mark in text.split(";") if mark.strip())
    return {name.strip(): value.strip() for name, _, value in marks}


def find_difference(expected: str, output: str) -> str:
    """Compares the output of commands with the text in a page. Returns an empty text if they agree, and otherwise a description.

    The lines may come in any order. `...` in a line stands for any text, and a line `...` for any number of lines. Numbers with a
    decimal point, with more than three digits or with a percent sign, and hexadecimal numbers, may differ. Accuracies must be
    similar. On a busy host, `ringrun` also reports ranks that have not joined after 2 s.
    """
    output = re.sub(r"^ringrun: still waiting for .*\n", "", output, flags=re.MULTILINE)
    wanted = [line for line in expected.splitlines() if line.strip()]
    left = [line for line in output.splitlines() if line.strip()]
    may_have_more = "..." in wanted
    for line in wanted:
        if line == "...":
            continue
        pattern = re.compile(pattern_of(line))
        found = next((other for other in left if pattern.fullmatch(other) and has_similar_accuracy(line, other)), None)
        if found is None:
            return f"no line of the output is like this one:\n{line}\nThe output is:\n{output}"
        left.remove(found)
    return f"the page lacks these lines:\n{chr(10).join(left)}" if left and not may_have_more else ""


VARIABLE = re.compile(r"\.\.\.|-?\d[\d,]*\.\d[\d.]*(?:e[-+]?\d+)?|\b\d+%|\b[0-9a-f]{8,}\b|\d{4,}|\s+")


def pattern_of(line: str) -> str:
    """Returns the regular expression of the lines that are like this line of a page."""

    def variable(text: str) -> str:
        if text == "...":
            return ".*"
        return r"\s+" if text.isspace() else r"-?[0-9a-f,.]+(?:e[-+]?\d+)?%?"

    end, pattern = 0, ""
    for part in VARIABLE.finditer(line := line.strip()):
        pattern += re.escape(line[end : part.start()]) + variable(part[0])
        end = part.end()
    return r"\s*" + pattern + re.escape(line[end:]) + r"\s*"


def has_similar_accuracy(line: str, other: str) -> bool:
    accuracies = [re.findall(r"accuracy (\d\.\d+)", text) for text in (line, other)]
    return all(abs(float(one) - float(two)) <= ACCURACY_DIFFERENCE_MAX for one, two in zip(*accuracies, strict=True))
