"""States of other code by parameter name, on one process: the authors' MARS and MARS_M, torch's AdamW, MARS in its
form with one state; parameters that are tied, frozen or wrapped."""

from __future__ import annotations

import copy
import io
from typing import Any

import golden_cases
import pytest
import torch
from golden_cases import GoldenCase
from torch import Tensor, nn
from torch.nn import Parameter

from mars_dist import MARS
from mars_dist.checkpoint import from_authors, full_states, load_full_states, settings_of, to_authors
from tests import engine_nets, nets
from tests.ddp_cases import messages
from tests.reference import ReferenceMARS
from tests.test_golden import take_step

BEGIN = 3
SELDOM = ("_bf16", "_gamma0", "_gamma1", "_schedule")  # what they vary is none of the states
NAMES = [pytest.param(n, marks=pytest.mark.slow) if n.endswith(SELDOM) else n for n in golden_cases.names()]


class Named(nn.Module):
    """The tensors of a golden case as a model."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            setattr(self, name, Parameter(value.clone()))


def authors_state(case: GoldenCase, steps: int) -> tuple[dict[str, Any], list[str]]:
    """The state dict of the authors' optimizer after ``steps`` steps, by the reference and the recorded gradients.

    Their states: those of every rule for every tensor; the last gradient also where it is not used.
    """
    reference = ReferenceMARS(case.p0, case.groups, **case.kwargs)
    for t in range(steps):
        reference.step(case.grads[t], lr=case.meta["lrs"][t], previous=case.previous[t])
    is_m = case.meta["kind"] == "MARS_M"
    names = [name for group in case.groups for name in group["names"]]
    states: dict[int, dict[str, Any]] = {}
    for i, name in enumerate(names):
        ours = reference.state[name]
        zeros = torch.zeros_like(ours["exp_avg"])
        h = case.grads[steps - 1][name] if case.previous[-1] is None else case.previous[steps][name]  # type: ignore[index]
        if is_m and case.rule_of[name] == "AdamW":
            states[i] = {"use_muon": False, "step": steps, "moment1": ours["exp_avg"], "moment2": ours["exp_avg_sq"]}
        elif is_m:
            states[i] = {"use_muon": True, "momentum_buffer": ours["exp_avg"], "last_grad": h}
        else:
            moments = {"exp_avg": ours["exp_avg"], "exp_avg_sq": ours.get("exp_avg_sq", zeros)}
            states[i] = {"step": steps, **moments, "last_grad": h}
            if case.kwargs.get("amsgrad"):
                states[i]["max_exp_avg_sq"] = ours.get("max_exp_avg_sq", zeros)
            if case.previous[-1] is not None:
                states[i]["previous_grad"] = h.clone()
    groups, at = [], 0
    for group in [{"names": names}] if is_m else case.groups:
        given = case.meta["kwargs"]
        if is_m:
            numbers = {
                key: given[key] for key in ("lr", "wd", "momentum", "ns_steps", "adamw_betas", "adamw_eps", "gamma")
            }
        else:
            keys = ("lr", "betas", "eps", "weight_decay", "amsgrad", "gamma", "optimize_1d", "weight_decay_1d")
            numbers = {key: group.get(key, case.kwargs[key]) for key in keys if key in group or key in case.kwargs}
            numbers["mars_type"] = case.kwargs["mars_type"]
        numbers["lr"] = case.meta["lrs"][steps - 1]
        groups.append({**numbers, "params": list(range(at, at + len(group["names"])))})
        at += len(group["names"])
    return {"state": states, "param_groups": groups}, names


def wrong(case: GoldenCase) -> dict[str, Any]:
    """Numbers that the authors' file has, and that must not stay as they were constructed."""
    return {**case.kwargs, "lr": case.kwargs["lr"] * 3.0, "lr_1d": case.kwargs["lr_1d"] * 3.0, "eps": 1e-3}


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_the_authors_code_goes_on(name: str) -> None:
    """From the middle of each golden trajectory, as their state dict, to its end."""
    case = golden_cases.case(name)
    saved, names = authors_state(case, BEGIN)
    stored = io.BytesIO()
    torch.save(saved, stored)
    stored.seek(0)
    model = Named(case.p0)
    params = dict(model.named_parameters())
    optimizer = MARS(case.param_groups(params), **wrong(case))
    loaded = from_authors(torch.load(stored, weights_only=True), names, case.params[BEGIN - 1])
    load_full_states(optimizer, model, loaded)
    for t in range(BEGIN, case.meta["steps"]):
        take_step(case, t, params, optimizer)
        for tensor, expected in case.params[t].items():
            error = (params[tensor].detach() - expected).abs().max().item()
            assert error <= case.tolerance(t, torch.float64), f"{tensor} after step {t}"
    assert {rule: count for rule, count in optimizer.rule_counts().items() if count} == case.rules


