"""What load_state_dict refuses, by name and before anything is changed; settings and precisions that travel."""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small import Parameters, assert_identical, copies, gradients, parameters, set_gradients, snapshot, train
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as helpers

from mars_dist import MARS, loading
from mars_dist.sharding.dtensor import local

NAMES = list(parameters())


def built(params: Parameters, steps: int = 3, **settings: Any) -> MARS:
    optimizer = MARS(
        [{"params": [(n, params[n]) for n in NAMES[:2]], "lr": 0.02}, {"params": [(n, params[n]) for n in NAMES[2:]]}],
        **{"lr": 0.01, "lr_1d": 0.01, **settings},
    )
    train(optimizer, params, range(steps))
    return optimizer


def everything(optimizer: MARS, params: Parameters) -> dict[str, Any]:
    """Copies of all that a load may change; ``is`` what has to be the same object."""
    ordinary = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {
        "numbers": snapshot(optimizer, params),
        "groups": copy.deepcopy(ordinary),
        "params": [[id(p) for p in group["params"]] for group in optimizer.param_groups],
        "group_objects": [id(group) for group in optimizer.param_groups],
        "state_objects": {n: [id(t) for t in optimizer.state.get(p, {}).values()] for n, p in params.items()},
        "number_of_states": len(optimizer.state),
        "settings": optimizer.settings,
        "updates": optimizer.tensor_updates,
        "rules": optimizer.rule_counts(),
        "tables": id(optimizer._tables),
        "layouts": len(optimizer._tables.seen()),
        "previous": id(optimizer._previous),
        "mode": optimizer._mode_is_loaded,
        "defaults": dict(optimizer.defaults),
        "hooks": [len(h) for h in (optimizer._optimizer_load_state_dict_pre_hooks,
                                   optimizer._optimizer_load_state_dict_post_hooks)],
    }  # fmt: skip


def assert_unchanged(optimizer: MARS, params: Parameters, before: dict[str, Any]) -> None:
    after = everything(optimizer, params)
    assert_identical(after.pop("numbers"), {**before}["numbers"])
    assert after == {k: v for k, v in before.items() if k != "numbers"}


