"""Checks that the lists of supported names and of unsupported names in docs/mpi.md agree with the code."""

import re
import subprocess
import sys

from mpi_jobs import HERE

DOCUMENT = HERE.parent.parent / "docs" / "mpi.md"


def test_the_table_of_unsupported_names_is_up_to_date() -> None:
    code = "from table_of_names import DOCUMENT, updated_document; raise SystemExit(DOCUMENT.read_text() != updated_document())"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"run {HERE / 'table_of_names.py'}\n{done.stderr}"


def test_names_that_the_document_lists_as_supported_exist() -> None:
    rows = [line for line in DOCUMENT.read_text().split("## What differs")[0].splitlines() if line.startswith("| ")]
    names = {name for row in rows for quoted in re.findall(r"`([^`]*)`", row) for name in re.findall(r"\b[A-Za-z]\w+", quoted)}
    names -= {"data", "count", "datatype", "counts", "displacements", "init", "MPI", "vector", "hvector", "indexed", "hindexed"}
    names -= {"indexed_block", "hindexed_block", "struct", "subarray", "resized", "Neighbor_alltoall", "Neighbor_allgather"}
    code = (
        "import ringtrain.mpi; ringtrain.mpi.rc.initialize = False\n"
        "from ringtrain.mpi import MPI\n"
        "places = [MPI, MPI.Cartcomm, MPI.Request, MPI.Prequest, MPI.Group, MPI.Op, MPI.Datatype, MPI.Status]\n"
        f"print(*[n for n in {sorted(names)} if not any(hasattr(p, n.split('.')[-1]) for p in places)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
