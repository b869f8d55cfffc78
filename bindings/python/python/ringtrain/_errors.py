"""The exceptions that ringtrain raises, as a hierarchy of classes below `Error`."""


class Error(RuntimeError):
    """The base of all errors. `rank` is the rank at fault, as a number in the job, and `host` is its host. If no rank is known to
    be at fault, `rank` and `host` are `None`."""

    rank: int | None = None
    host: str | None = None


class JobFailed(Error):
    """The job has failed on every rank, with the same cause on all ranks. `reported_by` is the rank from which this
    rank learned of the failure, or `None` if this rank detected the failure itself."""

    reported_by: int | None = None


class PeerLost(JobFailed):
    """A rank's process died, or the network to the rank failed."""


class PeerLeft(JobFailed):
    """A rank closed its group too early: another rank still needed data from this rank."""


class Mismatch(JobFailed):
    """Ranks called different operations, or the same operation with different arguments. `ranks` are two ranks whose
    calls differ."""

    ranks: tuple[int, int] | None = None


class Timeout(JobFailed, TimeoutError):
    """An operation did not end before its deadline."""


class Aborted(JobFailed):
    """A rank called `Group.abort`. The text of this exception contains the message that was passed to `abort`."""


class Misbehaved(JobFailed):
    """A rank sent data that break the protocol, or the network corrupted the data of a rank."""


class StartError(Error):
    """The ranks could not connect to each other."""


class InvalidArgument(Error, ValueError):
    """An argument is wrong. The rank with the wrong argument raises this exception before it sends any data. The other ranks
    learn of the mistake only in a collective of Python objects, in which they raise `Error`."""


class ModelFileError(Error, ValueError):
    """A model file is truncated or corrupt, has another format, or was written by a newer version."""


class Unsupported(InvalidArgument):
    """The operation does not support this element type or this reduction."""


class Truncated(InvalidArgument):
    """A message was longer than the buffer that should receive it. The message is lost, and the group can still be used.
    `source`, `tag` and `count` (the number of elements) describe the message."""

    source: int | None = None
    tag: int | None = None
    count: int | None = None


class Forked(Error):
    """This process was forked from a rank and is not a rank itself."""


class StillRunning(Error, TimeoutError):
    """`Handle.wait` reached its timeout. The operation continues."""
