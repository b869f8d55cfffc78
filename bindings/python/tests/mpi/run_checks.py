"""Runs the checks of some modules, one after the other. Each rank of a job runs this program. A failed check ends the job."""

import importlib
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ringtrain.mpi import MPI


def main() -> None:
    world = MPI.COMM_WORLD
    modules = [importlib.import_module(name) for name in sys.argv[1:]]
    checks = [value for module in modules for name, value in vars(module).items() if name.startswith("check_")]
    for check in checks:
        name = f"{check.__module__}.{check.__name__}"
        comm = world.Dup()
        try:
            check(comm)
        except BaseException as error:
            # Only the rank whose check failed prints the error. The other ranks get an error because the job has ended.
            if not (isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_PROC_ABORTED):
                print(f"CHECK {name} failed\nrank {world.rank} of {world.size}\n{traceback.format_exc()}END", flush=True)
            world.Abort(1)
        comm.Barrier()
        comm.Free()
        if world.rank == 0:
            print(f"CHECK {name} passed", flush=True)


main()
