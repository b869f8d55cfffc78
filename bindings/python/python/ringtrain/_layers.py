"""The layers of trained models, computed with numpy. `docs/model-format.md` describes each layer."""

from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ._errors import ModelFileError

Shape = tuple[int, ...]
Array = NDArray[np.float32]


class Layer(Protocol):
    """One layer of a trained model."""

    def tensor_shapes(self) -> dict[str, Shape]:
        """Returns the names and the shapes of the tensors of the layer."""

    def load_parameters(self, tensors: dict[str, Array]) -> None:
        """Sets the parameters of the layer from `tensors`, which has all tensors of the model by name."""

    def forward(self, values: Array) -> Array:
        """Returns the outputs for each row of `values`."""


class Dense:
    """A fully connected layer."""

    def __init__(self, number: int, inputs: int, outputs: int, rectify: bool) -> None:
        self._name = f"layers.{number}"
        self._inputs, self._outputs, self._rectify = inputs, outputs, rectify

    def tensor_shapes(self) -> dict[str, Shape]:
        return {f"{self._name}.weight": (self._outputs, self._inputs), f"{self._name}.bias": (self._outputs,)}

    def load_parameters(self, tensors: dict[str, Array]) -> None:
        self._weight, self._bias = (tensors[name] for name in self.tensor_shapes())

    def forward(self, values: Array) -> Array:
        values = values @ self._weight.T + self._bias
        return np.maximum(values, 0, out=values) if self._rectify else values


class Convolution:
    """A convolution with zero padding, followed by a rectifier. The output has the height and the width of the image."""

    def __init__(self, number: int, image: Shape, channels: int, kernel: int) -> None:
        self._name = f"layers.{number}"
        self._image, self._channels, self._kernel = image, channels, kernel

    def tensor_shapes(self) -> dict[str, Shape]:
        weight = (self._channels, self._image[0], self._kernel, self._kernel)
        return {f"{self._name}.weight": weight, f"{self._name}.bias": (self._channels,)}

    def load_parameters(self, tensors: dict[str, Array]) -> None:
        self._weight, self._bias = (tensors[name] for name in self.tensor_shapes())

    def forward(self, values: Array) -> Array:
        border = (self._kernel // 2, self._kernel // 2)
        padded = np.pad(values.reshape(-1, *self._image), ((0, 0), (0, 0), border, border))
        patches = sliding_window_view(padded, (self._kernel, self._kernel), axis=(2, 3))
        outputs = np.tensordot(patches, self._weight, axes=((1, 4, 5), (1, 2, 3))) + self._bias
        return np.maximum(outputs, 0).transpose(0, 3, 1, 2).reshape(len(values), -1)


class MaxPooling:
    """Max pooling with square windows. Rows and columns that do not fill a window are left out."""

    def __init__(self, image: Shape, window: int) -> None:
        self._image, self._window = image, window

    def tensor_shapes(self) -> dict[str, Shape]:
        return {}

    def load_parameters(self, tensors: dict[str, Array]) -> None:
        pass

    def forward(self, values: Array) -> Array:
        channels, height, width = self._image
        window, rows, columns = self._window, height // self._window, width // self._window
        images = values.reshape(-1, channels, height, width)[:, :, : rows * window, : columns * window]
        windows = images.reshape(-1, channels, rows, window, columns, window)
        return windows.max(axis=(3, 5)).reshape(len(values), -1)


def create_layers(model: str, features: int, image: Shape | None, outputs: int) -> list[Layer]:
    """Returns the layers of `model`, without their parameters. `features` is the number of features of a sample. If the samples
    are images, `image` is their shape (channels, height, width). `outputs` is the number of outputs of the last layer."""
    layers: list[Layer] = []
    number = 0

    def add_dense(units: int, rectify: bool) -> None:
        nonlocal number, features
        layers.append(Dense(number, features, units, rectify))
        number, features = number + 1, units

    kind, _, text = model.partition(":")
    if kind == "mlp":
        for width in text.split(","):
            add_dense(int(width), rectify=True)
    elif kind == "cnn" and image is not None:
        for name in text.split(","):
            if name.startswith("conv"):
                channels, kernel = map(int, name.removeprefix("conv").split("x"))
                layers.append(Convolution(number, image, channels, kernel))
                number, image = number + 1, (channels, *image[1:])
                features = channels * image[1] * image[2]
            elif name.startswith("pool"):
                window = int(name.removeprefix("pool"))
                layers.append(MaxPooling(image, window))
                image = (image[0], image[1] // window, image[2] // window)
                features = image[0] * image[1] * image[2]
            elif name.startswith("dense"):
                add_dense(int(name.removeprefix("dense")), rectify=True)
            elif not name.startswith("dropout"):
                raise ModelFileError(f"this version of ringtrain does not know the layer {name}; install a newer version")
    elif model not in ("linear", "softmax"):
        raise ModelFileError(f"this version of ringtrain does not know the model {model}; install a newer version")
    add_dense(outputs, rectify=False)
    return layers
