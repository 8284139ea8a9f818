"""State dicts of the authors' code (AGI-Arena/MARS) as states by parameter name, and back.

| authors' MARS | authors' MARS_M | here |
|---|---|---|
| step | step (of tensors under AdamW) | step |
| exp_avg | momentum_buffer, moment1 | exp_avg |
| exp_avg_sq, max_exp_avg_sq | moment2 | exp_avg_sq, max_exp_avg_sq |
| last_grad | last_grad | prev_grad |
| previous_grad, where it is not last_grad | the same | next_prev_grad |

Their code always clips at 1 and keeps the previous gradient as a second state. What it does not save (``lr_1d``,
``betas_1d``, ``is_approx``, in MARS also ``gamma`` of a run that changed it) is as the optimizer was constructed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mars_dist.checkpoint.across import FORMAT
from mars_dist.checkpoint.named import FORMAT as SETTINGS_FORMAT
from mars_dist.checkpoint.named import VALUE
from mars_dist.config import SETTINGS_KEY, Settings
from mars_dist.states import STEP

MARS_M = "mars-m"
TO_OURS = {
    "exp_avg": "exp_avg",
    "momentum_buffer": "exp_avg",
    "moment1": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "moment2": "exp_avg_sq",
    "max_exp_avg_sq": "max_exp_avg_sq",
    "last_grad": "prev_grad",
    "previous_grad": "next_prev_grad",
}
IN_GROUPS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "gamma", "optimize_1d", "weight_decay_1d")


def from_authors(
    state_dict: Mapping[str, Any], names: Sequence[str], parameters: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """What ``load_full_states`` takes, from the ``state_dict()`` of the authors' ``MARS`` or ``MARS_M``.

    Args:
        state_dict: as ``torch.load(path, weights_only=True)`` gives it.
        names: of the parameters, in the order of its groups: group after group, as the optimizer was built.
        parameters: their values by name, for ``load_full_states(..., values=True)``.

    Raises:
        ValueError: for another number of names; a state that is none of theirs.
    """
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    if len(ids) != len(names) or len(set(names)) != len(names):
        raise ValueError(
            f"the state dict is one of {len(ids)} parameters, and there are {len(names)} names ({len(set(names))} "
            "different ones): give the name of each, group after group"
        )
    name_of = dict(zip(ids, names, strict=True))
    states = state_dict["state"]
    counts = [int(state[STEP]) for state in states.values() if STEP in state]
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for i, state in states.items():
        state = {key: value for key, value in state.items() if key != "use_muon"}
        if state:
            tensors[name_of[i]] = _to_ours(name_of[i], state, max(counts, default=1))
    for name, value in (parameters or {}).items():
        if name in tensors:
            tensors[name][VALUE] = value
    first = state_dict["param_groups"][0]
    groups = [
        {"names": [name_of[i] for i in group["params"]], "values": _values(group)}
        for group in state_dict["param_groups"]
    ]
    if "momentum" in first:  # one group there, two here
        groups = [
            {"names": [name], "values": _values(group)}
            for group in state_dict["param_groups"]
            for name in (name_of[i] for i in group["params"])
        ]
    mars_type = first.get("mars_type", MARS_M if "momentum" in first else None)
    settings = {"format": SETTINGS_FORMAT, "optimizer": "the authors'", "mars_type": mars_type, "groups": groups}
    return {"format": FORMAT, "tensors": tensors, "settings": settings}


def _to_ours(name: str, state: Mapping[str, Any], count: int) -> dict[str, Tensor]:
    """``count``: for the matrices of MARS_M, which have no counter and whose rule needs none."""
    unknown = sorted(state.keys() - TO_OURS.keys() - {STEP})
    if unknown or not {"exp_avg", "momentum_buffer", "moment1"} & state.keys():
        raise ValueError(
            f"the state of {name} has {', '.join(sorted(state))}: it is none of the authors' MARS or MARS_M"
        )
    out = {TO_OURS[key]: value for key, value in state.items() if key != STEP}
    if "prev_grad" in out and "next_prev_grad" in out and torch.equal(out["prev_grad"], out["next_prev_grad"]):
        del out["next_prev_grad"]  # their update_last_grad() leaves it behind
    out[STEP] = torch.tensor(float(state.get(STEP, count)), dtype=torch.float32)
    return out


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    two_states = {"clip": 1.0, "one_state": False, "one_state_gamma": None}
    if "momentum" not in group:
        return {key: group[key] for key in IN_GROUPS if key in group} | two_states
    both = {"lr": group["lr"], "lr_1d_ratio": 1.0, "weight_decay": group["wd"], "weight_decay_1d": group["wd"]}
    betas = {"betas": [group["momentum"], 0.99], "betas_1d": list(group["adamw_betas"])}
    return {**both, **betas, "eps": group["adamw_eps"], "gamma": group["gamma"], **two_states}


def to_authors(states: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The state dict that the authors' optimizer loads, from what ``full_states`` gave.

    Args:
        states: of an optimizer with ``clip=1`` and two states, as theirs is.
        names: of the parameters in each of its groups, in order. MARS_M has one group: the matrices first.

    Raises:
        ValueError: where their code has no place for something: another clip, the form with one state, names that are
            not there.
    """
    settings, tensors = states["settings"], states["tensors"]
    ours = Settings.from_text(settings[SETTINGS_KEY])
    values = {name: group["values"] for group in settings["groups"] for name in group["names"]}
    missing = [name for group in names for name in group if name not in tensors]
    if missing:
        raise ValueError(f"the states have no {', '.join(missing[:3])}")
    is_m = ours.mars_type == MARS_M
    out_states: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group in names:
        for name in group:
            _refuse_other_forms(name, values[name])
            out_states[len(out_states)] = _to_theirs(tensors[name], is_m, values[name]["amsgrad"], ours.is_approx)
        first = len(out_states) - len(group)
        numbers = _their_group(values[group[0]], ours, is_m)
        groups.append({**numbers, "params": list(range(first, len(out_states)))})
    return {"state": out_states, "param_groups": groups}


