"""An alias of the module `ringtrain.mpi.MPI`. Both module names give the same classes, and pickles of these classes
are the same.
"""

import sys

from ringtrain.mpi import MPI

sys.modules[__name__] = MPI
