"""The error that an import raises if `ringtrain.mpi` does not have the imported part of mpi4py."""


class Missing(ImportError, NotImplementedError):
    """Programs that can run without the missing part catch `ImportError`, so this error is a subclass of `ImportError`."""


def missing(name: str) -> Missing:
    """Returns the error for an import of the module `name`."""
    return Missing(f"{name} is not supported by ringtrain.mpi", name=name)
