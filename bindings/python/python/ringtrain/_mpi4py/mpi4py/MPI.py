"""An alias of the module `ringtrain.mpi.MPI`, so that both names give the same classes and pickles."""

import sys

from ringtrain.mpi import MPI

sys.modules[__name__] = MPI
