"""Converts the columns of a table to the inputs of a model. `docs/model-format.md` describes the conversion."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._errors import InvalidArgument, ModelFileError

_MISSING = {"", "?", "<NA>", "#N/A"}
_MISSING_IN_ANY_CASE = {"na", "nan", "n/a", "null"}
_NUMBERS = ("number", "shifted-number")


def input_count(column: dict[str, Any]) -> int:
    """Returns the number of model inputs into which a column is converted. Raises `ModelFileError` if this version of ringtrain
    does not know the kind of the column."""
    kind, fields = _conversion_of(column)
    if kind in _NUMBERS:
        return 1 + fields["indicator"]
    return len(fields["categories"]) if kind == "one-hot" else fields["buckets"]


def to_array(values: Any) -> NDArray:
    """Converts a sequence to an array. Each masked element of a masked array becomes `None`, which is a missing
    value."""
    if not np.ma.is_masked(values):
        return np.asarray(values)
    array = np.array(np.ma.getdata(values), dtype=object)
    array[np.ma.getmaskarray(values)] = None
    return array


def encode_column(column: dict[str, Any], values: NDArray, accepts_missing: bool) -> NDArray[np.float32]:
    """Converts the values of a column to an array of inputs, with a row for each value and `input_count(column)` columns.

    `accepts_missing` says whether values may be missing in a column with categories.
    """
    name = column["name"]
    if values.ndim != 1:
        raise InvalidArgument(f"column `{name}` of x has the shape {values.shape}; it needs one value in each row")
    kind, fields = _conversion_of(column)
    if kind in _NUMBERS:
        return _encode_numbers(name, fields, values)
    texts = [_category_text(name, value) for value in values.tolist()]
    if not accepts_missing and "" in texts:
        raise InvalidArgument(f"x, row {texts.index('')}, column `{name}`: the value is missing")
    inputs = np.zeros((len(texts), input_count(column)), np.float32)
    if kind == "one-hot":
        index_of = {category: index for index, category in enumerate(fields["categories"])}
    else:
        index_of = {text: _hash_to_bucket(text, fields["buckets"]) for text in set(texts)}
    for row, text in enumerate(texts):
        if text in index_of:
            inputs[row, index_of[text]] = 1
    return inputs


def _conversion_of(column: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns how a column is converted: the kind (one of `_NUMBERS`, "one-hot" or "hashed"), and the fields of this kind."""
    [(kind, fields)] = column["inputs"].items()
    if kind not in (*_NUMBERS, "one-hot", "hashed"):
        raise ModelFileError(f"this version of ringtrain does not know columns of the kind {kind}; install a newer version")
    return kind, fields


def _encode_numbers(name: str, fields: dict[str, Any], values: NDArray) -> NDArray[np.float32]:
    if values.dtype.kind == "O":
        try:
            values = np.array([np.nan if _is_missing(value) else value for value in values.tolist()], np.float64)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"column `{name}` of x needs numbers: {error}") from None
    if values.dtype.kind not in "fiub":
        raise InvalidArgument(f"column `{name}` of x has elements of type {values.dtype}; it needs numbers")
    with np.errstate(over="ignore"):
        shifted = values.astype(np.float64) - fields["offset"] if "offset" in fields else values
        numbers = shifted.astype(np.float32)
    fill = fields["fill"]
    missing = np.isnan(numbers) if fill is not None else np.zeros(len(numbers), bool)
    wrong = ~(np.isfinite(numbers) | missing)
    if wrong.any():
        row = int(wrong.argmax())
        raise InvalidArgument(f"x, row {row}, column `{name}`: {values[row]} is not a finite number")
    numbers = np.where(missing, np.float32(0 if fill is None else fill), numbers)
    return np.stack([numbers, missing.astype(np.float32)], axis=1) if fields["indicator"] else numbers[:, None]


def _is_missing(value: Any) -> bool:
    """Returns whether an object means that a value is missing: `None`, or `NA` or `NaT` of pandas, or an object of numpy.ma."""
    return value is None or value is np.ma.masked or type(value).__name__ in ("NAType", "NaTType")


def _category_text(name: str, value: Any) -> str:
    """Converts a value of the column `name` to the text that `ringtrain` reads from a table: "" if the value is missing."""
    if isinstance(value, float) and value == value:
        raise InvalidArgument(
            f"column `{name}` of x holds the number {value}; it needs texts or integers, because it has categories"
        )
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise InvalidArgument(f"column `{name}` of x holds {value!r}, which is not UTF-8: decode the texts") from None
    text = "" if _is_missing(value) or isinstance(value, float) else str(value).strip(" \t\n\r\f")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "" if text in _MISSING or text.lower() in _MISSING_IN_ANY_CASE else text


def _hash_to_bucket(text: str, buckets: int) -> int:
    """Hashes the text of a value to the index of its input, which is less than `buckets`."""
    # Importing hashlib loads OpenSSL, so ranks that read no model do not import it.
    import hashlib

    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") % buckets
