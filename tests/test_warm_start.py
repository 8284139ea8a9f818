"""A state without the previous gradient continues as a first step, by numbers: AdamW's, or one that has lost it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import ReferenceMARS
from small import (
    MATRICES,
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
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint import state_dict as helpers

from mars_dist import MARS, ExactMode
from mars_dist.maths.absent import is_wholly_absent

EVERY_VARIANT = pytest.mark.parametrize("mars_type", VARIANTS)
EVERY_FIRST_STEP = pytest.mark.parametrize("first_step", ["reference", "paper"])
NUMBERS: dict[str, Any] = {"lr": 0.01, "lr_1d": 0.02, "weight_decay": 0.1, "gamma": 0.3}
ITERATION: dict[str, Any] = {"ns_dtype": "float64"}

Numbers = dict[str, Any]


def reference_of(params: Parameters, **settings: Any) -> ReferenceMARS:
    return ReferenceMARS(params, **{**NUMBERS, **ITERATION, **settings})


def mars_of(params: Parameters, **settings: Any) -> MARS:
    return MARS(params.items(), **{**NUMBERS, **ITERATION, **settings})


def said_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("load_state_dict")]


def without_h(saved: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """What a converter that knows AdamW only leaves of the states of ``names``."""
    for number, name in enumerate(parameters()):
        if name in names:
            saved["state"][number] = {k: v for k, v in saved["state"][number].items() if k != "prev_grad"}
    return saved


def h_is_missing(reference: ReferenceMARS, names: set[str], next_grads: dict[str, Tensor]) -> None:
    for name in names & MATRICES:
        g = next_grads[name].double()
        reference.state[name]["prev_grad"] = g if reference.first_step == "paper" else torch.zeros_like(g)


# ---- how the state reaches the optimizer that continues. Each is given a state without h and a way to build.

Build = Callable[[Parameters], MARS]
Carry = Callable[[dict[str, Any], Parameters, Build], MARS]


def plainly(saved: dict[str, Any], params: Parameters, build: Build) -> MARS:
    optimizer = build(params)
    optimizer.load_state_dict(saved)
    return optimizer


def saved_in_between(saved: dict[str, Any], params: Parameters, build: Build) -> MARS:
    """Loaded, saved before the next step, and loaded again."""
    file = io.BytesIO()
    torch.save(plainly(saved, copies(params), build).state_dict(), file)
    file.seek(0)
    return plainly(torch.load(file, weights_only=True), params, build)


def through_helpers(saved: dict[str, Any], params: Parameters, build: Build, **options: bool) -> MARS:
    """Saved in between by torch's helpers, and loaded by them into an optimizer that they have stepped with lr 0."""
    how = helpers.StateDictOptions(**options)  # type: ignore[arg-type]
    first = copies(params)
    named = helpers.get_optimizer_state_dict(nn.ParameterDict(first), plainly(saved, first, build), options=how)
    optimizer = build(params)
    helpers.set_optimizer_state_dict(nn.ParameterDict(params), optimizer, copy.deepcopy(named), options=how)
    return optimizer


def through_flat_helpers(saved: dict[str, Any], params: Parameters, build: Build) -> MARS:
    return through_helpers(saved, params, build, flatten_optimizer_state_dict=True)


def through_whole_helpers(saved: dict[str, Any], params: Parameters, build: Build) -> MARS:
    return through_helpers(saved, params, build, full_state_dict=True)


def a_stripped_state_through_helpers(saved: dict[str, Any], params: Parameters, build: Build) -> MARS:
    """h is missing in what the helpers are given: "whole", they put the rest into the states of a step with lr 0."""
    names = list(params)
    named = {
        "state": {names[number]: state for number, state in saved["state"].items()},
        "param_groups": [{**g, "params": [names[i] for i in g["params"]]} for g in saved["param_groups"]],
    }
    optimizer = build(params)
    how = helpers.StateDictOptions(full_state_dict=True)
    helpers.set_optimizer_state_dict(nn.ParameterDict(params), optimizer, named, options=how)
    return optimizer


def after_a_step_that_is_left_out(saved: dict[str, Any], params: Parameters, build: Build) -> MARS:
    optimizer = plainly(saved, params, build)
    set_gradients(params, {name: torch.full_like(p, torch.nan) for name, p in params.items()})
    optimizer.step()
    return optimizer


