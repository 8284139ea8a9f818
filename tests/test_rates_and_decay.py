"""Learning rate and decay of tensors under plain AdamW: a ratio to ``lr``, and the first decay that somebody named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import ReferenceMARS
from small import assert_close, gradients, parameters, set_gradients, train
from torch.nn import Parameter

from mars_dist import MARS


def test_the_1d_rate_is_a_ratio_so_that_a_change_of_lr_moves_both() -> None:
    params = parameters(torch.float64)
    optimizer = MARS(params.values(), lr=0.01, lr_1d=0.03)
    reference = ReferenceMARS(params, lr=0.01, lr_1d=0.03)
    for step, lr in enumerate((0.01, 0.002, 0.0, 0.05)):
        optimizer.param_groups[0]["lr"] = lr
        grads = gradients(step, params)
        set_gradients(params, grads)
        optimizer.step()
        reference.step(grads, lr=lr)
    assert_close(params, reference.params)


@pytest.mark.parametrize(
    ("kwargs", "ratio", "warned"),
    [
        ({}, 1.0, False),
        ({"lr": 0.0}, 1.0, False),
        ({"lr": 0.0, "lr_1d": 3e-3}, 1.0, True),
        ({"lr": 0.0, "lr_1d": 0.0}, 0.0, False),
        ({"lr": 0.01, "lr_1d": 0.0}, 0.0, False),
        ({"lr": torch.tensor(0.0)}, 1.0, False),
        ({"lr": torch.tensor(0.5, dtype=torch.float64), "lr_1d": 0.25}, 0.5, False),
    ],
    ids=str,
)
def test_the_ratio_of_the_two_rates_is_defined_at_lr_zero_too(
    kwargs: dict[str, Any], ratio: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Built with lr 0 there is no ratio to keep: vectors follow lr itself, and a given lr_1d is warned about."""
    optimizer = MARS([Parameter(torch.ones(3))], **kwargs)
    assert optimizer.param_groups[0]["lr_1d_ratio"] == ratio
    assert [("ratio 1" in m, "lr = 0" in m) for m in caplog.messages] == [(True, True)] * warned


def test_an_optimizer_built_with_lr_zero_trains_once_a_schedule_raises_it() -> None:
    params = parameters(torch.float64)
    optimizer, reference = MARS(params.values(), lr=0.0), ReferenceMARS(params, lr=0.0)
    for step, lr in enumerate((0.0, 0.01, 0.02)):
        optimizer.param_groups[0]["lr"] = lr
        grads = gradients(step, params)
        set_gradients(params, grads)
        optimizer.step()
        reference.step(grads, lr=lr)
    assert_close(params, reference.params)


@pytest.mark.parametrize(
    ("kwargs", "warnings"),
    [
        ({"lr": 2e-5}, 1),
        ({"lr": torch.tensor(2e-5)}, 1),
        ({"lr": 7e-4}, 1),
        ({"lr": 8e-4}, 0),
        ({"lr": 3e-3}, 0),
        ({"lr": 2e-5, "lr_1d": 3e-3}, 0),
        ({"lr": 2e-5, "lr_1d": 2e-5}, 0),
    ],
    ids=str,
)
def test_a_default_1d_rate_of_more_than_four_times_lr_is_warned_about_once(
    kwargs: dict[str, Any], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A fine-tune at 2e-5 would train its biases at 150 times that. Whoever gives lr_1d knows."""
    params = parameters()
    optimizer = MARS([{"params": [p]} for p in params.values()], **kwargs)
    optimizer.add_param_group({"params": [Parameter(torch.ones(2))]})
    train(optimizer, params, range(2))
    assert [m for m in caplog.messages if "lr_1d was not given" in m] == caplog.messages[:warnings]
    assert len([m for m in caplog.messages if "lr_1d" in m]) == warnings


# ---- the decay of tensors under plain AdamW


@pytest.mark.parametrize("group_1d", [{"weight_decay_1d": 0.7}, {}], ids=str)
@pytest.mark.parametrize("given", [{"weight_decay_1d": 0.5}, {"weight_decay_1d": 0.1}, {}], ids=str)
@pytest.mark.parametrize("group", [{"weight_decay": 0.0}, {}], ids=str)
@pytest.mark.parametrize("general", [{"weight_decay": 0.3}, {}], ids=str)
def test_the_decay_of_vectors_is_the_first_that_somebody_named(
    group_1d: dict[str, Any], given: dict[str, Any], group: dict[str, Any], general: dict[str, Any]
) -> None:
    """The group's own; the constructor's if it was given; the group's own ``weight_decay``; 0.1."""
    named = [*group_1d.values(), *given.values(), *group.values(), 0.1]
    p = Parameter(torch.ones(3))
    optimizer = MARS([{"params": [p], **group, **group_1d}], lr=0.5, lr_1d=0.5, **given, **general)
    assert optimizer.param_groups[0]["weight_decay_1d"] == named[0]
    p.grad = torch.zeros(3)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 1.0 - 0.5 * named[0]))