def settings_with(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(saved: dict[str, Any]) -> None:
        for group in saved["param_groups"]:
            group["mars_settings"] = json.dumps({**json.loads(group["mars_settings"]), **changes})

    return change


def in_state(key: str, value: Any, number: int = 4) -> Callable[[dict[str, Any]], None]:
    """``value`` (None: nothing) in the place of a state of one tensor; by default of the last, which is a scalar."""

    def change(saved: dict[str, Any]) -> None:
        saved["state"][number] = dict(saved["state"][number])
        if value is None:
            del saved["state"][number][key]
        else:
            saved["state"][number][key] = value

    return change


def in_group(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda saved: saved["param_groups"][1].update(values)


def replaced(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda saved: saved.update(values)


def another_group(saved: dict[str, Any]) -> None:
    saved["param_groups"].append({**saved["param_groups"][0], "params": []})


def a_tensor_less(saved: dict[str, Any]) -> None:
    saved["param_groups"][1]["params"] = [2, 3]
    saved["param_groups"][1]["param_names"] = ["tall", "other"]
    del saved["state"][4]


def settings_of_two(saved: dict[str, Any]) -> None:
    settings_with(ns_steps=3)({"param_groups": saved["param_groups"][1:]})


def settings_of_depth(saved: dict[str, Any]) -> None:
    for group in saved["param_groups"]:
        group["mars_settings"] = "[" * 100_000


SPARSE = torch.eye(6, 2).to_sparse()
REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "variant": (settings_with(mars_type="mars-lion"), "by mars_type='mars-lion', and this optimizer is 'mars-adamw'"),
    "format": (settings_with(format=2), "format 2, and this version of mars_dist knows format 1"),
    "format of text": (settings_with(format="1"), "format '1'"),
    "settings": (settings_with(warmth=3, clip_2d=1), "settings that this version .* not know: clip_2d, warmth"),
    "setting": (settings_with(ns_steps=0), "ns_steps must be a whole number of at least 1"),
    "setting of another type": (settings_with(matrix_ndim="two"), "matrix_ndim must be a number"),
    "unreadable settings": (in_group(mars_settings="{"), "saved by different optimizers"),
    "two settings": (settings_of_two, "saved by different optimizers"),
    "groups": (another_group, "3 parameter groups, this optimizer has 2"),
    "tensors": (a_tensor_less, r"group 1 has 2 tensors .* 3 .* \(only there: other; only here: kernel, scalar\)"),
    "group value": (in_group(lr=-1.0), r"parameter group 1: lr must be in \[0, inf\), got -1"),
    "betas": (in_group(betas=(0.9, 1.5)), r"parameter group 1: betas\[1\] must be in"),
    "one beta": (in_group(betas=0.9), r"parameter group 1: betas must be two numbers in \[0, 1\), got 0\.9"),
    "clip": (in_group(clip="no"), "parameter group 1: clip must be a number"),
    "form": (in_group(one_state=True, one_state_gamma=0.025), "one_state=True .* with clip=1"),
    "shape": (in_state("exp_avg", torch.ones(2, 6), 2), r"exp_avg' of tall has shape \(2, 6\), its parameter \(6, 2\)"),
    "shape of h": (in_state("prev_grad", torch.ones(12), 2), r"'prev_grad' of tall has shape \(12,\)"),
    "shape of a scalar": (in_state("exp_avg", torch.ones(1)), r"of scalar has shape \(1,\), its parameter \(\)"),
    "no exp_avg": (in_state("exp_avg", None), "scalar has no exp_avg .* needs after 3 steps"),
    "no exp_avg_sq": (in_state("exp_avg_sq", None, 2), "tall has no exp_avg_sq .*mars_type='mars-adamw' needs"),
    "no step": (in_state("step", None), "scalar has no step"),
    "step NaN": (in_state("step", torch.tensor(float("nan"))), "scalar has step nan, which is no count"),
    "step infinite": (in_state("step", float("inf")), "scalar has step inf"),
    "step negative": (in_state("step", torch.tensor(-1.0)), r"scalar has step -1\.0"),
    "step and a half": (in_state("step", 1.5), r"scalar has step 1\.5, which is no count"),
    "step without end": (in_state("step", 10**400), "scalar has step 9.*, which no run takes"),
    "step text": (in_state("step", "3"), "scalar has step '3'"),
    "step true": (in_state("step", True), "scalar has step True"),
    "step of two": (in_state("step", torch.ones(2)), "scalar has step tensor"),
    "step complex": (in_state("step", torch.tensor(1j)), "scalar has step tensor"),
    "text": (in_state("exp_avg", "zeros"), "'exp_avg' of scalar is a str and no tensor"),
    "list": (in_state("exp_avg_sq", [1.0]), "'exp_avg_sq' of scalar is a list and no tensor"),
    "number": (in_state("exp_avg", 1.0), "'exp_avg' of scalar is a float and no tensor"),
    "complex": (in_state("exp_avg", torch.ones((), dtype=torch.complex64)), "of scalar is a tensor of torch.complex64"),
    "integer": (in_state("exp_avg", torch.ones((), dtype=torch.int64)), "tensor of torch.int64"),
    "integer h": (in_state("prev_grad", torch.ones(6, 2, dtype=torch.int8), 2), "of tall is a tensor of torch.int8"),
    "boolean": (in_state("exp_avg_sq", torch.ones((), dtype=torch.bool)), "tensor of torch.bool"),
    "sparse": (in_state("exp_avg", SPARSE, 2), r"'exp_avg' of tall is a tensor of torch.float32 \(torch.sparse_coo\)"),
    "meta": (in_state("exp_avg", torch.ones((), device="meta")), "'exp_avg' of scalar is on the meta device"),
    "state": (lambda saved: saved["state"].update({4: [1, 2]}), "the state of scalar is a list"),
    "strange": (lambda saved: saved["state"].update({9: {}}), r"states of \[9\], which its groups do not name"),
    "no groups": (replaced(param_groups=None), "no state dict of an optimizer"),
    "no states": (replaced(state=None), "no state dict of an optimizer"),
    "params of one": (in_group(params=5), '"params" are no list'),
    "params without hash": (in_group(params=[[2], [3], [4]]), "name a tensor twice, or one of their"),
    "params twice": (in_group(params=[2, 3, 3]), "name a tensor twice"),
    "deep settings": (settings_of_depth, "mars_settings cannot be read"),
    "no params": (replaced(param_groups=[{}, {}]), 'param_groups without "params"'),
}  # fmt: skip


@pytest.mark.parametrize("trained", [True, False], ids=["into one that has trained", "into a new one"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_and_nothing_is_changed(case: str, trained: bool) -> None:
    change, said = REFUSED[case]
    first = built(parameters(), amsgrad=True)
    saved = copy.deepcopy(first.state_dict())
    change(saved)
    params = parameters()
    optimizer = built(params, steps=2 * trained, gamma=0.3, first_step="paper")
    undisturbed_params = parameters()
    undisturbed = built(undisturbed_params, steps=2 * trained, gamma=0.3, first_step="paper")
    before = everything(optimizer, params)
    with pytest.raises(ValueError, match=said) as caught:
        optimizer.load_state_dict(saved)
    assert str(caught.value).startswith("load_state_dict: the state is not loaded, and nothing was changed: ")
    assert_unchanged(optimizer, params, before)
    train(optimizer, params, range(2, 4))
    train(undisturbed, undisturbed_params, range(2, 4))
    assert_identical(snapshot(optimizer, params), snapshot(undisturbed, undisturbed_params))


def test_what_the_refusals_change_is_what_makes_them_fail() -> None:
    """Unchanged, the same state dict loads."""
    first = built(parameters(), amsgrad=True)
    params = parameters()
    optimizer = built(params, steps=2, gamma=0.3, first_step="paper")
    before = everything(optimizer, params)
    optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
    with pytest.raises(AssertionError):
        assert_unchanged(optimizer, params, before)


@pytest.mark.parametrize("at", [1, 4, 9])
def test_memory_that_runs_out_half_way_leaves_everything_as_it_was(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = built(parameters()).state_dict()
    params = parameters()
    optimizer = built(params, steps=2)
    before = everything(optimizer, params)
    calls: list[str] = []
    whole = loading.copy_as

    def failing(param: Any, value: Any) -> Any:
        calls.append("copy")
        if len(calls) == at:
            raise MemoryError("no more")
        return whole(param, value)

    monkeypatch.setattr(loading, "copy_as", failing)
    with pytest.raises(MemoryError):
        optimizer.load_state_dict(saved)
    assert len(calls) == at
    assert_unchanged(optimizer, params, before)


def test_states_that_mars_does_not_have_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    first_params = parameters()
    first = built(first_params)
    saved = copy.deepcopy(first.state_dict())
    for number in (0, 3):
        saved["state"][number] |= {"momentum_buffer": torch.ones(3), "note": "mine"}
    params = parameters()
    optimizer = built(params)
    optimizer.load_state_dict(saved)
    (said,) = said_by(caplog)
    assert "MARS has no such states: momentum_buffer of 2 tensors, note of 2 tensors" in said
    assert all(state.keys() <= {"step", "exp_avg", "exp_avg_sq", "prev_grad"} for state in optimizer.state.values())
    assert_identical(snapshot(optimizer, params)["states"], snapshot(first, first_params)["states"])


def said_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("load_state_dict")]


def test_a_warning_is_said_on_rank_0_only(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = built(parameters()).state_dict()
    for rank, count in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        caplog.clear()
        built(parameters(), gamma=0.7).load_state_dict(saved)
        assert len(said_by(caplog)) == count


# ---- through torch's checkpoint helpers


SHAPES: dict[str, tuple[int, ...]] = {"wide": (3, 5), "bias": (5,), "tall": (6, 2)}
SETTINGS: dict[str, Any] = {
    "first_step": "paper", "ns_steps": 3, "ns_dtype": "float64", "orthogonalizer": "cans", "matrix_ndim": (2, 3),
    "skip_nonfinite": True, "matrix_buffer_mb": 7.0,
}  # fmt: skip


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net_of(dtype: torch.dtype = torch.float32, sharded: bool = False) -> nn.ParameterDict:
    net = nn.ParameterDict(parameters(dtype, SHAPES))
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net)
    return net


def optimizer_of(net: nn.ParameterDict, **settings: Any) -> MARS:
    return MARS(net.parameters(), **{"lr": 0.01, "lr_1d": 0.01, **settings})


def step(net: nn.ParameterDict, optimizer: MARS, number: int, dtype: torch.dtype | None = None) -> None:
    """One step; gradients of another ``dtype`` where torch allows it."""
    whole = gradients(number, {n: torch.empty(s) for n, s in SHAPES.items()})
    for name, p in net.items():
        if dtype is not None:
            p.grad_dtype = dtype
        g = whole[name].to(dtype or p.dtype)
        if hasattr(p, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            g = distribute_tensor(g, p.device_mesh, p.placements)
        p.grad = g
    optimizer.step()


WAYS = {
    "whole": (False, helpers.StateDictOptions(full_state_dict=True)),
    "as it is": (False, helpers.StateDictOptions()),
    "flat": (False, helpers.StateDictOptions(flatten_optimizer_state_dict=True)),
    "FSDP2, whole": (True, helpers.StateDictOptions(full_state_dict=True)),
    "FSDP2, sharded": (True, helpers.StateDictOptions()),
    "FSDP2, flat": (True, helpers.StateDictOptions(flatten_optimizer_state_dict=True)),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def get(net: nn.ParameterDict, optimizer: MARS, way: str) -> Any:
    saved = helpers.get_optimizer_state_dict(net, optimizer, options=WAYS[way][1])
    return copy.deepcopy(saved) if WAYS[way][0] else through_a_file(saved)


def put(net: nn.ParameterDict, optimizer: MARS, saved: Any, way: str) -> None:
    helpers.set_optimizer_state_dict(net, optimizer, saved, options=WAYS[way][1])


@EVERY_WAY
@pytest.mark.usefixtures("one_rank")
def test_the_settings_travel_and_another_variant_is_refused(way: str) -> None:
    sharded = WAYS[way][0]
    net = net_of(sharded=sharded)
    optimizer = optimizer_of(net, mars_type="mars-m", **SETTINGS)
    for number in range(2):
        step(net, optimizer, number)
    saved = get(net, optimizer, way)
    second_net = net_of(sharded=sharded)
    second_net.load_state_dict(net.state_dict())
    second = optimizer_of(second_net, mars_type="mars-m")
    assert second.settings != optimizer.settings
    put(second_net, second, copy.deepcopy(saved), way)
    assert second.settings == optimizer.settings
    for number in range(2, 4):
        step(net, optimizer, number)
        step(second_net, second, number)
    assert all(torch.equal(local(a), local(b)) for a, b in zip(net.values(), second_net.values(), strict=True))

    third_net = net_of(sharded=sharded)
    third = optimizer_of(third_net, mars_type="mars-lion")
    step(third_net, third, 0)
    before = copy.deepcopy([{k: local(v) for k, v in third.state[p].items()} for p in third_net.values()])
    with pytest.raises(ValueError, match="mars_type='mars-m', and this optimizer is 'mars-lion'|has no exp_avg_sq"):
        put(third_net, third, saved, way)
    for state, p in zip(before, third_net.values(), strict=True):
        assert_identical(state, {k: local(v) for k, v in third.state[p].items()})
    assert third.settings.mars_type == "mars-lion"


# ---- precisions

CASES = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float64),
    (torch.float64, torch.float32),
]
EVERY_PRECISION = pytest.mark.parametrize(
    ("dtype", "grad_dtype"), CASES, ids=[f"{str(p)[6:]}, gradients {str(g)[6:]}" for p, g in CASES]
)


def dtypes(state: dict[str, Tensor]) -> dict[str, torch.dtype]:
    return {key: value.dtype for key, value in state.items()}


@EVERY_PRECISION
@pytest.mark.parametrize("way", ["state_dict", "file", *WAYS])
@pytest.mark.usefixtures("one_rank")
def test_states_keep_their_precision(way: str, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    sharded = way in WAYS and WAYS[way][0]
    net = net_of(dtype, sharded)
    optimizer = optimizer_of(net)
    for number in range(2):
        step(net, optimizer, number, grad_dtype)
    moments = torch.promote_types(dtype, torch.float32)
    expected = {"step": torch.float32, "exp_avg": moments, "exp_avg_sq": moments, "prev_grad": grad_dtype}
    assert dtypes(optimizer.state[net["wide"]]) == expected
    second_net = net_of(dtype, sharded)
    second_net.load_state_dict(net.state_dict())
    second = optimizer_of(second_net)
    if way in WAYS:
        put(second_net, second, get(net, optimizer, way), way)
    else:
        saved = optimizer.state_dict()
        second.load_state_dict(through_a_file(saved) if way == "file" else saved)
    for name, p in net.items():
        ours, theirs = optimizer.state[p], second.state[second_net[name]]
        assert dtypes(theirs) == dtypes(ours)
        assert_identical({k: local(v) for k, v in theirs.items()}, {k: local(v) for k, v in ours.items()})
    for number in range(2, 4):
        step(net, optimizer, number, grad_dtype)
        step(second_net, second, number, grad_dtype)
    assert all(torch.equal(local(a), local(b)) for a, b in zip(net.values(), second_net.values(), strict=True))


def test_the_message_of_a_refusal_is_one_line() -> None:
    for case, (change, _) in REFUSED.items():
        saved = copy.deepcopy(built(parameters(), amsgrad=True).state_dict())
        change(saved)
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            built(parameters(), steps=0).load_state_dict(saved)
        assert not re.search(r"\n", str(caught.value)), case


def test_a_left_out_step_does_not_round_h() -> None:
    """h of gradients in float32 stays as it is where the gradient of a step that is left out has 16 bits."""
    params = parameters(torch.bfloat16)
    optimizer = MARS(params.values(), skip_nonfinite=True)
    train(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    h = saved["state"][0]["prev_grad"] = torch.randn(params["wide"].shape)
    second_params = copies(params)
    second = MARS(second_params.values(), skip_nonfinite=True)
    second.load_state_dict(saved)
    set_gradients(second_params, {n: torch.full_like(p, torch.inf) for n, p in second_params.items()})
    second.step()
    assert torch.equal(second.state[second_params["wide"]]["prev_grad"], h)
