"""The process group of the backend "ring"."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ringtrain import _core, _shutdown
from ringtrain._text import counted
from ringtrain.torch import cuda, profiling, sparse, tensors
from ringtrain.torch.coalesced import CoalescedCollectives
from ringtrain.torch.completion import Completer
from ringtrain.torch.point_to_point import PointToPoint
from ringtrain.torch.work import CompletedWork, PendingWork, seconds

Tensor = torch.Tensor
Tensors = list[Tensor]


class RingProcessGroup(PointToPoint, CoalescedCollectives, dist.ProcessGroup):
    """The process group of `init_process_group("ring")` and of `new_group`. Use this class through `torch.distributed`.

    A call with `async_op=False` runs in the calling thread and wakes no other thread. A call with `async_op=True` returns at
    once; do not use the tensors of the operation before `Work.wait` has returned.

    Errors are of the class `ringtrain.Error`. After a rank is lost, every later call raises the same error, which names that
    rank.

    `global_ranks` has the rank of each member in the default group. Errors use these numbers. `started_by_ringrun` says whether
    one ringrun started all members.
    """

    def __init__(self, group: _core.Group, global_ranks: Sequence[int] = (), started_by_ringrun: bool = False) -> None:
        super().__init__(group.rank, group.size)
        self.started_by_ringrun = started_by_ringrun
        self._group = group
        self._global_ranks = list(global_ranks) or list(range(group.size))
        self._timeout = group.timeout
        self._timeout_lock = threading.Lock()
        self._completer = Completer("ring-completion")
        self._name = ""
        self._description = ""
        self._closed = False
        # Close the group when the process ends.
        _shutdown.register_resource(self)

    # Description

    @property
    def core(self) -> _core.Group:
        """The group in the compiled module. Use this group for operations that torch does not have."""
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
        return [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])

    def _get_backend(self, device: torch.device) -> RingProcessGroup:
        return self

    get_backend = _get_backend

    supports_coalescing = False
    supports_splitting = True

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> RingProcessGroup | None:
        """Returns a new group of the members `ranks`, in this order. Every member of the old group must call `split_group`,
        and passes the ranks of its own new group. A member whose own rank is not in `ranks` gets `None`.
        `opts` and `device_types` have no effect."""
        is_member = self.rank() in ranks
        try:
            # A rank is in at most one of the new groups, so the smallest rank of a group identifies the group.
            made = self._group.split(min(ranks) if is_member else None, list(ranks).index(self.rank()) if is_member else 0)
        except _core.Error as error:
            raise self._with_global_rank(error) from None
        if made is None:
            return None
        made.timeout = self._timeout if timeout is None else timeout.total_seconds()
        group = RingProcessGroup(made, [self._global_ranks[rank] for rank in ranks], self.started_by_ringrun)
        group.setGroupName(group_name or f"{self._name}:split:{min(ranks)}")
        group.setGroupDesc(group_desc or f"{self._description}:split:{min(ranks)}")
        return group

    def get_group_store(self) -> None:
        """Returns None, because the group keeps no connection to a store."""
        return None

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of all operations that begin after this call."""
        self._group.timeout = self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Does nothing. To set the timeout of one operation, pass the timeout to the call that begins the operation."""

    # Shutdown

    def shutdown(self) -> None:
        """Closes the group. For every operation that has not ended, `Work.wait` raises an error."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(_core.Error):  # the job has failed, and its operations have already raised the error
            self._group.close()
        self._completer.close(timeout=2.0)

    def abort(self) -> None:
        """Ends the job on every rank."""
        self.fail("torch.distributed was asked to abort the process group")
        self.shutdown()

    def fail(self, message: str) -> None:
        """Ends the job on every rank. The errors of all ranks contain `message`."""
        if self._closed:
            return
        with contextlib.suppress(_core.Error):  # the job has ended already, or this is a forked child
            self._group.abort(message)

    # Collectives. torch passes lists of tensors, because one process could once have several GPUs. Here each list has one tensor.

    def allreduce(self, tensor: Tensors | Tensor, opts: Any = None, timeout: timedelta | None = None) -> dist._Work:
        """All-reduces a tensor in place. Sparse tensors in the COO format can be added and averaged."""
        target = _single_tensor(tensor)
        op = _reduction_of(opts)
        options = _options_of(opts, timeout)
        if target.is_sparse:
            return self._all_reduce_now(
                lambda: sparse.all_reduce_sparse(self._group, target, tensors.reduction_name(op, target.dtype)), target, options
            )
        if not target.is_cpu and tensors.reduction_name(op, target.dtype) != "premulsum" and target.is_contiguous():
            name = tensors.reduction_name(op, target.dtype)
            begin = partial(self._group.all_reduce, async_op=True)
            return self._all_reduce_now(
                lambda: cuda.all_reduce_on_gpu(target, lambda host: begin(tensors.as_memory(host), name)), target, options
            )
        return self._run("all_reduce", options, *self._in_place_arguments(target, op))

    def broadcast(self, tensor: Tensors | Tensor, opts: Any = None, timeout: timedelta | None = None) -> dist._Work:
        target = _single_tensor(tensor)
        root = opts if isinstance(opts, int) else opts.rootRank
        host, back = tensors.writable_on_host(target)
        return self._run("broadcast", _options_of(opts, timeout), (tensors.as_memory(host), root), [target], back)

    def reduce(self, tensor: Tensors | Tensor, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> dist._Work:
        """Reduces the tensors of all ranks. On the root, the result replaces the tensor. The tensors of the other ranks do
        not change."""
        target = _single_tensor(tensor)
        root = opts if isinstance(opts, int) else opts.rootRank
        op = _reduction_of(opts if op is None else op)
        if self.rank() == root:
            arguments, outputs, back = self._in_place_arguments(target, op)
            return self._run("reduce", _options_of(opts, timeout), (*arguments, root), outputs, back)
        name, source = self._scaled_input(tensors.readable_on_host(target), op)
        return self._run("reduce", _options_of(opts, timeout), (None, name, root, tensors.as_memory(source, False)), [target])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist._Work:
        """Gathers the tensors of all ranks on every rank. The sizes of these tensors may differ; output i has the size of rank
        i's tensor."""
        parts, mine = _single_tensor_list(outputs), tensors.readable_on_host(_single_tensor(inputs))
        flat, back = tensors.flat_output(parts)
        arguments = (tensors.as_memory(flat), tensors.as_memory(mine, False), tensors.uneven_element_counts(parts, flat))
        return self._run("all_gather", _options_of(opts), arguments, [parts], back)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist._Work:
        """Gathers the tensors of all ranks into the tensor `output`, in rank order."""
        host, back = tensors.writable_on_host(output, keep=False)
        arguments = (tensors.as_memory(host), tensors.as_memory(tensors.readable_on_host(input), False))
        return self._run("all_gather", _options_of(opts), arguments, [output], back)

    _allgather_base = all_gather_single

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist._Work:
        """Each rank passes a list with one tensor for each rank. Rank i gets the reduction of all tensors with index i."""
        output, parts = _single_tensor(outputs), _single_tensor_list(inputs)
        op = _reduction_of(opts)
        name, flat = self._scaled_input(tensors.concatenate_on_host(parts), op)
        host, back = tensors.writable_on_host(output, keep=False)
        arguments = (tensors.as_memory(host), tensors.as_memory(flat, False), name, tensors.uneven_element_counts(parts, flat))
        return self._run("reduce_scatter", _options_of(opts, timeout), arguments, [output], back)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist._Work:
        """Divides the tensor of each rank into equal parts, one for each rank. Rank i gets the reduction of all parts with
        index i."""
        name, flat = self._scaled_input(tensors.readable_on_host(input), _reduction_of(opts))
        host, back = tensors.writable_on_host(output, keep=False)
        arguments = (tensors.as_memory(host), tensors.as_memory(flat, False), name)
        return self._run("reduce_scatter", _options_of(opts), arguments, [output], back)

    _reduce_scatter_base = reduce_scatter_single

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist._Work:
        """Gathers the tensors of all ranks in the root's list `outputs`. The other ranks get no tensors."""
        root = opts if isinstance(opts, int) else opts.rootRank
        mine = tensors.as_memory(tensors.readable_on_host(_single_tensor(inputs)), False)
        if self.rank() != root:
            return self._run("gather", _options_of(opts, timeout), (None, mine, root), [])
        parts = _single_tensor_list(outputs)
        flat, back = tensors.flat_output(parts)
        arguments = (tensors.as_memory(flat), mine, root, tensors.uneven_element_counts(parts, flat))
        return self._run("gather", _options_of(opts, timeout), arguments, [parts], back)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist._Work:
        """Gathers the tensors of all ranks into the root's tensor `output`, in rank order."""
        mine = tensors.as_memory(tensors.readable_on_host(input), False)
        if self.rank() != opts.rootRank:
            return self._run("gather", opts, (None, mine, opts.rootRank), [])
        host, back = tensors.writable_on_host(output, keep=False)
        return self._run("gather", opts, (tensors.as_memory(host), mine, opts.rootRank), [output], back)

    gather_into_tensor = gather_single

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist._Work:
        """Sends tensor i of the root's list to rank i."""
        root = opts if isinstance(opts, int) else opts.rootRank
        output = _single_tensor(outputs)
        host, back = tensors.writable_on_host(output, keep=False)
        flat, sizes = None, [host.numel() * tensors.values_per_element(host)] * self.size()
        if self.rank() == root:
            parts = _single_tensor_list(inputs)
            if any(part.numel() != output.numel() for part in parts):
                raise _core.InvalidArgument("scatter: all tensors of the list need as many elements as the output")
            flat = tensors.as_memory(tensors.concatenate_on_host(parts), False)
        return self._run("scatter", _options_of(opts, timeout), (tensors.as_memory(host), flat, root, sizes), [output], back)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist._Work:
        """Sends input i to rank i and receives output i from rank i. The sizes of tensors may differ."""
        flat, back = tensors.flat_output(outputs)
        mine = tensors.concatenate_on_host(inputs)
        uneven = tensors.uneven_element_counts(inputs, mine) or tensors.uneven_element_counts(outputs, flat)
        send, receive = (_element_counts(inputs, mine), _element_counts(outputs, flat)) if uneven else (None, None)
        arguments = (tensors.as_memory(flat), tensors.as_memory(mine, False), send, receive)
        return self._run("all_to_all", _options_of(opts), arguments, [outputs], back)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> dist._Work:
        """Sends part i of the input's rows to rank i and receives part i of the output's rows from rank i. If
        the lists of sizes are empty, all parts have equally many rows."""
        host, back = tensors.writable_on_host(output, keep=False)
        mine = tensors.readable_on_host(input)
        send, receive = _row_counts(mine, input_sizes, self.size()), _row_counts(host, output_sizes, self.size())
        arguments = (tensors.as_memory(host), tensors.as_memory(mine, False), send, receive)
        return self._run("all_to_all", _options_of(opts), arguments, [output], back)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist._Work:
        return self._run("barrier", _options_of(opts, timeout), (), [])

    def all_reduce_compressed(self, tensor: Tensor, op: dist.ReduceOp, compression: _core.Compressor | str | None) -> PendingWork:
        """Begins to all-reduce a tensor in place. `compression` is for float32 tensors. None means no compression."""
        host, back = tensors.writable_on_host(tensor)
        arguments = (tensors.as_memory(host), tensors.reduction_name(op, tensor.dtype), None, compression)
        return self._begin("all_reduce", None, arguments, [tensor], back)

    # Execution

    def _run(
        self, name: str, options: Any, arguments: tuple, outputs: Sequence[Any], back: Callable[[], None] | None = None
    ) -> dist._Work:
        """Runs the operation `name` and returns its work. If the call is asynchronous, the operation may still be in progress
        when this method returns."""
        limit = None if options is None else seconds(options.timeout)
        if options is None or options.asyncOp or limit is not None:
            work = self._begin(name, limit, arguments, outputs, back)
            if options is not None and not options.asyncOp:
                work.wait()
            return work
        event = profiling.begin_event(name)
        try:
            getattr(self._group, name)(*arguments)
        except _core.Error as error:
            raise self._with_global_rank(error) from None
        finally:
            profiling.end_event(event)
        if back is not None:
            back()
        return CompletedWork(outputs)

    def _begin(
        self, name: str, limit: float | None, arguments: tuple, outputs: Sequence[Any], back: Callable[[], None] | None
    ) -> PendingWork:
        event = profiling.begin_event(name)
        try:
            with self._with_timeout(limit):
                handle = getattr(self._group, name)(*arguments, async_op=True)
        except _core.Error as error:
            profiling.end_event(event)
            raise self._with_global_rank(error) from None
        return PendingWork([handle], outputs, [back] if back is not None else (), self._with_global_rank, self._completer, event)

    @contextlib.contextmanager
    def _with_timeout(self, limit: float | None) -> Iterator[None]:
        """A context manager. Operations that begin within the block have the timeout `limit`, or the
        group's timeout if `limit` is None."""
        if limit is None or limit == self._timeout:
            yield
            return
        with self._timeout_lock:
            self._group.timeout = limit
            try:
                yield
            finally:
                self._group.timeout = self._timeout

    def _all_reduce_now(self, reduce: Callable[[], None], target: Tensor, options: Any) -> dist._Work:
        """Runs an all-reduce that consists of several operations. The operations run in the calling thread even if `async_op` is
        true, so that all ranks begin these operations in the same order."""
        event = profiling.begin_event("all_reduce")
        try:
            with self._with_timeout(None if options is None else seconds(options.timeout)):
                reduce()
        except _core.Error as error:
            raise self._with_global_rank(error) from None
        finally:
            profiling.end_event(event)
        return CompletedWork([target])

    def _in_place_arguments(self, target: Tensor, op: dist.ReduceOp) -> tuple[tuple, Tensors, Callable[[], None] | None]:
        """Prepares an in-place reduction of `target`. Returns the arguments for the method of `core`, the output tensors, and
        the function that copies the result back to `target`, or `None` if no copy is needed."""
        host, back = tensors.writable_on_host(target)
        name = tensors.reduction_name(op, target.dtype)
        if name == "premulsum":
            name = "sum"
            host.detach().mul_(tensors.premul_factor(op))
        return (tensors.as_memory(host), name), [target], back

    def _scaled_input(self, source: Tensor, op: dist.ReduceOp) -> tuple[str, Tensor]:
        """Returns the name of the reduction `op` in the compiled module, and the tensor to reduce. If `op` has a factor, this
        tensor is `source` times the factor, otherwise `source` itself."""
        name = tensors.reduction_name(op, source.dtype)
        return ("sum", source.detach() * tensors.premul_factor(op)) if name == "premulsum" else (name, source)

    def _with_global_rank(self, error: Exception) -> Exception:
        """Returns an error that gives the rank at fault by its number in the default group. Returns `error` itself if this
        group and the default group have the same number for that rank."""
        rank = getattr(error, "rank", None)
        if rank is None or rank >= len(self._global_ranks) or self._global_ranks[rank] == rank:
            return error
        explained = type(error)(f"{error} (global rank {self._global_ranks[rank]}; the other numbers are ranks of this group)")
        explained.rank, explained.host = self._global_ranks[rank], error.host
        return explained


class _Options:
    """Stands in for torch's options object if torch passes only a timeout to a call."""

    def __init__(self, timeout: timedelta | None) -> None:
        self.timeout = timeout
        self.asyncOp = True


def _options_of(opts: Any, timeout: timedelta | None = None) -> Any:
    """Returns the options of a call. torch passes options as an object, as a timeout only, or not at all."""
    if hasattr(opts, "asyncOp"):
        return opts
    return _Options(timeout) if timeout is not None else None


def _reduction_of(opts: Any) -> Any:
    """Returns the reduction of a call. torch passes the reduction itself, options that contain the reduction, or None (a sum)."""
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts) if not isinstance(opts, int) else dist.ReduceOp.SUM


