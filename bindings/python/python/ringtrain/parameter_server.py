"""A parameter server: some ranks hold the parameters and apply gradients, and the other ranks compute gradients."""

import math
import operator
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _core, _shutdown, _world
from ._errors import Error, InvalidArgument, Unsupported
from ._parameters import Parameters, as_gradient
from .group import Group

_FLOAT32 = np.dtype(np.float32)
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_STATE_PREFIX = "optimizer."
# With these optimizers, the step of a parameter depends on the gradients of its whole tensor.
_RULES_OF_WHOLE_TENSORS = ("lamb", "lars")


class PushResult(NamedTuple):
    """Says whether the servers applied a gradient. `bool(result)` is `result.applied`."""

    applied: bool
    """Whether all servers applied the gradient. If false, at least one server dropped its part of the gradient, because
    the gradient was too old."""
    staleness: int
    """The number of updates of the server between this worker's pull and its push. With several servers, the largest of
    these numbers."""

    def __bool__(self) -> bool:
        return self.applied


class Staleness(NamedTuple):
    """The staleness of the gradients that a server has received."""

    counts: list[int]
    """`counts[s]` is the number of applied gradients with a staleness of `s`. `counts[1023]` also includes all larger
    values."""
    dropped: int
    """The number of gradients that the server dropped because of their staleness."""