CARRIERS: list[Carry] = [
    plainly,
    saved_in_between,
    through_helpers,
    through_whole_helpers,
    through_flat_helpers,
    a_stripped_state_through_helpers,
    after_a_step_that_is_left_out,
]


@pytest.mark.parametrize("carry", CARRIERS)
@EVERY_FIRST_STEP
@EVERY_VARIANT
def test_a_state_without_h_continues_as_a_first_step(
    mars_type: str, first_step: str, carry: Carry, caplog: pytest.LogCaptureFixture
) -> None:
    more = {"mars_type": mars_type, "first_step": first_step}
    skipping = {"skip_nonfinite": carry is after_a_step_that_is_left_out}
    loads = 2 if carry in (saved_in_between, through_helpers, through_flat_helpers, through_whole_helpers) else 1
    for lost in (set(parameters()), {"tall", "bias"}):
        params = parameters(torch.float64)
        optimizer, reference = mars_of(params, **more, **skipping), reference_of(params, **more)
        for step in range(3):
            grads = gradients(step, params)
            set_gradients(params, grads)
            optimizer.step()
            reference.step(grads)
        saved = without_h(copy.deepcopy(optimizer.state_dict()), lost)
        caplog.clear()
        params = copies(params)
        second = carry(saved, params, lambda its: mars_of(its, **more, **skipping))
        said = said_by(caplog)
        assert len(said) == loads
        h = "h = g" if first_step == "paper" else "h = 0"
        count = len(lost & MATRICES)
        assert all(f"{count} of 2 tensors come without the gradient of the step before" in s for s in said)
        assert all(f"as a first one ({h}, first_step='{first_step}')" in s for s in said)
        assert float(second.state[params["wide"]]["step"]) == 3.0
        for name in lost & MATRICES:  # it is there, and says that it is not
            assert is_wholly_absent(second.state[params[name]]["prev_grad"])
        h_is_missing(reference, lost, gradients(3, params))
        for step in range(3, 6):
            grads = gradients(step, params)
            set_gradients(params, grads)
            second.step()
            reference.step(grads)
        assert_close(params, reference.params, 1e-12)


@EVERY_FIRST_STEP
def test_that_h_matters_here(first_step: str) -> None:
    """With its h the same run ends elsewhere: the comparison above can fail."""
    params = parameters(torch.float64)
    optimizer, reference = (make(params, first_step=first_step) for make in (mars_of, reference_of))
    for step in range(6):
        grads = gradients(step, params)
        if step == 3:
            h_is_missing(reference, MATRICES, grads)
        set_gradients(params, grads)
        optimizer.step()
        reference.step(grads)
    assert all((params[name].detach() - reference.params[name]).abs().max() > 1e-6 for name in MATRICES)


@EVERY_FIRST_STEP
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("maximize", [False, True])
def test_a_gradient_of_minus_zero_is_a_gradient(first_step: str, clip: float | None, maximize: bool) -> None:
    """It is not taken for one that is absent, at the next step as after a checkpoint."""
    settings: Numbers = {"first_step": first_step, "clip": clip, "maximize": maximize}
    for skip_nonfinite in (False, True):
        params = parameters(torch.float64)
        reference = reference_of(params, **settings)
        optimizer = mars_of(params, **settings, skip_nonfinite=skip_nonfinite)
        for step in range(6):
            grads = gradients(step, params)
            if step in (0, 3):
                grads = {name: torch.full_like(g, -0.0) for name, g in grads.items()}
            set_gradients(params, grads)
            optimizer.step()
            reference.step(grads)
            saved, params = optimizer.state_dict(), copies(params)
            optimizer = mars_of(params, **settings, skip_nonfinite=skip_nonfinite)
            optimizer.load_state_dict(saved)
        assert_close(params, reference.params, 1e-12)


