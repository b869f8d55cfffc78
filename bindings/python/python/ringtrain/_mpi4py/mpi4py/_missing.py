"""The error that an import raises if `ringtrain.mpi` does not have the imported part of mpi4py."""


class Missing(ImportError, NotImplementedError):
    """The error is an `ImportError`, because programs catch an `ImportError` if they can also run without the missing part."""


def missing(name: str) -> Missing:
    """Returns the error for an import of the module `name`."""
    return Missing(f"{name} is not supported by ringtrain.mpi", name=name)
