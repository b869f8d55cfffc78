"""Collectives on buffers. Each plan gives a blocking, a nonblocking and a persistent method."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _core
from . import plans
from .datatypes import DATATYPES_BY_DTYPE_ID
from .errors import to_mpi_exception
from .info import INFO_NULL
from .operations import SUM, Op
from .plans import Plan
from .requests import NOTHING, Outcome, Prequest, Request

_InvalidArgument, _Error, _ndarray = _core.InvalidArgument, _core.Error, np.ndarray


class Collectives:
    """The collectives of communicators on buffers."""

    _group: Any

    def _run(self, plan: Plan) -> None:
        operation, arguments, finish = plan
        try:
            getattr(self._group, operation)(*arguments)
        except _Error as error:
            raise to_mpi_exception(error) from error
        if finish is not None:
            finish()

    def _begin(self, plan: Plan) -> Request:
        operation, arguments, finish = plan
        try:
            handle = getattr(self._group, operation)(*arguments, async_op=True)
        except _Error as error:
            raise to_mpi_exception(error) from error
        return Request._of(handle, None if finish is None else _after(finish))

    # These blocking methods pass contiguous arrays to ringtrain without a plan, which saves microseconds. If ringtrain does not
    # accept an array, it has sent nothing yet, and the method uses a plan.

    def Barrier(self) -> None:
        """Waits until all ranks have called `Barrier`."""
        try:
            self._group.barrier()
        except _Error as error:
            raise to_mpi_exception(error) from error

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Copies the root's buffer to the buffers of all ranks."""
        if type(buf) is _ndarray and id(buf.dtype) in DATATYPES_BY_DTYPE_ID:
            try:
                return self._group.broadcast(memoryview(buf).cast("B"), root)
            except (_InvalidArgument, TypeError, ValueError):
                pass
            except _Error as error:
                raise to_mpi_exception(error) from error
        return self._run(plans.bcast(self, buf, root))

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduces the buffers of all ranks, and writes the result to `recvbuf` on every rank. Raises `ValueError` if the types
        or lengths of the two buffers differ."""
        if (
            type(sendbuf) is _ndarray
            and type(recvbuf) is _ndarray
            and sendbuf.dtype is recvbuf.dtype
            and id(recvbuf.dtype) in DATATYPES_BY_DTYPE_ID
        ):
            native = op._plans.get(recvbuf.dtype.char) if op._plans else None
            if native is not None:
                try:
                    return self._group.all_reduce(recvbuf, native, sendbuf)
                except _InvalidArgument:
                    pass
                except _Error as error:
                    raise to_mpi_exception(error) from error
        return self._run(plans.allreduce(self, sendbuf, recvbuf, op))

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Gathers the buffers of all ranks on every rank, one after the other."""
        if (
            type(sendbuf) is _ndarray
            and type(recvbuf) is _ndarray
            and id(sendbuf.dtype) in DATATYPES_BY_DTYPE_ID
            and id(recvbuf.dtype) in DATATYPES_BY_DTYPE_ID
        ):
            try:
                return self._group.all_gather(memoryview(recvbuf).cast("B"), memoryview(sendbuf).cast("B"))
            except (_InvalidArgument, TypeError, ValueError):
                pass
            except _Error as error:
                raise to_mpi_exception(error) from error
        return self._run(plans.allgather(self, sendbuf, recvbuf))


def _after(finish: Callable[[], None]) -> Callable[[Any], Outcome]:
    def outcome(_raw: Any) -> Outcome:
        finish()
        return NOTHING

    return outcome


def _blocking(plan: Callable[..., Plan]) -> Callable[..., None]:
    def method(self: Collectives, *args: Any, **kwargs: Any) -> None:
        self._run(plan(self, *args, **kwargs))

    return method


def _nonblocking(plan: Callable[..., Plan]) -> Callable[..., Request]:
    def method(self: Collectives, *args: Any, **kwargs: Any) -> Request:
        return self._begin(plan(self, *args, **kwargs))

    return method


def _persistent(plan: Callable[..., Plan]) -> Callable[..., Prequest]:
    def method(self: Collectives, *args: Any, info: Any = INFO_NULL, **kwargs: Any) -> Prequest:
        return self._prepared(lambda: self._begin(plan(self, *args, **kwargs)))  # type: ignore[attr-defined]

    return method


def _define(name: str, plan: Callable[..., Plan]) -> None:
    """Adds the three methods of a plan to `Collectives`. The methods have the arguments and the description of the plan."""
    signature = inspect.signature(plan)
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *list(signature.parameters.values())[1:]]
    info = inspect.Parameter("info", inspect.Parameter.KEYWORD_ONLY, default=INFO_NULL)
    for method_name, make, extra, ending in (
        (name, _blocking, [], ""),
        ("I" + name.lower(), _nonblocking, [], " Returns a request at once."),
        (name + "_init", _persistent, [info], " Returns a persistent request."),
    ):
        if method_name in vars(Collectives):
            continue
        method = functools.wraps(plan)(make(plan))
        method.__name__, method.__qualname__ = method_name, f"Comm.{method_name}"
        method.__doc__ = (plan.__doc__ or "") + ending
        shown = signature.replace(parameters=[*parameters, *extra], return_annotation=signature.empty)
        method.__signature__ = shown  # type: ignore[attr-defined]
        setattr(Collectives, method_name, method)


for _plan in (
    plans.barrier, plans.bcast, plans.gather, plans.gatherv, plans.scatter, plans.scatterv, plans.allgather, plans.allgatherv,
    plans.alltoall, plans.alltoallv, plans.alltoallw, plans.reduce, plans.allreduce, plans.reduce_scatter,
    plans.reduce_scatter_block, plans.scan, plans.exscan,
):  # fmt: skip
    _define(_plan.__name__.capitalize(), _plan)
