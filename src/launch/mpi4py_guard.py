"""Replaces mpi4py on the ranks that ringrun starts without --mpi4py.

An installed MPI does not connect these ranks: MPI.COMM_WORLD would have the size 1 in each rank.
"""

import importlib
import os
import sys

MESSAGE = (
    "mpi4py is not available on ranks that ringrun started, because an installed MPI does not connect them: start the job with "
    "`ringrun --mpi4py` to run the script on the Python package of ringtrain, or with `ringrun --mpi4py=installed` to import "
    "the installed mpi4py, in which every rank is a world of size 1"
)


def is_started_by_mpi():
    """Returns whether an MPI launcher started this process. A rank may have called such a launcher."""
    return any(name in os.environ for name in "@MPI_VARIABLES@".split())


if os.environ.get("RING_WORLD_SIZE", "1") != "1" and not is_started_by_mpi():
    raise ModuleNotFoundError(MESSAGE, name=__name__)

# Import the installed package instead of this one.
sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__path__[0])]
del sys.modules[__name__]
try:
    importlib.import_module(__name__)
except ModuleNotFoundError as error:
    if error.name != __name__:
        raise
    raise ModuleNotFoundError(MESSAGE, name=__name__) from None
