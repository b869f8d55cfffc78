"""The primitive of JAX that executes a collective in a callback on the host.

The primitive has an ordered effect: JAX passes a token from each collective to the next, also between jitted functions. So each
rank executes its collectives in the order of its program, although JAX runs jitted functions asynchronously and in several
threads. All ranks run the same program, so all ranks have the same order.

The rules for derivatives treat each rank's result as its own function of the inputs of all ranks. The cotangents of all ranks
are added: the gradient of a sum is the sum of the cotangents of all ranks.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import effects
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ringtrain import _core
from ringtrain._text import counted
from ringtrain.arrays import as_contiguous
from ringtrain.jax import interrupts, job
from ringtrain.jax.execution import AllGather, AllReduce, Broadcast, Collective, ReduceScatter, SumOnRoot


class CollectiveEffect(effects.Effect):
    """The effect of a collective: all ranks must execute it, in the same order."""

    def __str__(self) -> str:
        return "ringtrain"

    def __hash__(self) -> int:
        # JAX looks up the token of this effect before it calls a jitted function. In a forked process, the call would not end.
        job.require_rank()
        return object.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return self is other


_effect = CollectiveEffect()
for _effects in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _effects.add_type(CollectiveEffect)

# The reductions that have gradients.
_LINEAR = ("sum", "avg")

_collective = Primitive("ringtrain_collective")
_collective.multiple_results = True


@dataclass(frozen=True)
class Site:
    """A line of the user's program. Errors name this line."""

    file: str
    line: int


def run_collective(collective: Collective, arrays: Sequence[Any]) -> list[jax.Array]:
    """Executes a collective, or adds it to the function that JAX traces. Returns an array for each of `arrays`."""
    group = job.current_group()
    # A job of one rank computes sums and averages without a callback.
    if not arrays or (group.size == 1 and getattr(collective, "op", "sum") in _LINEAR):
        return list(arrays)
    return _collective.bind(*arrays, collective=collective, size=group.size, site=_find_user_line())


# Outside jitted functions


@_collective.def_impl
def _run_now(*arrays: Any, collective: Collective, size: int, site: Site) -> list[jax.Array]:
    # The operations of jitted functions that the program has called before come first.
    job.wait_for_operations()
    inputs = [as_contiguous(array) for array in arrays]
    # JAX may use an aligned numpy array without a copy, and the next call may overwrite the outputs.
    return [jax.numpy.array(output, copy=True) for output in _execute(inputs, collective, size, site)]


def _execute(inputs: Sequence[np.ndarray], collective: Collective, size: int, site: Site) -> list[np.ndarray]:
    group = job.current_group()
    if group.size != size:
        raise _core.InvalidArgument(
            f"the function was traced in a job of {counted(size, 'rank')}, and this job has {group.size}; call jax.clear_caches()"
        )
    with interrupts.in_progress():
        return _call_from(site)(lambda: collective.run(group, inputs))


# Inside jitted functions


@_collective.def_effectful_abstract_eval
def _find_types(*avals: Any, collective: Collective, size: int, site: Site) -> tuple[list[Any], set[effects.Effect]]:
    return [aval.update(shape=collective.output_shape(aval.shape, size)) for aval in avals], {_effect}


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, collective: Collective, size: int, site: Site) -> Sequence[Any]:
    def callback(*inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        try:
            return tuple(_execute([np.asarray(array) for array in inputs], collective, size, site))
        except BaseException as error:
            job.record_failure(error)
            raise

    token = ctx.tokens_in.get(_effect)
    outputs, token, _ = mlir.emit_python_callback(
        ctx, callback, token, list(operands), ctx.avals_in, ctx.avals_out, has_side_effect=True
    )
    ctx.set_tokens_out(mlir.TokenSet({_effect: token}))
    return outputs


mlir.register_lowering(_collective, _lower, cacheable=False)


# Derivatives and batches


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    outputs = _collective.bind(*primals, **params)
    tangents_out: list[Any] = [ad.Zero(jax.typeof(output).to_tangent_aval()) for output in outputs]
    real = [index for index, primal in enumerate(primals) if jax.dtypes.issubdtype(primal.dtype, np.inexact)]
    if real:
        linear = params | {"collective": _linear(params["collective"])}
        found = _collective.bind(*(ad.instantiate_zeros(tangents[index]) for index in real), **linear)
        for index, tangent in zip(real, found, strict=True):
            tangents_out[index] = tangent
    return outputs, tangents_out


def _linear(collective: Collective) -> Collective:
    """Returns the collective for the tangents."""
    op = getattr(collective, "op", "sum")
    if op not in _LINEAR:
        raise NotImplementedError(f"the reduction {op!r} has no gradient; only sums and averages have gradients")
    return AllReduce(op) if isinstance(collective, AllReduce) else collective


def _transpose(cotangents: Sequence[Any], *operands: Any, collective: Collective, size: int, site: Site) -> Sequence[Any]:
    given = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    found = _collective.bind(*given, collective=_adjoint(collective), size=size, site=site)
    is_average = isinstance(collective, ReduceScatter) and collective.op == "avg"
    return [array / np.asarray(size, array.dtype) for array in found] if is_average else found


def _adjoint(collective: Collective) -> Collective:
    """Returns the collective for the cotangents."""
    match collective:
        case Broadcast(root=root):
            return SumOnRoot(root)
        case SumOnRoot(root=root):
            return Broadcast(root)
        case AllGather():
            return ReduceScatter("sum")
        case ReduceScatter():
            return AllGather()
    return collective


def _batch(arrays: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    """Moves the axis of the batch to the end, where no collective uses it."""
    moved = [array if axis is None else jax.numpy.moveaxis(array, axis, -1) for array, axis in zip(arrays, axes, strict=True)]
    outputs = _collective.bind(*moved, **params)
    return outputs, [axis if axis is None else output.ndim - 1 for output, axis in zip(outputs, axes, strict=True)]


ad.primitive_jvps[_collective] = _differentiate
ad.primitive_transposes[_collective] = _transpose
batching.primitive_batchers[_collective] = _batch


# The user's line

# Frames of these modules are between the user's line and this module.
_INTERNAL_MODULES = {"contextlib", "functools", "jax", "optax", "ringtrain"}


def _find_user_line() -> Site:
    """Returns the line of the innermost stack frame of the user's program."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL_MODULES:
        frame = frame.f_back
    return Site(frame.f_code.co_filename, frame.f_lineno)


@functools.lru_cache(maxsize=1024)
def _call_from(site: Site) -> Callable[[Callable[[], Any]], Any]:
    """Returns a function that calls its argument, and that claims to be at the user's line. The compiled module finds this line
    on the stack."""
    code = (lambda call: call()).__code__
    return types.FunctionType(code.replace(co_filename=site.file, co_firstlineno=site.line), {})
