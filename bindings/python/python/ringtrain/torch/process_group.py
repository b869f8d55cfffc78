"""`torch.distributed`'s process group, on a group of ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringtrain import _core
from ringtrain.torch import cuda, tensors
from ringtrain.torch.coalesced import Coalesced
from ringtrain.torch.completion import Completer
from ringtrain.torch.messages import Messages
from ringtrain.torch.works import Finished, Pending, seconds

Tensor = torch.Tensor
Tensors = list[Tensor]


class RingProcessGroup(Messages, Coalesced, dist.ProcessGroup):
    """What `init_process_group("ring")` and `new_group` make. Use it through `torch.distributed`.

    A call with `async_op=False` runs in the calling thread from beginning to end: no other thread is woken for it. With
    `async_op=True` it goes on by itself, and the tensors are not to be used before `Work.wait`.

    Errors are `ringtrain.Error`s; once a rank is lost every later call raises the same one, naming it. `global_ranks` are the
    members' numbers in torch's world, in which errors speak; `of_launcher` says whether one ringrun started them all.
    """

    def __init__(self, group: _core.Group, global_ranks: Sequence[int] = (), of_launcher: bool = False) -> None:
        super().__init__(group.rank, group.size)
        self.of_launcher = of_launcher
        self._group = group
        self._global_ranks = list(global_ranks) or list(range(group.size))
        self._timeout = group.timeout
        self._limited = threading.Lock()
        self._completer = Completer("ring-completion")
        self._name = ""
        self._description = ""
        self._closed = False

    # Who we are.

    @property
    def core(self) -> _core.Group:
        """The group underneath, for what torch has no words for."""
        return self._group

    def getBackendName(self) -> str:
        return "ring"

    def _get_backend_name(self) -> str:
        return "ring"

    def name(self) -> str:
        return "ring"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_desc = setGroupDesc

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        # None until torch has taken the group up: its flight recorder wants something to attach to on groups that have devices,
        # and a process group written in Python has nothing.
        if self not in dist.distributed_c10d._world.pg_map:
            return []
        return [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])

    def _get_backend(self, device: torch.device) -> RingProcessGroup:
        return self

    get_backend = _get_backend

    supports_coalescing = False
    supports_splitting = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long operations may take that are begun from now on."""
        self._group.timeout = self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Does nothing: an operation's own timeout is the one that it was called with."""

    # The end.

    def shutdown(self) -> None:
        """Lets go of the group. What has not ended yet fails."""
        if self._closed:
            return
        self._closed = True
        try:
            self._group.close()
        except _core.Error:
            pass  # The job has failed, and whoever asked for something has been told.
        self._completer.close(timeout=2.0)

    def abort(self) -> None:
        """Ends the job on every rank."""
        self.fail("torch.distributed was told to abort the process group")
        self.shutdown()

    def fail(self, message: str) -> None:
        """Tells the other ranks that this one gives up, and why."""
        if self._closed:
            return
        try:
            self._group.abort(message)
        except _core.Error:
            pass  # They know already, or this is a fork's child.

    # Collectives. torch's tensors come in lists because a process once had several GPUs; there is one in each.

    def allreduce(self, tensor: Tensors | Tensor, opts: Any = None, timeout: timedelta | None = None) -> dist._Work:
        """All-reduces in place."""
        target = _one(tensor)
        op = _op_of(opts)
        options = _options_of(opts, timeout)
        if not target.is_cpu and tensors.reduction(op, target.dtype) != "premulsum" and target.is_contiguous():
            return self._all_reduce_on_gpu(target, op, options)
        return self._run("all_reduce", options, *self._in_place(target, op))

    def broadcast(self, tensor: Tensors | Tensor, opts: Any = None, timeout: timedelta | None = None) -> dist._Work:
        target = _one(tensor)
        root = opts if isinstance(opts, int) else opts.rootRank
        host, back = tensors.writable(target)
        return self._run("broadcast", _options_of(opts, timeout), (tensors.memory(host), root), [target], back)

    def reduce(self, tensor: Tensors | Tensor, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> dist._Work:
        """Reduces in place on the root; other ranks' tensors stay as they are."""
        target = _one(tensor)
        root = opts if isinstance(opts, int) else opts.rootRank
        op = _op_of(opts if op is None else op)
        if self.rank() == root:
            arguments, outputs, back = self._in_place(target, op)
            return self._run("reduce", _options_of(opts, timeout), (*arguments, root), outputs, back)
        name, source = self._scaled(tensors.readable(target), op)
        return self._run("reduce", _options_of(opts, timeout), (None, name, root, tensors.memory(source, False)), [target])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist._Work:
        """Gathers every rank's tensor on all. Tensors may differ in size if each rank knows the sizes of all, as its outputs
        show."""
        parts, mine = _list_of(outputs), tensors.readable(_one(inputs))
        flat, back = tensors.flat_output(parts)
        arguments = (tensors.memory(flat), tensors.memory(mine, False), tensors.counts(parts, flat))
        return self._run("all_gather", _options_of(opts), arguments, [parts], back)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist._Work:
        """Gathers every rank's tensor into one, in rank order."""
        host, back = tensors.writable(output, keep=False)
        arguments = (tensors.memory(host), tensors.memory(tensors.readable(input), False))
        return self._run("all_gather", _options_of(opts), arguments, [output], back)

    _allgather_base = all_gather_single

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist._Work:
        """Reduces a list with a tensor for each rank, and gives each its own."""
        output, parts = _one(outputs), _list_of(inputs)
        op = _op_of(opts)
        name, flat = self._scaled(tensors.flatten(parts), op)
        host, back = tensors.writable(output, keep=False)
        arguments = (tensors.memory(host), tensors.memory(flat, False), name, tensors.counts(parts, flat))
        return self._run("reduce_scatter", _options_of(opts, timeout), arguments, [output], back)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist._Work:
        """Reduces a tensor of as many parts as there are ranks, and gives each its part."""
        name, flat = self._scaled(tensors.readable(input), _op_of(opts))
        host, back = tensors.writable(output, keep=False)
        arguments = (tensors.memory(host), tensors.memory(flat, False), name)
        return self._run("reduce_scatter", _options_of(opts), arguments, [output], back)

    _reduce_scatter_base = reduce_scatter_single

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist._Work:
        """Gathers every rank's tensor on the root, in a list that other ranks leave empty."""
        root = opts if isinstance(opts, int) else opts.rootRank
        mine = tensors.memory(tensors.readable(_one(inputs)), False)
        if self.rank() != root:
            return self._run("gather", _options_of(opts, timeout), (None, mine, root), [])
        parts = _list_of(outputs)
        flat, back = tensors.flat_output(parts)
        arguments = (tensors.memory(flat), mine, root, tensors.counts(parts, flat))
        return self._run("gather", _options_of(opts, timeout), arguments, [parts], back)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist._Work:
        """Gathers every rank's tensor into one on the root."""
        mine = tensors.memory(tensors.readable(input), False)
        if self.rank() != opts.rootRank:
            return self._run("gather", opts, (None, mine, opts.rootRank), [])
        host, back = tensors.writable(output, keep=False)
        return self._run("gather", opts, (tensors.memory(host), mine, opts.rootRank), [output], back)

    gather_into_tensor = gather_single

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist._Work:
        """Gives each rank a tensor of the root's list."""
        root = opts if isinstance(opts, int) else opts.rootRank
        output = _one(outputs)
        host, back = tensors.writable(output, keep=False)
        flat, sizes = None, [host.numel() * tensors.units(host)] * self.size()
        if self.rank() == root:
            parts = _list_of(inputs)
            if any(part.numel() != output.numel() for part in parts):
                raise _core.InvalidArgument("scatter: all tensors of the list need as many elements as the output")
            flat = tensors.memory(tensors.flatten(parts), False)
        return self._run("scatter", _options_of(opts, timeout), (tensors.memory(host), flat, root, sizes), [output], back)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist._Work:
        """Sends tensor i to rank i, and receives rank i's into output i. Sizes may differ."""
        flat, back = tensors.flat_output(outputs)
        mine = tensors.flatten(inputs)
        uneven = tensors.counts(inputs, mine) or tensors.counts(outputs, flat)
        send, receive = (_sizes(inputs, mine), _sizes(outputs, flat)) if uneven else (None, None)
        arguments = (tensors.memory(flat), tensors.memory(mine, False), send, receive)
        return self._run("all_to_all", _options_of(opts), arguments, [outputs], back)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> dist._Work:
        """Sends part i of the first dimension to rank i, and receives rank i's into part i. Without sizes the parts are equal."""
        host, back = tensors.writable(output, keep=False)
        mine = tensors.readable(input)
        send, receive = _row_counts(mine, input_sizes, self.size()), _row_counts(host, output_sizes, self.size())
        arguments = (tensors.memory(host), tensors.memory(mine, False), send, receive)
        return self._run("all_to_all", _options_of(opts), arguments, [output], back)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist._Work:
        return self._run("barrier", _options_of(opts, timeout), (), [])

    def all_reduce_compressed(self, tensor: Tensor, op: dist.ReduceOp, compression: str | None) -> Pending:
        """All-reduces float32 in place, by itself; as "fp16" or "bf16" on the wire."""
        host, back = tensors.writable(tensor)
        arguments = (tensors.memory(host), tensors.reduction(op, tensor.dtype), None, compression)
        handle = self._begin("all_reduce", None, arguments)
        return Pending([handle], [tensor], [back] if back is not None else (), self._explain, self._completer)

    # How they are run.

    def _run(
        self, name: str, options: Any, arguments: tuple, outputs: Sequence[Any], back: Callable[[], None] | None = None
    ) -> dist._Work:
        """Runs an operation in this thread, or begins it if torch is to wait for it later."""
        limit = None if options is None else seconds(options.timeout)
        if options is not None and not options.asyncOp and limit is None:
            try:
                getattr(self._group, name)(*arguments)
            except _core.Error as error:
                raise self._explain(error) from None
            if back is not None:
                back()
            return Finished(outputs)
        handle = self._begin(name, limit, arguments)
        work = Pending([handle], outputs, [back] if back is not None else (), self._explain, self._completer)
        if options is not None and not options.asyncOp:
            work.wait()
        return work

    def _begin(self, name: str, limit: float | None, arguments: tuple) -> _core.Handle:
        begin = getattr(self._group, name + "_async")
        try:
            if limit is None or limit == self._timeout:
                return begin(*arguments)
            with self._limited:
                self._group.timeout = limit
                try:
                    return begin(*arguments)
                finally:
                    self._group.timeout = self._timeout
        except _core.Error as error:
            raise self._explain(error) from None

    def _all_reduce_on_gpu(self, target: Tensor, op: dist.ReduceOp, options: Any) -> dist._Work:
        """In the calling thread even if `async_op` was asked for, so that all ranks begin their operations in one order."""
        name = tensors.reduction(op, target.dtype)
        limit = None if options is None else seconds(options.timeout)
        try:
            cuda.all_reduce(target, lambda host: self._begin("all_reduce", limit, (tensors.memory(host), name)))
        except _core.Error as error:
            raise self._explain(error) from None
        return Finished([target])

    def _in_place(self, target: Tensor, op: dist.ReduceOp) -> tuple[tuple, Tensors, Callable[[], None] | None]:
        """Arguments, outputs and way back of a reduction in place."""
        host, back = tensors.writable(target)
        name = tensors.reduction(op, target.dtype)
        if name == "premulsum":
            name = "sum"
            host.detach().mul_(tensors.factor(op))
        return (tensors.memory(host), name), [target], back

    def _scaled(self, source: Tensor, op: dist.ReduceOp) -> tuple[str, Tensor]:
        """The name of a reduction, and what is reduced."""
        name = tensors.reduction(op, source.dtype)
        return ("sum", source.detach() * tensors.factor(op)) if name == "premulsum" else (name, source)

    def _explain(self, error: Exception) -> Exception:
        """The error in torch's global ranks, where the group counts its members otherwise."""
        rank = getattr(error, "rank", None)
        if rank is None or rank >= len(self._global_ranks) or self._global_ranks[rank] == rank:
            return error
        told = type(error)(f"{error} (global rank {self._global_ranks[rank]}; this group counts its own)")
        told.rank, told.host = self._global_ranks[rank], error.host
        return told


class _Options:
    """What `_run` looks at, for the calls that carry a timeout only."""

    def __init__(self, timeout: timedelta | None) -> None:
        self.timeout = timeout
        self.asyncOp = True


def _options_of(opts: Any, timeout: timedelta | None = None) -> Any:
    """Options from any of the forms in which torch's methods take them."""
    if hasattr(opts, "asyncOp"):
        return opts
    return _Options(timeout) if timeout is not None else None


def _op_of(opts: Any) -> Any:
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts) if not isinstance(opts, int) else dist.ReduceOp.SUM


