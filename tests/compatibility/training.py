"""What runs on the ranks in test_compatibility.py: one training under a DeepSpeed engine with a feature turned on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.zero_cases import ZeroCase
from tests.zero_more_cases import Run

# Read off the engine after the training: does it really do what the configuration asks for?
ACTIVE: dict[str, Callable[[Any], Any]] = {
    "round_robin": lambda engine: engine.optimizer.round_robin_gradients,
}


def train(case: ZeroCase, active: str) -> dict[str, Any]:
    run = Run(case)
    run.train(0, case.steps)
    proof = bool(ACTIVE[active](run.engine))
    return {**run.close(), "active": proof}