def _single_tensor(argument: Any) -> Tensor:
    """Returns the tensor in `argument`, which is a tensor or a list with one tensor."""
    if isinstance(argument, Tensor):
        return argument
    if len(argument) != 1:
        raise _core.InvalidArgument(f"the ring backend takes one tensor at a time, not {len(argument)}")
    return argument[0]


def _single_tensor_list(argument: Any) -> Tensors:
    """Returns the tensors in `argument`: a list of tensors, or a list that contains one such list."""
    inner = argument[0] if argument and not isinstance(argument[0], Tensor) else argument
    if not inner:
        raise _core.InvalidArgument("the list of tensors is empty; it needs one for each rank")
    return inner


def _element_counts(parts: Tensors, whole: Tensor) -> list[int]:
    """Returns the length of each part, counted in elements of `tensors.as_memory(whole)`. For example, a complex number
    counts as two elements."""
    scale = tensors.values_per_element(whole)
    return [part.numel() * scale for part in parts]


def _row_counts(tensor: Tensor, sizes: Sequence[int], ranks: int) -> list[int] | None:
    """Returns the length of each rank's part, counted in elements of `tensors.as_memory(tensor)`. The part of a rank has
    `sizes[rank]` rows. Returns `None` if `sizes` is empty: all parts are then equal."""
    if not sizes:
        if tensor.dim() and tensor.shape[0] % ranks:
            raise _core.InvalidArgument(
                f"{counted(tensor.shape[0], 'row')} cannot be split evenly among {ranks} ranks; pass split sizes"
            )
        return None
    if len(sizes) != ranks or sum(sizes) != tensor.shape[0]:
        raise _core.InvalidArgument(f"the sizes {list(sizes)} do not split {counted(tensor.shape[0], 'row')} among {ranks} ranks")
    rows = tensor.shape[0]
    scale = (tensor.numel() // rows if rows else 0) * tensors.values_per_element(tensor)
    return [size * scale for size in sizes]
