"""The error of a part of mpi4py that is not there."""


class Missing(ImportError, NotImplementedError):
    """Caught by whoever can do without, as an `ImportError`."""


def missing(name: str) -> Missing:
    """The error of importing `name`."""
    return Missing(f"{name} is not supported by ringtrain.mpi", name=name)