def _refuse_other_forms(name: str, values: Mapping[str, Any]) -> None:
    if values["clip"] != 1.0 or values["one_state"]:
        raise ValueError(
            f"{name} was trained with clip={values['clip']} and one_state={values['one_state']}: the authors' code "
            "clips at 1 and keeps the previous gradient"
        )


def _to_theirs(tensors: Mapping[str, Tensor], is_m: bool, amsgrad: bool, is_approx: bool) -> dict[str, Any]:
    """Their code has every state for every tensor, zeros where its rule does not use one."""
    exp_avg = tensors["exp_avg"]
    zeros = torch.zeros_like(exp_avg)
    h = tensors.get("prev_grad")
    if is_m and h is None:
        moments = {"moment1": exp_avg, "moment2": tensors["exp_avg_sq"]}
        return {"use_muon": False, STEP: int(tensors[STEP]), **moments}
    out: dict[str, Any] = {"last_grad": zeros.clone() if h is None else h}
    if is_m:
        out |= {"use_muon": True, "momentum_buffer": exp_avg}
    else:
        out |= {STEP: int(tensors[STEP]), "exp_avg": exp_avg, "exp_avg_sq": tensors.get("exp_avg_sq", zeros)}
        if amsgrad:
            out["max_exp_avg_sq"] = tensors.get("max_exp_avg_sq", zeros.clone())
    if not is_approx:
        out["previous_grad"] = tensors.get("next_prev_grad", out["last_grad"]).clone()
    return out


def _their_group(values: Mapping[str, Any], ours: Settings, is_m: bool) -> dict[str, Any]:
    if not is_m:
        out = {key: tuple(values[key]) if key == "betas" else values[key] for key in IN_GROUPS}
        return {**out, "mars_type": ours.mars_type}
    momentum, gamma = values["betas"][0], values["gamma"]
    return {
        "lr": values["lr"],
        "wd": values["weight_decay"],
        "momentum": momentum,
        "ns_steps": ours.ns_steps,
        "adamw_betas": tuple(values["betas_1d"]),
        "adamw_eps": values["eps"],
        "gamma": gamma,
        "mars_factor": gamma * momentum / (1.0 - momentum),
        "clip_c": False,
        "is_approx": ours.is_approx,
    }
