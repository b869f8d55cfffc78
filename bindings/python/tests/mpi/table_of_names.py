"""Generates the table of unsupported names in docs/mpi.md from the code. `python table_of_names.py` updates the document."""

import re
from collections import defaultdict
from pathlib import Path

import ringtrain.mpi

ringtrain.mpi.rc.initialize = False
from ringtrain.mpi import placeholders  # noqa: E402

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "mpi.md"
MARKED = re.compile(r"(<!-- unsupported: begin -->\n).*?(<!-- unsupported: end -->)", re.DOTALL)


def make_table() -> str:
    """Returns the table, which has a row for each class and a row for the functions of the module."""
    rows: dict[str, list[str]] = defaultdict(list)
    for name in placeholders.UNSUPPORTED:
        owner, _, method = name.rpartition(".")
        if owner not in placeholders.WHOLE_CLASSES:
            rows[owner or "MPI"].append(f"`{method}`")
    rows |= {owner: ["everything"] for owner in placeholders.WHOLE_CLASSES}
    lines = [f"| `{owner}` | {' '.join(sorted(methods))} |" for owner, methods in sorted(rows.items())]
    return "\n".join(["| of | not supported |", "|---|---|", *lines]) + "\n"


def updated_document() -> str:
    """Returns the text of the document with the current table."""
    return MARKED.sub(lambda found: found[1] + make_table() + found[2], DOCUMENT.read_text())


if __name__ == "__main__":
    DOCUMENT.write_text(updated_document())
