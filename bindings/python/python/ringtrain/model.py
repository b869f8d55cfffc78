"""Predicts with models that `ringtrain --save-model FILE` wrote. This module needs only numpy. `docs/model-format.md` describes
the format of a model file."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._encoding import encode_column, input_count, to_array
from ._errors import InvalidArgument, ModelFileError
from ._layers import Layer, create_layers
from ._text import counted

_VERSION = 1
_HEADER_BYTES_MAX = 100_000_000
_BLOCK_ROWS = 4096
_MEAN, _INVERSE_DEVIATION = "features.mean", "features.inverse_deviation"


class Model:
    """A trained model. `ringtrain.load_model` reads a model from a file.

    `task` is "classification" or "regression". `columns` are the names of the features in the order in which the model uses
    them. `classes` is an array of the names of the classes; for regression, the array is empty. `description` is a dictionary
    with all fields of the description in the model file.
    """

    def __init__(self, description: dict[str, Any], tensors: dict[str, NDArray[np.float32]]) -> None:
        self.description = description
        self.task: str = description["task"]
        self.columns: list[str] = [column["name"] for column in description["columns"]]
        self.classes: NDArray = np.array(description["classes"], dtype=np.str_)
        divisor = description["pixel_divisor"]
        self._divisor = None if divisor is None else np.float32(divisor)
        self._mean, self._inverse_deviation = tensors.get(_MEAN), tensors.get(_INVERSE_DEVIATION)
        self._layers: list[Layer] = _create_layers_of(description)
        for layer in self._layers:
            layer.load_parameters(tensors)

    def __repr__(self) -> str:
        return f"<ringtrain.Model {self.description['model']}, {self.task}, {counted(len(self.columns), 'column')}>"

    def predict(self, x: Any) -> NDArray:
        """Returns the predictions for the rows of `x`: numbers in the unit of the target, or names of classes.

        `x` is an array with a row for each sample and a column for each feature, in the order of `columns`. `x` may also be a
        pandas.DataFrame, a dictionary of columns or a structured array. In a table, `predict` finds the features by the names of
        the columns, and ignores other columns. A model of data without names finds the features by position: `x` must have all
        columns of the training table, or all but the target, or only the features. Masked elements of a masked array are missing
        values. Texts may be `bytes` in UTF-8. Images may be an array of the shape (samples, height, width) or (samples, channels,
        height, width).
        """
        if self.task == "classification":
            return self.classes[self._outputs(x).argmax(axis=1)]
        target = self.description["target"]
        return target["mean"] + target["deviation"] * self._outputs(x)[:, 0].astype(np.float64)

    def predict_proba(self, x: Any) -> NDArray[np.float64]:
        """Returns an array of probabilities: a row for each row of `x`, and a column for each class, in the order of `classes`.
        `x` has the same form as for `predict`."""
        if self.task != "classification":
            raise InvalidArgument("the model predicts numbers, so there are no probabilities: call predict")
        outputs = self._outputs(x).astype(np.float64)
        powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def _outputs(self, x: Any) -> NDArray[np.float32]:
        features = self._encode_features(x)
        with np.errstate(over="ignore", invalid="ignore"):
            blocks = [self._forward(features[start : start + _BLOCK_ROWS]) for start in range(0, len(features), _BLOCK_ROWS)]
        return np.concatenate(blocks) if blocks else np.empty((0, _output_count(self.description)), np.float32)

    def _forward(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._divisor is not None:
            values = values / self._divisor
        if self._mean is not None:
            values = (values - self._mean) * self._inverse_deviation
        for layer in self._layers:
            values = layer.forward(values)
        if not np.isfinite(values).all():
            raise InvalidArgument("a prediction is not finite: a value is far outside the range of the training data")
        return values

    def _encode_features(self, x: Any) -> NDArray[np.float32]:
        """Returns the features of each row of `x` as numbers, which are not standardized yet."""
        names = _column_names(x)
        if names is None:
            array = self._flatten(to_array(x))
            if array.ndim != 2 or array.shape[1] != len(self.columns):
                raise InvalidArgument(f"x has the shape {array.shape}; the model needs the shape (rows, {len(self.columns)})")
            columns = list(array.T)
        elif self.description["columns_from"] == "position":
            found = _select_columns(x, names)
            columns = [to_array(found[index]) for index in self._positions_of_columns(len(found))]
        else:
            missing = [name for name in self.columns if name not in names]
            if missing:
                found = ", ".join(map(str, names))
                raise InvalidArgument(f"x has no column {', '.join(missing)}, which the model needs; its columns are {found}")
            columns = [to_array(x[name]) for name in self.columns]
        accepts_missing = self.description["missing"] in ("mean", "indicator")
        described = zip(self.description["columns"], columns, strict=True)
        return np.concatenate([encode_column(column, values, accepts_missing) for column, values in described], axis=1)

    def _flatten(self, array: NDArray) -> NDArray:
        """Returns images, an array of three or four dimensions, as rows of features. Returns other arrays unchanged."""
        image = self.description.get("image")
        if array.ndim not in (3, 4):
            return array
        found = array.shape[1:] if array.ndim == 4 else (1, *array.shape[1:])
        if image is not None and found != (image["channels"], image["height"], image["width"]):
            raise InvalidArgument(
                f"x has images of the shape {found} (channels, height, width); the model needs the shape "
                f"({image['channels']}, {image['height']}, {image['width']})"
            )
        return array.reshape(len(array), -1)

    def _positions_of_columns(self, count: int) -> Sequence[int]:
        """Returns the positions of the features in a table of `count` columns, as in `ringtrain predict`."""
        layout, whole = self.description.get("layout"), ""
        if layout is not None:
            features, target = layout["features"], layout["target"]
            table = counted(layout["columns"], "column")
            whole = f"the {table} of the training table, or all of these but the target (column {target}), or "
            if count == layout["columns"]:
                return features
            if count + 1 == layout["columns"]:
                return [index - (index > target) for index in features]
        if count == len(self.columns):
            return range(count)
        raise InvalidArgument(
            f"x has {counted(count, 'column')}, but the model finds its columns by position and needs {whole}only its "
            f"{counted(len(self.columns), 'feature')}"
        )


def load_model(path: str | os.PathLike[str]) -> Model:
    """Reads a model file that `ringtrain --save-model FILE` wrote. Checks the whole file, including its checksum.

    Raises `ModelFileError` if the file is truncated or corrupt, is not a model file, or needs a newer version of ringtrain.
    """
    with open(path, "rb") as file:
        content = file.read()
    try:
        return _parse_model_file(content)
    except ModelFileError as error:
        raise ModelFileError(f"{os.fspath(path)}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFileError(f"{os.fspath(path)} is truncated or corrupt ({error!r}); save the model again") from None


def _parse_model_file(content: bytes) -> Model:
    if not content:
        raise ModelFileError("the file is empty")
    if len(content) > 8 and content[8:9] != b"{":
        raise ModelFileError("this is not a safetensors file; pass a file that `ringtrain --save-model FILE` wrote")
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(len(content) - 8, _HEADER_BYTES_MAX):
        raise ModelFileError("the file is truncated or corrupt: it is shorter than its header")
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    _check_format(metadata)
    tensors = _read_tensors(header, memoryview(content)[8 + length :])
    text = metadata["description"]
    if metadata["sha256"] != _content_digest(text, tensors):
        raise ModelFileError("the file is corrupt: its content does not match its checksum")
    description = json.loads(text)
    if description["task"] == "text":
        raise ModelFileError(f"the model {description['model']} reads texts; use it with the commands of ringtrain")
    if description["model"].startswith("own:"):
        raise ModelFileError(f"the layers of the model {description['model']} are in the Rust program that saved it")
    _check_shapes(description, tensors)
    return Model(description, tensors)


def _check_format(metadata: Mapping[str, str]) -> None:
    found = metadata.get("format")
    if "state_hash" in metadata:
        raise ModelFileError("this is a checkpoint; to get a model file, pass --resume --save-model FILE to ringtrain")
    if found != "ringtrain-model":
        raise ModelFileError(f"the format is {found}; pass a file that `ringtrain --save-model FILE` wrote")
    version = int(metadata["version"])
    if version < 1:
        raise ModelFileError(f"the file is corrupt: its version is {version}, but versions begin with 1")
    if version > _VERSION:
        raise ModelFileError(
            f"the file has version {version} of its format; this ringtrain reads version {_VERSION}: update ringtrain"
        )


def _read_tensors(header: dict[str, Any], data: memoryview) -> dict[str, NDArray[np.float32]]:
    """Returns the tensors. The tensors together must cover the data without gaps."""
    tensors = {}
    position = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if entry["dtype"] != "F32" or start != position or end > len(data) or any(size < 0 for size in shape):
            raise ModelFileError(f"the file is truncated or corrupt: the tensor {name} has a wrong type or place")
        if end - start != 4 * math.prod(shape):
            raise ModelFileError(f"the file is corrupt: the tensor {name} has {end - start} bytes and the shape {shape}")
        tensors[name] = np.frombuffer(data[start:end], "<f4").reshape(shape)
        position = end
    if position != len(data):
        raise ModelFileError(f"the file is truncated or corrupt: it has {len(data)} bytes of tensors instead of {position}")
    return tensors


def _content_digest(description: str, tensors: Mapping[str, NDArray[np.float32]]) -> str:
    # Importing hashlib loads OpenSSL, so ranks that read no model do not import it.
    import hashlib

    digest = hashlib.sha256(f"{description}\n".encode())
    for name in sorted(tensors, key=str.encode):
        shape = "x".join(map(str, tensors[name].shape))
        digest.update(f"{name} F32 {shape}\n".encode())
        digest.update(tensors[name])
    return digest.hexdigest()


def _check_shapes(description: dict[str, Any], tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """Checks that the file has exactly the tensors of the model, with finite values."""
    inputs = sum(map(input_count, description["columns"]))
    image = description.get("image")
    if image is not None and math.prod(image[axis] for axis in ("channels", "height", "width")) != inputs:
        raise ModelFileError(f"the file is corrupt: its images have the shape {image}, but it has {inputs} inputs")
    wanted = {name: shape for layer in _create_layers_of(description) for name, shape in layer.tensor_shapes().items()}
    if _MEAN in tensors:
        wanted[_MEAN] = wanted[_INVERSE_DEVIATION] = (inputs,)
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != wanted:
        raise ModelFileError(f"the file is corrupt: it has the tensors {found} and not {wanted}")
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        raise ModelFileError("the file is corrupt: a parameter is not finite")


def _output_count(description: dict[str, Any]) -> int:
    return max(len(description["classes"]), 1)


def _create_layers_of(description: dict[str, Any]) -> list[Layer]:
    """Returns the layers of a model, without their parameters."""
    image = description.get("image")
    shape = None if image is None else (image["channels"], image["height"], image["width"])
    return create_layers(description["model"], sum(map(input_count, description["columns"])), shape, _output_count(description))


def _column_names(x: Any) -> list | None:
    """Returns the names of the columns of a table, or `None` for an array without names."""
    if isinstance(x, Mapping):
        return list(x)
    if hasattr(x, "columns") and hasattr(x, "iloc"):
        return list(x.columns)
    return list(x.dtype.names) if isinstance(x, np.ndarray) and x.dtype.names else None


def _select_columns(x: Any, names: list) -> list:
    """Returns the columns of a table in their order. Two columns of a DataFrame may have the same name."""
    if hasattr(x, "iloc"):
        return [x.iloc[:, index] for index in range(len(names))]
    return [x[name] for name in names]
