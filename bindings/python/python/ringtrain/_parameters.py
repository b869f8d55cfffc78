"""Presents the arrays or tensors of a model as one vector of float32 numbers."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._errors import InvalidArgument


def is_tensor(value: object) -> bool:
    """Returns whether `value` is a tensor of torch. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_array(name: str, value: Any) -> NDArray:
    """Returns the memory of a parameter as an array of float32 numbers."""
    if is_tensor(value):
        if value.layout is not sys.modules["torch"].strided or value.device.type != "cpu":
            raise InvalidArgument(f"{name} is a {value.layout} tensor on {value.device}; a dense tensor on the CPU is needed")
        if str(value.dtype) != "torch.float32":
            raise InvalidArgument(f"{name} is {value.dtype}, not float32")
        value = value.detach().numpy()
    if not isinstance(value, np.ndarray):
        raise InvalidArgument(f"{name} is a {type(value).__name__}, not a numpy array or a tensor")
    if value.dtype != np.float32:
        raise InvalidArgument(f"{name} is {value.dtype}, not float32")
    if not value.flags.carray:
        raise InvalidArgument(f"{name} is not contiguous in row-major order, or is read-only or not aligned")
    return value


class Parameters:
    """The parameters that a program has passed: an array, a sequence or mapping of arrays, or a module of torch.

    `keys` are the names or indices of the parameters. `originals` are the arrays or tensors that the program has passed, and
    `arrays` are their memory. `starts` are the positions of the parameters in the vector, and `sizes` are their numbers of
    elements. `element_count` is the total number of elements."""

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
        self.originals: list[Any] = list(named.values())
        self.keys = list(named)
        self.names = ["the parameter" if self.is_single else f"parameter {key!r}" for key in self.keys]
        self.arrays = [as_array(name, value) for name, value in zip(self.names, self.originals, strict=True)]
        addresses = [array.ctypes.data for array in self.arrays if array.size]
        if len(set(addresses)) < len(addresses):
            raise InvalidArgument("two parameters have the same memory; pass each parameter once")
        self.sizes = [array.size for array in self.arrays]
        *self.starts, self.element_count = np.cumsum([0, *self.sizes]).tolist()

    def slice_of_parameter(self, index: int) -> slice:
        """Returns the position of a parameter in the vector."""
        return slice(self.starts[index], self.starts[index] + self.sizes[index])

    def single_array(self) -> NDArray | None:
        """Returns the array if the only parameter is an array. Returns `None` for several parameters. Also returns `None` for a
        tensor, because autograd must learn of each change of a tensor."""
        return self.arrays[0] if len(self.arrays) == 1 and not is_tensor(self.originals[0]) else None

    def copy_to_vector(self, vector: NDArray) -> NDArray:
        """Copies all parameters to the vector, and returns the vector."""
        for index, array in enumerate(self.arrays):
            vector[self.slice_of_parameter(index)] = array.reshape(-1)
        return vector

    def copy_from_vector(self, vector: NDArray) -> None:
        """Copies the vector to the parameters."""
        for index, (original, array) in enumerate(zip(self.originals, self.arrays, strict=True)):
            values = vector[self.slice_of_parameter(index)].reshape(array.shape)
            if is_tensor(original):
                # `copy_` tells autograd that the tensor has changed; writing through the array would not.
                torch = sys.modules["torch"]
                with torch.no_grad():
                    original.copy_(torch.from_numpy(values))
            else:
                np.copyto(array, values)

    def copy_rows(self, index: int, rows: NDArray, values: NDArray) -> None:
        """Copies values to some rows of a parameter."""
        if is_tensor(self.originals[index]):
            torch = sys.modules["torch"]
            with torch.no_grad():
                self.originals[index][torch.from_numpy(rows)] = torch.from_numpy(values)
        else:
            self.arrays[index][rows] = values

    def gradient_arrays(self, gradient: Any) -> list[NDArray]:
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

    def gradients_of_tensors(self) -> list[Any]:
        """Returns the attribute `grad` of each tensor, or `None` where a tensor has no gradient."""
        for name, original in zip(self.names, self.originals, strict=True):
            if not is_tensor(original):
                raise InvalidArgument(f"{name} is a numpy array, which has no attribute grad; pass the gradient")
        return [original.grad for original in self.originals]

    def find_index(self, key: Any) -> int:
        """Returns the index of the parameter with the name or index `key`."""
        if key in self.keys:
            return self.keys.index(key)
        raise InvalidArgument(f"there is no parameter {key!r}; the parameters are {self.keys}")

    def check_rows(self, key: Any, rows: ArrayLike) -> tuple[int, NDArray, NDArray, NDArray]:
        """Finds rows of the parameter with the name or index `key`. Returns the index of the parameter, the distinct rows in
        ascending order, the position of each element of `rows` among the distinct rows, and the ranges of the distinct rows in
        the vector."""
        index = self.find_index(key)
        array = self.arrays[index]
        if array.ndim == 0:
            raise InvalidArgument(f"{self.names[index]} has no rows")
        rows = rows.detach().cpu().numpy() if is_tensor(rows) else np.asarray(rows)
        if rows.ndim != 1 or (rows.dtype.kind not in "iu" and rows.size):
            raise InvalidArgument(f"rows are a vector of integers, not {rows.dtype} of shape {rows.shape}")
        if rows.size and not (0 <= rows.min() and rows.max() < len(array)):
            raise InvalidArgument(f"{self.names[index]} has only the rows 0 to {len(array) - 1}")
        unique, places = np.unique(rows.astype(np.int64), return_inverse=True)
        return index, unique, places.reshape(-1), self.element_ranges_of_rows(index, unique)

    def element_ranges_of_rows(self, index: int, rows: NDArray) -> NDArray:
        """Returns the ranges of ascending rows of a parameter as pairs of first element and length. Merges adjacent
        rows."""
        width = self.sizes[index] // max(len(self.arrays[index]), 1)
        if not rows.size or not width:
            return np.empty((0, 2), np.int64)
        is_first = np.diff(rows, prepend=-2) != 1
        first = rows[is_first]
        counts = np.diff(np.append(np.flatnonzero(is_first), rows.size))
        return np.stack([self.starts[index] + first * width, counts * width], axis=1)


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
