"""``python -m tests.engines [--write]``: the table of engines as Markdown, printed or put into its README."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.engines import ROWS
from tests.engines.row import ANSWERS, Row
from tests.markdown import between

README = Path(__file__).parents[2] / "launch/README.md"
BEGIN, END = "<!-- engines:begin -->", "<!-- engines:end -->"


def table() -> str:
    """One table for each engine, a line for each row, in the order in which the rows are given."""
    lines: list[str] = []
    for engine in dict.fromkeys(row.engine for row in ROWS):
        head = [
            "| | variants | launcher | answer | ranks | |",
            "|---|---|---|---|---|---|",
        ]
        lines += ["", f"**{engine}**", "", *head]
        lines += [line(row) for row in ROWS if row.engine == engine]
    return "\n".join([*lines, ""])


def line(row: Row) -> str:
    ranks = "/".join(map(str, row.ranks))
    variants = "all" if len(row.variants) == 4 else ", ".join(row.variants)
    return f"| {row.feature} | {variants} | {row.launcher} | {answer(row)} | {ranks} | {row.note} |"


def answer(row: Row) -> str:
    """Works, or what the error says."""
    return f'{ANSWERS[row.answer]}: "{row.message}"' if row.message else ANSWERS[row.answer]


def written(text: str) -> str:
    """``text`` of the README with the table of today in it."""
    return between(text, BEGIN, END, table())


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        README.write_text(written(README.read_text()))
    else:
        print(table())
