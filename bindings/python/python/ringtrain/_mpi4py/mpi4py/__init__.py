"""`ringtrain.mpi` under mpi4py's name, for scripts that import that. `ringrun --mpi4py` puts it where Python looks."""

import sys

from ringtrain.mpi import MPI4PY_VERSION, Rc, get_config, get_include, profile, rc

__version__ = MPI4PY_VERSION
__all__ = ["MPI"]  # noqa: F822  (imported when it is asked for)

sys.modules[__name__ + ".rc"] = rc  # type: ignore[assignment]
