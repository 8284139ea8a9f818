"""Accelerate's and DeepSpeed's own checkpoints: bit-equal to the run that went on, and complete or an error.

DeepSpeed's are also in test_zero_more.py, the Trainer's in test_trainer_training.py and test_exact_trainer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import nets, save_accelerate_cases, save_failing_cases, save_zero_cases, zero_more_cases
from tests.accelerate_cases import Case
from tests.ranks import RankPool
from tests.save_cases import SAVED
from tests.test_zero_more import states_equal
from tests.zero_cases import ZeroCase

pytestmark = pytest.mark.timeout(300)
FULL, SHARDED = ({"state_dict_type": f"{kind}_STATE_DICT"} for kind in ("FULL", "SHARDED"))
M, LION = {"mars_type": "mars-m"}, {"mars_type": "mars-lion"}
LABELS = {"mars-adamw": "MARS-AdamW", "mars-lion": "MARS-Lion", "mars-m": "MARS-M"}
FACTS: dict[str, tuple[str, str, str]] = {
    "ddp": ("MULTI_CPU", "DistributedDataParallel", "whole tensors"),
    "fsdp1-original": ("FSDP", "FullyShardedDataParallel", "FSDP1"),
    "fsdp1-flat": ("FSDP", "FullyShardedDataParallel", "FSDP1"),
    "fsdp2": ("FSDP", "FSDPLayers", "DTensor (Shard(dim=0),)"),
    "zero2": ("DEEPSPEED", "DeepSpeedEngine", "ZeRO-1/2"),
    "zero3": ("DEEPSPEED", "DeepSpeedEngine", "ZeRO-3"),
}


def slow(case: Any) -> Any:
    return pytest.param(case, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def rows() -> list[Any]:
    forms: list[tuple[str, dict[str, Any], str]] = [("ddp", {}, "together")]
    for plugin in (SHARDED, FULL):
        forms += [("fsdp1-original", plugin, "together"), ("fsdp1-flat", plugin, "model-first")]
        forms += [("fsdp2", plugin, "together")]
    forms += [("zero2", {}, "together"), ("zero3", {}, "together")]
    out: list[Any] = [Case(engine, plugin=plugin, order=order) for engine, plugin, order in forms]
    more = [Case(engine, p, plugin=plugin, order=order) for engine, plugin, order in forms for p in (M, LION)]
    return out + [slow(case) for case in more]


@pytest.mark.parametrize("case", rows(), ids=str)
def test_accelerate(pool: RankPool, case: Case, tmp_path: Path) -> None:
    for result in pool.run(save_accelerate_cases.save_and_continue, case, str(tmp_path)):
        assert result["saving changed"] == [] and result["loaded"] == [] and result["continued"] == []
        assert result["was other"] and result["went on"], "this would prove nothing"
        assert result["steps"] == [SAVED] and result["gamma"] == 0.025
        assert result["rule_counts"] == {LABELS[case.params.get("mars_type", "mars-adamw")]: 5, "AdamW": 4}
        kind, model, engine = FACTS[case.engine]
        assert (result["type"], result["model"], result["engines"]) == (kind, model, {engine})
        assert any(name.endswith(".distcp") for name in result["files"]) == (case.plugin == SHARDED)


BF16 = [Case("fsdp1-original", plugin=SHARDED), Case("fsdp2", plugin=SHARDED)]
BF16 += [slow(case) for case in (Case("ddp"), Case("fsdp1-original", plugin=FULL), Case("fsdp2", plugin=FULL))]


@pytest.mark.parametrize("case", BF16, ids=str)
def test_accelerate_keeps_the_precision_of_states(pool: RankPool, case: Case, tmp_path: Path) -> None:
    """Of a bfloat16 model: float32 moments, and h in the gradients' bfloat16."""
    for result in pool.run(save_accelerate_cases.save_and_continue, case, str(tmp_path), "layers", True):
        assert result["saving changed"] == [] and result["loaded"] == [] and result["continued"] == []
        assert result["was other"] and result["steps"] == [SAVED]
        moments = dict.fromkeys(("exp_avg", "exp_avg_sq", "step"), torch.float32)
        assert result["dtypes"] == set((moments | dict.fromkeys(("param", "prev_grad"), torch.bfloat16)).items())
        kind, model, engine = FACTS[case.engine]
        assert (result["type"], result["model"], result["engines"]) == (kind, model, {engine})
        assert result["rule_counts"] == {"MARS-AdamW": 5, "AdamW": 4}


FSDP1 = Case("fsdp1-original", plugin=SHARDED)


def test_what_accelerate_does_by_itself_with_fsdp1_in_shards(pool: RankPool, tmp_path: Path) -> None:
    """Why there is something around it: it loads nothing, without an error."""
    assert pool.run(save_accelerate_cases.without_us, FSDP1, str(tmp_path)) == [0, 0]


