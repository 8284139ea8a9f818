"""Steps that are not taken: non-finite gradients with ``skip_nonfinite``, and the dry runs of checkpoint libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import ReferenceMARS
from small import (
    SHAPES,
    VARIANTS,
    Parameters,
    assert_close,
    assert_identical,
    copies,
    gradients,
    parameters,
    set_gradients,
    snapshot,
    train,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter

from mars_dist import MARS

EVERY_VARIANT = pytest.mark.parametrize("mars_type", VARIANTS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"first_step": "paper"},
    {"optimize_1d": True, "amsgrad": True},
    {"clip": None, "weight_decay": 0.1},
    {"lr": torch.tensor(0.01)},
    {"eps": 0.0},
    {"gamma": 0.0, "maximize": True},
]


def spoil(params: Parameters, where: str, value: float) -> None:
    """One element of one gradient."""
    grad = params[where].grad
    assert grad is not None
    grad.view(-1)[-1] = value


# ---- non-finite gradients


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("where", ["wide", "bias"])
@pytest.mark.parametrize("bad_steps", [{0}, {2}, {0, 1, 3}], ids=str)
@EVERY_DTYPE
@EVERY_VARIANT
def test_a_non_finite_gradient_leaves_everything_untouched_and_later_steps_never_see_it(
    mars_type: str, dtype: torch.dtype, bad_steps: set[int], where: str, value: float
) -> None:
    params, clean = parameters(dtype), parameters(dtype)
    optimizer = MARS(params.values(), mars_type=mars_type, skip_nonfinite=True)
    unspoilt = MARS(clean.values(), mars_type=mars_type, skip_nonfinite=True)
    for step in range(5):
        set_gradients(params, gradients(step, params))
        if step in bad_steps:
            spoil(params, where, value)
        before = snapshot(optimizer, params)
        optimizer.step()
        if step not in bad_steps:
            train(unspoilt, clean, [step])
        elif before["states"]:
            assert_identical(snapshot(optimizer, params), before)
        else:
            assert_identical(snapshot(optimizer, params)["params"], before["params"])
            assert all(not t.any() for state in optimizer.state.values() for t in state.values()), "nothing but zeros"
    assert_identical(snapshot(optimizer, params), snapshot(unspoilt, clean))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@EVERY_VARIANT
def test_a_skipped_step_is_no_step_with_every_option(mars_type: str, options: dict[str, Any]) -> None:
    params, clean = parameters(), parameters()
    optimizer = MARS(params.values(), mars_type=mars_type, skip_nonfinite=True, **options)
    unspoilt = MARS(clean.values(), mars_type=mars_type, skip_nonfinite=True, **options)
    for step in range(5):
        set_gradients(params, gradients(step, params))
        if step in (0, 2):
            spoil(params, "tall", torch.nan)
            optimizer.step()
        else:
            optimizer.step()
            train(unspoilt, clean, [step])
    assert_identical(snapshot(optimizer, params), snapshot(unspoilt, clean))
    assert all(p.isfinite().all() for p in params.values())


def test_h_of_the_step_after_a_skipped_one_is_the_last_finite_gradient() -> None:
    params = parameters(torch.float64)
    optimizer, reference = MARS(params.values(), skip_nonfinite=True), ReferenceMARS(params)
    for step in range(6):
        grads = gradients(step, params)
        set_gradients(params, grads)
        if step in (2, 3):
            spoil(params, "scalar", torch.inf)
        else:
            reference.step(grads)
        optimizer.step()
    assert_close(params, reference.params)


def test_without_non_finite_gradients_the_option_changes_nothing() -> None:
    for mars_type in VARIANTS:
        params, other = parameters(torch.float64), parameters(torch.float64)
        train(MARS(params.values(), mars_type=mars_type, skip_nonfinite=True), params, range(4))
        train(MARS(other.values(), mars_type=mars_type), other, range(4))
        assert_close(params, {name: p.detach() for name, p in other.items()})


@pytest.mark.parametrize("where", ["wide", "bias"])
@EVERY_VARIANT
def test_by_default_nan_goes_through_to_its_tensor_and_to_no_other(mars_type: str, where: str) -> None:
    """As in torch.optim: a NaN is seen where it arises. Under Lion in the momentum only: sign(NaN) is 0."""
    params, clean = parameters(), parameters()
    optimizer, unspoilt = MARS(params.values(), mars_type=mars_type), MARS(clean.values(), mars_type=mars_type)
    for step in range(3):
        set_gradients(params, gradients(step, params))
        if step == 1:
            spoil(params, where, torch.nan)
        optimizer.step()
        train(unspoilt, clean, [step])
    state = optimizer.state[params[where]]
    assert int(state["step"]) == 3 and state["exp_avg"].isnan().any()
    assert bool(params[where].isnan().any()) == (mars_type != "mars-lion" or where == "bias")
    for name in params.keys() - {where}:
        assert torch.equal(params[name], clean[name]), name


# ---- dry runs


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, p in parameters(dtype).items():
            self.register_parameter(name, p)

    @property
    def tensors(self) -> Parameters:
        return {name: p for name, p in self.named_parameters() if name in SHAPES}


Dry = Callable[[Model, MARS], None]


def by_checkpoint_library(model: Model, optimizer: MARS) -> None:
    get_optimizer_state_dict(model, optimizer)


def by_hand(model: Model, optimizer: MARS) -> None:
    """The same, written out: the library may change how it does it."""
    lrs = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], torch.Tensor) else 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = lr
    optimizer.zero_grad()


@pytest.mark.parametrize("dry_run", [by_checkpoint_library, by_hand])
@pytest.mark.parametrize("options", [*OPTIONS, {"skip_nonfinite": True}], ids=str)
@EVERY_VARIANT
def test_a_dry_run_changes_nothing_that_matters(mars_type: str, options: dict[str, Any], dry_run: Dry) -> None:
    model, fresh = Model(), Model()
    optimizer = MARS(model.parameters(), mars_type=mars_type, **options)
    other = MARS(fresh.parameters(), mars_type=mars_type, **options)
    dry_run(model, optimizer)
    assert optimizer.state, "no dry run was made"
    assert all(not t.any() for state in optimizer.state.values() for t in state.values()), "nothing but zeros"
    assert_identical(
        {n: p.detach() for n, p in model.tensors.items()}, {n: p.detach() for n, p in fresh.tensors.items()}
    )
    train(optimizer, model.tensors, range(3))
    train(other, fresh.tensors, range(3))
    assert_identical(snapshot(optimizer, model.tensors), snapshot(other, fresh.tensors))


@EVERY_VARIANT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_library_restores_a_run_bit_equal(mars_type: str, dtype: torch.dtype) -> None:
    kwargs: dict[str, Any] = {"mars_type": mars_type, "amsgrad": True}
    model, restored = Model(dtype), Model(dtype)
    optimizer = MARS(model.parameters(), lr=0.01, **kwargs)
    train(optimizer, model.tensors, range(3))
    saved = get_optimizer_state_dict(model, optimizer)
    restored.load_state_dict(model.state_dict())
    other = MARS(restored.parameters(), lr=0.5, **kwargs)
    set_optimizer_state_dict(restored, other, saved)
    train(optimizer, model.tensors, range(3, 6))
    train(other, restored.tensors, range(3, 6))
    assert_identical(snapshot(other, restored.tensors), snapshot(optimizer, model.tensors))


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
@EVERY_VARIANT
def test_real_gradients_at_lr_zero_are_a_step(mars_type: str, lr: float | torch.Tensor) -> None:
    """The first step of a warm-up from 0: h and the moments move, the parameters do not."""
    params = parameters(torch.float64)
    optimizer, reference = MARS(params.values(), mars_type=mars_type), ReferenceMARS(params, mars_type=mars_type)
    for step in range(4):
        now = lr if step == 0 else 0.01
        optimizer.param_groups[0]["lr"] = now
        grads = gradients(step, params)
        set_gradients(params, grads)
        before = {name: p.detach().clone() for name, p in params.items()}
        optimizer.step()
        reference.step(grads, lr=float(now))
        if step == 0:
            assert_identical({name: p.detach() for name, p in params.items()}, before)
    assert all(int(state["step"]) == 4 for state in optimizer.state.values())
    assert_close(params, reference.params, atol=1e-12)


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("names", [["wide", "bias"], ["bias"]], ids=str)
def test_zero_gradients_at_lr_zero_are_a_step_for_a_tensor_that_has_taken_one(
    names: list[str], lr: float | torch.Tensor
) -> None:
    params = parameters(torch.float64, {name: SHAPES[name] for name in names})
    optimizer, reference = MARS(params.values()), ReferenceMARS(params)
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    for step, now in enumerate((3e-3, lr, 3e-3)):
        optimizer.param_groups[0]["lr"] = now
        grads = zeros if step == 1 else gradients(step, params)
        set_gradients(params, grads)
        optimizer.step()
        reference.step(grads, lr=float(now))
    assert all(int(state["step"]) == 3 for state in optimizer.state.values())
    assert_close(params, reference.params)


@pytest.mark.parametrize("lr", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
@EVERY_VARIANT
def test_zero_gradients_at_a_positive_lr_are_a_step(mars_type: str, lr: float | torch.Tensor) -> None:
    """The decay acts and the counter counts, whatever the gradients are."""
    params = parameters(torch.float64)
    kwargs: dict[str, Any] = {"mars_type": mars_type, "weight_decay": 0.1, "lr_1d": 0.5}
    optimizer, reference = MARS(params.values(), lr=lr, **kwargs), ReferenceMARS(params, lr=0.25, **kwargs)
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    for step in range(3):
        grads = zeros if step == 0 else gradients(step, params)
        set_gradients(params, grads)
        optimizer.step()
        reference.step(grads)
    assert all(int(state["step"]) == 3 for state in optimizer.state.values())
    assert_close(params, reference.params, atol=1e-12)


def test_a_group_whose_lr_is_zero_does_not_make_a_dry_run_of_the_others() -> None:
    params = parameters(torch.float64, {"still": (3, 3), "moving": (3, 3)})
    optimizer = MARS([{"params": [p]} for p in params.values()], weight_decay=0.1)
    reference = ReferenceMARS(params, [{"names": [name]} for name in params], weight_decay=0.1)
    optimizer.param_groups[0]["lr"] = 0.0
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    set_gradients(params, zeros)
    optimizer.step()
    reference.step(zeros, lr=[0.0, 3e-3])
    assert_close(params, reference.params)
    assert int(optimizer.state[params["moving"]]["step"]) == 1


def test_a_tensor_that_never_had_a_gradient_is_new_after_a_dry_run_with_others() -> None:
    params = copies(parameters(torch.float64))
    optimizer, reference = MARS(params.values(), first_step="paper"), ReferenceMARS(params, first_step="paper")
    grads = gradients(0, params)
    late = grads.pop("wide")
    set_gradients(params, grads)
    optimizer.step()
    reference.step(grads)
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    set_gradients(params, {"wide": zeros["wide"]})
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 3e-3
    set_gradients(params, {"wide": late})
    optimizer.step()
    reference.step({"wide": late})
    assert_close(params, reference.params)
    assert isinstance(params["wide"], Parameter) and int(optimizer.state[params["wide"]]["step"]) == 1
