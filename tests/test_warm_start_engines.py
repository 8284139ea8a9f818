"""A state without h continues as a first step under FSDP1, FSDP2 and ZeRO, also when it is saved once more before it.

Equal bit by bit to a run in which the h of a first step is written into the states by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm_start_cases as cases
from tests.engine_cases import EngineCase
from tests.nets import MATRICES, VECTORS
from tests.ranks import RankPool
from tests.zero_cases import ZeroCase

pytestmark = pytest.mark.timeout(300)
LABELS = {"mars-adamw": "MARS-AdamW", "mars-m": "MARS-M"}
FIRST_STEPS = ("reference", "paper")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check(results: list[dict[str, Any]], rules: dict[str, int], engine: str) -> None:
    for result in results:
        kept, lost, by_hand = result["ends"]
        assert result["lost"] and result["lost"][0] > 0
        assert same(lost[0], by_hand[0]) and same(lost[1], by_hand[1])
        assert all(rule_counts == rules and engines == {engine} for _, _, rule_counts, engines in result["ends"])
    assert any(not same(result["ends"][0][0], result["ends"][1][0]) for result in results), (
        "with its h it ends elsewhere"
    )


DEFAULT = {("fsdp1", "paper", "mars-adamw"), ("fsdp2", "paper", "mars-m"), ("fsdp2", "reference", "mars-adamw")}
CASES = [
    pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.slow)
    for case in product(("fsdp1", "fsdp2"), FIRST_STEPS, LABELS)
]


@pytest.mark.parametrize(("engine", "first_step", "mars_type"), CASES)
def test_under_pytorchs_engines(pool: RankPool, engine: str, first_step: str, mars_type: str) -> None:
    case = EngineCase(engine, params={"first_step": first_step, "mars_type": mars_type, "ns_dtype": "float32"})
    results = pool.run(cases.under_torch, case, timeout=120)
    name = {"fsdp1": "FSDP1", "fsdp2": "DTensor (Shard(dim=0),)"}[engine]
    check(results, {LABELS[mars_type]: MATRICES, "AdamW": VECTORS}, name)
    assert {result["facts"]["type"] for result in results} == {
        "FullyShardedDataParallel" if engine == "fsdp1" else "FSDPNet"
    }


STAGES = [
    pytest.param(stage, first_step, marks=() if first_step == "paper" and stage > 1 else pytest.mark.slow)
    for stage, first_step in product((1, 2, 3), FIRST_STEPS)
]


@pytest.mark.parametrize(("stage", "first_step"), STAGES)
def test_under_zero(pool: RankPool, stage: int, first_step: str, tmp_path: Path) -> None:
    case = ZeroCase(stage, params={"first_step": first_step, "weight_decay": 0.05})
    results = pool.run(cases.under_zero, case, str(tmp_path), timeout=120)
    check(results, {"MARS-AdamW": MATRICES, "AdamW": VECTORS}, "ZeRO-3" if stage == 3 else "ZeRO-1/2")
