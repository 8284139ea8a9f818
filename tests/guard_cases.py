"""What runs on the ranks in test_guard.py: engines in which something takes the update away from MARS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.zero_cases import ZeroCase
from tests.zero_more_cases import Run


def nothing(run: Run) -> None:
    """An ordinary engine."""


def everything(run: Run) -> None:
    """The wrapper steps an AdamW of its own, as SuperOffload does."""
    other = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    for group in run.mars.param_groups:
        group |= other.defaults | group
    other.param_groups = run.mars.param_groups
    run.engine.optimizer.optimizer = other


def one_group(run: Run) -> None:
    """The second of two calls of an update goes to another optimizer."""
    step, calls = run.mars.step, []

    def every_other(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return step(*args, **kwargs) if len(calls) % 2 else None

    run.mars.step = every_other


def twice(run: Run) -> None:
    """A plug-in steps the optimizer once more after the engine did."""
    step = run.mars.step

    def again(*args: Any, **kwargs: Any) -> Any:
        step(*args, **kwargs)
        return step(*args, **kwargs)

    run.mars.step = again


def later(run: Run) -> None:
    """A feature that switches itself on after some warm-up steps, as ZenFlow does."""
    run.train(0, 3)
    everything(run)


def train(case: ZeroCase, take_over: Callable[[Run], None]) -> tuple[int, int]:
    run = Run(case)
    take_over(run)
    run.train(3, 5)
    return run.mars.tensor_updates, run.engine.global_steps


def start(case: ZeroCase) -> list[str]:
    """What MARS has logged when the engine has started."""
    run = Run(case)
    run.close()
    return run.messages.texts
