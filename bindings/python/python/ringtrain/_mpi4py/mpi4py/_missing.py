"""The error of importing a part of mpi4py that `ringtrain.mpi` does not have."""


class Missing(ImportError, NotImplementedError):
    """An `ImportError`, which programs that can do without the part catch."""


def missing(name: str) -> Missing:
    """Returns the error of importing the module `name`."""
    return Missing(f"{name} is not supported by ringtrain.mpi", name=name)
