"""Checks of names: every unsupported name of mpi4py's interface raises NotImplementedError."""

from ringtrain.mpi import MPI, placeholders


def check_unsupported_names_are_refused(comm):
    for name in placeholders.UNSUPPORTED:
        owner, _, method = name.rpartition(".")
        scope = getattr(MPI, owner) if owner else MPI
        try:
            what = getattr(scope, method)
            if isinstance(what, property):
                what.fget(None)
            what(*[None] * (0 if owner in ("", *placeholders.WHOLE_CLASSES) else 1))
        except NotImplementedError as error:
            assert f"MPI.{name}" in str(error) or method in str(error)
        else:
            raise AssertionError(name)


def check_windows_and_files(comm):
    for call in (
        lambda: MPI.Win.Allocate(8, comm=comm), lambda: MPI.Win.Create(None), lambda: MPI.File.Open(comm, "x"),
        lambda: comm.Spawn("x"), lambda: comm.Create_intercomm(0, comm, 1), lambda: comm.Psend_init(None, 1, 0),
        lambda: comm.Create_graph([], []), lambda: MPI.Open_port(),
    ):  # fmt: skip
        try:
            call()
        except NotImplementedError as error:
            assert "MPI." in str(error)
            assert "not supported" in str(error)
        else:
            raise AssertionError


def check_unknown_names(comm):
    assert not hasattr(MPI, "Frobnicate")
    assert not hasattr(comm, "Frobnicate")
