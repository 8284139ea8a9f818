"""``python -m tests.compatibility [--write]``: the compatibility table as Markdown, printed or put into its README."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.compatibility import ROWS
from tests.compatibility.row import ANSWERS, Row
from tests.markdown import between

README = Path(__file__).parents[2] / "ds_configs/README.md"
BEGIN, END = "<!-- compatibility:begin -->", "<!-- compatibility:end -->"


def table() -> str:
    """One table for each section, a line for each row, in the order in which the rows are given."""
    lines: list[str] = []
    for section in dict.fromkeys(row.section for row in ROWS):
        lines += ["", f"**{section}**", "", "| feature | answer | run with | |", "|---|---|---|---|"]
        rows = [row for row in ROWS if row.section == section]
        lines += [f"| {r.feature} | {ANSWERS[r.answer]} | {run_with(r)} | {r.note} |" for r in rows]
    return "\n".join([*lines, ""])


def run_with(row: Row) -> str:
    """What the cases of a row cover, in a few words."""
    if not row.cases:
        return "not run"
    stages = listed(case.stage for case in row.cases)
    dtypes = ", ".join(dict.fromkeys(case.dtype for case in row.cases))
    offload = ", with and without offload" * (len({case.offload for case in row.cases}) == 2)
    return f"ZeRO-{stages}, {dtypes}{offload}; {listed(row.ranks)} ranks"


def listed(numbers: object) -> str:
    return "/".join(map(str, sorted(set(numbers))))  # type: ignore[call-overload]


def written(text: str) -> str:
    """``text`` of the README with the table of today in it."""
    return between(text, BEGIN, END, table())


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        README.write_text(written(README.read_text()))
    else:
        print(table())
