"""Averages the parameters of all ranks from time to time: local SGD, DiLoCo and model averaging."""

import math
import operator
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _world
from ._core import Compressor
from ._errors import InvalidArgument, Mismatch
from ._parameters import Parameters
from .group import Group
from .handles import Handle


class _PendingAverage(NamedTuple):
    """An average that is in progress while the program takes steps."""

    change: Handle
    """The sum of the weighted changes. The sum of the weights is about 1."""
    samples: Handle
    """The number of samples of all ranks."""
    estimate: NDArray
    """This rank's estimate of the parameters after the average."""
    due: int
    """The average changes the parameters in the step with this number."""


class PeriodicAverage:
    """Averages the parameters of ranks that take their training steps alone. Between two averages, the ranks exchange
    nothing, so this method suits slow networks.

    The ranks start from the parameters of the group's rank 0. Each rank then takes steps with an optimizer of its own,
    and calls `step` after each of its steps. After every `every` steps, each rank computes how its parameters have
    changed since the last average. The ranks compute the weighted mean of these changes. The weight of a rank is its
    number of samples since the last average. Each rank adds the mean to the result of the last average, so all ranks
    have the same parameters again, bit for bit. This is local SGD (Stich, "Local SGD converges fast and communicates
    little", 2019).

    With `outer_lr` and `outer_momentum`, each rank does not add the mean. Instead, an outer optimizer takes a step: SGD
    with Nesterov momentum as in torch.optim. The gradient of this step is the mean with the opposite sign. DiLoCo
    (Douillard et al., 2023) uses `outer_lr=0.7` and `outer_momentum=0.9`.

    With `delay`, the ranks take steps while they average. After every `every` steps, they start to exchange their changes.
    Each rank estimates the result from its own changes alone, and goes on from this estimate. `delay` steps later, `step` waits
    for the mean, and adds the error of the estimate to the parameters. So with `delay`, the parameters of the ranks differ also
    after an average. Call `average` when they must be the same. Without `outer_lr` and `outer_momentum`, this is CoCoD-SGD
    (Shen et al., "Faster distributed deep net training: computation and communication decoupled stochastic gradient descent",
    2019). With them, it follows Kale et al., "Eager updates for overlapped communication and computation in DiLoCo", 2025.

    Without `every`, call `average` yourself, for example once after training.

    `parameters` is a float32 array, a sequence or mapping of arrays, a tensor, a sequence or mapping of tensors, or a
    module of torch. The arrays must be contiguous, and the tensors must be on the CPU. If you pass a module, only its
    parameters that require gradients are averaged. `compression`, such as "bf16" or "int8", compresses the changes between
    hosts.

    All ranks of `group` (by default the world) must create the object, with the same options. All ranks must compute
    equally many averages. Raises `InvalidArgument` if an argument is wrong, and `Mismatch` if the ranks pass
    different options or different numbers of parameters.
    """

    def __init__(
        self,
        parameters: Any,
        *,
        every: int | None = None,
        delay: int = 0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        compression: str | None = None,
        group: Group | None = None,
    ) -> None:
        if every is not None and operator.index(every) < 1:
            raise InvalidArgument(f"every is {every}; it must be at least 1")
        if not 0 <= operator.index(delay) <= (every or 0):
            raise InvalidArgument(f"delay is {delay}; it must be at least 0 and at most every, which is {every}")
        if not 0 < outer_lr < math.inf:
            raise InvalidArgument(f"outer_lr is {outer_lr}; it must be above 0 and finite")
        if not 0 <= outer_momentum < 1:
            raise InvalidArgument(f"outer_momentum is {outer_momentum}; it must be at least 0 and below 1")
        self._compressor = None if compression is None else Compressor(compression)
        self._group = _world.current_world() if group is None else group
        self._parameters = Parameters(parameters)
        self._every = every
        self._delay = delay
        self._outer_lr = np.float32(outer_lr)
        self._outer_momentum = np.float32(outer_momentum)
        self._check_same_options()
        self._steps = 0
        self._samples = 0.0
        self._last_total = 0.0
        """The number of samples of all ranks in the last average. 0 if there was no average yet."""
        self._pending: _PendingAverage | None = None
        count = self._parameters.element_count
        self._change = np.empty(count, np.float32)
        self._velocity = np.zeros(count if outer_momentum else 0, np.float32)
        """The velocity of the outer optimizer. Empty without `outer_momentum`."""
        self._start_of_round: NDArray = self._group.broadcast(self._parameters.copy_to_vector(np.empty(count, np.float32)))
        """The parameters after the last average, the same on all ranks."""
        self._parameters.copy_from_vector(self._start_of_round)

    def __repr__(self) -> str:
        when = "on request" if self._every is None else f"every {self._every} steps"
        return f"<ringtrain.PeriodicAverage: {self._parameters.element_count} parameters, {when}>"

    def step(self, samples: float = 1.0) -> bool:
        """Counts a step of this rank that used `samples` samples. After every `every` steps, averages the parameters.
        Returns whether this call has changed the parameters.

        The unit of `samples` does not matter, because only the ratios between the ranks matter. If the ranks have
        batches of different sizes, pass the size of the batch."""
        if not 0 <= samples < math.inf:
            raise InvalidArgument(f"samples is {samples}; it must be at least 0 and finite")
        self._steps += 1
        self._samples += samples
        is_due = self._pending is not None and self._steps >= self._pending.due
        if is_due:
            self._finish_pending()
        if self._every is None or self._steps % self._every:
            return is_due
        if self._delay:
            self._start()
        else:
            self.average()
        return True

    def average(self) -> None:
        """Averages the parameters now, and writes the result to the program's arrays or tensors. All ranks must call
        this method. A rank that has counted no samples with `step` since the last average has the weight 0. If no
        rank has counted samples, all ranks have the same weight. If an average is in progress (`delay`), it ends first.

        After an error, the program's arrays or tensors are unchanged, unless an average was in progress."""
        self._finish_pending()
        total = float(self._group.all_reduce(np.float64(self._samples)))
        self._write_change(self._samples / total if total > 0 else 1 / self._group.size)
        mean = self._group.all_reduce(self._change, out=self._change, compression=self._compressor)
        self._take_outer_step(self._start_of_round, self._velocity, mean)
        self._samples, self._last_total = 0.0, total
        self._parameters.copy_from_vector(self._start_of_round)

    def _start(self) -> None:
        """Starts to average the parameters, and changes them to this rank's estimate of the result."""
        # The ranks do not know their total number of samples yet. So they divide by the total of the last average, and
        # `_finish_pending` corrects the mean. Only the first average waits for the total here.
        if not self._last_total:
            self._last_total = float(self._group.all_reduce(np.float64(self._samples))) or 1.0
        own = self._parameters.copy_to_vector(np.empty_like(self._change)) - self._start_of_round
        self._write_change(self._samples / self._last_total)
        self._pending = _PendingAverage(
            change=self._group.all_reduce_async(self._change, out=self._change, compression=self._compressor),
            samples=self._group.all_reduce_async(np.float64(self._samples)),
            estimate=self._take_outer_step(self._start_of_round.copy(), self._velocity.copy(), own),
            due=self._steps + self._delay,
        )
        self._samples = 0.0
        self._parameters.copy_from_vector(self._pending.estimate)

    def _finish_pending(self) -> None:
        """Waits for the average in progress, if any, and adds the error of the estimate to the parameters."""
        if self._pending is None:
            return
        change, samples, estimate, _ = self._pending
        mean, total = change.wait(), float(samples.wait())
        self._pending = None
        if total > 0:
            mean *= np.float32(self._last_total / total)
            self._last_total = total
        error = self._take_outer_step(self._start_of_round, self._velocity, mean) - estimate
        error += self._parameters.copy_to_vector(estimate)
        self._parameters.copy_from_vector(error)

    def _write_change(self, weight: float) -> None:
        """Writes the changes of this rank since the last average, multiplied by `weight`, to `_change`."""
        if weight > 0:
            self._parameters.copy_to_vector(self._change)
            self._change -= self._start_of_round
            self._change *= np.float32(weight)
        else:
            # The parameters of this rank may be infinite, and 0 times infinity is NaN.
            self._change.fill(0)

    def _take_outer_step(self, start: NDArray, velocity: NDArray, mean: NDArray) -> NDArray:
        """Takes a step of the outer optimizer from `start`, and returns `start`. `mean` is the mean of the changes of all
        ranks, and loses its value."""
        if velocity.size:
            velocity *= self._outer_momentum
            velocity += mean
            mean += self._outer_momentum * velocity
        start += self._outer_lr * mean
        return start

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the state: "parameters" (the parameters after the last average), "velocity" (of the outer
        optimizer), "steps", "samples" and "last_total" (the number of samples of all ranks in the last average). If the
        compression has a memory, the state also has "residual", "result" and "calls", and every rank must save its own state.
        `numpy.savez(file, **state)` saves the state. Save the program's parameters and the state of its optimizer too.

        Raises `InvalidArgument` if an average is in progress (`delay`)."""
        self._check_no_average_in_progress("state_dict")
        state = {
            "parameters": self._start_of_round.copy(),
            "velocity": self._velocity.copy(),
            "steps": self._steps,
            "samples": self._samples,
            "last_total": self._last_total,
        }
        if self._compressor is not None and self._compressor.has_memory:
            state |= self._compressor.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned or `numpy.load` read from a file. Does not change the
        program's arrays or tensors. On all ranks, "parameters" and "velocity" must be the same.

        Raises `InvalidArgument` if the state belongs to other parameters or to other options, or if an average is in
        progress."""
        self._check_no_average_in_progress("load_state_dict")
        if missing := [name for name in ("parameters", "velocity", "steps", "samples") if name not in state]:
            raise InvalidArgument(f"the state has no {', '.join(missing)}")
        vectors = [np.array(state[name], np.float32) for name in ("parameters", "velocity")]
        for name, vector, own in zip(("parameters", "velocity"), vectors, (self._start_of_round, self._velocity), strict=True):
            if vector.shape != own.shape:
                raise InvalidArgument(f"{name} of the state have the shape {vector.shape}, but this object needs {own.shape}")
        steps, samples, last_total = int(state["steps"]), float(state["samples"]), float(state.get("last_total", 0.0))
        if steps < 0 or not (0 <= samples < math.inf and 0 <= last_total < math.inf):
            raise InvalidArgument(
                f"the state has {steps} steps, {samples} samples and last_total {last_total}; they must be finite and at least 0"
            )
        if self._compressor is not None and self._compressor.has_memory:
            empty = np.empty(0, np.float32)
            arrays = {name: np.array(state.get(name, empty)) for name in ("residual", "result")}
            self._compressor.load_state_dict({**arrays, "calls": int(state.get("calls", 0))})
        self._start_of_round, self._velocity = vectors
        self._steps, self._samples, self._last_total = steps, samples, last_total

    def _check_no_average_in_progress(self, method: str) -> None:
        if self._pending is not None:
            raise InvalidArgument(f"an average is in progress; call average() on all ranks before {method}()")

    def _check_same_options(self) -> None:
        compression = 0 if self._compressor is None else zlib.crc32(self._compressor.compression.encode())
        own = [self._every or 0, self._delay, self._outer_lr, self._outer_momentum, compression]
        options = self._group.all_gather(np.array(own, np.float64))
        for rank, row in enumerate(options):
            if not np.array_equal(row, options[0]):
                ranks = (self._group.members[0], self._group.members[rank])
                error = Mismatch(
                    f"rank {ranks[1]} and rank {ranks[0]} passed different options to PeriodicAverage: every, delay, outer_lr, "
                    f"outer_momentum and compression must be the same on all ranks"
                )
                error.ranks = ranks
                raise error