def _one(argument: Any) -> Tensor:
    """The tensor of a list of one."""
    if isinstance(argument, Tensor):
        return argument
    if len(argument) != 1:
        raise _core.InvalidArgument(f"the ring backend takes one tensor at a time, not {len(argument)}")
    return argument[0]


def _list_of(argument: Any) -> Tensors:
    """The list of tensors of a list of one list."""
    inner = argument[0] if argument and not isinstance(argument[0], Tensor) else argument
    if not inner:
        raise _core.InvalidArgument("a list of tensors is needed, one for each rank")
    return inner


def _sizes(parts: Tensors, whole: Tensor) -> list[int]:
    scale = tensors.units(whole)
    return [part.numel() * scale for part in parts]


def _row_counts(tensor: Tensor, sizes: Sequence[int], ranks: int) -> list[int] | None:
    """Elements of each part of the first dimension; `None` if all parts are equal."""
    if not sizes:
        if tensor.dim() and tensor.shape[0] % ranks:
            raise _core.InvalidArgument(f"{tensor.shape[0]} rows cannot be split evenly among {ranks} ranks; say how")
        return None
    if len(sizes) != ranks or sum(sizes) != tensor.shape[0]:
        raise _core.InvalidArgument(f"the sizes {list(sizes)} do not split {tensor.shape[0]} rows among {ranks} ranks")
    rows = tensor.shape[0]
    scale = (tensor.numel() // rows if rows else 0) * tensors.units(tensor)
    return [size * scale for size in sizes]
