"""Where the package `mpi4py` lies that resolves to `ringtrain.mpi`: `python -m ringtrain.mpi.path` prints the directory.

With that directory first on `PYTHONPATH`, `from mpi4py import MPI` is `from ringtrain.mpi import MPI`.
"""

from pathlib import Path


def directory() -> str:
    """The directory to put first on `PYTHONPATH`."""
    return str(Path(__file__).resolve().parent.parent / "_mpi4py")


if __name__ == "__main__":
    print(directory())
