"""Runs a script: `python -m mpi4py script.py`."""

from .run import main

main()
