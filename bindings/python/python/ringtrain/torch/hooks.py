"""Communication hooks that compress the gradients of DistributedDataParallel.

::

    model.register_comm_hook(None, ringtrain.torch.hooks.bf16)

    state = hooks.CompressionState()
    model.register_comm_hook(state, hooks.topk)

    state = hooks.CompressionState("powersgd:2", start_step=100)
    model.register_comm_hook(state, hooks.compress)

There is a hook for each compression, with the default parameter of the compression. The hook `compress` takes the compression and
its parameter from the state. The state is a `CompressionState`. For fp16 and bf16, which need no memory, it can also
be a process group, or None for the default group.

Only float32 gradients are compressed. The ranks of one host that share memory exchange exact gradients, also with PowerSGD.
"""

# DistributedDataParallel compares the annotations of hooks with types. Therefore this file must not import
# `annotations` from `__future__`, which would turn the annotations into strings.
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ringtrain import _core
from ringtrain.torch import bucket_memory
from ringtrain.torch.backend import ring_group
from ringtrain.torch.bucket_memory import CodecBucket, CompressedBucket, redistribute
from ringtrain.torch.power_sgd import PowerSgdBucket, PowerSgdSettings
from ringtrain.torch.process_group import RingProcessGroup
from ringtrain.torch.work import new_future

__all__ = [
    "CompressionState",
    "auto",
    "bf16",
    "compress",
    "ef21",
    "fp16",
    "fp8",
    "int4",
    "int4_stochastic",
    "int8",
    "int8_stochastic",
    "onebit",
    "powersgd",
    "qsgd",
    "randomk",
    "redistribute",
    "signsgd",
    "topk",
]

Future = torch.futures.Future[torch.Tensor]


class CompressionState:
    """The state of the hooks of one DistributedDataParallel.

    `compression` is the name of a compression, such as "int8", "topk:0.01" or "powersgd:4". It may be left out if the registered
    hook has the name of a compression. `process_group` is the process group of the DistributedDataParallel, or None for the
    default group. The backend of this process group must be "ring".

    If the compression rounds a lot, a rank adds what it could not send in a step to its gradients of the next step (error
    feedback). This needs the memory of one float32 for each parameter. In the first `start_step` steps, gradients are not
    compressed. `seed` is the seed of the random numbers. PowerSGD compresses a gradient only if its factors have less than
    1 / `min_compression_rate` of its elements. All ranks must pass the same values.

    `state_dict` and `load_state_dict` save and restore the state. Raises `ringtrain.InvalidArgument` for a wrong argument.
    """

    def __init__(
        self,
        compression: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        start_step: int = 0,
        min_compression_rate: float = 2.0,
        seed: int = 0,
    ) -> None:
        if start_step < 0:
            raise _core.InvalidArgument(f"start_step is {start_step}; it must be at least 0")
        if not min_compression_rate > 0:
            raise _core.InvalidArgument(f"min_compression_rate is {min_compression_rate}; it must be above 0")
        self.compression = None if compression is None else _core.Compressor(compression).compression
        self.process_group = process_group
        self.start_step = start_step
        self.min_compression_rate = min_compression_rate
        self.seed = seed
        self._buckets: dict[int, CompressedBucket] = {}
        # The buckets of PowerSGD whose gradients wait for the second exchange.
        self._begun: list[tuple[PowerSgdBucket, Future]] = []
        # The position of each parameter in the model, counted from the last parameter. The first step finds the positions:
        # DistributedDataParallel begins with the bucket of the last parameters.
        self._positions: dict[torch.nn.Parameter, int] = {}
        self._knows_model = False
        # What the buckets do not remember themselves.
        self._memory: bucket_memory.Memory = bucket_memory.empty()

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the memory, for `torch.save`: the number of steps, and for each parameter the errors that were not
        sent, the last result of EF21, and the factor of PowerSGD. Call this method between two steps. Every rank has its own
        errors, so every rank must save its own state."""
        bucket_memory.collect(self._buckets.values(), self._memory)
        state = bucket_memory.copied(self._memory)
        if state["results"] and dist.is_initialized():
            state["rank"] = dist.get_rank(self.process_group)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a result of `state_dict`, for the same model and the same rank. For another number of ranks, pass a result of
        `redistribute`. Raises `ringtrain.InvalidArgument` if a part of the state is missing, or if it is the state of EF21 of
        another rank. If the state belongs to another model, the next backward pass raises this error."""
        memory = bucket_memory.checked(state)
        if memory["results"] and "rank" in state and state["rank"] != (rank := dist.get_rank(self.process_group)):
            raise _core.InvalidArgument(
                f"rank {rank} loads the state of rank {state['rank']}; with ef21, every rank must save and load its own state"
            )
        self._memory = memory
        self._buckets.clear()

    def use(self, name: str) -> None:
        """Sets the compression to that of the hook `name`, unless the state has a compression of this kind."""
        if self.compression is None:
            self.compression = _core.Compressor(name).compression
        elif self.compression.split(":")[0] != name:
            raise _core.InvalidArgument(
                f'the state has the compression "{self.compression}", but the hook is that of "{name}"; register hooks.compress'
            )

    def reduce(self, bucket: dist.GradBucket) -> Future:
        """Begins to average the gradients of a bucket."""
        if self.compression is None:
            raise _core.InvalidArgument('the hook `compress` needs a state with a compression, as in CompressionState("int8")')
        group = ring_group(self.process_group)
        self._find_positions(bucket)
        is_power_sgd = self.compression.startswith("powersgd")
        # The library encodes nothing where ranks share memory. PowerSGD is not in the library, so the same rule is here.
        is_exact = is_power_sgd and group.core.transport in ("none", "shm")
        if bucket.buffer().dtype is not torch.float32 or self._memory["steps"] < self.start_step or is_exact:
            future = _average(group, bucket.buffer(), None)
        elif is_power_sgd:
            future = self._begin_power_sgd(group, bucket)
        else:
            future = _average(group, bucket.buffer(), self._memory_of(bucket).compressor)
        if bucket.is_last():
            self._finish_power_sgd()
            self._memory["steps"] += 1
            self._knows_model = True
        return future

    def _begin_power_sgd(self, group: RingProcessGroup, bucket: dist.GradBucket) -> Future:
        """Begins the first exchange of a bucket. The second exchanges of all buckets begin after the last bucket, in the thread
        of the backward pass. So all ranks begin all exchanges in the same order, and no thread waits within a continuation."""
        memory = self._memory_of(bucket)
        memory.begin(
            bucket.buffer(),
            bucket.gradients(),
            lambda factors: group.all_reduce_compressed(factors, dist.ReduceOp.AVG, None),
        )
        future = new_future([bucket.buffer()])
        self._begun.append((memory, future))
        return future

    def _finish_power_sgd(self) -> None:
        begun, self._begun = self._begun, []
        for memory, _ in begun:
            memory.begin_second()
        for memory, future in begun:
            future.set_result(memory.finish())

    def _find_positions(self, bucket: dist.GradBucket) -> None:
        """Finds the positions of the parameters, in the first step: DistributedDataParallel begins with the bucket of the last
        parameters of the model, and the parameters of a bucket have the order of the model."""
        for parameter in reversed(bucket.parameters()):
            if self._knows_model and parameter not in self._positions:
                raise _core.InvalidArgument("a CompressionState belongs to one model; create another state for the second model")
            self._positions.setdefault(parameter, len(self._positions))

    def _memory_of(self, bucket: dist.GradBucket) -> Any:
        """Returns the memory of a bucket. DistributedDataParallel changes its buckets after the first step. In this case, moves
        the memory of each parameter to the new bucket."""
        index, parameters = bucket.index(), bucket.parameters()
        found = self._buckets.get(index)
        if found is None or [*map(id, found.parameters)] != [*map(id, parameters)]:
            # The earlier buckets have already been changed in this step.
            changed = [self._buckets.pop(other) for other in list(self._buckets) if other >= index]
            bucket_memory.collect(changed, self._memory)
            found = self._buckets[index] = self._new_bucket(index, parameters)
            bucket_memory.restore(found, self._memory)
        return found

    def _new_bucket(self, index: int, parameters: list[torch.nn.Parameter]) -> CompressedBucket:
        positions = [self._positions[parameter] for parameter in parameters]
        name, _, rank = self.compression.partition(":")
        if name == "powersgd":
            settings = PowerSgdSettings(int(rank), self.min_compression_rate, self.seed)
            return PowerSgdBucket(parameters, positions, settings)
        return CodecBucket(parameters, positions, self.compression, self.seed + index)


