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

    def __init__(self, number: int, inputs: int, outputs: int, biases: bool) -> None:
        self._name = f"layers.{number}"
        self._inputs, self._outputs, self._biases = inputs, outputs, biases

    def tensor_shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {f"{self._name}.weight": (self._outputs, self._inputs)}
        return shapes | {f"{self._name}.bias": (self._outputs,)} if self._biases else shapes

    def load_parameters(self, tensors: dict[str, Array]) -> None:
        self._weight = tensors[f"{self._name}.weight"]
        self._bias = tensors[f"{self._name}.bias"] if self._biases else np.float32(0)

    def forward(self, values: Array) -> Array:
        return values @ self._weight.T + self._bias


class Convolution:
    """A convolution with zero padding. The output has the same height and width as the image."""

    def __init__(self, number: int, image: Shape, channels: int, kernel: int, biases: bool) -> None:
        self._name = f"layers.{number}"
        self._image, self._channels, self._kernel, self._biases = image, channels, kernel, biases

    def tensor_shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {f"{self._name}.weight": (self._channels, self._image[0], self._kernel, self._kernel)}
        return shapes | {f"{self._name}.bias": (self._channels,)} if self._biases else shapes

    def load_parameters(self, tensors: dict[str, Array]) -> None:
        self._weight = tensors[f"{self._name}.weight"]
        self._bias = tensors[f"{self._name}.bias"] if self._biases else np.float32(0)

    def forward(self, values: Array) -> Array:
        border = (self._kernel // 2, self._kernel // 2)
        padded = np.pad(values.reshape(-1, *self._image), ((0, 0), (0, 0), border, border))
        patches = sliding_window_view(padded, (self._kernel, self._kernel), axis=(2, 3))
        outputs = np.tensordot(patches, self._weight, axes=((1, 4, 5), (1, 2, 3))) + self._bias
        return outputs.transpose(0, 3, 1, 2).reshape(len(values), -1)


class BatchNorm:
    """Batch normalization with running statistics."""

    def __init__(self, number: int, channels: int) -> None:
        self._name = f"layers.{number}"
        self._channels = channels

    def tensor_shapes(self) -> dict[str, Shape]:
        names = ("weight", "bias", "running_mean", "running_var")
        return {f"{self._name}.{name}": (self._channels,) for name in names}

    def load_parameters(self, tensors: dict[str, Array]) -> None:
        weight, bias, mean, variance = (tensors[name] for name in self.tensor_shapes())
        if (variance < 0).any():
            raise ModelFileError(f"the tensor {self._name}.running_var has a negative variance")
        self._factor, self._mean, self._bias = weight / np.sqrt(variance + np.float32(1e-5)), mean, bias

    def forward(self, values: Array) -> Array:
        planes = values.reshape(len(values), self._channels, -1)
        planes = (planes - self._mean[:, None]) * self._factor[:, None] + self._bias[:, None]
        return planes.reshape(values.shape)


class Rectifier:
    """Replaces negative values by 0."""

    def tensor_shapes(self) -> dict[str, Shape]:
        return {}

    def load_parameters(self, tensors: dict[str, Array]) -> None:
        pass

    def forward(self, values: Array) -> Array:
        return np.maximum(values, 0)


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
    kind, _, text = model.partition(":")
    names = text.split(",") if kind in ("mlp", "cnn") else []
    if kind != "cnn":
        image = None
    if (kind == "cnn" and image is None) or (not names and model not in ("linear", "softmax")):
        raise ModelFileError(f"this version of ringtrain does not know the model {model}; install a newer version")
    for index, name in enumerate(names):
        # A layer before a batch normalization has no biases, and its rectifier follows the batch normalization.
        is_normalized = names[index + 1 : index + 2] == ["batchnorm"]
        if name.startswith("conv") and image is not None:
            channels, kernel = map(int, name.removeprefix("conv").split("x"))
            layers.append(Convolution(number, image, channels, kernel, not is_normalized))
            number, image = number + 1, (channels, *image[1:])
            features = channels * image[1] * image[2]
        elif name.startswith("pool") and image is not None:
            window = int(name.removeprefix("pool"))
            layers.append(MaxPooling(image, window))
            image = (image[0], image[1] // window, image[2] // window)
            features = image[0] * image[1] * image[2]
        elif (units := name.removeprefix("dense")).isdecimal():
            layers.append(Dense(number, features, int(units), not is_normalized))
            number, features, image = number + 1, int(units), None
        elif name == "batchnorm":
            layers.append(BatchNorm(number, image[0] if image is not None else features))
            number += 1
        elif not name.startswith("dropout"):
            raise ModelFileError(f"this version of ringtrain does not know the layer {name}; install a newer version")
        if not is_normalized and not name.startswith(("pool", "dropout")):
            layers.append(Rectifier())
    layers.append(Dense(number, features, outputs, biases=True))
    return layers
