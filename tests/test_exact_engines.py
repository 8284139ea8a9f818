"""Exact mode in every engine: REPLAY of both gradients, what the engine counts, dropout, overflows."""

from __future__ import annotations

from collections.abc import Iterator
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
