"""Texts of messages."""


def counted(count: int, noun: str) -> str:
    """Returns a count and its noun, for example `1 rank` or `4 ranks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
