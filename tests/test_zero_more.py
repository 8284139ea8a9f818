"""MARS under ZeRO when something is unusual: non-finite gradients, checkpoints, odd parameters, schedules, mismatches.

Where training happens the result is checked by REPLAY, as in test_zero.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import nets, zero_cases, zero_more_cases
from tests.ranks import RankError, RankPool
from tests.reference import ReferenceMARS
from tests.zero_cases import LR, ZeroCase
from tests.zero_more_cases import FROZEN, Poison

pytestmark = pytest.mark.timeout(180)
BASE = {"weight_decay": 0.05}
SKIP = {**BASE, "skip_nonfinite": True}
TOLERANCE = 2e-6
NOT_OF_THE_REFERENCE = ("skip_nonfinite", "ns_dtype", "matrix_buffer_mb")  # it iterates in float64


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3], ids=["2ranks", "3ranks"])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(request.param)
    yield pool
    pool.close()


def replayed(
    result: dict[str, Any],
    case: ZeroCase,
    lr: list[float] | None = None,
    groups: list[dict[str, Any]] | None = None,
) -> dict[str, torch.Tensor]:
    """The float64 reference on the gradients that reached MARS; a tensor of a skipped call has no gradient there."""
    kwargs = {k: v for k, v in {**LR, **case.params}.items() if k not in NOT_OF_THE_REFERENCE}
    reference = ReferenceMARS(result["start"], groups, **kwargs)
    for i, gradients in enumerate(result["gradients"]):
        shaped = {name: g.view(result["start"][name].shape) for name, g in gradients.items()}
        reference.step(shaped, lr=None if lr is None else lr[i])
    return reference.params


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a if a[name].numel())


def moved(result: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    for name, start in result["start"].items():
        if name not in but and start.numel():
            assert (result["end"][name] - start).abs().max() > 1e-3, f"{name} did not move: this would prove nothing"


# -------------------------------------------------------------------------------------------- non-finite gradients

STEPS, BAD = 8, 3
# How MARS is constructed is shown for every engine by test_zero.py; what it is constructed on, by the first of the two.
CONSTRUCT = pytest.mark.parametrize("construct", ["json", pytest.param("instance", marks=pytest.mark.slow)])
AGAIN = [(1, "fp32"), (2, "bf16")]  # stages 1 and 2 are one engine: in the default tier each in one precision
ENGINES = [(stage, dtype) for stage in (1, 2, 3) for dtype in ("fp32", "bf16")]
MARKED = [pytest.param(*engine, marks=[pytest.mark.slow] * (engine in AGAIN)) for engine in ENGINES]
EVERY_ENGINE = pytest.mark.parametrize(("stage", "dtype"), MARKED)


@pytest.mark.parametrize(
    ("rank", "value"),
    [
        (0, float("nan")),
        (1, float("-inf")),
        pytest.param(0, float("-inf"), marks=pytest.mark.slow),
        pytest.param(1, float("nan"), marks=pytest.mark.slow),
    ],
)
@EVERY_ENGINE
def test_one_bad_number_on_one_rank_leaves_all_ranks_untouched(
    pool: RankPool, stage: int, dtype: str, rank: int, value: float
) -> None:
    """Written into the flat gradient after DeepSpeed's own check, in the one flat that holds every tensor."""
    case = ZeroCase(stage, dtype, params=SKIP, construct="instance", steps=STEPS)
    results = pool.run(zero_more_cases.train, case, Poison(BAD, rank, value), timeout=90)
    for result in results:
        assert [i for i, untouched in enumerate(result["untouched"]) if untouched] == [BAD]
        assert result["steps"] == [STEPS - 1.0] and result["finite"] and result["skipped_by_deepspeed"] == 0
        assert furthest(result["end"], results[0]["end"]) == 0.0
    result = results[0]
    assert sum(not g.isfinite().all() for g in result["gradients"][BAD].values()) == 1
    del result["gradients"][BAD]
    assert furthest(replayed(result, case), result["end"]) < TOLERANCE
    moved(result)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("bad_call", [0, 1])