@pytest.mark.parametrize("name", NAMES)
def test_what_is_given_back_to_the_authors_code_is_what_it_would_have(name: str) -> None:
    case = golden_cases.case(name)
    saved, names = authors_state(case, BEGIN)
    model = Named(case.p0)
    params = dict(model.named_parameters())
    optimizer = MARS(case.param_groups(params), **case.kwargs)
    for t in range(BEGIN):
        take_step(case, t, params, optimizer)
    if case.previous[-1] is not None:  # as their loop does before its step
        for name_, p in params.items():
            p.grad.copy_(case.previous[BEGIN][name_])  # type: ignore[index, union-attr]
        optimizer.update_previous_grad()
        optimizer.update_last_grad()
    is_m = case.meta["kind"] == "MARS_M"
    back = to_authors(full_states(optimizer, model), [names] if is_m else [g["names"] for g in case.groups])
    assert back["state"].keys() == saved["state"].keys()
    bound = case.tolerance(BEGIN, torch.float64)
    for i, state in saved["state"].items():
        is_used = case.rule_of[names[i]] != "AdamW"
        assert back["state"][i].keys() == state.keys()
        for key, value in state.items():
            if isinstance(value, Tensor):
                if key in ("last_grad", "previous_grad") and not is_used:
                    continue  # their AdamW does not read it
                assert (back["state"][i][key] - value).abs().max().item() <= bound, (names[i], key)
            else:
                assert back["state"][i][key] == value
    for ours, theirs in zip(back["param_groups"], saved["param_groups"], strict=True):
        assert ours["params"] == theirs["params"]
        assert {key: plain(ours[key]) for key in theirs} == {key: plain(value) for key, value in theirs.items()}


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def test_what_has_no_place_in_the_authors_code_is_refused() -> None:
    case = golden_cases.case("adamw_approx")
    saved, names = authors_state(case, BEGIN)
    model = Named(case.p0)
    with pytest.raises(ValueError, match="names"):
        from_authors(saved, names[:-1])
    strange = copy.deepcopy(saved)
    strange["state"][0]["nu"] = strange["state"][0]["exp_avg"]
    with pytest.raises(ValueError, match="none of the authors'"):
        from_authors(strange, names)
    lion = MARS(case.param_groups(dict(model.named_parameters())), **{**case.kwargs, "mars_type": "mars-lion"})
    with pytest.raises(ValueError, match="mars-adamw"):
        load_full_states(lion, model, from_authors(saved, names, case.params[BEGIN - 1]))
    other = MARS(case.param_groups(dict(model.named_parameters())), **case.kwargs, clip=0.5)
    with pytest.raises(ValueError, match=r"clip=0\.5"):
        to_authors(full_states(other, model), [names])


# ------------------------------------------------------------------------------------- other optimizers, forms, nets

MARS_SETTINGS: dict[str, Any] = {"lr": 1e-2, "lr_1d": 4e-3, "clip": 0.1}


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(*nets.batch(step)).backward()
        optimizer.step()


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def test_adamw_of_torch_goes_on() -> None:
    model, other = nets.build(), nets.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9))
    train(model, optimizer, range(4))
    states = full_states(optimizer, model)
    assert set(states["tensors"]["norm.weight"]) == {"param", "exp_avg", "exp_avg_sq", "step"}
    train(model, optimizer, range(4, 9))
    fresh = torch.optim.AdamW(other.parameters(), lr=3.0)
    load_full_states(fresh, other, states)
    train(other, fresh, range(4, 9))
    assert distance(model, other) == 0.0


def test_states_of_adamw_begin_a_run_of_mars() -> None:
    """As MARS.load_state_dict takes them: moments and counters go on, the first step has no previous gradient."""
    models = [nets.build() for _ in range(3)]
    adamw = torch.optim.AdamW(models[0].parameters(), lr=1e-2)
    train(models[0], adamw, range(4))
    states = full_states(adamw, models[0])
    by_name, by_number = (MARS(model.named_parameters(), **MARS_SETTINGS) for model in models[1:])
    with messages() as texts:
        load_full_states(by_name, models[1], states)
    assert any("5 of 5 tensors come without the gradient of the step before" in text for text in texts)
    models[2].load_state_dict(models[0].state_dict())
    by_number.load_state_dict(adamw.state_dict())
    for model, optimizer in zip(models[1:], (by_name, by_number), strict=True):
        train(model, optimizer, range(4, 9))
    assert distance(models[1], models[2]) == 0.0
    assert by_name.rule_counts() == {"MARS-AdamW": 5, "AdamW": 4}


def test_states_of_mars_do_not_go_into_adamw() -> None:
    model = nets.build()
    states = full_states(MARS(model.named_parameters(), **MARS_SETTINGS), model)
    with pytest.raises(ValueError, match="saved by MARS, and this optimizer is AdamW"):
        load_full_states(torch.optim.AdamW(model.parameters()), model, states)


