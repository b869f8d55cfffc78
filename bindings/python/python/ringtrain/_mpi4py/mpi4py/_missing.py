"""The error of a part of mpi4py that does not exist here."""


class Missing(ImportError, NotImplementedError):
    """An `ImportError`, so that programs for which the part is optional can catch it."""


def missing(name: str) -> Missing:
    """The error of importing `name`."""
    return Missing(f"{name} is not supported by ringtrain.mpi", name=name)
