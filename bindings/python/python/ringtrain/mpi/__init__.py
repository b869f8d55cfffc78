"""The interface of mpi4py on ringtrain. Scripts for mpi4py can use `from ringtrain.mpi import MPI` without other changes.

Importing this package does nothing. Importing `ringtrain.mpi.MPI` joins the job, as importing `mpi4py.MPI` initializes MPI. To
join later, set `ringtrain.mpi.rc.initialize` to False first."""

import sys

__all__ = ["MPI", "Rc", "rc", "get_config", "get_include", "profile"]  # noqa: F822  (MPI is imported on first use)

MPI4PY_VERSION = "4.1.2"
"""The version of mpi4py whose interface this package has."""


class Rc:
    """Options that a program can set before it imports `MPI`. The names are those of mpi4py. Only `timeout` is an addition of
    ringtrain.

    `initialize` (True) says whether the import joins the job. `timeout` (None) is the number of seconds that an operation may
    take. None means no limit, as in MPI. The other options have no effect: a program that ends always leaves the job, objects
    are always received whole, and any thread may call any function."""

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
# Scripts use `import mpi4py.rc`, so the object is registered as a module.
sys.modules[__name__ + ".rc"] = rc  # type: ignore[assignment]


def get_config() -> dict[str, str]:
    """Returns an empty dictionary, because there is no MPI library."""
    return {}


def get_include() -> str:
    """Not supported: there are no headers to compile against."""
    raise NotImplementedError("ringtrain.mpi.get_include: there is no C interface")


def profile(name: str, *, path: object = None) -> None:
    """Not supported: there is no MPI library whose calls a profiler could intercept."""
    raise NotImplementedError("ringtrain.mpi.profile: there is no MPI library to profile")
