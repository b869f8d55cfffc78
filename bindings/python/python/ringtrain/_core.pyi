"""The compiled module of `ringtrain`: groups of ranks, and operations on memory. Programs use `ringtrain.Group` instead.

A *buffer* is an object with the buffer protocol and contiguous elements, for example a C-contiguous numpy array, or a `Memory`.
Reductions are named "sum", "avg", "min", "max", "prod", "land", "lor", "lxor", "band", "bor", "bxor", "premulsum". Element types
are named "f16", "bf16", "f32", "f64", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64" and "bool". Elements of other types
(complex, structured) are sent as bytes and cannot be reduced. If an input overlaps with the output, the call copies the input
first.

Any thread may make any call. Other Python threads run while a call waits. If a signal handler raises an exception (Ctrl-C), a
blocking call ends within 100 ms. If that call is a collective or a message, the job ends, and the other ranks' errors name the
rank that was interrupted.
"""

from collections.abc import Buffer, Sequence
from typing import Any, final

class Error(RuntimeError):
    """The base of all errors. `rank` (a rank in the job) and `host` name the rank at fault, or are `None`."""

    rank: int | None
    host: str | None

class JobFailed(Error):
    """The job has failed on every rank, with the same cause on all ranks. `reported_by` is the rank from which this rank learned
    of the failure, or `None`."""

    reported_by: int | None

class PeerLost(JobFailed):
    """A rank's process died, or the network to the rank failed."""

class PeerLeft(JobFailed):
    """A rank closed its group while other ranks still needed this rank."""

class Mismatch(JobFailed):
    """Ranks called different operations, or the same operation with different arguments. `ranks` are the two ranks that the
    message names."""

class Timeout(JobFailed, TimeoutError):
    """An operation did not end within its deadline."""

class Aborted(JobFailed):
    """A rank aborted the job. The message gives its reason."""

class Misbehaved(JobFailed):
    """A rank broke the protocol, or the network corrupted its data."""

class StartError(Error):
    """The ranks could not connect to each other."""

class InvalidArgument(Error, ValueError):
    """An argument is wrong. This rank has sent nothing, with one exception: in a collective of Python objects, this
    rank informs the other ranks of the error, and the other ranks raise `Error`."""

class Unsupported(InvalidArgument):
    """The operation is not defined on elements of this type."""

class Truncated(InvalidArgument):
    """A message was longer than the buffer that should receive it. The message is lost, and the group can still be used.
    `source`, `tag` and `count` (the number of elements) describe the message."""

    source: int | None
    tag: int | None
    count: int | None

class Forked(Error):
    """This process was forked from a rank and is not a rank itself."""

class StillRunning(Error, TimeoutError):
    """`Handle.wait` reached its timeout. The operation continues."""

@final
class Memory:
    """A buffer of `count` elements of type `dtype` at `address`. The caller guarantees that the elements stay valid as long as
    the object `owner` lives."""

    def __init__(self, owner: object, address: int, count: int, dtype: str, writable: bool = True) -> None: ...

AnyBuffer = Buffer | Memory

@final
class Shared:
    """Memory from `Group.alloc`, with the buffer protocol. `is_shared` says whether the host's other ranks can access this
    memory."""

    is_shared: bool
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Handle:
    """The handle of an operation that has begun. The handle keeps the operation's buffers alive. If the handle is dropped, the
    operation continues for the other ranks, but its result may not arrive in this rank's buffers. A receive that has matched no
    message yet is cancelled."""
    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the operation and returns its result: `None` for collectives and sends, `(source, tag, count)` for
        `receive`, `(bytes, source, tag)` for `receive_bytes`, or what the function that began the operation says.
        Raises `StillRunning` after `timeout` seconds. Several calls, also from several threads, return the same result."""
    def test(self) -> bool:
        """Returns whether the operation has ended, with a result or an error. Makes progress without waiting."""
    def cancel(self) -> bool:
        """Cancels a receive that has matched no message yet. Returns whether the receive is cancelled. After a cancellation,
        `wait` raises `Error`."""

@final
class Compressor:
    """A compression, and what a rank could not send in earlier calls. `compression` is a name such as "int8" or "topk:0.01".
    `seed` is the seed of the random numbers, the same on all ranks. Use a compressor for one buffer only, and in one call at a
    time."""

    compression: str
    """The name of the compression, with its parameter."""
    has_memory: bool
    """Whether the result of a call depends on the earlier calls: through their errors, or because each call draws other random
    numbers."""
    def __init__(self, compression: str, seed: int = 0) -> None: ...
    def report(self) -> dict[str, Any] | None:
        """Returns what a compressor with the compression "auto" has chosen: "compression" (a name), "is_trial",
        "relative_error" and "seconds" (per call). Returns `None` for other compressions."""
    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the memory: the array "residual" of float32, which is empty before the first call, the array
        "result", which is empty without EF21, and the number "calls"."""
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the memory by a result of `state_dict`."""

def wait_any(handles: Sequence[Handle], timeout: float | None = None) -> int | None:
    """Waits until an operation has ended and returns the index of its handle. Returns `None` after `timeout` seconds, or if
    `handles` is empty."""

@final
class Gossip:
    """The gossip averaging of a group, as this rank uses it. `ringtrain.Gossip` describes its functions. Vectors are
    buffers of f32 with `count` elements. While a thread is in a call, another call raises `Error`."""
    def __init__(self, group: Group, parameters: AnyBuffer, count: int, every: int) -> None:
        """Writes rank 0's parameters to `parameters`."""
    is_closed: bool
    averages: tuple[int, int]
    """How many averages this rank has done and skipped."""
    lost_ranks: list[tuple[int, str]]
    """The rank in the job of each lost rank, and the reason."""
    def step(self, parameters: AnyBuffer) -> bool: ...
    def finish(self, parameters: AnyBuffer, timeout: float | None) -> None:
        """Closes the gossip, also after an error."""
    def abort(self, message: str) -> None:
        """Ends the connections. The other ranks count this rank as lost, with this message."""
    def close(self) -> None: ...

