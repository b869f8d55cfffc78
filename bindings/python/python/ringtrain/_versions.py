"""Compares the versions of the frameworks that are installed."""

from __future__ import annotations

import re


def is_older(found: str, minimum: tuple[int, ...]) -> bool:
    """Returns whether a version, such as "2.16.0rc1", is older than the oldest version that a module supports."""
    return tuple(int(number) for number in re.findall(r"\d+", found)[:3]) < minimum
