"""Trainings under PyTorch's engines that once went wrong: steps at the wrong moment, groups of ranks that overlap,
states that move through torch's helpers, a state with other values than those given."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mars_dist import MARS
from tests import engine_again_cases as cases
from tests import engine_cases, engine_more_cases
from tests.engine_cases import BASE, EngineCase
from tests.nets import MATRICES, VECTORS
from tests.ranks import RankPool
from tests.reference import ReferenceMARS

pytestmark = pytest.mark.timeout(300)
TOLERANCE = 2e-6
RULES = {"MARS-AdamW": MATRICES, "AdamW": VECTORS}
AGAIN_ON_FOUR = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    pools = {size: RankPool(size) for size in (2, 4)}  # a pool starts its processes when it is first used
    yield pools
    for pool in pools.values():
        pool.close()


def is_fsdp1(facts: dict[str, Any]) -> bool:
    """With original parameters, all of them in one unit that is cut over all ranks."""
    return (facts["type"], facts["strategies"], facts["flat"]) == ("FullyShardedDataParallel", {"FULL_SHARD"}, 0)


# ------------------------------------------------------------------------------------------- steps at the wrong moment


@pytest.mark.parametrize("earlier", [0, 2])
@pytest.mark.parametrize("size", AGAIN_ON_FOUR)
def test_a_step_on_gradients_that_no_sync_left_unsummed_raises(
    pools: dict[int, RankPool], size: int, earlier: int
) -> None:
    for result in pools[size].run(cases.step_after_no_sync, earlier, timeout=60):
        assert is_fsdp1(result["facts"])
        assert result["kind"] == "RuntimeError" and "no_sync()" in result["said"]
        assert not result["moved"]


@pytest.mark.parametrize("earlier", [0, 2])
@pytest.mark.parametrize("size", AGAIN_ON_FOUR)
def test_a_step_within_summon_full_params_raises(pools: dict[int, RankPool], size: int, earlier: int) -> None:
    """And the same step works outside of it: the error has left nothing behind."""
    for result in pools[size].run(cases.step_within_summoned_parameters, earlier, timeout=60):
        assert is_fsdp1(result["facts"])
        assert result["kind"] == "RuntimeError" and "outside of summon_full_params" in result["said"]
        assert not result["moved"] and result["moves_outside"]


# --------------------------------------------------------------------------------------- groups of ranks that overlap


def furthest_from_reference(result: dict[str, Any], without: int | None = None) -> float:
    """How far the values are from those of the reference on the whole gradients, but for the step ``without``."""
    model = ReferenceMARS(result["start"], None, **BASE)
    for step, gradients in enumerate(result["gradients"]):
        if step != without:
            model.step(gradients)
    assert all((model.params[name] - result["start"][name]).abs().max() > 1e-3 for name in result["end"])
    return max(float((model.params[name] - end).abs().max()) for name, end in result["end"].items())


@pytest.mark.parametrize("bad_step", [None, 0, 2])
def test_all_ranks_skip_a_step_that_is_not_finite_in_the_expert_of_one_pair(
    pools: dict[int, RankPool], bad_step: int | None
) -> None:
    for result in pools[4].run(cases.experts_beside_dense, bad_step, timeout=60):
        assert result["engines"] == {"DTensor (Shard(dim=0),)"} and result["held"] == {"dense": 8, "expert": 16}
        assert result["rule_counts"] == {"MARS-AdamW": 2}
        assert result["moved"] == [[step != bad_step] * 2 for step in range(4)]
        assert set(result["counts"].values()) == {4.0 - (bad_step is not None)}
        assert result["end"].keys() == {"dense", "expert"}
        assert furthest_from_reference(result, without=bad_step) < TOLERANCE


@pytest.mark.parametrize("beside", [False, True])
def test_a_tensor_whose_mesh_this_rank_is_not_in(pools: dict[int, RankPool], beside: bool) -> None:
    for rank, result in enumerate(pools[4].run(cases.on_a_mesh_of_the_first_two, beside, timeout=60)):
        held = {"some": 16 if rank < 2 else 0, **({"all": 8} if beside else {})}
        assert result["held"] == held and result["engines"] == {"DTensor (Shard(dim=0),)"}
        assert result["rule_counts"] == {"MARS-AdamW": len(held)}
        assert result["end"].keys() == {name for name in held if held[name]}
        if result["end"]:
            assert result["moved"] == [[numel > 0 for numel in held.values()]] * 4
            assert furthest_from_reference(result) < TOLERANCE


# ----------------------------------------------------------------------------------------- torch.distributed.checkpoint


@pytest.mark.parametrize("size", AGAIN_ON_FOUR)
@pytest.mark.parametrize("kind", ["plain", "bf16", "groups", "unfrozen"])
def test_fsdp1_continues_from_a_state_of_torchs_helper(pools: dict[int, RankPool], kind: str, size: int) -> None:
    """What one unit holds may have states of different kinds, dtypes and ages: torch's helper wants them alike."""
    case = cases.HEAD_WITHOUT_MARS if kind == "groups" else cases.FSDP1
    results = pools[size].run(cases.continued, case, kind == "bf16", kind == "unfrozen", timeout=60)
    rules = {"MARS-AdamW": MATRICES - 1, "AdamW": VECTORS + 1} if kind == "groups" else RULES
    for result in results:
        assert is_fsdp1(result["facts"]) and result["rules"] == [(rules, {"FSDP1"})] * 2
        assert result["dtypes"] == {"torch.bfloat16" if kind == "bf16" else "torch.float32"}
        assert len(result["saved"]) == MATRICES + VECTORS == len(set(result["saved"]))
        assert result["states"]["equal"] and result["states"]["number"] > 0
        assert result["equal"] and not result["stayed"]