@pytest.mark.parametrize("one_state", [True, False])
def test_the_form_of_the_states_travels(one_state: bool) -> None:
    """Without the clip momentum and previous gradient may be one state: what is loaded says which form it has."""
    settings: dict[str, Any] = {"lr": 1e-2, "lr_1d": 4e-3, "clip": None, "mars_type": "mars-lion"}
    model, other = nets.build(), nets.build()
    optimizer = MARS(model.named_parameters(), one_state=one_state, **settings)
    train(model, optimizer, range(4))
    states = full_states(optimizer, model)
    assert ("prev_grad" in states["tensors"]["linear.weight"]) != one_state
    fresh = MARS(other.named_parameters(), one_state=not one_state, **settings)
    load_full_states(fresh, other, states)
    train(model, optimizer, range(4, 9))
    train(other, fresh, range(4, 9))
    assert distance(model, other) == 0.0
    assert full_states(fresh, other)["tensors"]["linear.weight"].keys() == states["tensors"]["linear.weight"].keys()


def test_names_are_those_of_the_model_however_it_is_wrapped() -> None:
    model = nets.build()
    expected = [name for name, _ in model.named_parameters()]
    optimizer = MARS(list(model.parameters()), **MARS_SETTINGS)  # MARS itself is told no names
    compiled = torch.compile(model, backend="eager")
    for given in (model, compiled, nn.DataParallel(model)):
        assert [n for group in settings_of(optimizer, given)["groups"] for n in group["names"]] == expected
    inside = nn.ModuleDict({"module": model})  # a name like any other here
    (group,) = settings_of(optimizer, inside)["groups"]
    assert group["names"] == [f"module.{name}" for name in expected]


def test_a_model_of_other_parameters_is_refused() -> None:
    optimizer = MARS(nets.build().named_parameters(), **MARS_SETTINGS)
    with pytest.raises(RuntimeError, match="is no parameter of the Net that was given"):
        full_states(optimizer, nets.build())


def test_tied_parameters_are_there_once_and_loaded_by_any_of_their_names() -> None:
    model, other = engine_nets.build("tied"), engine_nets.build("tied")
    optimizer = MARS(model.named_parameters(), **MARS_SETTINGS)
    train(model, optimizer, range(4))
    states = full_states(optimizer, model)
    assert set(states["tensors"]) == {"embedding.weight", "linear.weight", "linear.bias"}
    states["tensors"]["head.weight"] = states["tensors"].pop("embedding.weight")
    names = states["settings"]["groups"][0]["names"]
    names[names.index("embedding.weight")] = "head.weight"
    fresh = MARS(other.named_parameters(), **MARS_SETTINGS)
    load_full_states(fresh, other, states)
    train(model, optimizer, range(4, 9))
    train(other, fresh, range(4, 9))
    assert distance(model, other) == 0.0


def test_frozen_parameters_are_the_models_own_affair() -> None:
    model = engine_nets.build("lora")
    optimizer = MARS(model.named_parameters(), **MARS_SETTINGS)
    assert set(full_states(optimizer, model)["tensors"]) == {"down.weight", "up.weight", "head.bias"}
    train(model, optimizer, range(2))
    assert set(full_states(optimizer, model)["tensors"]) == {"down.weight", "up.weight", "head.bias"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_states_keep_their_precision(dtype: torch.dtype) -> None:
    """bfloat16 parameters: float32 moments and a bfloat16 h; where gradients are float32, h can hold them."""
    model = nets.build().to(torch.bfloat16)
    optimizer = MARS(model.named_parameters(), **MARS_SETTINGS)
    train(model, optimizer, range(4))
    states = full_states(optimizer, model)
    matrix = states["tensors"]["linear.weight"]
    assert {key: value.dtype for key, value in matrix.items()} == {
        **dict.fromkeys(("exp_avg", "exp_avg_sq", "step"), torch.float32),
        **dict.fromkeys(("param", "prev_grad"), torch.bfloat16),
    }
    other = nets.build().to(dtype)
    fresh = MARS(other.named_parameters(), **MARS_SETTINGS)
    load_full_states(fresh, other, states)
    again = full_states(fresh, other)["tensors"]["linear.weight"]
    assert again["prev_grad"].dtype == dtype and again["exp_avg"].dtype == torch.float32
    assert all(torch.equal(again[key].float(), value.float()) for key, value in matrix.items())
    train(other, fresh, range(4, 9))
    if dtype == torch.bfloat16:
        train(model, optimizer, range(4, 9))
        assert distance(model, other) == 0.0
    else:
        assert torch.equal(fresh.state[other.linear.weight]["prev_grad"], other.linear.weight.grad)