def test_the_decision_is_taken_for_each_call_of_the_engine(pool: RankPool, stage: int, bad_call: int) -> None:
    """Built by name there are two flats and two calls: the tensors of the other flat take their step."""
    case = ZeroCase(stage, params=SKIP, steps=STEPS)
    results = pool.run(zero_more_cases.train, case, Poison(BAD, 1, calls=bad_call), timeout=90)
    for result in results:
        assert [i for i, untouched in enumerate(result["untouched"]) if untouched] == [2 * BAD + bad_call]
        assert sorted(result["steps"]) == [STEPS - 1.0, STEPS] and result["finite"]
        assert furthest(result["end"], results[0]["end"]) == 0.0
    result = results[0]
    skipped = {n for n, p in result["start"].items() if (p.ndim != 2) == bool(bad_call)}
    assert {n for n, g in result["gradients"][BAD].items() if not g.isfinite().all()} < skipped
    for name in skipped:
        del result["gradients"][BAD][name]
    assert furthest(replayed(result, case), result["end"]) < TOLERANCE


@pytest.mark.parametrize("stage", [1, 2])
def test_a_bad_loss_with_deepspeeds_check_turned_off_leaves_all_ranks_untouched(pool: RankPool, stage: int) -> None:
    """``check_grad_overflow: false``: after the reduction only the rank that owns `shift` holds a NaN."""
    extra = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    case = ZeroCase(stage, "bf16", params=SKIP, construct="instance", steps=STEPS)
    results = pool.run(zero_more_cases.train_with, case, extra, Poison(BAD, 1, where="loss"), timeout=90)
    for result in results:
        assert [i for i, untouched in enumerate(result["untouched"]) if untouched] == [BAD]
        assert result["skipped_by_deepspeed"] == 0 and result["steps"] == [STEPS - 1.0] and result["finite"]
    result = results[0]
    assert {n for n, g in result["gradients"][BAD].items() if not g.isfinite().all()} == {"shift"}
    del result["gradients"][BAD]
    assert furthest(replayed(result, case), result["end"]) < TOLERANCE


@pytest.mark.parametrize(("stage", "dtype"), [*MARKED, (0, "bf16")])
def test_a_step_that_deepspeed_skips_leaves_the_states_alone(pool: RankPool, stage: int, dtype: str) -> None:
    """DeepSpeed finds the NaN of one rank's loss itself and does not call MARS at all."""
    case = ZeroCase(stage, dtype, params=BASE, steps=STEPS)
    results = pool.run(zero_more_cases.train, case, Poison(BAD, 1, where="loss"), timeout=90)
    calls_per_update = 1 if stage == 0 else 2
    for result in results:
        assert result["skipped_by_deepspeed"] == 1 and result["gradients"][BAD] == {}
        assert len(result["untouched"]) == (STEPS - 1) * calls_per_update and not any(result["untouched"])
        assert set(result["steps"]) == {STEPS - 1.0} and result["finite"]
        assert furthest(result["end"], results[0]["end"]) == 0.0
    assert furthest(replayed(results[0], case), results[0]["end"]) < TOLERANCE


def test_at_stage_0_where_deepspeed_checks_nothing_a_bad_loss_is_left_out(pool: RankPool) -> None:
    case = ZeroCase(0, params=SKIP, steps=STEPS)
    for result in pool.run(zero_more_cases.train, case, Poison(BAD, 1, where="loss"), timeout=90):
        assert [i for i, untouched in enumerate(result["untouched"]) if untouched] == [BAD]
        assert result["skipped_by_deepspeed"] == 0 and set(result["steps"]) == {STEPS - 1.0} and result["finite"]
        if result["gradients"]:
            del result["gradients"][BAD]
            assert furthest(replayed(result, case), result["end"]) < TOLERANCE