@pytest.mark.parametrize("size", AGAIN_ON_FOUR)
@pytest.mark.parametrize(("first", "second"), [("fsdp1", "fsdp2"), ("fsdp2", "fsdp1"), ("fsdp2", "fsdp2")])
def test_a_state_of_one_engine_set_into_another_and_back(
    pools: dict[int, RankPool], first: str, second: str, size: int
) -> None:
    engines = {"fsdp1": {"FSDP1"}, "fsdp2": {"DTensor (Shard(dim=0),)"}}
    for result in pools[size].run(cases.moved_between, EngineCase(first), EngineCase(second), timeout=60):
        assert result["engines"] == [engines[first], engines[second], engines[first]]
        assert result["rule_counts"] == RULES and result["counts"] == [4.0]
        began, *later = result["states"]
        # step, two moments for all, the previous gradient for matrices
        assert len([name for name in began if began[name].abs().max() > 0]) == 3 * (MATRICES + VECTORS) + MATRICES
        for state in later:
            for name in began.keys() | state.keys():
                if name in began and name in state:
                    assert torch.equal(began[name], state[name]), name
                else:  # FSDP1's helper wants all tensors of a unit to have the same states
                    assert name.endswith(".prev_grad") and not (began | state)[name].any(), name


# ----------------------------------------------------------------------------------------------------- dry runs, models


@pytest.mark.parametrize("size", AGAIN_ON_FOUR)
def test_partial_sums_that_are_missing_after_a_dry_run_are_an_error_on_every_rank(
    pools: dict[int, RankPool], size: int
) -> None:
    case = EngineCase("tensor_parallel", {"sequence": True}, "layers", before="dry_run")
    missing = EngineCase(**{**vars(case), "missing": ((0, 1, "norm.weight"),)})
    for result in pools[size].run(engine_more_cases.outcome, missing, timeout=60):
        assert result["kind"] == "RuntimeError" and "partial sums" in result["said"]
        assert not result["moved"]
    for result in pools[size].run(engine_cases.run, case, timeout=60):  # the ranks live, and nobody lacks one
        assert result["rule_counts"] == {"MARS-AdamW": 5, "AdamW": 4} and result["counts"] == [float(case.steps)]
        assert result["facts"]["dtensors"] == 8 and "DTensor (Replicate(),)" in result["engines"]


@pytest.mark.parametrize("size", AGAIN_ON_FOUR)
def test_one_optimizer_over_two_fsdp1_models(pools: dict[int, RankPool], size: int) -> None:
    for result in pools[size].run(cases.one_optimizer_over_two_models, timeout=60):
        assert all(map(is_fsdp1, result["facts"])) and result["engines"] == {"FSDP1"}
        assert result["alone"] == RULES
        assert result["rule_counts"] == {rule: 2 * number for rule, number in RULES.items()}
        assert result["equal"] and result["moved"]


# ------------------------------------------------------------------------------------- a state with values of its own


def stepped(**settings: Any) -> MARS:
    torch.manual_seed(3)
    params = [("matrix", torch.nn.Parameter(torch.randn(4, 3))), ("vector", torch.nn.Parameter(torch.randn(3)))]
    optimizer = MARS(params, **settings)
    for _, p in params:
        p.grad = torch.randn(p.shape)
    optimizer.step()
    return optimizer


def said_by_loading(optimizer: MARS, state: dict[str, Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="mars_dist"), warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(state)
    return caplog.messages


def test_a_loaded_state_with_other_values_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = stepped(first_step="paper", gamma=0.1)
    (said,) = said_by_loading(optimizer, stepped(gamma=0.025).state_dict(), caplog)
    assert "first_step reference (given: paper)" in said and "gamma 0.025 (given: 0.1)" in said
    assert optimizer.settings.first_step == "reference" and optimizer.param_groups[0]["gamma"] == 0.025


def test_a_loaded_state_with_the_same_values_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    assert said_by_loading(stepped(gamma=0.1), stepped(gamma=0.1).state_dict(), caplog) == []


def test_betas_that_a_file_gives_as_lists_become_tuples(caplog: pytest.LogCaptureFixture) -> None:
    """Some formats know lists only: they are the same values, and nothing is said."""
    state = copy.deepcopy(stepped().state_dict())
    for name in ("betas", "betas_1d"):
        state["param_groups"][0][name] = list(state["param_groups"][0][name])
    optimizer = stepped()
    given = {name: optimizer.param_groups[0][name] for name in ("betas", "betas_1d")}
    assert said_by_loading(optimizer, state, caplog) == []
    for name, value in given.items():
        assert type(optimizer.param_groups[0][name]) is tuple and optimizer.param_groups[0][name] == value


def test_a_state_saved_after_loading_has_the_same_keys() -> None:
    """torch's helpers put what was saved into the state of a new optimizer, key by key."""
    first, second = stepped(), stepped()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    (saved,), (again,) = first.state_dict()["param_groups"], second.state_dict()["param_groups"]
    assert again.keys() == saved.keys()