@pytest.mark.parametrize(
    "case", [FSDP1, Case("fsdp1-flat", plugin=SHARDED, order="model-first"), Case("fsdp2", plugin=SHARDED)], ids=str
)
def test_states_without_a_place_are_an_error(pool: RankPool, case: Case, tmp_path: Path) -> None:
    """amsgrad was on when it was saved."""
    saved = Case(**{**vars(case), "params": {"amsgrad": True}})
    for said in pool.run(save_accelerate_cases.into_another_variant, saved, {}, str(tmp_path)):
        assert said.startswith("RuntimeError: MARS: ") and "(max_exp_avg_sq)" in said and "amsgrad" in said


@pytest.mark.parametrize(
    ("case", "file"),
    [
        (FSDP1, "optimizer_0/.metadata"),
        (FSDP1, "optimizer_0/__1_0.distcp"),
        (Case("fsdp2", plugin=SHARDED), "optimizer_0/__1_0.distcp"),
        (Case("fsdp2", plugin=FULL), "optimizer.bin"),
    ],
    ids=str,
)
def test_a_missing_file_is_the_same_error_on_all_ranks(pool: RankPool, case: Case, file: str, tmp_path: Path) -> None:
    said = pool.run(save_accelerate_cases.with_a_file_gone, case, str(tmp_path), file, timeout=60)
    assert said[0] == said[1]
    assert said[0].startswith("CheckpointError: ") and file.rpartition("/")[2] in said[0]
    assert "damaged or incomplete" in said[0] or "loading the optimizer's states" in said[0]


@pytest.fixture(scope="module")
def own_pool() -> Iterator[RankPool]:
    """For the Trainer: processes in which no Accelerator was made before, whose state is the process's."""
    pool = RankPool(2)
    yield pool
    pool.close()


def test_the_trainer_with_fsdp1_in_shards(own_pool: RankPool, tmp_path: Path) -> None:
    for result in own_pool.run(save_accelerate_cases.trainer_with_fsdp1, str(tmp_path), timeout=90):
        assert result["differences"] == [] and result["number"] > 50
        assert result["steps"] == [4.0, 4.0] and ".metadata" in result["files"]
        assert (result["model"], result["engines"]) == ("FullyShardedDataParallel", {"FSDP1"})
        assert result["rule_counts"]["MARS-AdamW"] == 10


# --------------------------------------------------------------------------------------------------------- DeepSpeed

BASE: dict[str, Any] = {"clip": 0.1, "weight_decay": 0.05}
BF16_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
ZERO = [
    ZeroCase(0, params={**BASE, **M}),
    ZeroCase(0, "bf16", params=BASE),
    ZeroCase(1, "bf16", params=BASE, extra=BF16_SUMS),
    ZeroCase(2, params={**BASE, **M}, construct="groups", zero={"round_robin_gradients": True}),
    ZeroCase(3, params=BASE, construct="groups", zero={"sub_group_size": 60}),
    ZeroCase(3, "bf16", offload=True, params={**BASE, **M}, zero={"sub_group_size": 60}),
    slow(ZeroCase(2, "bf16", offload=True, params=BASE)),
    slow(ZeroCase(1, params={**BASE, **LION}, construct="groups")),
    slow(ZeroCase(3, params={**BASE, **LION}, zero={"sub_group_size": 60})),
    slow(ZeroCase(1, "bf16", params={**BASE, **M}, construct="groups", extra=BF16_SUMS)),
    slow(ZeroCase(2, "bf16", params=BASE, zero={"round_robin_gradients": True})),
]


