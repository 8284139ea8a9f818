"""Exact mode in every engine: REPLAY of both gradients, END TO END, what the engine counts, dropout, overflows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import exact_cases, exact_left_cases, nets
from tests.exact_cases import SETTINGS, Case
from tests.ranks import RankPool
from tests.reference import ReferenceMARS
from tests.test_engines import LABELS, furthest
from tests.zero_cases import ZeroCase

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
    "hsdp": ("FSDPNet", "DTensor (Replicate(), Shard(dim=0))"),
    "fsdp1-hybrid": ("FullyShardedDataParallel", "FSDP1"),
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
FOUR = ("hsdp", "fsdp1-hybrid")  # on a mesh of 2 x 2
TWO = tuple(engine for engine in ACTIVE if engine not in FOUR)
TENSOR = {
    "tensor": {"DTensor (Shard(dim=0),)", "DTensor (Shard(dim=1),)", "DTensor (Replicate(),)", "whole tensors"},
    "tensor-fsdp2": {
        "DTensor (Shard(dim=0),)",
        "DTensor (Shard(dim=0), Replicate())",
        "DTensor (Shard(dim=0), Shard(dim=1))",
        "DTensor (_StridedShard(dim=0, sf=2), Shard(dim=0))",
    },
}
WRAPPED_IN_BF16 = {"zero0": ("FP16_UnfusedOptimizer", "copies")}
CONSTANT = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.0, "warmup_min_lr": 0.0}}}
CASES = [
    *(Case(engine, params) for engine in ACTIVE for params in ({}, LION, *MATRIX.values())),
    *(Case(engine, params, dtype="bf16") for engine in ("zero0", "zero2", "zero3") for params in ({}, LION)),
    *(Case("zero1", params, dtype="bf16", config=FLOAT32_SUMS) for params in ({}, LION)),
    *(Case(engine, params, offload=True) for engine in ("zero1", "zero2", "zero3") for params in ({}, LION)),
    Case("zero3", dtype="bf16", offload=True),
    Case("zero1", MATRIX["mars-shampoo"], dtype="bf16", config=FLOAT32_SUMS),
    Case("zero1", MATRIX["mars-m"], dtype="bf16", config=FLOAT32_SUMS),
    *(Case(engine, params, offload=True) for engine in ("zero2", "zero3") for params in MATRIX.values()),
    *(Case(engine, accumulation=2, clip=0.1) for engine in TWO),
    *(Case(engine, {"first_step": "paper", "skip_nonfinite": True}) for engine in ("ddp", "fsdp2", "zero2", "zero3")),
]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    pools = {size: RankPool(size) for size in (2, 4)}  # a pool starts its processes when it is first used
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def pool(pools: dict[int, RankPool]) -> RankPool:
    return pools[2]


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
def test_replay(pools: dict[int, RankPool], case: Case) -> None:
    results = pools[4 if case.engine in FOUR else 2].run(exact_cases.run, case, timeout=120)
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


@pytest.mark.parametrize("variant", ["mars-adamw", "mars-m"])
@pytest.mark.parametrize("engine", TENSOR)
def test_replay_under_tensor_parallelism(pools: dict[int, RankPool], engine: str, variant: str) -> None:
    case = Case(engine, MATRIX.get(variant, {}), net="layers")
    results = pools[4].run(exact_cases.run, case, timeout=120)
    for each in results:
        assert each["engines"] == TENSOR[engine] and each["rule_counts"] == {LABELS[variant]: 5, "AdamW": 4}
        assert each["counts"] == [case.steps] and not [m for m in each["messages"] if "exact mode" in m]
        assert furthest(each["end"], results[0]["end"]) == 0.0
    result = results[0]
    assert any(furthest(result["gradients"][t], result["ahead"][t]) > 1e-4 for t in range(1, case.steps))
    assert furthest(replayed(result, case).params, result["end"]) < (5e-6 if variant in MATRIX else 2e-6)


def by_hand(case: Case, rates: list[list[float]]) -> dict[str, torch.Tensor]:
    """Exact mode on one process: h is the gradient of a step's batch at the point before, clipped as every gradient."""
    net = nets.build()
    start = {name: p.detach().double() for name, p in net.named_parameters()}
    model = ReferenceMARS(start, **{**SETTINGS, **case.params})

    def gradients(step: int) -> dict[str, torch.Tensor]:
        net.zero_grad()
        net(*nets.batch(step, exact_cases.BATCH)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        return {name: p.grad.double() for name, p in net.named_parameters() if p.grad is not None}

    previous = None
    for step in range(case.steps):
        present, ahead = gradients(step), gradients(step + 1)
        model.step(present, lr=rates[step][0], previous=previous)
        previous = ahead
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_(model.params[name])
    return model.params


USUAL = ("ddp", "fsdp2", "zero2", "zero3", "accelerate-ddp")


def marked(engine: str) -> Any:
    """In the default tier one engine of a kind."""
    case = Case(engine, accumulation=2, clip=0.1)
    return pytest.param(case, id=str(case), marks=[] if engine in USUAL else pytest.mark.slow)


@pytest.mark.parametrize("case", [marked(engine) for engine in TWO])
def test_both_passes_are_clipped_and_accumulated_as_on_one_process(pool: RankPool, case: Case) -> None:
    """REPLAY takes h as it came: only this sees a look-ahead that was not clipped or accumulated as a step is."""
    result = pool.run(exact_cases.run, case, timeout=120)[0]
    assert furthest(by_hand(case, result["rates"]), result["end"]) < 2e-5
    if case.engine.startswith("zero"):  # WarmupLR over 4 steps, a step late
        rates = [lrs[0] for lrs in result["rates"]]
        assert rates == sorted(rates) and len(set(rates)) == 4 and rates[4:] == [1e-2] * 6


def unclipped(case: Case) -> dict[str, Any]:
    """Planted: a look-ahead is not clipped."""
    from unittest import mock

    from mars_dist.integrations.exact_loop import Loop

    keep = Loop.keep

    def wrong(self: Any) -> None:
        self.before_step, kept = None, self.before_step
        keep(self)
        self.before_step = kept

    with mock.patch.object(Loop, "keep", wrong):
        return exact_cases.run(case)


def test_a_look_ahead_that_is_not_clipped_would_be_found(pool: RankPool) -> None:
    case = Case("fsdp2", accumulation=2, clip=0.1)
    result = pool.run(unclipped, case, timeout=120)[0]
    assert furthest(by_hand(case, result["rates"]), result["end"]) > 1e-2


PLACES = [(1, True), (2, False), (2, True), (3, False)]
STATIC = {"fp16": {"enabled": True, "loss_scale": 1024}}


def test_a_pipeline_is_refused(pool: RankPool) -> None:
    case = ZeroCase(0, params={"weight_decay": 0.05, "is_approx": False})
    for said in pool.run(exact_cases.pipeline, case, timeout=120):
        assert "exact mode does not work with PipelineModule" in said


def test_the_table_names_the_variants_that_run_here() -> None:
    from tests.engines import ROWS

    run: dict[str, set[str]] = {}
    for case in CASES:
        run.setdefault(case.engine, set()).add(case.params.get("mars_type", "mars-adamw"))
    assert all(variants == set(LABELS) for variants in run.values()), run
    rows = [row for row in ROWS if row.shown_by.startswith("tests/test_exact_engines.py")]
    assert len(rows) >= 5 and all(set(row.variants) <= set(LABELS) for row in rows)


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
@pytest.mark.parametrize(
    "engine",
    ["ddp", "fsdp2", "zero2", *(pytest.param(e, marks=pytest.mark.slow) for e in ("fsdp1-original", "zero1", "zero3"))],
)
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
        assert result["keys"] == ["exp_avg,exp_avg_sq,prev_grad,step"]
        assert result["equal"]


@pytest.mark.parametrize(
    "case",
    [
        Case("ddp", {"lr": 0.0}, accumulation=2),
        Case("fsdp2", {"lr": 0.0}, accumulation=2),
        *(Case(f"zero{stage}", {"lr": 0.0}, 2, config={"scheduler": exact_cases.FROZEN}) for stage in (2, 3)),
        Case("zero2", {"lr": 0.0}, 2, offload=True, config={"scheduler": exact_cases.FROZEN}),
    ],
    ids=str,
)
def test_a_batch_that_is_left_early_leaves_nothing_behind(pool: RankPool, case: Case) -> None:
    """What was set around its passes is undone, and its part of a gradient is in no later one."""
    results = pool.run(exact_cases.left_early, case, timeout=120)
    net = nets.build()
    for result in results:
        assert result["type"] == ACTIVE[case.engine][0] and not result["moved"]
        assert all(result.get("reduced", [True])), "the engine no longer exchanges gradients"
        for step in (1, 2, 3):
            net.zero_grad()
            net(*nets.batch(step, exact_cases.BATCH)).backward()
            for name, p in net.named_parameters():
                torch.testing.assert_close(result["ahead"][step][name], p.grad.double(), atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("case", exact_left_cases.cases(), ids=str)
def test_loops_and_batches_that_are_left(pool: RankPool, case: Case) -> None:
    """Whatever was left, a gradient that reaches MARS is that of a whole batch, over micro-batches and ranks."""
    kind, engine = ACTIVE[case.engine]
    last = set() if case.engine == "accelerate-zero2" else {"last batch, ahead 3"}
    for each in pool.run(exact_left_cases.left, case, timeout=120):
        assert (each["type"], each["engines"], each["updates"]) == (kind, {engine}, 0)
        assert each["stream"], "the random streams are replaced while a batch that was left is held"
        assert each.get("sync_gradients", True)
        assert each["after an exception"].keys() == {"ahead 1"}
        assert each["batches left"].keys() == {"ahead 1", "ahead 2", "ahead 3"} | last
        if "zero" not in case.engine:
            assert each["a loop of one's own"].keys() == {"ahead 2"}
        found = [each[k] for k in ("after an exception", "batches left", "a loop of one's own") if k in each]
        assert max(max(errors.values()) for errors in found) < 5e-7, found


def test_a_wrapper_around_engine_step_stays_and_another_accumulation_is_refused(pool: RankPool) -> None:
    for each in pool.run(exact_left_cases.wrapped_step, Case("zero2", accumulation=2), timeout=120):
        assert each["is_there"] and (each["calls"], each["steps"]) == (8, 4), "called in ordinary passes only"
        assert "accumulation=1" in each["said"] and "accumulate 2" in each["said"]


@pytest.mark.parametrize("case", [Case(f"zero{n}", dtype="fp16", offload=o, config=STATIC) for n, o in PLACES], ids=str)
def test_a_batch_that_overflowed_and_was_not_stepped_is_forgotten(pool: RankPool, case: Case) -> None:
    for each in pool.run(exact_left_cases.left_not_finite, case, timeout=120):
        assert all(each["kept"]) and each["errors"].keys() == {"ahead 1", "ahead 2", "ahead 3"}
        assert max(each["errors"].values()) < 2e-3, "beyond a rounding of float16"
