"""One line of the table of engines: what runs for it, or which test shows it, and what the table says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ANSWERS = {
    "works": "works",
    "refused": "refused",
    "untested": "not run here",
}
EVERY = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        engine, feature, note: what the table says.
        launcher: what starts the processes, as the table says it.
        variants: the ``mars_type``s that the answer holds for.
        answer: "works"; "refused" (an error says ``message`` on every rank); "untested".
        ranks: the numbers of ranks it is run on.
        cases: what ``function(case)`` runs on every rank. Rows without cases name the test, or the file of tests, that
            ``shown_by`` holds, and which of its cases by ``kind``.
        collectives: how many a step after the first makes with element-wise variants.
        groups: of ranks that share matrices. Matrix variants make two all-to-alls more for each, or one broadcast from
            each owner where ranks hold copies.
        in_rounds: the same for each of several rounds.
        engines: what ``optimizer.engines()`` says.
        active: what ``facts`` must say: the proof that the engine under test was active.
        same_as_one_process: whether the end is also that of one process in float32.
    """

    engine: str
    feature: str
    launcher: str = "process group"
    variants: tuple[str, ...] = EVERY
    answer: str = "works"
    message: str = ""
    note: str = ""
    ranks: tuple[int, ...] = (2, 3, 4)
    cases: tuple[Any, ...] = ()
    function: Callable[[Any], dict[str, Any]] | None = None
    shown_by: str = ""
    kind: str = ""
    collectives: int = 1
    groups: int = 1
    in_rounds: bool = False
    engines: tuple[str, ...] = ()
    active: tuple[tuple[str, Any], ...] = ()
    same_as_one_process: bool = True
