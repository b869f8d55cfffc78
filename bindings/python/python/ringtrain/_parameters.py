"""Presents the arrays or tensors of a model as one vector of float32 numbers."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._errors import InvalidArgument


def is_tensor(thing: object) -> bool:
    """Returns whether `thing` is a tensor of torch. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.Tensor)


def as_array(name: str, thing: Any) -> NDArray:
    """Returns the memory of a parameter as an array of float32 numbers."""
    if is_tensor(thing):
        if thing.layout is not sys.modules["torch"].strided or thing.device.type != "cpu":
            raise InvalidArgument(f"{name} is a {thing.layout} tensor on {thing.device}; a dense tensor on the CPU is needed")
        if str(thing.dtype) != "torch.float32":
            raise InvalidArgument(f"{name} is {thing.dtype}, not float32")
        thing = thing.detach().numpy()
    if not isinstance(thing, np.ndarray):
        raise InvalidArgument(f"{name} is a {type(thing).__name__}, not a numpy array or a tensor")
    if thing.dtype != np.float32:
        raise InvalidArgument(f"{name} is {thing.dtype}, not float32")
    if not thing.flags.carray:
        raise InvalidArgument(f"{name} is not contiguous in row-major order, or is read-only or not aligned")
    return thing


class Parameters:
    """The parameters that a program has passed: an array, a sequence or mapping of arrays, or a module of torch.
    `keys` are the names or indices of the parameters, and `len` is the number of all elements."""

    def __init__(self, parameters: Any) -> None:
        torch = sys.modules.get("torch")
        self.is_single = isinstance(parameters, np.ndarray) or is_tensor(parameters)
        self.is_mapping = True
        if torch is not None and isinstance(parameters, torch.nn.Module):
            named = {name: value for name, value in parameters.named_parameters() if value.requires_grad}
        elif isinstance(parameters, Mapping):
            named = dict(parameters)
        elif self.is_single or isinstance(parameters, Iterable):
            self.is_mapping = False
            named = dict(enumerate([parameters] if self.is_single else parameters))
        else:
            raise InvalidArgument(f"the parameters are a {type(parameters).__name__}; pass arrays, tensors or a torch.nn.Module")
        self.things: list[Any] = list(named.values())
        self.keys = list(named)
        self.names = ["the parameter" if self.is_single else f"parameter {key!r}" for key in self.keys]
        self.arrays = [as_array(name, thing) for name, thing in zip(self.names, self.things, strict=True)]
        addresses = [array.ctypes.data for array in self.arrays if array.size]
        if len(set(addresses)) < len(addresses):
            raise InvalidArgument("two parameters have the same memory; pass each parameter once")
        self.sizes = [array.size for array in self.arrays]
        self.ends = np.cumsum([0, *self.sizes]).tolist()
        self.len: int = self.ends[-1]

    def part(self, index: int) -> slice:
        """Returns the position of a parameter in the vector."""
        return slice(self.ends[index], self.ends[index + 1])

    def copy_to(self, vector: NDArray) -> NDArray:
        """Copies all parameters to the vector, and returns it."""
        for index, array in enumerate(self.arrays):
            vector[self.part(index)] = array.reshape(-1)
        return vector

    def copy_from(self, vector: NDArray) -> None:
        """Copies the vector to the parameters."""
        for index, (thing, array) in enumerate(zip(self.things, self.arrays, strict=True)):
            values = vector[self.part(index)].reshape(array.shape)
            if is_tensor(thing):
                # `copy_` tells autograd that the tensor has changed; writing through the array would not.
                torch = sys.modules["torch"]
                with torch.no_grad():
                    thing.copy_(torch.from_numpy(values))
            else:
                np.copyto(array, values)

    def copy_rows(self, index: int, rows: NDArray, values: NDArray) -> None:
        """Copies values to some rows of a parameter."""
        if is_tensor(self.things[index]):
            torch = sys.modules["torch"]
            with torch.no_grad():
                self.things[index][torch.from_numpy(rows)] = torch.from_numpy(values)
        else:
            self.arrays[index][rows] = values

    def gradients(self, gradient: Any) -> list[NDArray]:
        """Returns the gradient of each parameter as an array. `gradient` has the same structure as the parameters."""
        if self.is_single:
            given = [gradient]
        elif self.is_mapping:
            if not isinstance(gradient, Mapping) or set(gradient) != set(self.keys):
                raise InvalidArgument("the gradients must be a mapping with the same keys as the parameters")
            given = [gradient[key] for key in self.keys]
        else:
            given = list(gradient)
            if len(given) != len(self.keys):
                raise InvalidArgument(f"there are {len(given)} gradients for {len(self.keys)} parameters")
        return [
            as_gradient(f"the gradient of {name}", values, array.shape)
            for name, values, array in zip(self.names, given, self.arrays, strict=True)
        ]

    def own_gradients(self) -> list[Any]:
        """Returns the attribute `grad` of each tensor, or `None` where a tensor has no gradient."""
        for name, thing in zip(self.names, self.things, strict=True):
            if not is_tensor(thing):
                raise InvalidArgument(f"{name} is a numpy array, which has no attribute grad; pass the gradient")
        return [thing.grad for thing in self.things]

    def find(self, key: Any) -> int:
        """Returns the index of a parameter, whose name or index is `key`."""
        if key in self.keys:
            return self.keys.index(key)
        raise InvalidArgument(f"there is no parameter {key!r}; the parameters are {self.keys}")

    def rows(self, key: Any, rows: ArrayLike) -> tuple[int, NDArray, NDArray, NDArray]:
        """Returns the index of a parameter, its rows in `rows` in ascending order without repetition, the position of
        each element of `rows` in these rows, and the ranges of these rows in the vector."""
        index = self.find(key)
        array = self.arrays[index]
        if array.ndim == 0:
            raise InvalidArgument(f"{self.names[index]} has no rows")
        rows = rows.detach().cpu().numpy() if is_tensor(rows) else np.asarray(rows)
        if rows.ndim != 1 or (rows.dtype.kind not in "iu" and rows.size):
            raise InvalidArgument(f"rows are a vector of integers, not {rows.dtype} of shape {rows.shape}")
        if rows.size and not (0 <= rows.min() and rows.max() < len(array)):
            raise InvalidArgument(f"{self.names[index]} has only the rows 0 to {len(array) - 1}")
        unique, places = np.unique(rows.astype(np.int64), return_inverse=True)
        return index, unique, places.reshape(-1), self.ranges(index, unique)

    def ranges(self, index: int, rows: NDArray) -> NDArray:
        """Returns the ranges of ascending rows of a parameter as pairs of first element and length. Merges adjacent
        rows."""
        width = self.sizes[index] // max(len(self.arrays[index]), 1)
        if not rows.size or not width:
            return np.empty((0, 2), np.int64)
        is_first = np.diff(rows, prepend=-2) != 1
        first = rows[is_first]
        counts = np.diff(np.append(np.flatnonzero(is_first), rows.size))
        return np.stack([self.ends[index] + first * width, counts * width], axis=1)


def as_gradient(name: str, values: Any, shape: tuple[int, ...]) -> NDArray:
    """Returns a gradient as an array of real numbers with this shape."""
    if is_tensor(values):
        values = (values.to_dense() if values.is_sparse else values).detach().cpu().numpy()
    array = np.asarray(values)
    if array.dtype.kind not in "fiu":
        raise InvalidArgument(f"{name} is {array.dtype}, not real numbers")
    if array.shape != shape:
        raise InvalidArgument(f"{name} has the shape {array.shape}, not {shape}")
    return array
