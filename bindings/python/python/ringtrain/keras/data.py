"""Gives each rank its own part of the data."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from ringtrain._horovod.process_sets import ProcessSet, global_process_set
from ringtrain._text import counted


def shard(dataset: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Returns this rank's part of the data. All ranks get the same number of elements, so up to `size() - 1` elements at the end
    are left out.

    - Arrays and tensors, also in tuples, lists and dictionaries: every `size()`-th row, beginning at row `rank()`.
    - A `tf.data.Dataset`: every `size()`-th element. If the dataset has been batched, the elements are batches. If it shuffles,
      pass it a seed, so that all ranks shuffle in the same way.
    - A `keras.utils.PyDataset`: every `size()`-th batch.
    - An iterator, such as a generator: every `size()`-th element.
    """
    members = process_set.members()
    rank, size = members.group.rank, members.group.size
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(dataset, tensorflow.data.Dataset):
        return _shard_tf_data(dataset, rank, size)
    if isinstance(dataset, keras.utils.PyDataset):
        return _ShardedPyDataset(dataset, rank, size)
    if isinstance(dataset, Iterator):
        return _every_nth(dataset, rank, size)
    if isinstance(dataset, (tuple, list)) and not (dataset and np.isscalar(dataset[0])):
        return type(dataset)(_shard_value(part, rank, size) for part in dataset)
    if isinstance(dataset, Mapping):
        return {name: _shard_value(part, rank, size) for name, part in dataset.items()}
    return _shard_value(dataset, rank, size)


def _shard_value(value: Any, rank: int, size: int) -> Any:
    if value is None:
        return None
    if isinstance(value, (tuple, list)) and not (value and np.isscalar(value[0])):
        return type(value)(_shard_value(part, rank, size) for part in value)
    if isinstance(value, Mapping):
        return {name: _shard_value(part, rank, size) for name, part in value.items()}
    if hasattr(value, "iloc"):  # a table of pandas
        return value.iloc[rank : len(value) // size * size : size]
    if not (hasattr(value, "shape") and hasattr(value, "__getitem__")) and not isinstance(value, (tuple, list)):
        raise TypeError(
            f"shard cannot divide a {type(value).__name__}; pass arrays, a tf.data.Dataset, a PyDataset or an iterator (for a "
            "DataLoader of PyTorch, use torch.utils.data.distributed.DistributedSampler)"
        )
    if len(value) < size:
        raise ValueError(f"{counted(len(value), 'row')} cannot be divided among {size} ranks")
    return value[rank : len(value) // size * size : size]


def _shard_tf_data(dataset: Any, rank: int, size: int) -> Any:
    count = int(dataset.cardinality())
    # Negative numbers mean that the number is infinite or unknown.
    if count >= 0:
        if count < size:
            raise ValueError(f"{counted(count, 'element')} of the dataset cannot be divided among {size} ranks")
        return dataset.take(count // size * size).shard(size, rank)
    # A group of fewer than `size` elements at the end is left out.
    groups = dataset.window(size, drop_remainder=True)
    return groups.flat_map(lambda *parts: _skip_windows(parts, rank))


def _skip_windows(parts: tuple[Any, ...], rank: int) -> Any:
    import tensorflow as tf

    whole = parts[0] if len(parts) == 1 else tf.data.Dataset.zip(parts)
    return whole.skip(rank).take(1)


def _every_nth(elements: Iterator[Any], rank: int, size: int) -> Iterator[Any]:
    while len(group := list(itertools.islice(elements, size))) == size:
        yield group[rank]


class _ShardedPyDataset(keras.utils.PyDataset):
    """Every `size`-th batch of a `PyDataset`."""

    def __init__(self, dataset: keras.utils.PyDataset, rank: int, size: int) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset, self._rank, self._size = dataset, rank, size
        if self.num_batches == 0:
            raise ValueError(f"the dataset has a length of {dataset.num_batches}, which cannot be divided among {size} ranks")

    @property
    def num_batches(self) -> int | None:
        """The number of batches of this rank."""
        count = self._dataset.num_batches
        return None if count is None else count // self._size

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index * self._size + self._rank]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()
