"""What operations fail with. The classes mirror the library's own errors."""


class Error(RuntimeError):
    """Whatever fails. `rank` and `host` are those to blame, in the numbers of the job; `None` where nobody is."""

    rank: int | None = None
    host: str | None = None


class JobFailed(Error):
    """The job has ended on every rank, with the same cause everywhere. `reported_by` is the rank that told this one."""

    reported_by: int | None = None


class PeerLost(JobFailed):
    """A rank's process died, or the network to it failed."""


class PeerLeft(JobFailed):
    """A rank closed its group while others still had something to do with it."""


class Mismatch(JobFailed):
    """Ranks called different things at the same place; `ranks` are the two that are named."""

    ranks: tuple[int, int] | None = None


class Timeout(JobFailed, TimeoutError):
    """An operation did not end within its deadline."""


class Aborted(JobFailed):
    """A rank gave up and said why."""


class Misbehaved(JobFailed):
    """A rank broke the protocol, or the network corrupted what it said."""


class StartError(Error):
    """The ranks could not meet."""


class InvalidArgument(Error, ValueError):
    """What was asked for cannot be; nothing has been sent."""


class Unsupported(InvalidArgument):
    """The reduction is not defined on such elements."""


class Truncated(InvalidArgument):
    """A message was longer than the buffer; it has been thrown away, and the group is as it was."""

    source: int | None = None
    tag: int | None = None
    count: int | None = None


class Forked(Error):
    """This process was forked from a rank, and is none."""


class StillRunning(Error, TimeoutError):
    """`Handle.wait` gave up waiting; the operation goes on."""