@final
class NamedTensors:
    """Collectives of a group on tensors with names. Each rank may submit the tensors in any order and from any thread. Creating
    this object is a collective: all ranks must create it. If a tensor waits for another rank for `stall_warning` seconds (60
    by default), rank 0 logs a warning. After `stall_abort` seconds (by default never), the job ends.

    `output` holds this rank's elements, and receives the result. If `input` is not None, the elements are copied from it. A name
    may be used again when the tensor has its result. The error of a handle names the tensor and, if a rank is at fault, the
    rank."""
    def __init__(self, group: Group, stall_warning: float | None = None, stall_abort: float | None = None) -> None: ...
    is_closed: bool
    stalls: list[tuple[str | None, list[int], float]]
    """On rank 0, the tensors that have waited longer than `stall_warning`: the name, the missing ranks in the job, and the
    seconds that the tensor had waited. The name of a join or close is None."""
    def all_reduce(self, name: str, output: AnyBuffer, op: str = "sum", input: AnyBuffer | None = None) -> Handle: ...
    def broadcast(self, name: str, output: AnyBuffer, root: int) -> Handle: ...
    def reduce_scatter(self, name: str, output: AnyBuffer, input: AnyBuffer, op: str = "sum") -> Handle:
        """`output` receives this rank's part of the result. The first ranks have one element more if the elements cannot be
        divided evenly."""
    def all_gather_bytes(self, name: str, data: AnyBuffer) -> Handle:
        """The handle returns a `bytearray` with the bytes of all ranks, in rank order."""
    def join(self) -> Handle:
        """Declares that this rank has no more data. Until all ranks have joined, it contributes zeros to sums and averages, and
        may submit no tensor. The handle returns the rank that joined last."""
    def statistics(self) -> dict[str, int]:
        """The numbers of submitted tensors, of those found in the cache, of operations and of reports."""
    def abort(self, message: str) -> None:
        """Ends the job on all ranks. Their errors contain `message`."""
    def close(self, timeout: float | None = None) -> None:
        """Waits until all ranks have closed. Afterwards, this rank can submit no tensors. Raises `StillRunning` after `timeout`
        seconds."""

