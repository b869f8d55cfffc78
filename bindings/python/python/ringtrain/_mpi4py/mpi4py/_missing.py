"""The error that an import raises if `ringtrain.mpi` does not have the imported part of mpi4py."""


class Missing(ImportError, NotImplementedError):
    """A subclass of `ImportError`, because programs that can run without the missing part of mpi4py catch
    `ImportError`.
    """


def missing(name: str) -> Missing:
    """Returns the error for an import of the module `name`."""
    return Missing(f"{name} is not supported by ringtrain.mpi", name=name)
