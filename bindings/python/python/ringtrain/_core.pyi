"""The compiled part of `ringtrain`: groups of ranks, and operations on memory. `ringtrain.Group` is what programs use.

A *buffer* is anything with the buffer protocol whose elements are of a known type and lie one after another, such as a
C-contiguous
numpy array, or a `Memory`. Reductions are named "sum", "avg", "min", "max", "prod", "land", "lor", "lxor", "band", "bor", "bxor",
"premulsum". Element types are named "f16", "bf16", "f32", "f64", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64" and
"bool". Buffers of
other element types (complex, structured) are moved as bytes; they cannot be reduced.

Every call lets other Python threads run while it waits, and may be made by any thread. A signal handler that raises (Ctrl-C)
ends a
blocking call within 100 ms; a blocking operation that is interrupted so ends the job, and the other ranks are told by whom.
"""

from collections.abc import Buffer, Sequence
from typing import Any, final

class Error(RuntimeError):
    """Whatever fails. `rank` and `host` are those to blame, in the numbers of the job; `None` where nobody is."""

    rank: int | None
    host: str | None

class JobFailed(Error):
    """The job has ended on every rank, with the same cause everywhere. `reported_by` is the rank that told this one."""

    reported_by: int | None

class PeerLost(JobFailed):
    """A rank's process died, or the network to it failed."""

class PeerLeft(JobFailed):
    """A rank closed its group while others still had something to do with it."""

class Mismatch(JobFailed):
    """Ranks called different things at the same place; `ranks` are the two that are named."""

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

    source: int | None
    tag: int | None
    count: int | None

class Forked(Error):
    """This process was forked from a rank, and is none."""

class StillRunning(Error, TimeoutError):
    """`Handle.wait` gave up waiting; the operation goes on."""

@final
class Memory:
    """`count` elements of type `dtype` at `address`, which stay valid for as long as `owner` lives. Nobody checks that."""
    def __init__(self, owner: object, address: int, count: int, dtype: str, writable: bool = True) -> None: ...

AnyBuffer = Buffer | Memory

@final
class Shared:
    """Memory of a group's own (`Group.alloc`), with the buffer protocol. `is_shared` says whether peers reach it."""

    is_shared: bool
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Handle:
    """An operation under way. It keeps its buffers alive. Dropping it lets the operation go on for the other ranks, but its
    result may never come to this rank's buffers; a receive that has found no message yet is withdrawn."""
    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the end, `timeout` seconds at most (`StillRunning`), and gives the result: `None` for collectives and sends,
        `(source, tag, count)` for `receive_async`, `(bytes, source, tag)` for `receive_bytes_async`. May be called again, by any
        thread, with the same answer."""
    def test(self) -> bool:
        """Whether it has ended, well or not. Does what can be done without waiting."""
    def cancel(self) -> bool:
        """Withdraws a receive that has found no message yet; whether it did. Waiting for it then raises `Error`."""

def wait_any(handles: Sequence[Handle], timeout: float | None = None) -> int | None:
    """The index of a handle that has ended; `None` after `timeout` seconds, or if there are none."""

@final
class Rendezvous:
    """Serves the place where the ranks of a job meet, from a thread of its own, until all have come or it is dropped."""
    def __init__(self, size: int, secret: str, job_id: str, host: str = "127.0.0.1", start_timeout: float = 30.0) -> None: ...
    address: str
    """`ip:port`."""

def join(
    *,
    rank: int | None = None,
    size: int | None = None,
    rendezvous: str | None = None,
    job_id: str | None = None,
    secret: str | None = None,
    peers: str | None = None,
    start_timeout: float | None = None,
    timeout: float | None = None,
    algorithm: str | None = None,
    transport: str | None = None,
    congestion: str | None = None,
    streams: str | None = None,
    host_id: str | None = None,
    check_payloads: bool | None = None,
) -> Group:
    """Joins a job: with no word of how, the one that `ringrun` has started this process for, or else a world of one. `job_id`
    are 32
    hexadecimal digits; `peers` is the path of a file with each rank's `host:port`, and needs `rank`. Times are in seconds."""

def solo() -> Group:
    """A group of this process alone."""

def before_fork() -> None:
    """Tells the module that this process is about to fork."""

def after_fork() -> None:
    """Tells the module that this process is a fork's child: every call raises `Forked` from now on."""

