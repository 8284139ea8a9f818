"""The surface of ``mars_dist.MARS``: its signature, where its numbers live, names, states, groups."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from typing import Any

import pytest
import torch
from reference import ReferenceMARS
from small import MATRICES, SHAPES, VARIANTS, assert_close, gradients, parameters, set_gradients, train
from torch import Tensor, nn
from torch.nn import Parameter

from mars_dist import MARS

# As in the authors' class, so that a user of theirs changes only the import.
THEIRS: dict[str, Any] = {
    "lr": 3e-3,
    "betas": (0.95, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "gamma": 0.025,
    "is_approx": True,
    "mars_type": "mars-adamw",
    "optimize_1d": False,
    "lr_1d": 3e-3,
    "betas_1d": (0.9, 0.95),
    "weight_decay_1d": 0.1,
}
OURS: dict[str, Any] = {
    "clip": 1.0,
    "first_step": "reference",
    "ns_steps": 5,
    "ns_dtype": None,
    "orthogonalizer": "newton-schulz",
    "matrix_ndim": 2,
    "skip_nonfinite": False,
    "use_mars": None,
    "maximize": False,
    "fan_in_fan_out": False,
    "matrix_parts": 1,
    "matrix_buffer_mb": 256.0,
    "one_state": None,
}
# What may differ between groups; lr_1d is kept as its ratio to lr.
GROUP_KEYS = {
    *("lr", "betas", "eps", "weight_decay", "amsgrad", "gamma", "optimize_1d", "lr_1d_ratio", "betas_1d"),
    *("weight_decay_1d", "clip", "use_mars", "maximize", "fan_in_fan_out", "matrix_parts", "one_state"),
}
SETTINGS = {
    *("mars_type", "is_approx", "first_step", "ns_steps", "ns_dtype", "orthogonalizer", "matrix_ndim"),
    "skip_nonfinite",
}


# ---- the constructor


def test_the_signature_is_the_authors_followed_by_keywords_of_ours() -> None:
    given = {
        name: p.default
        for name, p in inspect.signature(MARS).parameters.items()
        if name != "params" and p.kind is not inspect.Parameter.VAR_KEYWORD
    }
    assert list(given)[: len(THEIRS)] == list(THEIRS), "the order of their positional arguments"
    assert given == {**THEIRS, **OURS}


def test_their_arguments_can_be_given_by_position() -> None:
    optimizer = MARS([Parameter(torch.ones(2, 2))], *THEIRS.values())
    assert optimizer.param_groups[0]["lr_1d_ratio"] == 1.0
    assert optimizer.param_groups[0]["betas_1d"] == (0.9, 0.95)


# ---- where the numbers live


def test_what_may_differ_between_groups_lives_in_param_groups_and_the_rest_once_in_the_state_dict() -> None:
    saved = MARS(parameters().values()).state_dict()
    assert saved.keys() == {"state", "param_groups"}, "what torch's helpers, FSDP1 and DeepSpeed keep"
    assert {"lr", "betas", "gamma", "weight_decay"} <= saved["param_groups"][0].keys()
    assert GROUP_KEYS <= saved["param_groups"][0].keys()
    settings = json.loads(saved["param_groups"][0]["mars_settings"])
    assert SETTINGS <= settings.keys()
    assert not SETTINGS & saved["param_groups"][0].keys(), "one place for each number"
    assert not GROUP_KEYS & settings.keys(), "one place for each number"


def test_a_number_changed_in_a_group_takes_effect_at_the_next_step() -> None:
    """Nothing that a scheduler may write is kept on the object."""
    params = parameters(torch.float64)
    optimizer = MARS(params.values(), lr=0.01, weight_decay=0.1, optimize_1d=True)
    reference = ReferenceMARS(params, lr=0.01, weight_decay=0.1, optimize_1d=True)
    changes = {"lr": 0.02, "betas": (0.8, 0.9), "gamma": 0.3, "eps": 1e-4, "weight_decay": 0.5}
    for step, (name, value) in enumerate(changes.items()):
        grads = gradients(step, params)
        set_gradients(params, grads)
        optimizer.step()
        reference.step(grads)
        optimizer.param_groups[0][name] = reference.groups[0][name] = value
    grads = gradients(99, params)
    set_gradients(params, grads)
    optimizer.step()
    reference.step(grads)
    assert_close(params, reference.params)


@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_the_clip_of_a_group_is_its_own(skip_nonfinite: bool) -> None:
    clips = {"none": None, "low": 0.1, "high": 5.0}
    params = parameters(torch.float64, {name: (3, 3) for name in clips})
    groups = [{"params": [params[name]], "clip": clip} for name, clip in clips.items()]
    optimizer = MARS(groups, skip_nonfinite=skip_nonfinite)
    grads = {name: 10.0 * g for name, g in gradients(0, params).items()}
    set_gradients(params, grads)
    optimizer.step()
    direction = {name: g / g.norm() for name, g in grads.items()}
    expected = {"none": 1.475 * grads["none"], "low": 0.1 * direction["low"], "high": 5.0 * direction["high"]}
    assert_close({n: first_moment(optimizer, p) for n, p in params.items()}, {n: 0.05 * c for n, c in expected.items()})


def first_moment(optimizer: MARS, p: Tensor) -> Tensor:
    return optimizer.state[p]["exp_avg"]


# ---- parameters and names


def test_named_parameters_are_accepted_and_their_names_kept() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    twin = copy.deepcopy(net)
    named, bare = MARS(net.named_parameters()), MARS(twin.parameters())
    for step in range(3):
        for model, optimizer in ((net, named), (twin, bare)):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(step + 1))).square().sum().backward()
            optimizer.step()
    assert named.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert named.state_dict()["param_groups"][0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


def test_two_models_with_the_same_names_are_counted_as_two() -> None:
    models = nn.Linear(4, 3), nn.Linear(3, 2)
    optimizer = MARS([{"params": model.named_parameters()} for model in models])
    models[1](models[0](torch.ones(2, 4))).sum().backward()
    optimizer.step()
    assert optimizer.rule_counts() == {"MARS-AdamW": 2, "AdamW": 2}


def test_the_rules_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    params = parameters()
    optimizer = MARS(params.values())
    with caplog.at_level(logging.INFO, logger="mars_dist"):
        train(optimizer, params, range(3))
    said = [message for message in caplog.messages if " on " in message]
    assert said == ["MARS-AdamW on 2 matrices, AdamW on 3 other tensors (whole tensors)"]


# ---- states


def test_states_are_created_by_the_first_step_of_each_tensor() -> None:
    params = parameters()
    optimizer = MARS(params.values())
    assert not optimizer.state and not optimizer.state_dict()["state"]
    grads = gradients(0, params)
    del grads["wide"], grads["bias"]
    set_gradients(params, grads)
    optimizer.step()
    assert {name for name, p in params.items() if p in optimizer.state} == {"tall", "kernel", "scalar"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mars_type", VARIANTS)
@pytest.mark.parametrize("optimize_1d", [False, True], ids=["vectors_adamw", "vectors_mars"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
def test_states_have_the_keys_and_dtypes_of_their_rule_and_no_more(
    dtype: torch.dtype, mars_type: str, optimize_1d: bool, amsgrad: bool
) -> None:
    params = parameters(dtype)
    optimizer = MARS(params.values(), mars_type=mars_type, optimize_1d=optimize_1d, amsgrad=amsgrad)
    train(optimizer, params, range(2))
    moment = torch.float64 if dtype == torch.float64 else torch.float32
    second = {"exp_avg_sq": moment} | ({"max_exp_avg_sq": moment} if amsgrad else {})
    for name, p in params.items():
        is_matrix = name in MATRICES
        wanted = {"step": torch.float32, "exp_avg": moment}
        if is_matrix or optimize_1d:
            wanted["prev_grad"] = dtype
        # Lion keeps no second moment at all; the matrix variants give tensors that are no matrices MARS-AdamW.
        under_lion = mars_type == "mars-lion" and (is_matrix or optimize_1d)
        under_matrix_rule = mars_type in ("mars-shampoo", "mars-m") and is_matrix
        if not (under_lion or under_matrix_rule):
            wanted |= second
        state = optimizer.state[p]
        assert {key: value.dtype for key, value in state.items()} == wanted, name
        assert state["step"].shape == () and state["step"] == 2
        assert all(value.shape == p.shape for key, value in state.items() if key != "step")
        assert not any(value.requires_grad for value in state.values())


# ---- groups added later


def test_an_added_group_is_resolved_as_the_others_and_the_dict_is_left_alone() -> None:
    params = parameters(torch.float64)
    late = ["tall", "scalar"]
    early = [name for name in SHAPES if name not in late]
    optimizer = MARS([params[name] for name in early], lr=0.01, lr_1d=0.02, weight_decay=0.1)
    overrides: dict[str, Any] = {"lr": 0.02, "lr_1d": 0.005, "betas": [0.9, 0.95], "weight_decay": 0.0, "gamma": 0.1}
    group = {"params": iter([params[name] for name in late]), **overrides}
    before = dict(group)
    optimizer.add_param_group(group)
    assert group == before
    added = optimizer.param_groups[1]
    assert added.keys() == optimizer.param_groups[0].keys()
    expected = {"lr": 0.02, "lr_1d_ratio": 0.25, "betas": (0.9, 0.95), "weight_decay": 0.0, "weight_decay_1d": 0.0}
    assert {key: added[key] for key in expected} == expected

    groups: list[dict[str, Any]] = [{"names": early}, {"names": late, **overrides}]
    reference = ReferenceMARS(params, groups, lr=0.01, lr_1d=0.02, weight_decay=0.1)
    for step in range(3):
        grads = gradients(step, params)
        set_gradients(params, grads)
        optimizer.step()
        reference.step(grads)
    assert_close(params, reference.params)


def test_a_group_of_its_own_may_choose_its_rule() -> None:
    params = parameters(shapes={"head": (4, 3), "body": (4, 3), "norm": (3,)})
    choices = {"head": False, "body": None, "norm": True}
    optimizer = MARS([{"params": [p], "use_mars": choices[name]} for name, p in params.items()])
    train(optimizer, params, range(1))
    assert {name: "prev_grad" in optimizer.state[p] for name, p in params.items()} == {
        "head": False,
        "body": True,
        "norm": True,
    }
    assert optimizer.rule_counts() == {"MARS-AdamW": 2, "AdamW": 1}
