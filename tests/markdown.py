"""Tables that are printed from the tests, between two marks in a README."""

from __future__ import annotations


def between(text: str, begin: str, end: str, table: str) -> str:
    """``text`` with ``table`` between its marks.

    Raises:
        ValueError: where the marks are not in it.
    """
    if not 0 <= text.find(begin) < text.find(end):
        raise ValueError(f"there is no {begin} and {end} to put the table between")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + "\n" + table + "\n" + end + after
