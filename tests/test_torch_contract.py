"""What every torch optimizer does: closures, maximize, schedulers, GradScaler, step hooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import ReferenceMARS
from small import (
    VARIANTS,
    assert_close,
    assert_identical,
    gradients,
    parameters,
    set_gradients,
    snapshot,
    train,
)
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler

from mars_dist import MARS

EVERY_VARIANT = pytest.mark.parametrize("mars_type", VARIANTS)


# ---- closure, maximize


def test_a_closure_runs_with_gradients_on_and_its_loss_is_returned() -> None:
    p, twin = Parameter(torch.ones(2, 3)), Parameter(torch.ones(2, 3))
    optimizer, plain = MARS([p]), MARS([twin])
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        calls.append(loss)
        return loss

    with torch.no_grad():
        returned: Any = optimizer.step(closure)  # type: ignore[arg-type]
    assert len(calls) == 1 and returned is calls[0] and returned.requires_grad
    twin.grad = torch.full((2, 3), 2.0)
    assert plain.step() is None
    assert torch.equal(p, twin)


@EVERY_VARIANT
def test_maximize_is_minimising_with_the_opposite_gradients(mars_type: str) -> None:
    up, down = parameters(), parameters()
    ascent, descent = MARS(up.values(), mars_type=mars_type, maximize=True), MARS(down.values(), mars_type=mars_type)
    for step in range(4):
        grads = gradients(step, up)
        set_gradients(up, {name: -g for name, g in grads.items()})
        set_gradients(down, grads)
        ascent.step()
        descent.step()
    assert all(torch.equal(up[name], down[name]) for name in up)


# ---- schedulers


def cosine(optimizer: MARS) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)


def warmup_from_zero(optimizer: MARS) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)


def one_cycle(optimizer: MARS) -> Any:
    """Moves beta1 as well, hence the strength of the correction."""
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8)


def warmup_then_step(optimizer: MARS) -> Any:
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.StepLR(optimizer, 2)], milestones=[3])


EXPECTED_LR: dict[Callable[..., Any], Callable[[int], float]] = {
    cosine: lambda t: 0.02 * (1 + math.cos(math.pi * t / 6)) / 2,
    warmup_from_zero: lambda t: 0.02 * t / 4,
}


@pytest.mark.parametrize("lr", [0.02, torch.tensor(0.02, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("schedule", [cosine, warmup_from_zero, one_cycle, warmup_then_step])
@EVERY_VARIANT
def test_a_schedule_moves_both_learning_rates(schedule: Callable[..., Any], lr: float | Tensor, mars_type: str) -> None:
    kwargs: dict[str, Any] = {
        "mars_type": mars_type,
        "weight_decay": 0.1,
        "weight_decay_1d": 0.2,
        "ns_dtype": "float64",
    }
    params = parameters(torch.float64)
    lr = lr.clone() if isinstance(lr, Tensor) else lr
    optimizer = MARS(params.values(), lr=lr, lr_1d=0.06, **kwargs)
    reference = ReferenceMARS(params, lr=0.02, lr_1d=0.06, **kwargs)
    scheduler = schedule(optimizer)
    for step in range(8):
        group = optimizer.param_groups[0]
        assert isinstance(group["lr"], Tensor) == isinstance(lr, Tensor)
        if schedule in EXPECTED_LR:
            assert float(group["lr"]) == pytest.approx(EXPECTED_LR[schedule](step), abs=1e-9)
        reference.groups[0]["betas"] = group["betas"]
        grads = gradients(step, params)
        set_gradients(params, grads)
        optimizer.step()
        reference.step(grads, lr=float(group["lr"]))
        scheduler.step()
    assert_close(params, reference.params, atol=1e-11)


@EVERY_VARIANT
def test_lr_as_a_tensor_of_one_element_is_the_number(mars_type: str) -> None:
    results = []
    for lr in (0.25, torch.tensor(0.25), torch.tensor([0.25], dtype=torch.float64)):
        params = parameters(torch.float64)
        train(MARS(params.values(), mars_type=mars_type, lr=lr, lr_1d=0.5, weight_decay=0.1), params, range(3))
        results.append({name: p.detach() for name, p in params.items()})
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])


# ---- GradScaler


@EVERY_VARIANT
def test_gradscaler_unscales_and_a_skipped_step_changes_nothing(mars_type: str) -> None:
    params = parameters(torch.float64)
    optimizer = MARS(params.values(), mars_type=mars_type, ns_dtype="float64")
    reference = ReferenceMARS(params, mars_type=mars_type)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(5):
        grads = gradients(step, params)
        optimizer.zero_grad()
        loss = sum(((p * grads[name]).sum() for name, p in params.items()), torch.zeros((), dtype=torch.float64))
        overflows = step in (0, 2)
        scaler.scale(loss * (torch.inf if overflows else 1.0)).backward()
        before = snapshot(optimizer, params)
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            assert_identical(snapshot(optimizer, params), before)
        else:
            reference.step(grads)
    assert_close(params, reference.params, atol=1e-12)
    assert scaler.get_scale() == 256.0, "two steps overflowed"


def test_step_hooks_are_called() -> None:
    params = parameters()
    optimizer = MARS(params.values())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(optimizer, params, range(2))
    assert calls == ["before", "after"] * 2
