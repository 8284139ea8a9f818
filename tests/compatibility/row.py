"""One line of the compatibility table: what runs for it and what the table says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests import nets
from tests.compatibility import training
from tests.zero_cases import ZeroCase

# A clip of 0.1: in these nets c is seldom longer than 1, and a clip that never acts would not be tested.
BASE = {"weight_decay": 0.05, "clip": 0.1}
NET = {"MARS-AdamW": nets.MATRICES, "AdamW": nets.VECTORS}

ANSWERS = {
    "works": "works",
    "warns": "works, with a warning",
    "refused": "refused",
    "untested": "a warning: untested",
}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        section, feature, note: what the table says.
        keys: the dotted keys of ds_config.json that the cases turn on.
        cases: ``function(case, active)`` runs on every rank.
        function: returns start, end and gradients (whole, by name: what REPLAY needs), rule_counts, engines, messages
            and ``active``, which must be true. ``end`` must be equal on all ranks.
        active: the name in ``training.ACTIVE`` of the proof that the engine really does what the case asks for.
        answer: "works", "warns" (works, and a message matches ``message``), "refused" (an error matches it), or
            "untested" (cannot be run here, so there are no cases; the guard warns about it).
        counts: how many tensors take which rule, on every rank.
        ranks: the numbers of ranks.
        replay: the reference's result where it is not that of constant settings, from a result and its case.
    """

    section: str
    feature: str
    keys: tuple[str, ...]
    cases: tuple[ZeroCase, ...]
    active: str = ""
    function: Callable[[ZeroCase, str], dict[str, Any]] = training.train
    answer: str = "works"
    message: str = ""
    note: str = ""
    counts: dict[str, int] = field(default_factory=lambda: dict(NET))
    ranks: tuple[int, ...] = (2, 3)
    replay: Callable[[dict[str, Any], ZeroCase], dict[str, Tensor]] | None = None