@final
class ParameterServer:
    """A parameter server, as this rank uses it. `ringtrain.ParameterServer` describes its functions. Vectors are buffers
    of f32 with one element for each parameter. `ranges` is a buffer of i64 with a pair of first element and length for
    each range. The ranges must be ascending and must not overlap. The functions that push return whether all servers
    applied the gradient, and the largest staleness of its parts. While a thread is in a call on a worker, another call on
    this worker raises `Error`."""
    def __init__(
        self,
        group: Group,
        parameters: AnyBuffer,
        tensors: Sequence[int],
        servers: int,
        optimizer: str,
        learning_rate: float,
        momentum: float,
        adam: tuple[float, float, float],
        weight_decay: float | None,
        synchronous: bool,
        staleness: int | None,
        staleness_aware: bool,
    ) -> None:
        """`tensors` holds the number of elements of each tensor. `adam` holds the two betas and epsilon."""
    is_server: bool
    is_closed: bool
    workers: list[int]
    """The workers' ranks in the job."""
    part: tuple[int, int]
    """The position of this server's first parameter, and the number of its parameters."""
    state_names: list[str]
    """The names of the vectors of the optimizer's state."""
    lost_workers: list[tuple[int, str]]
    staleness: tuple[list[int], int]
    """The number of applied gradients with each staleness, and the number of dropped gradients."""
    def pull(self, parameters: AnyBuffer) -> None: ...
    def push(self, gradient: AnyBuffer) -> tuple[bool, int]: ...
    def push_pull(self, gradient: AnyBuffer, parameters: AnyBuffer) -> tuple[bool, int]: ...
    def set_learning_rate(self, rate: float) -> None: ...
    def push_ranges(self, ranges: AnyBuffer, gradients: AnyBuffer) -> tuple[bool, int]: ...
    def pull_ranges(self, ranges: AnyBuffer, values: AnyBuffer) -> None: ...
    def wait_for_workers(self, timeout: float | None = None) -> bool: ...
    def read_state(self, parameters: AnyBuffer, state: Sequence[AnyBuffer]) -> int:
        """Copies this server's part of the parameters and of the optimizer's state. Returns the number of updates."""
    def write_state(self, parameters: AnyBuffer, state: Sequence[AnyBuffer], steps: int) -> None: ...
    def abort(self, message: str) -> None:
        """Ends the connections. The errors of the other ranks contain the message."""
    def close(self) -> None: ...

@final
class Rendezvous:
    """The rendezvous server of a job. A separate thread runs the server until all ranks have joined or this object is dropped."""
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
    """Joins a job. Without arguments, joins the job for which `ringrun` started this process. If `ringrun` did not start this
    process, makes a job of one rank. `job_id` has 32 hexadecimal digits. `peers` is the path of a file with each rank's
    `host:port`; with `peers`, you must also pass `rank`. Times are in seconds."""

def solo() -> Group:
    """Returns a group whose only rank is this process."""

def before_fork() -> None:
    """Tells the module that this process is about to fork."""

def after_fork() -> None:
    """Tells the module that this process is a forked child. From now on every call raises `Forked`."""

