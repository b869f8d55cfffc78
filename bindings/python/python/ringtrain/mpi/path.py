"""Prints the directory of a package `mpi4py` that is an alias of `ringtrain.mpi`: `python -m ringtrain.mpi.path`.

If this directory is first on `PYTHONPATH`, `from mpi4py import MPI` imports `ringtrain.mpi.MPI`."""

from pathlib import Path


def directory() -> str:
    """Returns the directory to put first on `PYTHONPATH`."""
    return str(Path(__file__).resolve().parent.parent / "_mpi4py")


if __name__ == "__main__":
    print(directory())
