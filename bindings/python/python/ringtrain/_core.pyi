"""The compiled module of `ringtrain`: groups of ranks, and operations on memory. Programs use `ringtrain.Group` instead.

A *buffer* is an object with the buffer protocol and contiguous elements, for example a C-contiguous numpy array, or a `Memory`.
Reductions are named "sum", "avg", "min", "max", "prod", "land", "lor", "lxor", "band", "bor", "bxor", "premulsum". Element types
are named "f16", "bf16", "f32", "f64", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64" and "bool". Elements of other types
(complex, structured) are moved as bytes; they cannot be reduced. An input that overlaps with the output is copied first.

Any thread may make any call. Other Python threads run while a call waits. A signal handler that raises (Ctrl-C) ends a blocking
call within 100 ms. If that call is a collective or a message, the job ends, and the other ranks are told which rank was
interrupted.
"""

from collections.abc import Buffer, Sequence
from typing import Any, final

class Error(RuntimeError):
    """The base of all errors. `rank` (its number in the job) and `host` name the rank at fault, or are `None`."""

    rank: int | None
    host: str | None

class JobFailed(Error):
    """The job has failed on every rank, with the same cause on all. `reported_by` is the rank that told this one."""

    reported_by: int | None

class PeerLost(JobFailed):
    """A rank's process died, or the network to it failed."""

class PeerLeft(JobFailed):
    """A rank closed its group while other ranks still needed it."""

class Mismatch(JobFailed):
    """Ranks called different operations, or the same one with different arguments. `ranks` are the two that the message names."""

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

    source: int | None
    tag: int | None
    count: int | None

class Forked(Error):
    """This process was forked from a rank and is not a rank itself."""

class StillRunning(Error, TimeoutError):
    """`Handle.wait` timed out. The operation goes on."""

@final
class Memory:
    """`count` elements of type `dtype` at `address`. The caller promises that they stay valid as long as `owner` lives."""
    def __init__(self, owner: object, address: int, count: int, dtype: str, writable: bool = True) -> None: ...

AnyBuffer = Buffer | Memory

@final
class Shared:
    """Memory from `Group.alloc`, with the buffer protocol. `is_shared` says whether peers can access it."""

    is_shared: bool
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Handle:
    """An operation that has begun. It keeps its buffers alive. If it is dropped, the operation goes on for the other ranks, but
    its result may not arrive in this rank's buffers. A receive that has matched no message yet is cancelled."""
    def wait(self, timeout: float | None = None) -> Any:
        """Waits for at most `timeout` seconds (`StillRunning`) and returns the result: `None` for collectives and sends,
        `(source, tag, count)` for `receive_async`, `(bytes, source, tag)` for `receive_bytes_async`. Any thread may call it
        again and gets the same result."""
    def test(self) -> bool:
        """Whether the operation has ended, with a result or an error. Makes progress without waiting."""
    def cancel(self) -> bool:
        """Cancels a receive that has matched no message yet, and returns whether it did. `wait` then raises `Error`."""

def wait_any(handles: Sequence[Handle], timeout: float | None = None) -> int | None:
    """The index of a handle whose operation has ended; `None` after `timeout` seconds, or if there are no handles."""

@final
class Rendezvous:
    """The rendezvous server of a job. A separate thread runs it until all ranks have joined or this object is dropped."""
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
    """Joins a job. Without arguments, it is the job that `ringrun` started this process for, or else a world of one. `job_id` has
    32 hexadecimal digits. `peers` is the path of a file with each rank's `host:port`, and needs `rank`. Times are in seconds."""

def solo() -> Group:
    """A group of only this process."""

def before_fork() -> None:
    """Tells the module that this process is about to fork."""

def after_fork() -> None:
    """Tells the module that this process is a forked child. From now on every call raises `Forked`."""