class ParameterServer:
    """A parameter server. Each rank creates this object as a server or as a worker. The first `servers` ranks of `group` hold
    equal parts of the parameters and apply gradients. The other ranks are workers: they pull parameters, compute gradients and
    push these gradients. With lamb and lars, each array or tensor is on one server, so the parts may differ in size.

    All ranks of `group` (by default the world) must create the object at the same time, with parameters of the same
    shapes and with the same options. The parameters of the group's rank 0 are the initial parameters.

    `parameters` is a float32 array, a sequence or mapping of arrays, a tensor, a sequence or mapping of tensors, or a
    module of torch. The arrays must be contiguous, and the tensors must be on the CPU. The server holds only those
    parameters of a module that require gradients. Buffers and frozen parameters keep the values that each rank has
    given them.

    The optimizers are "sgd", "momentum", "nesterov", "adam", "adamw", "lamb" and "lars". `momentum`, `betas`, `eps`
    and `weight_decay` mean the same as in torch.optim. The defaults are 0.9 for `momentum`, (0.9, 0.999) for `betas`
    and 1e-8 for `eps`. The default of `weight_decay` is 0.01 for adamw and lamb, 0.0005 for lars, and otherwise 0.

    By default, a server applies each gradient as soon as the gradient arrives (asynchronous SGD). No worker waits for
    another worker, and the loss of a worker does not affect the other ranks. With `staleness`, a server drops a gradient
    if more than `staleness` updates happened since the worker received the parameters. With `staleness_aware`, a server
    divides the learning rate by the staleness of the gradient. Gradients with a staleness of 0 or 1 keep the full rate.
    With `synchronous`, a server waits in each step for the gradients of all workers, and applies their mean.

    Raises `InvalidArgument` if an argument is wrong or no rank is a worker, `Unsupported` if there are more servers than
    parameters, or with lamb and lars more servers than arrays, and `Mismatch` if the ranks pass different numbers of
    parameters. Any thread may call any method; the calls of a worker run one after another.
    """

    def __init__(
        self,
        parameters: Any,
        lr: float,
        *,
        optimizer: str = "sgd",
        momentum: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        servers: int = 1,
        synchronous: bool = False,
        staleness: int | None = None,
        staleness_aware: bool = False,
        group: Group | None = None,
    ) -> None:
        _check_constants(optimizer, lr, momentum, betas, eps, weight_decay)
        servers = operator.index(servers)
        if not 1 <= servers < 2**32:
            raise InvalidArgument(f"servers is {servers}; at least 1 server is needed")
        if staleness is not None and not 0 <= operator.index(staleness) < 2**64:
            raise InvalidArgument(f"staleness is {staleness}; it must be at least 0")
        if synchronous and (staleness is not None or staleness_aware):
            raise InvalidArgument("a synchronous server has no old gradients; leave out staleness and staleness_aware")
        group = _world.current_world() if group is None else group
        self._parameters = Parameters(parameters)
        self._optimizer = optimizer
        self._is_synchronous = bool(synchronous)
        # A thread of a worker must hold this lock while it uses `_values` or `_gradient`.
        self._lock = threading.RLock()
        self._values = self._parameters.copy_to_vector(np.empty(self._parameters.element_count, np.float32))
        self._core = _core.ParameterServer(
            group.core,
            self._values,
            self._parameters.sizes,
            servers,
            optimizer,
            lr,
            0.9 if momentum is None else momentum,
            (*(betas or (0.9, 0.999)), 1e-8 if eps is None else eps),
            weight_decay,
            bool(synchronous),
            staleness,
            bool(staleness_aware),
        )
        self._resource = _shutdown.GroupResource(self._core)
        self.is_server: bool = self._core.is_server
        """Whether this rank is a server."""
        self.workers: list[int] = self._core.workers
        """The ranks of the workers in the job."""
        own = group.members[group.rank]
        self.worker_index: int | None = None if self.is_server else self.workers.index(own)
        """The number of this worker among the workers, from 0; `None` on a server. Use this number to choose the
        worker's data."""
        self._gradient = np.empty_like(self._values)
        # With one array and one server, a pull writes directly to this array.
        array = self._parameters.single_array() if servers == 1 else None
        self._pulls_into_array = array is not None
        received = self._values if array is None else array
        # The memory to which a pull writes. A `Memory` costs less time in each call than an array.
        self._received: Any = _core.Memory(received, received.ctypes.data, received.size, "f32") if received.size else received

    def __repr__(self) -> str:
        role = "server" if self.is_server else f"worker {self.worker_index} of {len(self.workers)}"
        return f"<ringtrain.ParameterServer: {role}, {self._optimizer}, {self._parameters.element_count} parameters>"

    # Workers

    def pull(self) -> None:
        """Receives the current parameters from all servers and writes them to the program's arrays or tensors.

        Raises `PeerLost` if a server is lost: the exception's `rank` is the server, and the parameters do not change, unless the
        server is lost while it sends them: then some of them may have their new values. Raises `JobFailed` if a synchronous
        server has lost a worker. Only workers may call `pull`, `push`, `push_pull`, `push_rows`, `pull_rows` and
        `set_learning_rate`."""
        self._check_worker()
        with self._lock:
            self._core.pull(self._received)
            if not self._pulls_into_array:
                self._parameters.copy_from_vector(self._values)

    def push(self, gradient: Any = None) -> PushResult:
        """Sends a gradient to all servers. The gradient must have been computed with the parameters that this worker
        received last.

        `gradient` has the structure and the shapes of the parameters; numbers of other types are converted to
        float32. Without `gradient`, the call sends the attribute `grad` of each tensor. A tensor without `grad` has a
        gradient of zeros. If a `grad` is sparse, the call sends only its rows, as `push_rows` does. Raises the same
        errors as `pull`."""
        self._check_worker()
        with self._lock:
            if gradient is None and self._sends_rows(grads := self._parameters.gradients_of_tensors()):
                ranges, values = self._sparse_ranges(grads)
                return PushResult(*self._core.push_ranges(ranges, values))
            return PushResult(*self._core.push(self._contiguous_gradient(gradient)))

    def push_pull(self, gradient: Any = None) -> PushResult:
        """Does the same as `push` and then `pull`, in one round trip. Unlike `push`, sends a sparse `grad` as a dense
        gradient."""
        self._check_worker()
        with self._lock:
            result = self._core.push_pull(self._contiguous_gradient(gradient), self._received)
            if not self._pulls_into_array:
                self._parameters.copy_from_vector(self._values)
            return PushResult(*result)

    def set_learning_rate(self, lr: float) -> None:
        """Sets the learning rate with which servers apply the later gradients of all workers. One call of one worker is enough.
        With synchronous servers, call it before this worker pushes the gradient of the first step with the new rate. A new
        job starts with the rate that it passes to the constructor. Raises the same errors as `pull`."""
        self._check_worker()
        if not 0 <= lr <= _FLOAT32_MAX:
            raise InvalidArgument(f"lr is {lr}, which is out of its range")
        with self._lock:
            self._core.set_learning_rate(lr)

    def push_rows(self, parameter: int | str, rows: ArrayLike, values: Any) -> PushResult:
        """Sends the gradients of some rows of one parameter, such as the rows of an embedding that a batch uses.

        `parameter` is the parameter's name or index. `rows` is a vector of integers in any order, and `values` has
        the gradient of each of these rows. If `rows` contains a row several times, its gradients are added. The state
        of the optimizer changes only in these rows. Raises `Unsupported` with a synchronous server, lamb or lars, which
        need the gradients of all rows."""
        self._check_worker()
        self._refuse_rows_if_synchronous()
        index, unique, places, ranges = self._parameters.check_rows(parameter, rows)
        shape = (places.size, *self._parameters.arrays[index].shape[1:])
        gradients = as_gradient("the gradient of the rows", values, shape)
        sums = np.zeros((unique.size, *shape[1:]), np.float32)
        np.add.at(sums, places, gradients.astype(np.float32, copy=False))
        with self._lock:
            return PushResult(*self._core.push_ranges(ranges, sums.reshape(-1)))

    def pull_rows(self, parameter: int | str, rows: ArrayLike) -> None:
        """Receives the current values of some rows of one parameter, and writes them to the program's array or
        tensor. The arguments are those of `push_rows`. The staleness of the next push counts from this call."""
        self._check_worker()
        index, unique, _, ranges = self._parameters.check_rows(parameter, rows)
        values = np.empty((unique.size, *self._parameters.arrays[index].shape[1:]), np.float32)
        with self._lock:
            self._core.pull_ranges(ranges, values.reshape(-1))
            self._parameters.copy_rows(index, unique, values)

    def _check_worker(self) -> None:
        if self.is_server:
            raise Error("this rank is a server; only workers push and pull")

    def _refuse_rows_if_synchronous(self) -> None:
        if self._is_synchronous:
            raise Unsupported("a synchronous server needs the gradients of all parameters; call push")
        if self._optimizer in _RULES_OF_WHOLE_TENSORS:
            message = f"{self._optimizer} needs the gradients of whole tensors; call push, or use another optimizer"
            raise Unsupported(message)

    def _sends_rows(self, grads: list[Any]) -> bool:
        needs_whole_gradients = self._is_synchronous or self._optimizer in _RULES_OF_WHOLE_TENSORS
        return not needs_whole_gradients and any(grad is not None and grad.is_sparse for grad in grads)

    def _contiguous_gradient(self, gradient: Any) -> NDArray:
        """Returns the gradients of all parameters in one contiguous array of float32. If `gradient` is `None`, these are the
        attributes `grad` of the tensors. If `gradient` is already such an array, returns it without a copy."""
        if type(gradient) is np.ndarray and self._parameters.is_single and gradient.dtype == _FLOAT32:
            if gradient.flags.carray and gradient.shape == self._parameters.arrays[0].shape:
                return gradient
        parameters = self._parameters
        if gradient is None:
            grads = parameters.gradients_of_tensors()
            arrays = [None if grad is None else _to_dense_gradient(parameters, index, grad) for index, grad in enumerate(grads)]
        else:
            arrays = parameters.gradient_arrays(gradient)
        for index, array in enumerate(arrays):
            self._gradient[parameters.slice_of_parameter(index)] = 0 if array is None else array.reshape(-1)
        return self._gradient

    def _sparse_ranges(self, grads: list[Any]) -> tuple[NDArray, NDArray]:
        """Returns the ranges of the vector for which `grads` has gradients, and the gradients of these ranges. At least one of
        `grads` is sparse."""
        parameters = self._parameters
        ranges, values = [], []
        for index, grad in enumerate(grads):
            if grad is not None and grad.is_sparse and grad.sparse_dim() == 1:
                grad = grad.detach().coalesce()
                rows = grad.indices()[0].numpy()
                ranges.append(parameters.element_ranges_of_rows(index, rows))
                values.append(grad.values().numpy().reshape(-1))
            elif parameters.sizes[index]:
                ranges.append(np.array([[parameters.starts[index], parameters.sizes[index]]], np.int64))
                whole = (
                    np.zeros(parameters.sizes[index], np.float32) if grad is None else _to_dense_gradient(parameters, index, grad)
                )
                values.append(whole.reshape(-1))
        return np.concatenate(ranges), np.concatenate(values).astype(np.float32, copy=False)

    # Servers

    def wait_for_workers(self, timeout: float | None = None) -> bool:
        """On a server, waits until every worker has closed its connections or is lost. Returns `False` if `timeout` seconds have
        passed before that, otherwise `True`. Ctrl-C interrupts the wait."""
        return self._core.wait_for_workers(timeout)

    @property
    def lost_workers(self) -> list[tuple[int, str]]:
        """On a server, a pair for each worker that this server has lost: the worker's rank in the job, and the
        reason."""
        return self._core.lost_workers

    @property
    def staleness(self) -> Staleness:
        """On a server, the staleness of the gradients that this server has received."""
        return Staleness(*self._core.staleness)

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of this server's part of the parameters and of the optimizer's state. No update happens during the copy.
        The keys are "parameters" (this part), "start" (its position in the vector of all parameters), "steps" (the number of
        updates), "optimizer" (the optimizer's name), and a key for each vector of the optimizer's state, such as "velocity".
        `numpy.savez(file, **state)` saves the part. Each server saves its own part."""
        start, count = self._core.part
        parameters = np.empty(count, np.float32)
        vectors = {name.removeprefix(_STATE_PREFIX): np.empty(count, np.float32) for name in self._core.state_names}
        steps = self._core.read_state(parameters, list(vectors.values()))
        return {"optimizer": self._optimizer, "start": start, "steps": steps, "parameters": parameters, **vectors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the part that `state_dict` has returned, or that `numpy.load` has read from a file. The job must have the same
        number of servers as the job that saved the part. All servers must have called this method before a worker pulls. To
        ensure this order, call `group.barrier()` on all ranks after the servers have called this method.

        Raises `InvalidArgument` if the state belongs to another optimizer or to other parameters."""
        start, count = self._core.part
        names = [name.removeprefix(_STATE_PREFIX) for name in self._core.state_names]
        expected = ["optimizer", "start", "steps", "parameters", *names]
        if missing := [name for name in expected if name not in state]:
            raise InvalidArgument(f"the state has no {', '.join(missing)}")
        if str(state["optimizer"]) != self._optimizer:
            raise InvalidArgument(f"the state belongs to the optimizer {state['optimizer']}, not {self._optimizer}")
        parameters, *vectors = (np.array(state[name]) for name in ("parameters", *names))
        if int(state["start"]) != start or any(vector.shape != (count,) for vector in (parameters, *vectors)):
            raise InvalidArgument(
                f"the state has the parameters from {int(state['start'])} of shape {parameters.shape}, but this server has "
                f"{count} parameters from {start}"
            )
        steps = int(state["steps"])
        if not 0 <= steps < 2**64:
            raise InvalidArgument(f"steps is {steps}; a number of updates is at least 0")
        self._core.write_state(parameters, vectors, steps)

    # All ranks

    @property
    def is_closed(self) -> bool:
        """Whether this object has been closed."""
        return self._core.is_closed

    def close(self) -> None:
        """Closes the connections of this rank. A worker tells the servers that it has ended. On a server, call
        `wait_for_workers` first: otherwise, the next call of each worker raises `PeerLost`. The end of the program
        also closes the connections. A second call of `close` does nothing."""
        self._core.close()

    def __enter__(self) -> "ParameterServer":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            # The servers count this worker as lost, with this reason.
            self._core.abort(f"its program raised {type(error).__name__}: {error}")
        self.close()


def _to_dense_gradient(parameters: Parameters, index: int, grad: Any) -> NDArray:
    return as_gradient(f"the gradient of {parameters.names[index]}", grad, parameters.arrays[index].shape)


def _check_constants(
    optimizer: str,
    lr: float,
    momentum: float | None,
    betas: tuple[float, float] | None,
    eps: float | None,
    weight_decay: float | None,
) -> None:
    """Raises `InvalidArgument` if a constant of an optimizer is out of its range, or has no effect."""
    has_momentum = optimizer in ("momentum", "nesterov", "lars")
    is_adam = optimizer in ("adam", "adamw", "lamb")
    if momentum is not None and not has_momentum:
        raise InvalidArgument(f"the optimizer {optimizer} has no momentum; use momentum, nesterov or lars")
    if (betas is not None or eps is not None) and not is_adam:
        raise InvalidArgument(f"the optimizer {optimizer} has no betas and no eps; use adam, adamw or lamb")
    if betas is not None and len(betas) != 2:
        raise InvalidArgument(f"betas has {len(betas)} numbers instead of 2")
    for name, value, is_valid in (
        ("lr", lr, lambda x: 0 < x <= _FLOAT32_MAX),
        ("momentum", momentum, lambda x: 0 <= x < 1),
        *(("betas", beta, lambda x: 0 <= x < 1) for beta in betas or ()),
        ("eps", eps, lambda x: 0 < x < math.inf),
        ("weight_decay", weight_decay, lambda x: 0 <= x <= _FLOAT32_MAX),
    ):
        if value is not None and not is_valid(value):
            raise InvalidArgument(f"{name} is {value}, which is out of its range")