@pytest.mark.parametrize("case", ZERO, ids=str)
def test_deepspeed(pool: RankPool, case: ZeroCase, tmp_path: Path) -> None:
    """As ``test_a_saved_run_continues_bit_equal``, in an engine with the same variant and wrong hyper-parameters."""
    other = ZeroCase(**{**vars(case), "params": {**case.params, "gamma": 0.9, "lr": 0.5, "lr_1d": 0.25, "clip": 0.7}})
    label = LABELS[case.params.get("mars_type", "mars-adamw")]
    for result in pool.run(zero_more_cases.save_and_continue, case, other, str(tmp_path), timeout=90):
        assert states_equal(result["saved"], result["loaded"])
        assert {float(state["step"]) for state in result["saved"]} == {float(case.steps // 2)}
        (states, uninterrupted), (again, continued) = result["uninterrupted"], result["continued"]
        assert states and states_equal(states, again)
        for name, end in uninterrupted["end"].items():
            assert (end == continued["end"][name]).all(), name
        assert continued["rule_counts"] == uninterrupted["rule_counts"] == {label: nets.MATRICES, "AdamW": nets.VECTORS}
        assert continued["engines"] == uninterrupted["engines"] and continued["wrapper"] == uninterrupted["wrapper"]


WRAPPERS = {0: "MARS", 1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}


@pytest.mark.parametrize("stage", [0, 2, 3, pytest.param(1, marks=pytest.mark.slow)])
def test_deepspeed_in_exact_mode(pool: RankPool, stage: int, tmp_path: Path) -> None:
    case = ZeroCase(stage, params={**BASE, "is_approx": False, "gamma": 0.3}, construct="instance")
    for result in pool.run(save_zero_cases.exactly, case, str(tmp_path), timeout=90):
        assert result["differences"] == [] and result["number"] >= 5 and "prev_grad" in result["states"]
        assert result["position"] == SAVED and result["wrapper"] == WRAPPERS[stage]
        assert result["rule_counts"] == {"MARS-AdamW": nets.MATRICES, "AdamW": nets.VECTORS}


@pytest.mark.parametrize(("stage", "empty"), [(1, False), (2, True), (3, False)])
def test_a_missing_shard_of_deepspeed_is_the_same_error_on_all_ranks(
    pool: RankPool, stage: int, empty: bool, tmp_path: Path
) -> None:
    results = pool.run(
        save_zero_cases.with_a_shard_gone, ZeroCase(stage, params=BASE), str(tmp_path), empty, timeout=60
    )
    assert results[0] == results[1] and results[0]["untouched"] and results[0]["wrapper"] == WRAPPERS[stage]
    said = results[0]["said"]
    assert (
        said.startswith("CheckpointError: ") and "zero_pp_rank_1" in said if empty else "of rank 1, only of 0" in said
    )
    assert "run any program" not in said


# ---------------------------------------------------------------------------------------- a rank that cannot save


def slow_pair(pair: tuple[int, int]) -> Any:
    return pytest.param(*pair, marks=pytest.mark.slow)


FULL_DISK = "failed on 1 of 2 ranks: rank {}: OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("stage", "rank"), [(0, 0), (2, 0), (2, 1), (3, 1), pytest.param(1, 1, marks=pytest.mark.slow)]
)
def test_deepspeed_says_on_all_ranks_that_one_cannot_save(
    pool: RankPool, stage: int, rank: int, tmp_path: Path
) -> None:
    """DeepSpeed alone leaves the others waiting. ``latest`` names the checkpoint before, and training goes on."""
    results = pool.run(save_failing_cases.with_deepspeed, ZeroCase(stage, params=BASE), str(tmp_path), rank, timeout=60)
    assert results[rank]["tried"] and not results[1 - rank]["tried"]
    for result in results:
        assert result["said"] == results[0]["said"]
        expected = f"CheckpointError: saving {tmp_path / 'global_step2'} {FULL_DISK.format(rank)}"
        assert result["said"].startswith(expected), result["said"]
        assert (result["pointed"], result["newest"]) == ("global_step1", "global_step1")
        assert result["then"] == "global_step3" and result["faults"] == []
        assert result["wrapper"] == WRAPPERS[stage]
        assert result["rule_counts"] == {"MARS-AdamW": nets.MATRICES, "AdamW": nets.VECTORS}


@pytest.mark.parametrize(
    ("case", "rank"),
    [(Case("ddp"), 0), (Case("ddp"), 1), (Case("fsdp2", plugin=FULL), 0), (Case("fsdp2", plugin=SHARDED), 1)]
    + [(Case("zero2"), 1)],
    ids=str,
)
def test_accelerate_says_on_all_ranks_that_one_cannot_save(
    pool: RankPool, case: Case, rank: int, tmp_path: Path
) -> None:
    results = pool.run(save_failing_cases.with_accelerate, case, str(tmp_path), rank, timeout=60)
    assert results[rank]["tried"] and not results[1 - rank]["tried"]
    for result in results:
        assert result["said"] == results[0]["said"]
        assert result["said"].startswith("CheckpointError: ") and FULL_DISK.format(rank) in result["said"]
        assert result["newest"] == "checkpoint_1" and result["faults"] == []
        assert result["model"] == FACTS[case.engine][1]
        assert result["rule_counts"] == {"MARS-AdamW": 5, "AdamW": 4}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_trainer_says_on_all_ranks_that_one_cannot_save(own_pool: RankPool, rank: int, tmp_path: Path) -> None:
    results = own_pool.run(save_failing_cases.with_trainer, str(tmp_path), rank, timeout=60)
    for result in results:
        assert result["said"] == results[0]["said"]
        expected = f"CheckpointError: saving step 2 of the Trainer {FULL_DISK.format(rank)}"
        assert result["said"].startswith(expected), result["said"]
        assert (result["newest"], result["model"]) == ("checkpoint-1", "DistributedDataParallel")
