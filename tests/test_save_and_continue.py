"""Saved in the middle and continued by a new model and a new optimizer: bit-equal to the run that went on.

One row per engine and way of saving; further variants are repetitions, in the slow tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mars_dist.maths.absent import is_wholly_absent
from tests import engine_nets, save_cases
from tests.ranks import RankPool
from tests.save_cases import END, SAVED, SaveCase

pytestmark = pytest.mark.timeout(300)
EXACT = {"is_approx": False, "gamma": 0.3}
FLAT = {"original": False}
HSDP, BOTH = {"mesh": "square"}, {"data": True}
LABELS = {"mars-adamw": "MARS-AdamW", "mars-lion": "MARS-Lion", "mars-shampoo": "MARS-Shampoo", "mars-m": "MARS-M"}


def slow(case: SaveCase) -> Any:
    return pytest.param(case, marks=pytest.mark.slow)


# FSDP1 sharded on "layers": dcp.load cannot read a tensor of which a rank holds no row ("net" has such), AdamW's too.
ON_TWO = [
    *(SaveCase(engine, way) for engine in ("ddp", "fsdp2") for way in ("plain", "full", "sharded")),
    *(SaveCase("tensor_parallel", way, net="layers") for way in ("plain", "full", "sharded")),
    SaveCase("fsdp2", "sharded-later"),
    *(SaveCase("fsdp1", way, options) for options in ({}, FLAT) for way in ("plain", "full", "fsdp-full")),
    *(SaveCase("fsdp1", way, options, net="layers") for options in ({}, FLAT) for way in ("sharded", "fsdp-sharded")),
]
ON_FOUR = [
    *(SaveCase("fsdp2", way, HSDP) for way in ("plain", "full", "sharded")),
    *(SaveCase("tensor_parallel", way, BOTH, net="layers") for way in ("plain", "full", "sharded")),
    SaveCase("fsdp1", "full", {"strategy": "HYBRID_SHARD"}),
    *(SaveCase("fsdp2", way) for way in ("full", "sharded")),  # one row and no row of some tensors
]


def repeated(cases: list[SaveCase]) -> list[Any]:
    """The rows, and what they are repeated with."""
    out: list[Any] = list(cases)
    for case in cases:
        matrix, exact = replace(case, params={"mars_type": "mars-m"}), replace(case, params=EXACT, skipped=True)
        out.append(matrix if case.way in ("full", "fsdp-full") else slow(matrix))
        out.append(exact if "sharded" in case.way else slow(exact))
        for params in ({"mars_type": "mars-lion"}, {"mars_type": "mars-shampoo"}, EXACT):
            out.append(slow(replace(case, params=params)))
        out.append(slow(replace(case, params={**EXACT, "mars_type": "mars-m"}, skipped=True)))
        out.append(slow(replace(case, params={"amsgrad": True})))
        if case.engine in ("ddp", "fsdp2"):
            out.append(slow(replace(case, bf16=True)))
    return out


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


def check(results: list[dict[str, Any]], case: SaveCase) -> None:
    label = LABELS[case.params.get("mars_type", "mars-adamw")]
    matrices, vectors = engine_nets.SIZES[case.net]
    assert sum(result["elements"] for result in results) > 0
    for result in results:
        assert result["saving changed"] == [], "saving changed the run that goes on"
        assert result["loaded"] == []
        assert result["continued"] == []
        assert result["was other"] and (result["went on"] or case.bf16), "this would prove nothing"
        assert result["looked ahead"] == case.skipped
        assert result["steps"] == [SAVED - case.skipped]
        assert result["rule_counts"] == {label: matrices, "AdamW": vectors}
        assert result["groups"][0]["lr"] == 1e-2 and result["groups"][0]["clip"] == 0.1
        active(result, case)


def active(result: dict[str, Any], case: SaveCase) -> None:
    """What the objects themselves say about the engine."""
    if case.engine == "ddp":
        assert (result["type"], result["engines"]) == ("DistributedDataParallel", {"whole tensors"})
    elif case.engine == "fsdp1":
        assert (result["type"], result["engines"]) == ("FullyShardedDataParallel", {"FSDP1"})
        assert bool(result["facts"]["flat"]) == (case.options == FLAT)
    elif case.engine == "fsdp2":
        assert result["type"].startswith("FSDP") and result["facts"]["plain"] == 0
        replicated = "(Replicate(), Shard(dim=0))" if case.options == HSDP else "(Shard(dim=0),)"
        assert result["engines"] == {f"DTensor {replicated}"}
    elif case.engine == "tensor_parallel":
        assert result["facts"]["dtensors"] > 0 and any("Shard(dim=1)" in e for e in result["engines"])
    else:
        assert result["engines"] == {"whole tensors"}


@pytest.mark.parametrize("case", repeated(ON_TWO), ids=str)
def test_on_two_ranks(two: RankPool, case: SaveCase, tmp_path: Path) -> None:
    check(two.run(save_cases.save_and_continue, case, str(tmp_path)), case)


@pytest.mark.parametrize("case", repeated(ON_FOUR), ids=str)
def test_on_four_ranks(four: RankPool, case: SaveCase, tmp_path: Path) -> None:
    check(four.run(save_cases.save_and_continue, case, str(tmp_path)), case)


@pytest.mark.parametrize("case", repeated([SaveCase("one", way) for way in ("plain", "full", "sharded")]), ids=str)
def test_on_one_process(case: SaveCase, tmp_path: Path) -> None:
    check([save_cases.save_and_continue(case, str(tmp_path))], case)


# ------------------------------------------------------------------------------------------------- other world sizes


@pytest.fixture(scope="module")
def pools(two: RankPool, four: RankPool) -> Iterator[dict[int, RankPool]]:
    pools = {1: RankPool(1), 2: two, 3: RankPool(3), 4: four}
    yield pools
    for size in (1, 3):
        pools[size].close()


MOVES = [(2, 3), (4, 2), (2, 1)]
LION, SHAMPOO, M = ({"mars_type": f"mars-{name}"} for name in ("lion", "shampoo", "m"))


def moves() -> list[Any]:
    """(ranks before, ranks after, case)."""
    out: list[Any] = []
    for before, after in MOVES:
        out.append((before, after, SaveCase("fsdp2", "sharded")))
        out.append((before, after, SaveCase("fsdp2", "sharded", params=EXACT, skipped=True)))
        out.append((before, after, SaveCase("fsdp2", "full", params=M)))
        out.append((before, after, SaveCase("ddp", "plain0")))
        out.append((before, after, SaveCase("fsdp1", "full")))
        more = [SaveCase("fsdp2", way, params=p) for way in ("sharded", "full") for p in (LION, SHAMPOO, M, EXACT)]
        more += [SaveCase("ddp", way, params=p) for way in ("plain0", "sharded") for p in (M, EXACT)]
        more += [SaveCase("fsdp1", "full", o, params=p) for o in ({}, FLAT) for p in (M, EXACT)]
        more += [SaveCase("fsdp1", "sharded", o, net="layers") for o in ({}, FLAT)]
        if after > 1:
            more += [
                SaveCase("tensor_parallel", way, net="layers", params=p) for way in ("sharded", "full") for p in ({}, M)
            ]
        out += [pytest.param(before, after, case, marks=pytest.mark.slow) for case in more]
    return out


@pytest.mark.parametrize(("before", "after", "case"), moves(), ids=str)
def test_on_another_number_of_ranks(
    pools: dict[int, RankPool], before: int, after: int, case: SaveCase, tmp_path: Path
) -> None:
    moved(pools[before], pools[after], case, case, tmp_path)


@pytest.mark.parametrize("params", [{}, M, EXACT], ids=["adamw", "m", "exact"])
def test_between_hsdp_and_fsdp2(pools: dict[int, RankPool], params: dict[str, Any], tmp_path: Path) -> None:
    hsdp = SaveCase("fsdp2", "sharded", HSDP, params=params)
    moved(pools[4], pools[2], hsdp, replace(hsdp, options={}), tmp_path / "down")
    moved(pools[2], pools[4], replace(hsdp, options={}), hsdp, tmp_path / "up")


def read_by_a_rule(case: SaveCase, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole states, without the h that FSDP1 with original parameters shows of vectors, which have none."""
    whole = results[0]["whole"]
    fillers = [key for key, t in whole.items() if key.endswith("/prev_grad") and is_wholly_absent(t)]
    assert not fillers or case.engine == "fsdp1", fillers
    return {key: t for key, t in whole.items() if key not in fillers}


