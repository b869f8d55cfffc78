"""An interface to ringtrain that scripts written for mpi4py can use as it is: `from ringtrain.mpi import MPI`.

Importing this package does nothing; importing `ringtrain.mpi.MPI` joins the job, as importing `mpi4py.MPI` initialises MPI,
unless `ringtrain.mpi.rc.initialize` was set to False before.
"""

import sys

__all__ = ["MPI", "Rc", "rc", "get_config", "get_include", "profile"]  # noqa: F822  (MPI is imported when it is asked for)

MPI4PY_VERSION = "4.1.2"
"""The version of mpi4py whose interface this is."""


class Rc:
    """What may be chosen before `MPI` is imported. The names are mpi4py's; `timeout` is ringtrain's own.

    `initialize` (True): join the job on import. `finalize`: accepted; a program that ends leaves the job in any case.
    `recv_mprobe`, `fast_reduce`, `irecv_bufsz`, `threads`, `thread_level`, `errors`: accepted; objects are always received whole,
    and threads may always call anything. `timeout` (None): seconds that an operation may take; None is for ever, as in MPI.
    """

    initialize = True
    threads = True
    thread_level = "multiple"
    finalize = None
    fast_reduce = True
    recv_mprobe = True
    irecv_bufsz = 32768
    errors = "exception"
    timeout = None

    def __init__(self, **options: object) -> None:
        self(**options)

    def __setattr__(self, name: str, value: object) -> None:
        if not hasattr(self, name):
            raise TypeError(f"object has no attribute {name!r}")
        super().__setattr__(name, value)

    def __call__(self, **options: object) -> None:
        for name in options:
            if not hasattr(self, name):
                raise TypeError(f"unexpected argument {name!r}")
        for name, value in options.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"<{__name__}.rc>"


rc = Rc()
# `import mpi4py.rc` is an idiom: the object stands where a module would.
sys.modules[__name__ + ".rc"] = rc  # type: ignore[assignment]


def get_config() -> dict[str, str]:
    """What the MPI library was built with: nothing, for there is none."""
    return {}


def get_include() -> str:
    """Not supported: there are no headers to compile against."""
    raise NotImplementedError("ringtrain.mpi.get_include: there is no C interface")


def profile(name: str, *, path: object = None) -> None:
    """Not supported: there is no MPI library whose calls a profiler could intercept."""
    raise NotImplementedError("ringtrain.mpi.profile: there is no MPI library to profile")
