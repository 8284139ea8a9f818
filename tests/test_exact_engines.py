"""Exact mode in every engine: REPLAY of both gradients, what the engine counts, dropout, overflows, collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import exact_cases, nets
from tests.exact_cases import SETTINGS, Case
from tests.ranks import RankPool
from tests.reference import ReferenceMARS
from tests.test_engines import LABELS, furthest

pytestmark = pytest.mark.timeout(300)
LION = {"mars_type": "mars-lion"}
MATRIX = {variant: {"mars_type": variant, "ns_dtype": "float32"} for variant in ("mars-shampoo", "mars-m")}
FLOAT32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
ZERO = "DeepSpeedZeroOptimizer"
ACTIVE = {
    "ddp": ("DistributedDataParallel", "whole tensors"),
    "fsdp1-original": ("FullyShardedDataParallel", "FSDP1"),
    "fsdp1-flat": ("FullyShardedDataParallel", "FSDP1"),
    "fsdp2": ("FSDPNet", "DTensor (Shard(dim=0),)"),
    "zero0": ("MARS", "whole tensors"),
    "zero1": (ZERO, "ZeRO-1/2"),
    "zero2": (ZERO, "ZeRO-1/2"),
    "zero3": (f"{ZERO}_Stage3", "ZeRO-3"),
    "accelerate-ddp": ("MULTI_CPU", "whole tensors"),
    "accelerate-fsdp1-original": ("FSDP", "FSDP1"),
    "accelerate-fsdp2": ("FSDP", "DTensor (Shard(dim=0),)"),
    "accelerate-zero2": ("DEEPSPEED", "ZeRO-1/2"),
    "accelerate-zero3": ("DEEPSPEED", "ZeRO-3"),
}
WRAPPED_IN_BF16 = {"zero0": ("FP16_UnfusedOptimizer", "copies")}
CONSTANT = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.0, "warmup_min_lr": 0.0}}}
CASES = [
    *(Case(engine, params) for engine in ACTIVE for params in ({}, LION)),
    *(Case(engine, params, dtype="bf16") for engine in ("zero0", "zero2", "zero3") for params in ({}, LION)),
    *(Case("zero1", params, dtype="bf16", config=FLOAT32_SUMS) for params in ({}, LION)),
    *(Case(engine, params, offload=True) for engine in ("zero1", "zero2", "zero3") for params in ({}, LION)),
    Case("zero3", dtype="bf16", offload=True),
    *(Case(engine, MATRIX["mars-m"]) for engine in ("ddp", "fsdp1-original", "fsdp2", "zero2", "zero3")),
    *(Case(engine, MATRIX["mars-shampoo"]) for engine in ("fsdp1-flat", "zero0", "zero1")),
    *(Case(engine, accumulation=2, clip=0.1) for engine in ACTIVE),
    *(Case(engine, {"first_step": "paper", "skip_nonfinite": True}) for engine in ("ddp", "fsdp2", "zero2", "zero3")),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def replayed(result: dict[str, Any], case: Case) -> ReferenceMARS:
    """The reference on what reached MARS."""
    settings = {k: v for k, v in {**SETTINGS, **case.params}.items() if k not in ("skip_nonfinite", "ns_dtype")}
    model = ReferenceMARS(result["start"], **settings)
    for t, gradients in enumerate(result["gradients"]):
        if not gradients:
            continue
        previous = result["ahead"][t] or None
        if previous is None and t and model.first_step == "reference":
            previous = {name: torch.zeros_like(g) for name, g in gradients.items()}
        if previous is None and t:
            previous = gradients
        lrs = result["rates"][t]
        model.step(gradients, lr=lrs[0], previous=previous)
    return model


def is_again(case: Case) -> bool:
    """A repetition over more settings."""
    lion = bool(case.params.get("mars_type")) and case.engine not in ("fsdp2", "zero2", "zero3")
    accumulated = case.accumulation > 1 and case.engine not in ("ddp", "fsdp2", "zero2", "zero3", "accelerate-zero2")
    return lion or accumulated or case.engine == "zero1" and case.offload


@pytest.mark.parametrize("case", [pytest.param(c, id=str(c), marks=[pytest.mark.slow] * is_again(c)) for c in CASES])
def test_replay(pool: RankPool, case: Case) -> None:
    results = pool.run(exact_cases.run, case, timeout=120)
    result = results[0]
    kind, engine = ACTIVE[case.engine]
    if case.dtype == "bf16":
        kind, engine = WRAPPED_IN_BF16.get(case.engine, (kind, engine))
        kind = "BF16_Optimizer" if case.config else kind
    variant = case.params.get("mars_type", "mars-adamw")
    passes = case.steps * case.accumulation
    for each in results:
        assert each["facts"]["type"] == kind and each["engines"] == {engine}
        assert each["rule_counts"] == {LABELS[variant]: nets.MATRICES, "AdamW": nets.VECTORS}
        assert each["counts"] == [case.steps] and each["hooks"] % case.steps == 0 and each["hooks"] > 0
        assert (each["handed_out"], each["evaluations"]) == (passes, 2 * passes - case.accumulation)
        assert "next_prev_grad" not in each["state_keys"] and "prev_grad" in each["state_keys"]
        previous, spare = each["bytes"]
        assert previous == spare > 0, "exact mode costs one more buffer of the size of prev_grad"
        assert furthest(each["end"], result["end"]) == 0.0, "the ranks hold different parameters"
        if each["counters"] is not None:
            # Accelerate calls engine.step() once per batch, a loop by hand with each micro-batch.
            calls = case.steps if case.engine.startswith("accelerate") else passes
            assert each["counters"] == (case.steps, calls, case.steps * exact_cases.BATCH, 0)
        assert len([m for m in each["messages"] if "exact mode" in m]) == 0
    for t in range(case.steps):
        assert set(result["gradients"][t]) == set(result["start"])
        assert set(result["ahead"][t]) == (set(result["start"]) if t else set())
    assert any(furthest(result["gradients"][t], result["ahead"][t]) > 1e-4 for t in range(1, case.steps))
    assert furthest(replayed(result, case).params, result["end"]) < (5e-6 if variant in MATRIX else 2e-6)


OVERFLOWS = [
    *(Case(engine, dtype="fp16", broken=((w, 4),)) for engine in ("zero2", "zero3") for w in ("ahead", "present")),
    # Another one at the smallest scale ends an ordinary training.
    Case("zero2", dtype="fp16", config={"fp16": {"min_loss_scale": 1024}}, broken=(("ahead", 1),)),
]
MORE_OVERFLOWS = [
    *(Case("zero1", dtype="fp16", broken=((which, 4),)) for which in ("ahead", "present")),
    *(Case(z, dtype="fp16", offload=True, broken=((w, 4),)) for z in ("zero2", "zero3") for w in ("ahead", "present")),
    *(
        Case(z, dtype="fp16", clip=0.1, accumulation=2, broken=(("ahead", 4), ("present", 6)))
        for z in ("zero2", "zero3")
    ),
    *(Case(z, LION, dtype="fp16", broken=(("present", 4), ("ahead", 5))) for z in ("zero2", "zero3")),
]


@pytest.mark.parametrize(
    "case",
    [*OVERFLOWS, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_OVERFLOWS)],
    ids=str,
)
def test_an_overflow_under_deepspeed(pool: RankPool, case: Case) -> None:
    """In the extra pass it costs h of one step; in the ordinary pass a step, whose h waits for the next one."""
    results = pool.run(exact_cases.run, case, timeout=120)
    result, ordinary = results[0], pool.run(exact_cases.run_approximate, case, timeout=120)[0]
    lost_h, lost = ({step for which, step in case.broken if which == w} for w in ("ahead", "present"))
    said = [m for m in result["messages"] if "no gradient of this batch at the point before" in m]
    assert len(said) == len(lost_h)
    for each in results:
        assert each["facts"]["type"] == ACTIVE[case.engine][0] and each["engines"] == {ACTIVE[case.engine][1]}
        variant = case.params.get("mars_type", "mars-adamw")
        assert each["rule_counts"] == {LABELS[variant]: nets.MATRICES, "AdamW": nets.VECTORS}
        assert each["counts"] == [case.steps - len(lost)] and each["counters"][3] == len(lost)
        assert all(each[key] == ordinary[key] for key in ("counters", "scales", "rates", "hooks"))
        assert furthest(each["end"], result["end"]) == 0.0
    assert len(set(result["scales"])) > 1, "the scale did not move: the comparison would prove nothing"
    assert {t for t in range(1, case.steps) if not result["ahead"][t]} == lost_h
    assert {t for t in range(case.steps) if not result["gradients"][t]} == lost
    for step in lost - {step - 1 for step in lost_h}:
        # The point has not moved: h of the step after it is its own gradient.
        assert furthest(result["ahead"][step + 1], result["gradients"][step + 1]) < 1e-3
    assert furthest(replayed(result, case).params, result["end"]) < 2e-6


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_the_loss_scale_does_not_move_while_looking_ahead(pool: RankPool, engine: str) -> None:
    """ZeRO divides by the scale after it has grown, which halves that gradient. It must not happen to h as well."""
    grows, static = (
        pool.run(exact_cases.run, Case(engine, {"lr": 0.0}, dtype="fp16", config=CONSTANT | config, steps=6))[0]
        for config in ({}, {"fp16": {"loss_scale": 1024}})
    )
    assert grows["scales"] == [1024, 1024, 1024, 2048, 2048, 2048] and set(static["scales"]) == {1024}
    for t in range(1, 6):
        assert (
            furthest(grows["ahead"][t], static["ahead"][t])
            < 1e-3
            < furthest(static["ahead"][t], {name: h / 2 for name, h in static["ahead"][t].items()})
        )


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
def test_dropout_draws_the_same_masks_in_both_passes(pool: RankPool, engine: str) -> None:
    """Where the point does not move (lr 0), the two gradients of a batch are the same bit by bit."""
    case = Case(engine, {"lr": 0.0}, net="dropout", accumulation=2, config=CONSTANT, steps=4)
    results = pool.run(exact_cases.run, case, timeout=60)
    result = results[0]
    assert result["engines"] == {ACTIVE[engine][1]} and result["facts"]["type"] in (ACTIVE[engine][0], "FSDPDropped")
    assert furthest(result["start"], result["end"]) == 0.0
    for t in range(1, case.steps):
        assert furthest(result["ahead"][t], result["gradients"][t]) == 0.0
        assert furthest(result["gradients"][t], result["gradients"][t - 1]) > 1e-3
    masks = [hash(m[0].tobytes()) for each in results for m in each["masks"].values()]
    assert len(set(masks)) == len(masks) == 2 * 2 * case.steps, "two ranks or two micro-batches drop the same"
    assert all((m[0] == m[-1]).all() for each in results for m in each["masks"].values())


@pytest.mark.parametrize("skips", [False, True], ids=["", "skip_nonfinite"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp1-original", "fsdp2", "zero1", "zero2", "zero3"])
def test_collectives(pool: RankPool, engine: str, skips: bool) -> None:
    """Looking ahead MARS itself exchanges nothing (one flag with skip_nonfinite); its steps exchange what they did."""
    case = Case(engine, {"skip_nonfinite": skips}, steps=4)
    looked, stepped = [], []
    for result in pool.run(exact_cases.run, case, timeout=60):
        looked.append([n for looking, n in result["collectives"] if looking])
        stepped.append([n for looking, n in result["collectives"] if not looking])
    approximate = [n for _, n in pool.run(exact_cases.run_approximate, case, timeout=60)[0]["collectives"]]
    sharded = engine != "ddp"
    for looks, steps in zip(looked, stepped, strict=True):
        # In the first call of all, which looks ahead, the ranks compare their tables.
        assert looks[1:] == [int(skips and sharded)] * 2 and len(steps) == 4
        assert steps[1:] == approximate[1:] == [int(sharded)] * 3
        assert looks[0] + steps[0] - int(skips and sharded) == approximate[0]


@pytest.mark.parametrize("case", [Case("fsdp1-original"), Case("fsdp1-original", dtype="bf16")], ids=str)
def test_torchs_helper_saves_and_loads_right_after_a_skipped_step(pool: RankPool, case: Case) -> None:
    """h of two steps is there then, in some tensors of a unit; the helper wants the same states in all of them."""
    for result in pool.run(exact_cases.saved_after_a_skipped_step, replace(case, steps=6), timeout=60):
        assert result["engines"] == [("FullyShardedDataParallel", {"FSDP1"})] * 2
        assert result["keys"] == ["exp_avg,exp_avg_sq,next_prev_grad,prev_grad,step"]
        assert result["equal"]
