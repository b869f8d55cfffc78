"""The exchange of gradients between the ranks, from the back end of Keras to the reducer of numpy arrays and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from ringtrain import _core
from ringtrain._horovod.local import LocalVariables, scaled
from ringtrain._horovod.process_sets import ProcessSet
from ringtrain._horovod.reducer import ArrayReducer, ReducerSettings
from ringtrain._horovod.variables import ArraySpec

Gradient = Any
Variable = Any


@dataclass(frozen=True)
class ExchangeSettings:
    """The settings of a `GradientExchange`."""

    reducer: ReducerSettings
    process_set: ProcessSet
    sparse_as_dense: bool = False
    factor: float = 1.0
    """The results are multiplied by this number."""
    scale_local_gradients: bool = True
    """Whether gradients of local variables are divided by the number of ranks."""


class GradientExchange:
    """Averages the gradients of the variables of one optimizer over the ranks."""

    def __init__(self, settings: ExchangeSettings) -> None:
        self.settings = settings
        self._reducers: dict[tuple[ArraySpec, ...], ArrayReducer] = {}
        self._is_in_epoch = False
        self.local = LocalVariables(settings.scale_local_gradients)
        """The variables whose gradients are not exchanged."""

    def is_active(self) -> bool:
        """Returns whether this rank exchanges gradients with others."""
        process_set = self.settings.process_set
        return process_set.included() is not False and process_set.members().group.size > 1

    def reduce(self, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> list[Gradient]:
        """Returns the average of the gradients over the ranks. Inside a compiled function, adds the exchange to the function. A
        gradient that is None on all ranks stays None."""
        if self.is_active():
            size = self.settings.process_set.members().group.size
            gradients = self.local.reduce_others(gradients, variables, size, lambda *some: _reduce_on_backend(self, *some))
        if self.settings.factor != 1.0:
            gradients = [scaled(gradient, self.settings.factor) for gradient in gradients]
        return list(gradients)

    def reducer_for(self, variables: Sequence[Variable], dtypes: Sequence[Any]) -> ArrayReducer:
        """Returns the reducer for gradients of these types. Creates it at the first call, in which all ranks take part. Raises
        `ringtrain.InvalidArgument` on all ranks if their variables differ."""
        specs = tuple(
            ArraySpec(getattr(v, "path", v.name), tuple(v.shape), np.dtype(dtype))
            for v, dtype in zip(variables, dtypes, strict=True)
        )
        if specs not in self._reducers or self._reducers[specs].is_closed():
            self._reducers[specs] = ArrayReducer(self.settings.process_set.members(), specs, self.settings.reducer)
        return self._reducers[specs]

    def reduce_arrays(self, reducer: ArrayReducer, arrays: Sequence[Any]) -> list[Any]:
        """Reduces gradients as numpy arrays. The result of a gradient that no rank has is None."""
        return reducer.reduce([None if array is None else np.asarray(array) for array in arrays])

    def begin_epoch(self) -> None:
        """Makes the next `end_epoch` check the ranks."""
        self._is_in_epoch = True

    def end_epoch(self) -> None:
        """Raises `ringtrain.Error` on all ranks if other ranks still train. Does nothing if called again in the same epoch."""
        if self._is_in_epoch and self.is_active():
            self._is_in_epoch = False
            for reducer in self._reducers.values():
                reducer.end_data()


def _reduce_on_backend(
    exchange: GradientExchange, gradients: Sequence[Gradient], variables: Sequence[Variable]
) -> list[Gradient]:
    backend = keras.backend.backend()
    if backend == "jax":
        from ringtrain.keras.exchange_jax import reduce_gradients
    elif backend == "torch":
        from ringtrain.keras.exchange_torch import reduce_gradients
    else:
        from ringtrain.keras.exchange_tensorflow import reduce_gradients
    return reduce_gradients(exchange, gradients, variables)


def numpy_type(dtype: str) -> np.dtype[Any]:
    """Returns numpy's type for a name such as "float32" or "bfloat16"."""
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    try:
        return np.dtype(dtype)
    except TypeError:
        raise _core.Unsupported(f"gradients of type {dtype} cannot be reduced") from None
