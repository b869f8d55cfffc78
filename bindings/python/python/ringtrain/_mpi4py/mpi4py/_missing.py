"""The error that importing a part of mpi4py raises if `ringtrain.mpi` does not have this part."""


class Missing(ImportError, NotImplementedError):
    """Is an `ImportError`, because programs catch an `ImportError` if they can also run without the missing part."""


def missing(name: str) -> Missing:
    """Returns the error that importing the module `name` raises."""
    return Missing(f"{name} is not supported by ringtrain.mpi", name=name)
