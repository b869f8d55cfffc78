"""Divides arrays into buckets."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def divide_into_buckets(
    kinds_and_bytes: Sequence[tuple[Hashable, int]], bucket_bytes: int, *, from_last: bool = False
) -> list[list[int]]:
    """Divides arrays, which are given by their kinds and sizes, into buckets of at most `bucket_bytes` bytes. Returns the
    positions of the arrays of each bucket, from the first array to the last, or `from_last` to the first. All arrays of a bucket
    have the same kind, for example the same type. A larger array has a bucket of its own."""
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    positions = range(len(kinds_and_bytes))
    for position in reversed(positions) if from_last else positions:
        kind, nbytes = kinds_and_bytes[position]
        bucket, used = open_buckets.get(kind, ([], 0))
        if not bucket or used + nbytes > bucket_bytes:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(position)
        open_buckets[kind] = (bucket, used + nbytes)
    return buckets
