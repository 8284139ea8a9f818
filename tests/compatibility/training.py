"""The plain training of a row: an engine, ten steps, and what REPLAY needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.zero_cases import ZeroCase
from tests.zero_more_cases import Run


def train(case: ZeroCase, active: str) -> dict[str, Any]:
    """Active: the engine has the stage that was asked for, and the whole gradients that reach MARS are clipped."""
    run = Run(case)
    run.train(0, case.steps)
    stage = run.engine.zero_optimization_stage()
    result = run.close()
    norms = [whole_norm(gradients) for gradients in result["gradients"]]
    clipped = not case.clip or (max(norms) < 1.001 * case.clip and min(norms) > 0.999 * case.clip)
    return {**result, "active": stage == case.stage and clipped}


def whole_norm(gradients: Mapping[str, Tensor]) -> float:
    return float(torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt())