def _average(group: RingProcessGroup, gradients: torch.Tensor, compression: "_core.Compressor | str | None") -> Future:
    work = group.all_reduce_compressed(gradients, dist.ReduceOp.AVG, compression)
    return work.overlapping_future().then(lambda future: future.value()[0])


def compress(state: CompressionState, bucket: dist.GradBucket) -> Future:
    """Averages the gradients of a bucket over the ranks, with the compression of the state."""
    return state.reduce(bucket)


def _hook(name: str) -> Callable[[Any, dist.GradBucket], Future]:
    """Returns the hook for the compression `name`."""
    has_memory = _core.Compressor(name).has_memory

    def hook(state: CompressionState | dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future:
        if isinstance(state, CompressionState):
            state.use(name)
            return state.reduce(bucket)
        if has_memory:
            raise _core.InvalidArgument(
                f'the hook for "{name}" remembers earlier steps; register it with the state hooks.CompressionState()'
            )
        compression = name if bucket.buffer().dtype is torch.float32 else None
        return _average(ring_group(state), bucket.buffer(), compression)

    hook.__name__ = hook.__qualname__ = name.replace("-", "_")
    hook.__doc__ = f'Averages the gradients of a bucket over the ranks, with the compression "{name}".'
    return hook


fp16 = _hook("fp16")
bf16 = _hook("bf16")
fp8 = _hook("fp8-e4m3")
int8 = _hook("int8")
int8_stochastic = _hook("int8-stochastic")
int4 = _hook("int4")
int4_stochastic = _hook("int4-stochastic")
qsgd = _hook("qsgd")
onebit = _hook("onebit")
signsgd = _hook("signsgd")
topk = _hook("topk")
randomk = _hook("randomk")
powersgd = _hook("powersgd")
auto = _hook("auto")
ef21 = _hook("ef21")