@EVERY_FIRST_STEP
@pytest.mark.parametrize("by_file", [False, True])
def test_a_missing_look_ahead_is_missing_after_a_checkpoint(first_step: str, by_file: bool) -> None:
    """Exact mode: the extra pass of step 2 reaches nothing, and the run is cut before that step."""
    settings: Numbers = {"is_approx": False, "first_step": first_step}
    params = parameters(torch.float64)
    optimizer, reference = mars_of(params, **settings), reference_of(params, **settings)
    for step in range(4):
        if step == 2 and by_file:
            saved, params = copy.deepcopy(optimizer.state_dict()), copies(params)
            assert all(is_wholly_absent(saved["state"][i]["prev_grad"]) for i in (0, 2))
            optimizer = mars_of(params, **settings)
            optimizer.load_state_dict(saved)
        if step != 1:  # what is taken here is for the next step
            set_gradients(params, gradients(100 + step, params))
            with optimizer.looking_ahead():
                optimizer.step()
        elif not by_file:
            with optimizer.looking_ahead():
                set_gradients(params, {})
                optimizer.step()
        grads = gradients(step, params)
        set_gradients(params, grads)
        optimizer.step()
        none = {n: g if first_step == "paper" else torch.zeros_like(g) for n, g in grads.items()}
        reference.step(grads, previous=none if step in (0, 2) else gradients(99 + step, params))
    assert_close(params, reference.params, 1e-12)


@EVERY_FIRST_STEP
def test_a_state_without_h_in_exact_mode(first_step: str) -> None:
    settings: Numbers = {"is_approx": False, "first_step": first_step}
    params = parameters(torch.float64)
    data = [gradients(step, params) for step in range(6)]

    def train_on(optimizer: MARS, params: Parameters, part: list[Any], goes_on: int) -> None:
        exact = ExactMode(optimizer, part, lambda grads: set_gradients(params, grads), seed=0)
        if goes_on:
            exact.load_state_dict({"handed_out": goes_on, "seed": 0})
        for batch in exact:
            for grads in batch:
                set_gradients(params, grads)
            optimizer.step()

    optimizer, reference = mars_of(params, **settings), reference_of(params, **settings)
    train_on(optimizer, params, data[:3], 0)
    saved = without_h(copy.deepcopy(optimizer.state_dict()), set(params))
    params = copies(params)
    second = mars_of(params, **settings)
    second.load_state_dict(saved)
    train_on(second, params, data[3:], 3)
    for step, grads in enumerate(data):  # the gradients do not depend on the point: h is that of its own batch
        h = {n: g if first_step == "paper" or step not in (0, 3) else torch.zeros_like(g) for n, g in grads.items()}
        reference.step(grads, previous=h)
    assert_close(params, reference.params, 1e-12)


# ---- from torch.optim.AdamW

ADAMW: Numbers = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
KINDS: dict[str, Numbers] = {
    "plain": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
}


def adamw_state(params: Parameters, **kind: Any) -> dict[str, Any]:
    """After 5 steps, of which "tall" and "bias" take 3."""
    adamw = torch.optim.AdamW(params.values(), **{**ADAMW, **kind})
    for step in range(5):
        grads = gradients(50 + step, params)
        if step < 2:
            del grads["tall"], grads["bias"]
        set_gradients(params, grads)
        adamw.step()
    return copy.deepcopy(adamw.state_dict())


def continued_from(saved: dict[str, Any], params: Parameters, **settings: Any) -> ReferenceMARS:
    """The reference begun at AdamW's moments: its lr, betas, eps and decay hold, the ratio of the rates is MARS's."""
    group = saved["param_groups"][0]
    theirs: Numbers = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
    reference = ReferenceMARS(
        params,
        [{"names": list(params), "lr_1d": 2.0 * group["lr"], "weight_decay_1d": group["weight_decay"]}],
        **{**NUMBERS, **ITERATION, **theirs, "amsgrad": group["amsgrad"], "maximize": group["maximize"], **settings},
    )
    for number, name in enumerate(params):
        state = saved["state"][number]
        rule = reference.rules[name]
        keys = ["exp_avg"] + ["exp_avg_sq", "max_exp_avg_sq"] * rule.endswith("AdamW")
        reference.state[name] = {k: state[k].double().clone() for k in keys if k in state}
        reference.state[name]["step"] = int(state["step"])
    return reference