@final
class Group:
    """Some ranks of a job, seen from one of them. Collectives of one group are done one after the other, whichever thread calls
    them;
    messages are not kept waiting by them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    members: list[int]
    """The members' ranks in the job."""
    transport: str
    timeout: float
    """Seconds that an operation may take which is begun from now on. May be set, also to `math.inf`."""
    is_closed: bool

    def algorithm(self, operation: str, bytes: int) -> str: ...
    def statistics(self) -> dict[str, float]: ...

    # Collectives. `output` is written; where `input` is None the data is in `output` already, and replaced there ("in place").
    # `counts` are each rank's number of elements, where they differ. `compression` is None, "fp16" or "bf16" (f32 only).
    def all_reduce(
        self, output: AnyBuffer, op: str = "sum", input: AnyBuffer | None = None, compression: str | None = None
    ) -> None: ...
    def reduce(self, output: AnyBuffer, op: str, root: int, input: AnyBuffer | None = None) -> None:
        """On other ranks than the root, `output` ends with partial results; with `input` it is not touched there, and may be
        None."""
    def reduce_scatter(
        self, output: AnyBuffer, input: AnyBuffer, op: str = "sum", counts: Sequence[int] | None = None
    ) -> None: ...
    def all_gather(self, output: AnyBuffer, input: AnyBuffer | None, counts: Sequence[int] | None = None) -> None:
        """Without `input`, this rank's part stands in its place in `output`."""
    def gather(self, output: AnyBuffer | None, input: AnyBuffer, root: int, counts: Sequence[int] | None = None) -> None:
        """`output` is looked at on the root only."""
    def scatter(self, output: AnyBuffer, input: AnyBuffer | None, root: int, counts: Sequence[int] | None = None) -> None:
        """`input` is looked at on the root only."""
    def broadcast(self, output: AnyBuffer, root: int) -> None: ...
    def all_to_all(
        self,
        output: AnyBuffer,
        input: AnyBuffer,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
    ) -> None: ...
    def scan(self, output: AnyBuffer, op: str = "sum", input: AnyBuffer | None = None) -> None: ...
    def exscan(self, output: AnyBuffer, op: str = "sum", input: AnyBuffer | None = None) -> None:
        """On rank 0 `output` ends as it was."""
    def barrier(self) -> None: ...

    # The same, going on by themselves. Nobody may use the buffers before `Handle.wait` has returned.
    def all_reduce_async(
        self, output: AnyBuffer, op: str = "sum", input: AnyBuffer | None = None, compression: str | None = None
    ) -> Handle: ...
    def reduce_async(self, output: AnyBuffer, op: str, root: int, input: AnyBuffer | None = None) -> Handle: ...
    def reduce_scatter_async(
        self, output: AnyBuffer, input: AnyBuffer, op: str = "sum", counts: Sequence[int] | None = None
    ) -> Handle: ...
    def all_gather_async(self, output: AnyBuffer, input: AnyBuffer | None, counts: Sequence[int] | None = None) -> Handle: ...
    def gather_async(
        self, output: AnyBuffer | None, input: AnyBuffer, root: int, counts: Sequence[int] | None = None
    ) -> Handle: ...
    def scatter_async(
        self, output: AnyBuffer, input: AnyBuffer | None, root: int, counts: Sequence[int] | None = None
    ) -> Handle: ...
    def broadcast_async(self, output: AnyBuffer, root: int) -> Handle: ...
    def all_to_all_async(
        self,
        output: AnyBuffer,
        input: AnyBuffer,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
    ) -> Handle: ...
    def scan_async(self, output: AnyBuffer, op: str = "sum", input: AnyBuffer | None = None) -> Handle: ...
    def exscan_async(self, output: AnyBuffer, op: str = "sum", input: AnyBuffer | None = None) -> Handle: ...
    def barrier_async(self) -> Handle: ...

    # Messages. Tags are 0 to 2**32 - 2; a source or tag of None is any. A receive takes a message of at most as many elements, of
    # the same type. A synchronous send is complete only when a receive has matched the message.
    def send(self, buffer: AnyBuffer, to: int, tag: int = 0, synchronous: bool = False) -> None: ...
    def receive(self, buffer: AnyBuffer, source: int | None = None, tag: int | None = None) -> tuple[int, int, int]:
        """Gives `(source, tag, count)`."""
    def send_receive(
        self, buffer: AnyBuffer, to: int, send_tag: int, output: AnyBuffer, source: int | None, receive_tag: int | None
    ) -> tuple[int, int, int]: ...
    def send_async(self, buffer: AnyBuffer, to: int, tag: int = 0, synchronous: bool = False) -> Handle: ...
    def receive_async(self, buffer: AnyBuffer, source: int | None = None, tag: int | None = None) -> Handle: ...
    def probe(self, source: int | None = None, tag: int | None = None, timeout: float = 0.0) -> tuple[int, int, int, str] | None:
        """`(source, tag, count, dtype)` of a message that has come and that nobody has asked for; `None` after `timeout` s."""

    # Bytes whose number only the sender knows. They are messages and collectives of type "u8"; buffers of any type are taken as
    # bytes.
    def send_bytes(self, data: AnyBuffer, to: int, tag: int = 0, synchronous: bool = False) -> None: ...
    def receive_bytes(self, source: int | None = None, tag: int | None = None) -> tuple[bytes, int, int]: ...
    def send_bytes_async(self, data: AnyBuffer, to: int, tag: int = 0, synchronous: bool = False) -> Handle: ...
    def receive_bytes_async(self, source: int | None = None, tag: int | None = None) -> Handle: ...
    def receive_into_bytes(self, buffer: AnyBuffer, source: int | None = None, tag: int | None = None) -> tuple[int, int, int]:
        """Receives bytes into the beginning of a buffer of any type, and gives `(source, tag, count of bytes)`. A message that
        is longer
        raises `Truncated` on this rank alone."""
    def receive_into_bytes_async(self, buffer: AnyBuffer, source: int | None = None, tag: int | None = None) -> Handle: ...
    def broadcast_bytes(self, data: AnyBuffer | None, root: int) -> bytes: ...
    def all_gather_bytes(self, data: AnyBuffer) -> list[bytes]: ...
    def gather_bytes(self, data: AnyBuffer, root: int) -> list[bytes] | None: ...
    def scatter_bytes(self, data: Sequence[AnyBuffer] | None, root: int) -> bytes: ...
    def all_to_all_bytes(self, data: Sequence[AnyBuffer]) -> list[bytes]: ...

    # Groups. All ranks of this group have to call them.
    def split(self, colour: int | None, key: int = 0) -> Group | None: ...
    def subgroup(self, ranks: Sequence[int]) -> Group | None: ...
    def duplicate(self) -> Group: ...
    def alloc(self, count: int, dtype: str) -> Shared: ...
    def abort(self, message: str) -> Error:
        """Ends the job on every rank, and gives the error that all of them get."""
    def close(self) -> None:
        """Lets go of the group; calls on it raise `Error` from now on."""
