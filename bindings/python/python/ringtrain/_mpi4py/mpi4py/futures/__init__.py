"""Not supported."""

from mpi4py._missing import missing

raise missing(__name__)
