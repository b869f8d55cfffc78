"""The exceptions. The classes mirror the errors of the Rust library."""


class Error(RuntimeError):
    """The base of all errors. `rank` (its number in the job) and `host` name the rank at fault, or are `None`."""

    rank: int | None = None
    host: str | None = None


class JobFailed(Error):
    """The job has failed on every rank, with the same cause on all. `reported_by` is the rank that told this one."""

    reported_by: int | None = None


class PeerLost(JobFailed):
    """A rank's process died, or the network to it failed."""


class PeerLeft(JobFailed):
    """A rank closed its group while other ranks still needed it."""


class Mismatch(JobFailed):
    """Ranks called different operations, or the same one with different arguments. `ranks` are the two that the message names."""

    ranks: tuple[int, int] | None = None


class Timeout(JobFailed, TimeoutError):
    """An operation did not end within its deadline."""


class Aborted(JobFailed):
    """A rank aborted the job. The message gives its reason."""


class Misbehaved(JobFailed):
    """A rank broke the protocol, or the network corrupted its data."""


class StartError(Error):
    """The ranks could not connect to each other."""


class InvalidArgument(Error, ValueError):
    """An argument is wrong. Nothing has been sent, except that the other ranks of a collective of objects are told."""


class Unsupported(InvalidArgument):
    """The reduction is not defined on elements of this type."""


class Truncated(InvalidArgument):
    """A message was longer than the buffer. The message is lost, and the group can go on."""

    source: int | None = None
    tag: int | None = None
    count: int | None = None


class Forked(Error):
    """This process was forked from a rank and is not a rank itself."""


class StillRunning(Error, TimeoutError):
    """`Handle.wait` timed out. The operation goes on."""