@pytest.mark.parametrize("kind", KINDS)
@EVERY_FIRST_STEP
@EVERY_VARIANT
def test_adamw_to_mars(mars_type: str, first_step: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    params = parameters(torch.float64)
    saved = adamw_state(params, **KINDS[kind])
    settings: Numbers = {"mars_type": mars_type, "first_step": first_step}
    reference = continued_from(saved, params, **settings)
    optimizer = mars_of(params, **settings)
    optimizer.load_state_dict(saved)
    (said,) = said_by(caplog)
    assert "lr 0.003 (given: 0.01)" in said and "betas (0.8, 0.9) (given: (0.95, 0.99))" in said
    assert "eps 1e-06 (given: 1e-08)" in said and "weight_decay 0.2 (given: 0.1)" in said
    assert "2 of 2 tensors come without the gradient of the step before (prev_grad), as from AdamW" in said
    if mars_type == "mars-adamw":
        assert "left out" not in said
    else:
        assert "the rule of the tensor does not use it: exp_avg_sq of 2 tensors" in said
    group = optimizer.param_groups[0]
    assert group["gamma"] == 0.3 and group["lr_1d_ratio"] == 2.0 and group["clip"] == 1.0
    assert group.keys() == mars_of(parameters()).param_groups[0].keys(), "no flags of torch.optim"
    matrix = optimizer.state[params["tall"]]
    assert float(matrix["step"]) == 3.0 and ("exp_avg_sq" in matrix) is (mars_type == "mars-adamw")
    h_is_missing(reference, MATRICES, gradients(0, params))
    for step in range(4):
        grads = gradients(step, params)
        set_gradients(params, grads)
        optimizer.step()
        reference.step(grads)
    assert_close(params, reference.params, 1e-12)
    assert all(float(optimizer.state[p]["step"]) == {"tall": 7.0, "bias": 7.0}.get(n, 9.0) for n, p in params.items())


@pytest.mark.parametrize("mars_type", ["mars-lion", "mars-shampoo", "mars-m"])
def test_adamw_to_the_form_with_one_state(mars_type: str, caplog: pytest.LogCaptureFixture) -> None:
    """b = m - gamma * h is AdamW's momentum itself for h = 0."""
    params = parameters(torch.float64)
    saved = adamw_state(params)
    reference = continued_from(saved, params, mars_type=mars_type, clip=None)
    optimizer = mars_of(params, mars_type=mars_type, clip=None, gamma=0.05)
    optimizer.param_groups[0]["gamma"] = 0.3
    optimizer.load_state_dict(saved)
    assert "2 of 2 tensors come without the gradient of the step before" in "".join(said_by(caplog))
    assert optimizer.param_groups[0]["one_state"] is True
    h_is_missing(reference, MATRICES, gradients(0, params))
    for step in range(4):
        grads = gradients(step, params)
        set_gradients(params, grads)
        optimizer.step()
        reference.step(grads)
        assert optimizer.state[params["wide"]].keys() == {"step", "exp_avg"}
    assert_close(params, reference.params, 1e-12)


def test_how_the_step_may_be_kept() -> None:
    """A number, in whichever precision, or one for the group, as DeepSpeed's and apex's FusedAdam keep it."""
    expected = None
    for keep in ("tensor", "number", "float64", "int64", "one element", "group", "capturable"):
        params = parameters(torch.float64)
        saved = adamw_state(params)
        for state in saved["state"].values():
            state["step"] = torch.tensor(5.0)
            if keep == "group":
                del state["step"]
            elif keep == "number":
                state["step"] = 5
            elif keep in ("float64", "int64"):
                state["step"] = state["step"].to(getattr(torch, keep))
            elif keep == "one element":
                state["step"] = state["step"].reshape(1)
        saved["param_groups"][0] |= {"step": 5} if keep == "group" else {"capturable": keep == "capturable"}
        optimizer = mars_of(params)
        optimizer.load_state_dict(saved)
        step = optimizer.state[params["tall"]]["step"]
        assert (step.dtype, step.shape, float(step)) == (torch.float32, (), 5.0)
        train(optimizer, params, range(2))
        end = snapshot(optimizer, params)
        expected = expected or end
        assert_identical(end, expected)


def test_a_decay_that_was_given_for_vectors_stays() -> None:
    saved = adamw_state(parameters())
    for given, expected in (({}, 0.2), ({"weight_decay_1d": 0.05}, 0.05)):
        optimizer = mars_of(parameters(), **given)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["weight_decay_1d"] == expected
        assert optimizer.param_groups[0]["betas_1d"] == (0.9, 0.95)


def test_moments_that_adamw_kept_in_16_bits_become_float32() -> None:
    params = parameters(torch.bfloat16)
    saved = adamw_state(params)
    assert saved["state"][0]["exp_avg"].dtype == torch.bfloat16
    optimizer = mars_of(params)
    optimizer.load_state_dict(saved)
    state = optimizer.state[params["wide"]]
    assert {k: v.dtype for k, v in state.items()} == {
        "step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32, "prev_grad": torch.bfloat16,
    }  # fmt: skip
    assert torch.equal(state["exp_avg"], saved["state"][0]["exp_avg"].float())
    train(optimizer, params, range(2))
    assert all(p.isfinite().all() for p in params.values())


def test_a_state_of_sgd_is_refused() -> None:
    params = parameters()
    sgd = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    set_gradients(params, gradients(0, params))
    sgd.step()
    optimizer = mars_of(copies(params))
    optimizer.load_state_dict({**sgd.state_dict(), "state": {}})  # its values alone are values
    with pytest.raises(ValueError, match="wide has no step"):
        saved = copy.deepcopy(sgd.state_dict())
        for state in saved["state"].values():
            state["exp_avg"] = state["momentum_buffer"]
        optimizer.load_state_dict(saved)


def test_adamw_through_torchs_helpers() -> None:
    """By name. "Whole" (and flat) torch's helpers raise KeyError for group keys that only one optimizer has."""
    for options in ({}, {"full_state_dict": True}):
        how = helpers.StateDictOptions(**options)  # type: ignore[arg-type]
        adamw_params = parameters(torch.float64)
        saved = adamw_state(adamw_params)
        params = copies(adamw_params)
        for p in adamw_params.values():
            p.grad = None  # torch's helper takes no step where there are gradients
        adamw = torch.optim.AdamW(adamw_params.values(), lr=1.0)
        adamw.load_state_dict(saved)
        named: Any = helpers.get_optimizer_state_dict(nn.ParameterDict(adamw_params), adamw, options=how)
        if options:
            with pytest.raises(KeyError, match="foreach"):
                helpers.set_optimizer_state_dict(nn.ParameterDict(params), mars_of(params), named, options=how)
            named["param_groups"] = [{k: g[k] for k in ("params", *ADAMW, "amsgrad")} for g in named["param_groups"]]
        reference = continued_from(saved, params)
        reference.groups[0]["weight_decay_1d"] = 0.1  # given: "whole", MARS's keys are in what is loaded
        optimizer = mars_of(params, weight_decay_1d=0.1)
        helpers.set_optimizer_state_dict(nn.ParameterDict(params), optimizer, named, options=how)
        h_is_missing(reference, MATRICES, gradients(0, params))
        for step in range(3):
            grads = gradients(step, params)
            set_gradients(params, grads)
            optimizer.step()
            reference.step(grads)
        assert_close(params, reference.params, 1e-12)


def test_adamw_from_a_folder_of_torchs_checkpoints(tmp_path: Path) -> None:
    """torch asks for every state that the new optimizer shows, unless it is told to load what is there."""
    adamw_params = parameters(torch.float64)
    saved = adamw_state(adamw_params)
    params = copies(adamw_params)
    for p in adamw_params.values():
        p.grad = None
    adamw = torch.optim.AdamW(adamw_params.values(), lr=1.0)
    adamw.load_state_dict(saved)
    named = helpers.get_optimizer_state_dict(nn.ParameterDict(adamw_params), adamw)
    dcp.save({"optimizer": named}, checkpoint_id=tmp_path, no_dist=True)
    optimizer = mars_of(params, weight_decay_1d=0.1)
    reference = continued_from(saved, params)
    reference.groups[0]["weight_decay_1d"] = 0.1
    net = nn.ParameterDict(params)
    into: Any = {"optimizer": helpers.get_optimizer_state_dict(net, optimizer)}
    with pytest.raises(BaseException, match=r"Missing key in checkpoint state_dict: optimizer\.state\..*prev_grad"):
        dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
    dcp.load(into, checkpoint_id=tmp_path, no_dist=True, planner=DefaultLoadPlanner(allow_partial_load=True))
    helpers.set_optimizer_state_dict(net, optimizer, into["optimizer"])
    h_is_missing(reference, MATRICES, gradients(0, params))
    for step in range(3):
        grads = gradients(step, params)
        set_gradients(params, grads)
        optimizer.step()
        reference.step(grads)
    assert_close(params, reference.params, 1e-12)
