"""A run that is saved and continued in the middle is bit-equal to one that was not."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import (
    VARIANTS,
    Parameters,
    assert_identical,
    copies,
    gradients,
    parameters,
    set_gradients,
    snapshot,
    train,
)

from mars_dist import MARS

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
EVERY_VARIANT = pytest.mark.parametrize("mars_type", VARIANTS)

# None of these is what the saved run was built with, and each would change its numbers.
OTHER: dict[str, Any] = {
    "lr": 1.0,
    "betas": (0.5, 0.6),
    "eps": 1e-2,
    "weight_decay": 0.9,
    "amsgrad": False,
    "gamma": 0.9,
    "optimize_1d": True,
    "lr_1d": 0.5,
    "betas_1d": (0.1, 0.2),
    "weight_decay_1d": 0.8,
    "clip": 0.01,
    "first_step": "reference",
    "ns_steps": 1,
    "ns_dtype": "bfloat16",
    "orthogonalizer": "svd",
    "matrix_ndim": (2, 3),
    "skip_nonfinite": True,
    "use_mars": False,
    "maximize": True,
}


def build(params: Parameters, **kwargs: Any) -> MARS:
    """Two groups that differ; "kernel" belongs to the second."""
    second = ["tall", "kernel"]
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in params.items() if name not in second]},
        {"params": [params[name] for name in second]},
    ]
    if not kwargs.keys() & OTHER.keys():  # the run that is saved
        groups[1] |= {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.0, "gamma": 0.1}
        kwargs |= {"lr": 0.01, "lr_1d": 0.02, "weight_decay": 0.1, "amsgrad": True, "first_step": "paper"}
    return MARS(groups, **kwargs)


def other(optimizer: MARS) -> dict[str, Any]:
    """Other values for everything but the variant: another one is refused (test_loading.py)."""
    return {**OTHER, "mars_type": optimizer.settings.mars_type, "is_approx": True}


def by_state_dict(optimizer: MARS, params: Parameters) -> tuple[MARS, Parameters]:
    params = copies(params)
    loaded = build(params, **other(optimizer))
    loaded.load_state_dict(optimizer.state_dict())
    return loaded, params


def through_a_file(optimizer: MARS) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_file(optimizer: MARS, params: Parameters) -> tuple[MARS, Parameters]:
    params = copies(params)
    loaded = build(params, **other(optimizer))
    loaded.load_state_dict(through_a_file(optimizer))
    return loaded, params


def by_file_into_one_that_has_trained(optimizer: MARS, params: Parameters) -> tuple[MARS, Parameters]:
    values, params = params, copies(params)
    loaded = build(params, **other(optimizer))
    train(loaded, params, range(50, 52))
    loaded.load_state_dict(through_a_file(optimizer))
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(values[name])
    return loaded, params


def by_deepcopy(optimizer: MARS, params: Parameters) -> tuple[MARS, Parameters]:
    return copy.deepcopy((optimizer, params))


def by_pickle(optimizer: MARS, params: Parameters) -> tuple[MARS, Parameters]:
    return pickle.loads(pickle.dumps((optimizer, params)))


Carry = Callable[[MARS, Parameters], tuple[MARS, Parameters]]
CARRIERS = [by_state_dict, by_file, by_file_into_one_that_has_trained, by_deepcopy, by_pickle]
EVERY_CARRIER = pytest.mark.parametrize("carry", CARRIERS)


def train_all(optimizer: MARS, params: Parameters, step: int) -> None:
    """One step; "bias" and "wide" get no gradient in the beginning, so that their first step comes after the cut."""
    grads = gradients(step, params)
    if step < 4:
        del grads["bias"], grads["wide"]
    set_gradients(params, grads)
    optimizer.step()


@EVERY_CARRIER
@EVERY_VARIANT
@DTYPES
def test_a_run_continues_bit_equal_while_the_first_one_goes_on(
    carry: Carry, mars_type: str, dtype: torch.dtype
) -> None:
    params = parameters(dtype)
    optimizer = build(params, mars_type=mars_type)
    undisturbed_params = copies(params)
    undisturbed = build(undisturbed_params, mars_type=mars_type)
    for step in range(3):
        train_all(optimizer, params, step)
        train_all(undisturbed, undisturbed_params, step)
    second, second_params = carry(optimizer, params)
    assert_identical(snapshot(second, second_params), snapshot(optimizer, params))
    for step in range(3, 7):  # in turns: memory that is shared would be written twice
        train_all(optimizer, params, step)
        train_all(second, second_params, step)
        train_all(undisturbed, undisturbed_params, step)
    assert_identical(snapshot(second, second_params), snapshot(undisturbed, undisturbed_params))
    assert_identical(snapshot(optimizer, params), snapshot(undisturbed, undisturbed_params))
    assert any((p != q).any() for p, q in zip(params.values(), parameters(dtype).values(), strict=True))


@EVERY_CARRIER
def test_groups_and_settings_travel(carry: Carry) -> None:
    params = parameters()
    optimizer = build(params, mars_type="mars-m")
    train(optimizer, params, range(2))
    second, _ = carry(optimizer, params)
    a, b = optimizer.state_dict(), second.state_dict()
    for group, carried in zip(a["param_groups"], b["param_groups"], strict=True):
        assert group.items() <= carried.items()
    assert optimizer.settings == second.settings
    assert all("mars_settings" in group for group in a["param_groups"])


@EVERY_CARRIER
def test_a_non_finite_step_is_left_out_after_the_cut_as_before_it(carry: Carry) -> None:
    params = parameters()
    optimizer = build(params, mars_type="mars-adamw")
    train(optimizer, params, range(2))
    second, second_params = carry(optimizer, params)
    bad = {name: torch.full_like(p, torch.nan) for name, p in second_params.items()}
    set_gradients(second_params, bad)
    second.step()
    assert all(p.isnan().all() for p in second_params.values()), "the saved run was built to let NaN through"


@EVERY_CARRIER
def test_exact_mode_continues_bit_equal(carry: Carry) -> None:
    def step_exactly(optimizer: MARS, params: Parameters, step: int) -> None:
        set_gradients(params, gradients(1000 + step, params))
        optimizer.update_previous_grad()
        set_gradients(params, gradients(step, params))
        optimizer.step()
        optimizer.update_last_grad()

    params = parameters()
    optimizer = build(params, mars_type="mars-adamw", is_approx=False)
    for step in range(3):
        step_exactly(optimizer, params, step)
    second, second_params = carry(optimizer, params)
    for step in range(3, 6):
        step_exactly(optimizer, params, step)
        step_exactly(second, second_params, step)
    assert_identical(snapshot(second, second_params), snapshot(optimizer, params))


def test_moments_of_bfloat16_parameters_keep_their_precision_through_a_load() -> None:
    """torch.optim casts loaded states to the dtype of the parameter."""
    params = parameters(torch.bfloat16)
    optimizer = build(params, mars_type="mars-adamw")
    train(optimizer, params, range(2))
    second, second_params = by_state_dict(optimizer, params)
    state = second.state[second_params["wide"]]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float32, torch.float32)
    assert (state["exp_avg"] != state["exp_avg"].bfloat16().float()).any()


def test_a_loaded_dictionary_is_not_written_to_by_later_steps() -> None:
    params = parameters()
    optimizer = build(params, mars_type="mars-adamw")
    train(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    second_params = copies(params)
    second = build(second_params, mars_type="mars-adamw")
    second.load_state_dict(saved)
    train(second, second_params, range(2, 4))
    for i, state in kept["state"].items():
        assert_identical(saved["state"][i], state)


def test_a_step_counter_shared_by_all_states_of_a_dictionary_counts_once_per_step() -> None:
    params = parameters()
    optimizer = MARS(params.values())
    train(optimizer, params, range(2))
    saved = optimizer.state_dict()
    shared = torch.tensor(2.0)
    saved["state"] = {i: {**state, "step": shared} for i, state in saved["state"].items()}
    second_params = copies(params)
    second = MARS(second_params.values())
    second.load_state_dict(saved)
    train(optimizer, params, range(2, 4))
    train(second, second_params, range(2, 4))
    assert_identical(snapshot(second, second_params), snapshot(optimizer, params))


def test_a_step_counter_that_was_saved_as_a_number_is_read() -> None:
    params = parameters()
    optimizer = MARS(params.values())
    train(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    second_params = copies(params)
    second = MARS(second_params.values())
    second.load_state_dict(saved)
    train(optimizer, params, range(2, 4))
    train(second, second_params, range(2, 4))
    assert_identical(snapshot(second, second_params), snapshot(optimizer, params))


def test_a_dictionary_with_other_groups_is_refused_and_changes_nothing() -> None:
    params = parameters()
    optimizer = build(params, mars_type="mars-adamw")
    train(optimizer, params, range(2))
    single_params = copies(params)
    single = MARS(single_params.values())
    train(single, single_params, range(2))
    before = snapshot(single, single_params)
    with pytest.raises(ValueError, match="parameter groups"):
        single.load_state_dict(optimizer.state_dict())
    assert_identical(snapshot(single, single_params), before)


def test_hooks_on_loading_see_and_change_what_torch_optim_lets_them() -> None:
    params = parameters()
    optimizer = MARS(params.values())
    train(optimizer, params, range(2))
    second_params = copies(params)
    second = MARS(second_params.values())
    seen: list[Any] = []

    def doubled(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        states = {i: {**state, "exp_avg": 2.0 * state["exp_avg"]} for i, state in saved["state"].items()}
        return {**saved, "state": states}

    second.register_load_state_dict_pre_hook(doubled)
    second.register_load_state_dict_post_hook(lambda loaded: seen.append(snapshot(loaded, second_params)))  # type: ignore[arg-type]
    second.load_state_dict(optimizer.state_dict())
    assert_identical(seen[0], snapshot(second, second_params))
    for name, p in second_params.items():
        assert torch.equal(second.state[p]["exp_avg"], 2.0 * optimizer.state[params[name]]["exp_avg"])