@pytest.mark.parametrize("params", [BASE, {**SKIP, "first_step": "paper", "optimize_1d": True}], ids=["", "skip"])
@EVERY_ENGINE
def test_padding_that_nobody_initialised_does_no_harm(
    pool: RankPool, stage: int, dtype: str, params: dict[str, Any]
) -> None:
    """DeepSpeed allocates flats without writing their padding: it may be NaN, and is no part of any tensor."""
    buckets = {"reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000}  # gigabytes of NaN otherwise
    case = ZeroCase(stage, dtype, params=params, construct="instance", zero=buckets, steps=STEPS)
    results = pool.run(zero_more_cases.train_on_used_memory, case, timeout=90)
    assert stage < 3 or any(result["undefined"] for result in results), "this test lost its point"
    for result in results:
        assert not any(result["untouched"]) and result["steps"] == [STEPS] and result["finite"]
        assert furthest(result["end"], results[0]["end"]) == 0.0
    assert furthest(replayed(results[0], case), results[0]["end"]) < TOLERANCE


# ------------------------------------------------------------------------------------------------------ checkpoints

SAVED = [
    *(ZeroCase(stage, dtype, params=BASE) for stage, dtype in [(0, "fp32"), (0, "bf16"), *ENGINES]),
    *(ZeroCase(stage, params={**BASE, "mars_type": "mars-lion", "optimize_1d": True}) for stage in (1, 2, 3)),
    ZeroCase(2, params={**BASE, "amsgrad": True}, construct="instance"),
    ZeroCase(3, params=BASE, zero={"sub_group_size": 60}),
    ZeroCase(2, offload=True, params=BASE),
    ZeroCase(3, offload=True, params=BASE),
]


@pytest.mark.slow  # test_save_and_continue_libraries.py has every stage in the default tier
@pytest.mark.parametrize("case", SAVED, ids=str)
def test_a_saved_run_continues_bit_equal(pool: RankPool, case: ZeroCase, tmp_path: Path) -> None:
    """In an engine whose MARS was built with other arguments, but for the variant: another one is refused."""
    variant = case.params.get("mars_type", "mars-adamw")
    other = {"mars_type": variant, "gamma": 0.9, "lr": 0.5, "lr_1d": 0.25, "clip": None, "first_step": "paper"}
    rebuilt = ZeroCase(**{**vars(case), "params": other})
    for result in pool.run(zero_more_cases.save_and_continue, case, rebuilt, str(tmp_path), timeout=90):
        assert states_equal(result["saved"], result["loaded"])
        assert all("prev_grad" in state or "exp_avg_sq" in state for state in result["saved"])
        assert any("prev_grad" in state for state in result["saved"])
        assert {float(state["step"]) for state in result["saved"]} == {float(case.steps // 2)}
        (states, uninterrupted), (again, continued) = result["uninterrupted"], result["continued"]
        assert states_equal(states, again)
        assert furthest(uninterrupted["end"], continued["end"]) == 0.0
        assert continued["rule_counts"] == uninterrupted["rule_counts"]
        assert continued["engines"] == uninterrupted["engines"]
        assert result["settings"]["mars_type"] == case.params.get("mars_type", "mars-adamw")
        if "start" in uninterrupted and uninterrupted["gradients"]:
            assert furthest(replayed(uninterrupted, case), continued["end"]) < TOLERANCE


def states_equal(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> bool:
    assert [sorted(x) for x in a] == [sorted(x) for x in b]
    return all(x[k].dtype == y[k].dtype and torch.equal(x[k], y[k]) for x, y in zip(a, b, strict=True) for k in x)


# ----------------------------------------------------------------------------------------------------- odd parameters

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def checked(pool: RankPool, case: ZeroCase, still: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train; replay; the ranks agree."""
    results = pool.run(zero_more_cases.train, case, timeout=90)
    result = results[0]
    for other in results:
        assert furthest(other["end"], result["end"]) == 0.0
        assert other["rule_counts"] == result["rule_counts"]
    assert furthest(replayed(result, case), result["end"]) < TOLERANCE
    moved(result, but=still)
    return result


@pytest.mark.parametrize(("stage", "offload"), [(0, False), *((s, o) for s in (1, 2, 3) for o in (False, True))])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_parameter_without_gradient_in_some_steps(pool: RankPool, stage: int, offload: bool, dtype: str) -> None:
    """What DeepSpeed hands over then: zeros; at stage 3 and with offload the gradient of the step before once more."""
    case = ZeroCase(stage, dtype, offload, params=BASE, net="short")
    result = checked(pool, case)
    assert result["rule_counts"] == {"MARS-AdamW": nets.MATRICES, "AdamW": nets.VECTORS}
    given = [g["narrow.weight"] for g in result["gradients"]]
    for step in range(1, case.steps, 3):
        assert torch.equal(given[step], given[step - 1] if stage == 3 or offload else torch.zeros_like(given[step]))


@STAGES
@CONSTRUCT
def test_frozen_parameters_do_not_move_and_shift_nothing(pool: RankPool, stage: int, construct: str) -> None:
    case = ZeroCase(stage, params=BASE, net="frozen", construct=construct)
    result = checked(pool, case, still=FROZEN)
    assert result["rule_counts"] == {"MARS-AdamW": nets.MATRICES - 1, "AdamW": nets.VECTORS - 1}
    assert all(torch.equal(result["start"][name], result["end"][name]) for name in FROZEN)


@pytest.mark.parametrize("stage", [0, 2])
def test_frozen_parameters_in_16_bits(pool: RankPool, stage: int) -> None:
    case = ZeroCase(stage, "bf16", params=BASE, net="frozen", construct="instance", steps=2)
    result = pool.run(zero_more_cases.train_counts, case, timeout=90)[0]
    assert result["rule_counts"] == {"MARS-AdamW": nets.MATRICES - 1, "AdamW": nets.VECTORS - 1}


@STAGES
@CONSTRUCT
def test_tied_weights_are_one_tensor(pool: RankPool, stage: int, construct: str) -> None:
    result = checked(pool, ZeroCase(stage, params=BASE, net="tied", construct=construct))
    assert result["rule_counts"] == {"MARS-AdamW": 2, "AdamW": 3}


@pytest.mark.parametrize("stage", [0, 1, 2])  # DeepSpeed itself cannot gather an empty parameter at stage 3
@CONSTRUCT
def test_parameters_without_elements_are_no_obstacle(pool: RankPool, stage: int, construct: str) -> None:
    result = checked(pool, ZeroCase(stage, params={**BASE, "skip_nonfinite": True}, net="empty", construct=construct))
    empty = 1 if stage == 0 else 0  # of each kind; DeepSpeed leaves them out of its flats
    assert result["rule_counts"] == {"MARS-AdamW": nets.MATRICES + empty, "AdamW": nets.VECTORS + empty}
    assert result["finite"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_group_without_parameters_shifts_nothing(pool: RankPool, stage: int) -> None:
    """DeepSpeed deletes it, and the groups behind it get other numbers."""
    case = ZeroCase(stage, params=BASE, construct="groups")
    result = pool.run(zero_more_cases.train, case, timeout=90)[0]
    net = nets.build()
    first, second = zero_cases.group_names(net)
    groups: list[dict[str, Any]] = [{"names": first}, {"names": second, **zero_cases.SECOND_SETTINGS}]
    assert result["rule_counts"] == {"MARS-AdamW": nets.MATRICES, "AdamW": nets.VECTORS}
    assert furthest(replayed(result, case, groups=groups), result["end"]) < TOLERANCE


# ----------------------------------------------------------------------------------------------------- other engines


@pytest.mark.parametrize("construct", ["json", "instance"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_born_partitioned(pool: RankPool, construct: str, dtype: str) -> None:
    """``deepspeed.zero.Init``: MARS is constructed on parameters of shape (0,)."""
    case = ZeroCase(3, dtype, params=BASE, construct=construct)
    results = pool.run(zero_more_cases.train, case, None, True, timeout=90)
    assert all(r["rule_counts"] == {"MARS-AdamW": nets.MATRICES, "AdamW": nets.VECTORS} for r in results)
    assert results[0]["engines"] == {"ZeRO-3"} and len(results[0]["steps"]) == (2 if construct == "json" else 1)
    assert furthest(replayed(results[0], case), results[0]["end"]) < TOLERANCE
    moved(results[0])


@CONSTRUCT
def test_the_bf16_optimizer_with_gradients_accumulated_in_fp32(pool: RankPool, construct: str) -> None:
    """Its gradients are views of a buffer that is zeroed in place."""
    case = ZeroCase(1, "bf16", params=BASE, construct=construct, extra={"data_types": {"grad_accum_dtype": "fp32"}})
    result = checked(pool, case)
    assert (result["wrapper"], result["engines"]) == ("BF16_Optimizer", {"ZeRO-1/2"})
    assert result["rule_counts"] == {"MARS-AdamW": nets.MATRICES, "AdamW": nets.VECTORS}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", ["mars-shampoo", "mars-m"])
def test_matrix_variants_at_stage_0(pool: RankPool, variant: str, dtype: str) -> None:
    case = ZeroCase(0, dtype, params={**BASE, "mars_type": variant, "ns_dtype": "float32"})
    results = pool.run(zero_more_cases.train, case, timeout=90)
    label = {"mars-shampoo": "MARS-Shampoo", "mars-m": "MARS-M"}[variant]
    assert all(r["rule_counts"] == {label: nets.MATRICES, "AdamW": nets.VECTORS} for r in results)
    assert results[0]["wrapper"] == ("MARS" if dtype == "fp32" else "FP16_UnfusedOptimizer")
    assert furthest(replayed(results[0], case), results[0]["end"]) < 5e-6
    moved(results[0])


# ---------------------------------------------------------------------------------------------------------- schedule


@STAGES
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_warmup_from_zero_in_the_json_acts_on_both_learning_rates(pool: RankPool, stage: int, dtype: str) -> None:
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": LR["lr"], "warmup_num_steps": 5, "warmup_type": "linear"}
    extra = {"scheduler": {"type": "WarmupLR", "params": warmup}}
    case = ZeroCase(stage, dtype, params=BASE, extra=extra)
    results = pool.run(zero_more_cases.train, case, timeout=90)
    result = results[0]
    used = [calls[0] for calls in result["lr"]]
    assert all(set(calls) == {calls[0]} for calls in result["lr"])
    assert used[0] == 0.0 and used == sorted(used) and used[-1] == pytest.approx(LR["lr"]) and len(set(used)) > 4
    assert set(result["steps"]) == {float(case.steps)}, "a step at lr 0 with real gradients is a step"
    assert furthest(replayed(result, case, lr=used), result["end"]) < TOLERANCE
    moved(result)
    for other in results[1:]:
        assert furthest(other["end"], result["end"]) == 0.0


# -------------------------------------------------------------------------------------------------------- mismatches


@pytest.mark.parametrize("stage", [1, 2, 3])
@CONSTRUCT
def test_ranks_with_different_models_raise_on_every_rank(pool: RankPool, stage: int, construct: str) -> None:
    """Equal in the number of elements, so that DeepSpeed itself notices nothing."""
    case = ZeroCase(stage, params=BASE, net="unlike", construct=construct)
    with pytest.raises(RankError, match="build the same model, groups and optimizer on every rank") as error:
        pool.run(zero_more_cases.train, case, timeout=90)
    assert str(error.value).count("the ranks that share these tensors do not agree on the names, shapes or order") >= (
        pool.world_size
    ), "every rank must raise"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_on_copies_of_the_parameters_does_not_train(pool: RankPool, stage: int) -> None:
    """DeepSpeed does not find the copies in the model: an error, never a run that is something else."""
    with pytest.raises(RankError, match="(KeyError|AttributeError)") as error:
        pool.run(zero_more_cases.on_copies, stage, timeout=90)
    assert all(f"rank {rank}:" in str(error.value) for rank in range(pool.world_size))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_changed_behind_the_engine_are_reported_on_every_rank(pool: RankPool, stage: int) -> None:
    """Only one rank holds the changed number: the others must not wait for it for ever."""
    with pytest.raises(RankError, match="does not agree with the weights of gain") as error:
        pool.run(zero_more_cases.changed_behind_the_engine, stage, timeout=60)
    assert all(f"rank {rank}:" in str(error.value) for rank in range(pool.world_size))
