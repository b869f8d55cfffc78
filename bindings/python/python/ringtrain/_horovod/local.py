"""Variables whose gradients each rank keeps for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


class LocalVariables:
    """The variables of TensorFlow or Keras whose gradients are not exchanged."""

    def __init__(self, is_scaled: bool) -> None:
        """If `is_scaled`, local gradients are divided by the number of ranks, as in Horovod: the loss of a rank is a part of the
        average loss of all ranks."""
        self._is_scaled = is_scaled
        # Variables compare their elements, and so cannot be members of a set.
        self._by_id: dict[int, Any] = {}

    def add(self, variable: Any) -> None:
        """Adds a variable. Functions that have been compiled before do not change."""
        self._by_id[id(variable)] = variable

    def __contains__(self, variable: Any) -> bool:
        return id(variable) in self._by_id

    def reduce_others(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        size: int,
        reduce: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    ) -> list[Any]:
        """Returns the gradients, after `reduce` has reduced those that are not local over `size` ranks."""
        results = list(gradients)
        shared = [index for index, variable in enumerate(variables) if variable not in self]
        if self._is_scaled:
            for index in set(range(len(results))).difference(shared):
                results[index] = scaled(results[index], 1.0 / size)
        reduced = reduce([gradients[index] for index in shared], [variables[index] for index in shared])
        for index, gradient in zip(shared, reduced, strict=True):
            results[index] = gradient
        return results


def scaled(gradient: Any, factor: float) -> Any:
    """Returns a gradient, which may be None or sparse, multiplied by a number."""
    if gradient is None:
        return None
    if hasattr(gradient, "dense_shape"):  # tf.IndexedSlices
        return type(gradient)(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def variables_of_layers(layers: Any) -> list[Any]:
    """Returns the variables that a layer of Keras, or a list of layers, trains. Raises ValueError for other objects, and for
    layers that have no variables yet."""
    if layers is None:
        return []
    found = list(layers) if isinstance(layers, Iterable) else [layers]
    for layer in found:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"local_layers needs layers of Keras, and not {layer!r}")
        if not getattr(layer, "built", True):
            raise ValueError(f"the layer {layer.name} in local_layers has no variables yet; build the model first")
    return [variable for layer in found for variable in layer.trainable_weights]