def moved(before: RankPool, after: RankPool, case: SaveCase, other: SaveCase, folder: Path) -> None:
    """The states arrive bit by bit, and the training ends as one that was never interrupted, on one process."""
    folder.mkdir(exist_ok=True)
    saved = before.run(save_cases.save_only, case, str(folder))
    went_on = after.run(save_cases.load_and_go_on, other, str(folder), saved[0]["position"])
    wanted = save_cases.undisturbed(replace(case, engine="one", options={}))
    tolerance = 5e-6 if case.params.get("mars_type") in ("mars-m", "mars-shampoo") else 2e-6
    label = LABELS[case.params.get("mars_type", "mars-adamw")]
    matrices, vectors = engine_nets.SIZES[case.net]
    for result in went_on:
        assert save_cases.differences(read_by_a_rule(case, saved), read_by_a_rule(other, [result])) == []
        assert result["rule_counts"] == {label: matrices, "AdamW": vectors}
        active(result, other)
        for key, value in wanted.items():
            if key.endswith("/param"):
                assert (result["end"][key] - value).abs().max() < tolerance, key
            if key.endswith("/step"):
                assert result["end"][key] == value == END - case.skipped
        assert save_cases.differences(went_on[0]["end"], result["end"]) == []
    assert save_cases.different_values(saved[0]["whole"], went_on[0]["end"])
