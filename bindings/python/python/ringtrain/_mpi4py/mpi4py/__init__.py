"""`ringtrain.mpi` under the name `mpi4py`, for scripts that import mpi4py. `ringrun --mpi4py` adds this package to PYTHONPATH."""

import sys

from ringtrain.mpi import MPI4PY_VERSION, Rc, get_config, get_include, profile, rc

__version__ = MPI4PY_VERSION
__all__ = ["MPI"]  # noqa: F822  (imported on first use)

sys.modules[__name__ + ".rc"] = rc  # type: ignore[assignment]
