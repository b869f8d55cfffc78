"""Horovod's callbacks for `model.fit`. Any of them also checks at the end of each epoch that all ranks had the same number of
batches."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import keras
import numpy as np

from ringtrain._horovod import job, objects
from ringtrain._horovod.process_sets import ProcessSet, global_process_set
from ringtrain.keras.optimizer import exchange_of
from ringtrain.keras.values import broadcast_variables

Logs = MutableMapping[str, Any]


class _RankCallback(keras.callbacks.Callback):
    """A callback of a model that several ranks train."""

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        _prepare(model)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        exchange = exchange_of(self.model.optimizer)
        if exchange is not None:
            exchange.begin_epoch()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        exchange = exchange_of(self.model.optimizer)
        if exchange is not None:
            exchange.end_epoch()


class BroadcastGlobalVariablesCallback(_RankCallback):
    """Copies the weights of the model and the state of the optimizer from the root to all ranks when training begins, or after
    the first batch if the model has not been built before. Raises `ringtrain.InvalidArgument` on all ranks if their models
    differ; the error names the variable."""

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Iterable[Any] | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Each rank keeps its own values of `local_variables`. `device` has no effect."""
        super().__init__()
        self._local = {id(variable): variable for variable in local_variables or ()}
        self.root_rank = root_rank
        self._process_set = process_set
        self._is_done = False

    def register_local_var(self, var: Any) -> None:
        """Declares that each rank keeps its own value of a variable."""
        self._local[id(var)] = var

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._is_done = False
        # The back end JAX builds the optimizer later; its state is then all zeros or comes from a file that all ranks load.
        if self.model.built:
            optimizer = self.model.optimizer
            if optimizer is not None and not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if not self._is_done:
            _sync(self.model)
            self._broadcast()

    def _broadcast(self) -> None:
        self._is_done = True
        if self._process_set.included() is not False:
            variables = self.model.weights + (self.model.optimizer.variables if self.model.optimizer is not None else [])
            shared = [variable for variable in variables if id(variable) not in self._local]
            broadcast_variables(shared, self.root_rank, self._process_set)


class MetricAverageCallback(_RankCallback):
    """Averages the metrics over the ranks at the end of each epoch. Put it before callbacks that use metrics, such as
    ReduceLROnPlateau and ModelCheckpoint.

    Raises ValueError on all ranks if a metric is not a number on some ranks only, or if the ranks have different metrics."""

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        """`device` has no effect."""
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if logs is None or self._process_set.included() is False:
            return
        mine = {name: float(np.asarray(value)) for name, value in logs.items() if _is_number(value)}
        all_ranks = objects.allgather_object(mine, process_set=self._process_set)
        _check_metrics(all_ranks, self._process_set.members().ranks)
        for name in mine:
            logs[name] = float(np.mean([values[name] for values in all_ranks]))


class LearningRateScheduleCallback(_RankCallback):
    """Multiplies the learning rate `initial_lr` by `multiplier` in the epochs from `start_epoch` to `end_epoch` (exclusive).
    `multiplier` is a number, or a function of the epoch. With `staircase`, the rate changes only when an epoch begins. Otherwise
    it changes before each batch, and the function gets fractions of epochs.

    With `momentum_correction`, the velocity of SGD is scaled when the rate changes (arXiv:1706.02677)."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr must be a number")
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier
        # With a number, the rate cannot change within an epoch.
        self.staircase = staircase or not callable(multiplier)
        self.current_epoch = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        optimizer = self.model.optimizer
        if isinstance(_inner(optimizer)._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            raise ValueError(f"{type(self).__name__} needs an optimizer with a number as learning rate, and not a schedule")
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(f"the number of batches in an epoch is unknown; pass {type(self).__name__} steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set_rate(epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set_rate(epoch)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            # The name that Horovod and older versions of Keras give the learning rate.
            logs["lr"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set_rate(self, epoch: float) -> None:
        _sync(self.model)
        optimizer = self.model.optimizer
        old, new = float(keras.ops.convert_to_numpy(optimizer.learning_rate)), self.initial_lr * self.multiplier(epoch)
        if new == old:
            return
        optimizer.learning_rate = new
        inner = _inner(optimizer)
        if self.momentum_correction and getattr(inner, "momentum", 0) and hasattr(inner, "momentums") and old:
            for velocity in inner.momentums:
                if velocity is not None:
                    velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size()` to `initial_lr` within `warmup_epochs` (arXiv:1706.02677). `initial_lr`
    is the rate for all ranks, which usually is the rate for one rank times `size()`. With a `verbose` above 0, prints the
    final rate."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # Make the last batch of the warm-up reach the full rate.
            epoch += 1.0 / self.steps_per_epoch
            return 1.0 / job.size() * (epoch * (job.size() - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch == self.end_epoch - 1 and self.verbose > 0:
            rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the model on rank 0 when the monitored metric is the best so far. Put it after MetricAverageCallback, so that
    the metric is that of all ranks. Other ranks save nothing."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | os.PathLike[str] | None = None,
    ) -> None:
        """`filepath` ends in `.keras`, or with `save_weights_only` in `.weights.h5`. It can also be set later, as the attribute
        `filepath`. The order of the arguments is that of horovod.tensorflow.keras."""
        if not isinstance(save_weights_only, bool):
            raise ValueError(f"save_weights_only is {save_weights_only!r} instead of a bool; pass mode and save_freq by name")
        path = filepath or ("best.weights.h5" if save_weights_only else "best.keras")
        super().__init__(path, monitor, verbose, True, save_weights_only, mode, save_freq)
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint has no file name; pass it filepath='best.keras'")
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if job.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if job.rank() == 0:
            super().on_epoch_end(epoch, logs)


def _prepare(model: Any) -> None:
    """Turns off what the model cannot do on several ranks, before Keras makes the function that trains."""
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and exchange_of(optimizer.inner_optimizer) is not None:
        raise ValueError("use DistributedOptimizer(LossScaleOptimizer(optimizer)) instead of a LossScaleOptimizer outside")
    if keras.backend.backend() == "tensorflow" and exchange_of(optimizer) is not None and model.jit_compile:
        # TensorFlow's XLA cannot call Python. Without XLA, the function is still a graph.
        model.jit_compile = False


def _inner(optimizer: Any) -> Any:
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def _sync(model: Any) -> None:
    """Makes the variables of the model have their values. On JAX, `fit` keeps the values elsewhere during an epoch."""
    if keras.backend.backend() == "jax" and getattr(model, "_jax_state", None) is not None:
        model.jax_state_sync()


def _is_number(value: Any) -> bool:
    return np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number)


def _check_metrics(all_ranks: list[dict[str, float]], ranks: list[int]) -> None:
    for rank, values in zip(ranks, all_ranks, strict=True):
        if values.keys() != all_ranks[0].keys():
            different = sorted(values.keys() ^ all_ranks[0].keys())
            raise ValueError(f"rank {ranks[0]} and rank {rank} have different metrics: {', '.join(different)}")
    for name in all_ranks[0]:
        missing = [rank for rank, values in zip(ranks, all_ranks, strict=True) if math.isnan(values[name])]
        if missing and len(missing) < len(ranks):
            raise ValueError(
                f"the metric {name} is not a number (NaN) on rank {', '.join(map(str, missing))}, but on others it is"
            )