@final
class Group:
    """A group of ranks of a job. Collectives of one group run one after another, even if several threads call them. Messages do
    not wait for collectives."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    members: list[int]
    """The members' ranks in the job."""
    transport: str
    timeout: float
    """How many seconds each operation that begins from now on may take. You may set it, also to `math.inf`."""
    is_closed: bool

    def algorithm(self, operation: str, bytes: int) -> str: ...
    def statistics(self) -> dict[str, float]: ...

    # Collectives write to `output`. If `input` is None, the data is in `output` and is replaced ("in place"). `counts` are the
    # ranks' numbers of elements, if they differ. `compression` is None, "fp16" or "bf16" (f32 only).
    def all_reduce(
        self, output: AnyBuffer, op: str = "sum", input: AnyBuffer | None = None, compression: str | None = None
    ) -> None: ...
    def reduce(self, output: AnyBuffer, op: str, root: int, input: AnyBuffer | None = None) -> None:
        """On other ranks than the root, `output` ends with partial results, or is not used if there is an `input`."""
    def reduce_scatter(
        self, output: AnyBuffer, input: AnyBuffer, op: str = "sum", counts: Sequence[int] | None = None
    ) -> None: ...
    def all_gather(self, output: AnyBuffer, input: AnyBuffer | None, counts: Sequence[int] | None = None) -> None:
        """Without `input`, this rank's part is in `output` already, at its position."""
    def gather(self, output: AnyBuffer | None, input: AnyBuffer, root: int, counts: Sequence[int] | None = None) -> None:
        """Only the root uses `output`."""
    def scatter(self, output: AnyBuffer, input: AnyBuffer | None, root: int, counts: Sequence[int] | None = None) -> None:
        """Only the root uses `input`."""
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
        """On rank 0 `output` does not change."""
    def barrier(self) -> None: ...

    # The asynchronous forms. Do not use the buffers before `Handle.wait` has returned.
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
        """Returns `(source, tag, count)`."""
    def send_receive(
        self, buffer: AnyBuffer, to: int, send_tag: int, output: AnyBuffer, source: int | None, receive_tag: int | None
    ) -> tuple[int, int, int]: ...
    def send_async(self, buffer: AnyBuffer, to: int, tag: int = 0, synchronous: bool = False) -> Handle: ...
    def receive_async(self, buffer: AnyBuffer, source: int | None = None, tag: int | None = None) -> Handle: ...
    def probe(self, source: int | None = None, tag: int | None = None, timeout: float = 0.0) -> tuple[int, int, int, str] | None:
        """`(source, tag, count, dtype)` of the next message that no receive has matched; `None` after `timeout` seconds."""

    # Messages of bytes whose number only the sender knows. They have type "u8"; the elements of any buffer are taken as bytes.
    def send_bytes(self, data: AnyBuffer, to: int, tag: int = 0, synchronous: bool = False) -> None: ...
    def receive_bytes(self, source: int | None = None, tag: int | None = None) -> tuple[bytes, int, int]: ...
    def send_bytes_async(self, data: AnyBuffer, to: int, tag: int = 0, synchronous: bool = False) -> Handle: ...
    def receive_bytes_async(self, source: int | None = None, tag: int | None = None) -> Handle: ...
    def receive_into_bytes(self, buffer: AnyBuffer, source: int | None = None, tag: int | None = None) -> tuple[int, int, int]:
        """Receives bytes into the beginning of a buffer of any type. Returns `(source, tag, count of bytes)`. If the message is
        longer than the buffer, only this rank raises `Truncated`."""
    def receive_into_bytes_async(self, buffer: AnyBuffer, source: int | None = None, tag: int | None = None) -> Handle: ...
    # Collectives of bytes. A rank that passes `refusal`, a reason, has no data: every other rank raises an `Error` that names it.
    def broadcast_bytes(self, data: AnyBuffer | None, root: int, refusal: str | None = None) -> bytes: ...
    def all_gather_bytes(self, data: AnyBuffer | None, refusal: str | None = None) -> list[bytes]: ...
    def gather_bytes(self, data: AnyBuffer | None, root: int, refusal: str | None = None) -> list[bytes] | None: ...
    def scatter_bytes(self, data: Sequence[AnyBuffer] | None, root: int, refusal: str | None = None) -> bytes: ...
    def all_to_all_bytes(self, data: Sequence[AnyBuffer] | None, refusal: str | None = None) -> list[bytes]: ...

    # Groups. All ranks of this group call them.
    def split(self, colour: int | None, key: int = 0) -> Group | None: ...
    def subgroup(self, ranks: Sequence[int]) -> Group | None: ...
    def duplicate(self) -> Group: ...
    def alloc(self, count: int, dtype: str) -> Shared: ...
    def abort(self, message: str) -> Error:
        """Ends the job on every rank. Returns the error that all ranks get."""
    def close(self) -> None:
        """Closes the group. Later calls on it raise `Error`."""
