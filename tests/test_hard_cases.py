"""Trainings that once went wrong under ZeRO, on real engines with 2 ranks (what runs there: hard_cases.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import hard_cases, nets
from tests.ranks import RankError, RankPool

COUNTS = {"MARS-AdamW": nets.MATRICES, "AdamW": nets.VECTORS}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("kind", ["matrices", "vectors"])
@pytest.mark.parametrize("stage, dtype", [(0, "fp32"), (1, "fp32"), (2, "fp32"), (2, "bf16"), (3, "fp32")])
def test_a_model_with_only_matrices_or_only_vectors_trainable(
    pool: RankPool, stage: int, dtype: str, kind: str
) -> None:
    counts, moved = pool.run(hard_cases.only_trainable, stage, dtype, kind)[0]
    assert counts == ({"MARS-AdamW": nets.MATRICES} if kind == "matrices" else {"AdamW": nets.VECTORS})
    wanted = {n for n, p in nets.build().named_parameters() if (p.ndim == 2) == (kind == "matrices")}
    assert moved <= wanted and (moved == wanted or dtype == "bf16")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_tensor_that_is_frozen_at_the_first_step_is_trained_once_it_is_thawed(pool: RankPool, stage: int) -> None:
    counts, moved = pool.run(hard_cases.thawed, stage)[0]
    assert counts == COUNTS
    assert moved > 5e-3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_deep_copy_under_zero_raises_instead_of_stepping_flat_tensors(pool: RankPool, stage: int) -> None:
    for message in pool.run(hard_cases.copied, stage):
        assert "is a copy (deepcopy or pickle)" in message and "state_dict()" in message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_gradients_at_lr_zero_count_the_same_however_the_groups_are_cut(pool: RankPool, stage: int) -> None:
    counters, end = pool.run(hard_cases.warm_up_from_zero, stage)[0]
    _, whole = pool.run(hard_cases.warm_up_from_zero, 0)[0]
    assert set(counters) == {4.0}
    assert max((end[n] - whole[n]).abs().max().item() for n in end) < 5e-6


@pytest.mark.parametrize("stage, dtype", [(0, "bf16"), (1, "fp32"), (2, "fp32"), (3, "fp32")])
def test_exact_mode_without_looking_ahead_is_an_error_at_the_second_step(
    pool: RankPool, stage: int, dtype: str
) -> None:
    for taken, said in pool.run(hard_cases.exact_mode, stage, dtype):
        assert "twice with the same previous gradient" in said and "mars_dist.ExactMode" in said
        assert taken == 1


@pytest.mark.parametrize(
    "first, second",
    [((2, "fp32"), (2, "fp32")), ((1, "fp32"), (3, "fp32")), ((2, "bf16"), (0, "bf16")), ((2, "fp32"), (0, "fp32"))],
)
def test_another_engine_on_the_same_model(pool: RankPool, first: tuple[int, str], second: tuple[int, str]) -> None:
    assert pool.run(hard_cases.one_after_the_other, first, second)[0] == COUNTS


@pytest.mark.parametrize(
    "setting",
    [{"mars_type": "mars-lion"}, {"clip": None}, {"skip_nonfinite": True}, {"gamma": 0.1}, {"optimize_1d": True}],
    ids=lambda s: next(iter(s)),
)
def test_ranks_with_other_settings_are_told_on_every_rank(pool: RankPool, setting: dict[str, Any]) -> None:
    with pytest.raises(RankError, match="do not agree") as error:
        pool.run(hard_cases.ranks_that_differ, setting, timeout=60.0)
    assert str(error.value).count("do not agree") >= pool.world_size