@final
class Group:
    """A group of ranks of a job. Collectives of one group run one after another, even if several threads call them. A message
    need not wait for a collective to end."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    members: list[int]
    """The members' ranks in the job."""
    transport: str
    timeout: float
    """The limit in seconds for each operation. `math.inf` means no limit. A new value applies to operations that begin later."""
    is_closed: bool

    def algorithm(self, operation: str, bytes: int) -> str: ...
    def statistics(self) -> dict[str, float]: ...

    # Collectives write to `output`. If `input` is None, the operation is in place and reads its data from `output`. `counts` has
    # the number of elements of each rank, if these numbers differ. `compression` is for f32 only.
    #
    # With `async_op`, a collective or message only begins, and the call returns its handle. Do not use the buffers before
    # `Handle.wait` has returned. Otherwise the call waits, and returns what `Handle.wait` would return.
    def all_reduce(
        self,
        output: AnyBuffer,
        op: str = "sum",
        input: AnyBuffer | None = None,
        compression: str | Compressor | None = None,
        *,
        async_op: bool = False,
    ) -> Handle | None: ...
    def reduce(
        self, output: AnyBuffer | None, op: str, root: int, input: AnyBuffer | None = None, *, async_op: bool = False
    ) -> Handle | None:
        """On a rank that is not the root, `output` is not used if `input` is passed. If `input` is None, `output` holds partial
        results afterwards."""
    def reduce_scatter(
        self,
        output: AnyBuffer,
        input: AnyBuffer,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Handle | None: ...
    def all_gather(
        self, output: AnyBuffer, input: AnyBuffer | None, counts: Sequence[int] | None = None, *, async_op: bool = False
    ) -> Handle | None:
        """If `input` is None, this rank's part must already be at its position in `output`."""
    def gather(
        self,
        output: AnyBuffer | None,
        input: AnyBuffer,
        root: int,
        counts: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Handle | None:
        """Only the root uses `output`."""
    def scatter(
        self,
        output: AnyBuffer,
        input: AnyBuffer | None,
        root: int,
        counts: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Handle | None:
        """Only the root uses `input`."""
    def broadcast(self, output: AnyBuffer, root: int, *, async_op: bool = False) -> Handle | None: ...
    def all_to_all(
        self,
        output: AnyBuffer,
        input: AnyBuffer,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Handle | None: ...
    def scan(
        self, output: AnyBuffer, op: str = "sum", input: AnyBuffer | None = None, *, async_op: bool = False
    ) -> Handle | None: ...
    def exscan(
        self, output: AnyBuffer, op: str = "sum", input: AnyBuffer | None = None, *, async_op: bool = False
    ) -> Handle | None:
        """On rank 0, `output` does not change."""
    def barrier(self, *, async_op: bool = False) -> Handle | None: ...

    # Messages. Tags are 0 to 2**32 - 2. A source or tag of None matches any source or tag. A message must have the type of the
    # receive's buffer and no more elements than the buffer. A synchronous send completes only when a receive has matched the
    # message.
    def send(
        self, buffer: AnyBuffer, to: int, tag: int = 0, synchronous: bool = False, *, async_op: bool = False
    ) -> Handle | None: ...
    def receive(self, buffer: AnyBuffer, source: int | None = None, tag: int | None = None, *, async_op: bool = False) -> Any:
        """The result is `(source, tag, count)`."""
    def send_receive(
        self, buffer: AnyBuffer, to: int, send_tag: int, output: AnyBuffer, source: int | None, receive_tag: int | None
    ) -> tuple[int, int, int]: ...
    def probe(self, source: int | None = None, tag: int | None = None, timeout: float = 0.0) -> tuple[int, int, int, str] | None:
        """Returns `(source, tag, count, dtype)` of the next message that no receive has matched, or `None` after `timeout`
        seconds."""

    # Messages of bytes. Only the sender needs to know the length. The messages have the type "u8". Buffers of any type can be
    # sent.
    def send_bytes(
        self, data: AnyBuffer, to: int, tag: int = 0, synchronous: bool = False, *, async_op: bool = False
    ) -> Handle | None: ...
    def receive_bytes(self, source: int | None = None, tag: int | None = None, *, async_op: bool = False) -> Any:
        """The result is `(bytes, source, tag)`."""
    def receive_into_bytes(
        self, buffer: AnyBuffer, source: int | None = None, tag: int | None = None, *, async_op: bool = False
    ) -> Any:
        """Receives bytes into the beginning of a buffer of any type. The result has the source, the tag and the number of
        bytes. If the message is longer than the buffer, only this rank raises `Truncated`."""

    # Collectives of bytes. A rank that cannot contribute data passes the reason as `refusal`. Every other rank then raises an
    # `Error` that names that rank and the reason.
    def broadcast_bytes(self, data: AnyBuffer | None, root: int, refusal: str | None = None) -> bytes: ...
    def all_gather_bytes(self, data: AnyBuffer | None, refusal: str | None = None) -> list[bytes]: ...
    def gather_bytes(self, data: AnyBuffer | None, root: int, refusal: str | None = None) -> list[bytes] | None: ...
    def scatter_bytes(self, data: Sequence[AnyBuffer] | None, root: int, refusal: str | None = None) -> bytes: ...
    def all_to_all_bytes(self, data: Sequence[AnyBuffer] | None, refusal: str | None = None) -> list[bytes]: ...

    # All ranks of this group must call these five functions.
    def write_timeline(self) -> str | None: ...
    def split(self, colour: int | None, key: int = 0) -> Group | None: ...
    def subgroup(self, ranks: Sequence[int]) -> Group | None: ...
    def duplicate(self) -> Group: ...
    def alloc(self, count: int, dtype: str) -> Shared: ...

    # Any rank may call these functions.
    def abort(self, message: str) -> Error:
        """Ends the job on every rank. Returns the error that all ranks get."""
    def write_flight_record(self, reason: str) -> None: ...
    def close(self) -> None:
        """Closes the group. Later calls on the group raise `Error`."""

class ArrayGroup:
    """The base class of `ringtrain.Group`. If the arguments are numpy arrays that need no conversion, and `out` is passed, a
    method runs its operation itself. Otherwise it calls the method of the subclass that has the same name with an underscore in
    front."""

    def __init__(self, core: Group) -> None: ...
    def all_reduce(self, x: Any, op: str = "sum", *, out: Any = None, compression: str | Compressor | None = None) -> Any: ...
    def reduce_scatter(self, x: Any, op: str = "sum", *, out: Any = None, counts: Sequence[int] | None = None) -> Any: ...
    def broadcast(self, x: Any, root: int = 0, *, out: Any = None) -> Any: ...
    def all_gather(self, x: Any, *, out: Any = None, counts: Sequence[int] | None = None) -> Any: ...
    def gather(self, x: Any, root: int = 0, *, out: Any = None, counts: Sequence[int] | None = None) -> Any: ...
    def scatter(self, x: Any, root: int = 0, *, out: Any = None, counts: Sequence[int] | None = None) -> Any: ...
    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = None,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
    ) -> Any: ...
    def barrier(self) -> None: ...
    def send(self, x: Any, to: int, tag: int = 0, *, synchronous: bool = False) -> None: ...
    def receive(self, out: Any, source: int | None = None, tag: int | None = None) -> Any: ...
