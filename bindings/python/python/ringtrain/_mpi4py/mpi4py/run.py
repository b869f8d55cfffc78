"""`python -m mpi4py script.py` runs a script.

With mpi4py, an uncaught exception ends the whole job only if the script runs under `python -m mpi4py`. With
`ringtrain.mpi`, an uncaught exception always ends the whole job.
"""

import runpy
import sys


def main() -> None:
    """Runs the file, `-m module` or `-c command` that the command line names."""
    from mpi4py import MPI  # noqa: F401  (joins the job)

    arguments = sys.argv[1:]
    if not arguments:
        sys.exit("usage: python -m mpi4py [-m module | -c command | file] [argument ..]")
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")
