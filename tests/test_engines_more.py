"""MARS under PyTorch's engines when something is unusual: gradients missing, not finite; ranks that differ; dry runs.

Where training happens the result is checked by REPLAY, as in test_engines.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests import engine_cases, engine_more_cases
from tests.engine_cases import EVERYONE, EngineCase
from tests.ranks import RankPool
from tests.test_engines import counts_of, furthest, moved, replayed

pytestmark = pytest.mark.timeout(300)
TOLERANCE = 2e-6
SQUARE = ("hsdp", "hybrid", "tensor_x_fsdp2")
ENGINES = {
    "fsdp1_flat": EngineCase("fsdp1", {"original": False}),
    "fsdp1": EngineCase("fsdp1"),
    "fsdp2": EngineCase("fsdp2"),
    "hsdp": EngineCase("fsdp2", {"mesh": "square"}),
    "hybrid": EngineCase("fsdp1", {"strategy": "HYBRID_SHARD"}),
    "tensor": EngineCase("tensor_parallel", net="layers"),
    "tensor_x_fsdp2": EngineCase("tensor_parallel", {"data": True}, "layers"),
}


def engines(*default: str, without: tuple[str, ...] = ()) -> Any:
    """All engines but ``without``; those that are not named, as repetitions, in the slow tier."""
    chosen = [e for e in ENGINES if e not in without]
    marked = [pytest.param(e, marks=[] if e in default else [pytest.mark.slow]) for e in chosen]
    return pytest.mark.parametrize("engine", marked)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.slow),
        4,
    ],
    ids=["2ranks", "3ranks", "4ranks"],
)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(request.param)
    yield pool
    pool.close()


def trained(pool: RankPool, case: EngineCase) -> list[dict[str, Any]]:
    """The results on all ranks, which agree with each other and with REPLAY."""
    results = pool.run(engine_cases.run, case, timeout=60)
    model = replayed(results[0], case)
    for result in results:
        assert furthest(result["end"], results[0]["end"]) == 0.0, "the ranks hold different parameters"
        assert result["rule_counts"] == counts_of(model)
        kind = {"fsdp1": {"FSDP1"}}.get(case.engine)
        assert result["engines"] == kind if kind else any("DTensor" in e for e in result["engines"]), result["engines"]
    assert furthest(model.params, results[0]["end"]) < TOLERANCE
    return results


def on(pool: RankPool, engine: str) -> EngineCase:
    """Meshes of 2 x 2 need four ranks; with fewer another engine takes the place, so that nothing is skipped."""
    return ENGINES[engine if pool.world_size == 4 or engine not in SQUARE else "fsdp2"]


# -------------------------------------------------------------------------------------------------- missing gradients


@pytest.mark.parametrize("step", [0, 4])
@engines("fsdp1", "fsdp2", "tensor_x_fsdp2", without=("hsdp", "hybrid"))
def test_a_gradient_missing_on_one_rank_is_a_piece_of_zeros(pool: RankPool, engine: str, step: int) -> None:
    cut = {2: "norm.weight", 3: "head", 4: "norm.weight"}[pool.world_size]  # FSDP1 leaves a part to another rank
    where = {"fsdp1_flat": "_flat_param", "fsdp1": cut}.get(engine, "embedding")
    case = replace(on(pool, engine), missing=((step, 1, where),))
    results = trained(pool, case)
    for result in results:
        assert result["counts"] in ([], [10.0]) and {len(c) for c in result["collectives"][1:]} == {
            2 if case.options.get("data") else 1
        }
    undisturbed = pool.run(engine_cases.run, replace(case, missing=()), timeout=60)[0]
    assert furthest(undisturbed["end"], results[0]["end"]) > 1e-4, "nothing was missing: this would prove nothing"


def test_a_gradient_that_is_missing_from_partial_sums_is_a_zero_in_the_sum(pool: RankPool) -> None:
    """A rank without it joins the collective that the engine has left to MARS."""
    case = EngineCase("tensor_parallel", {"sequence": True}, "layers", missing=((4, 1, "norm.weight"),))
    results = trained(pool, case)
    assert all(set(r["counts_by_name"].values()) == {10.0} for r in results)
    undisturbed = pool.run(engine_cases.run, replace(case, missing=()), timeout=60)[0]
    assert furthest(undisturbed["end"], results[0]["end"]) > 1e-4, "nothing was missing: this would prove nothing"


def test_partial_sums_that_are_missing_at_the_first_step_are_an_error_on_every_rank(pool: RankPool) -> None:
    case = EngineCase("tensor_parallel", {"sequence": True}, "layers", missing=((0, 1, "norm.weight"),))
    for result in pool.run(engine_more_cases.outcome, case, timeout=60):
        assert "another rank lacks a gradient that the others have as partial sums" in result["said"]
        assert not result["moved"]


@engines("hsdp", without=("fsdp1_flat", "fsdp1", "fsdp2"))
def test_a_gradient_missing_on_one_replica_only_is_an_error(pool: RankPool, engine: str) -> None:
    """On all ranks that can know of it; the others go on, and nobody waits for ever."""
    where = {"tensor": "down.bias", "tensor_x_fsdp2": "down.bias", "hybrid": "norm.weight"}.get(engine, "embedding")
    case = replace(on(pool, engine), missing=((0, 1, where),))
    results = pool.run(engine_more_cases.outcome, case, timeout=60)
    if pool.world_size < 4 and engine in SQUARE:  # nothing is replicated there
        assert not any(result["said"] for result in results)
        return
    told = {"hsdp": (0, 1), "hybrid": (0, 1)}.get(engine, range(pool.world_size))
    for rank, result in enumerate(results):
        assert ("missing on one rank only" in result["said"]) == (rank in told), f"rank {rank}: {result['said']}"
        assert result["moved"] == (rank not in told)
    assert "This rank has none for " + where in results[1]["said"]
    assert "The message of another rank names it." in results[0]["said"]


@engines("fsdp1_flat", "fsdp2")
def test_a_gradient_missing_on_all_ranks_leaves_the_tensor_alone(pool: RankPool, engine: str) -> None:
    names = {"head.weight"} if "flat" not in engine else None
    case = replace(
        on(pool, engine),
        missing=tuple((s, EVERYONE, "head" if names else "_flat_param") for s in (0, 4)),
    )
    for result in trained(pool, case):
        for name, count in result["counts_by_name"].items():
            assert count == (8.0 if names is None or name in names else 10.0), name
        assert [i for i, g in enumerate(result["gradients"]) if "head.weight" not in g] == [0, 4]
        assert {len(c) for c in result["collectives"][1:]} == {2 if case.options.get("data") else 1}


# ------------------------------------------------------------------------------------- not finite, ranks that differ


@pytest.mark.parametrize("step", [slow(0), 3])
@engines("fsdp1", "hsdp", without=("fsdp1_flat",))
def test_a_nan_on_one_rank_leaves_everything_untouched_on_all(pool: RankPool, engine: str, step: int) -> None:
    """Under HSDP on the two ranks that hold the same piece, as its all-reduce over the replicas leaves it."""
    case = on(pool, engine)
    last = pool.world_size - 1
    ranks = (last - 2, last) if pool.world_size == 4 and engine in ("hsdp", "hybrid") else (last,)
    name = {"fsdp1": "head.weight", "hybrid": "head.weight", "tensor": "up.weight"}.get(engine, "embedding.weight")
    case = replace(case, params={"skip_nonfinite": True}, bad=(step, ranks, name))
    for result in trained(pool, case):
        assert [i for i, g in enumerate(result["gradients"]) if not g[name].isfinite().all()] == [step]
        skipped = [i for i, untouched in enumerate(result["untouched"]) if untouched]
        assert skipped == [step] or (step == 0 and skipped == []), "states are created at the first step, as zeros"
        assert result["counts"] in ([], [9.0])


@pytest.mark.parametrize(
    "difference",
    [{"weight_decay": 0.1}, slow({"clip": 0.2}), slow({"mars_type": "mars-lion"})],
    ids=str,
)
@pytest.mark.parametrize("engine", ENGINES)
def test_settings_that_differ_between_ranks_are_an_error_on_every_rank(
    pool: RankPool, engine: str, difference: dict[str, Any]
) -> None:
    case = replace(on(pool, engine), differ=difference)
    for rank, result in enumerate(pool.run(engine_more_cases.outcome, case, timeout=60)):
        assert "do not agree" in result["said"] and "another rank" in result["said"], f"rank {rank}: {result['said']}"
        assert not result["moved"]


# ------------------------------------------------------------------------- before the first step; another optimizer


@pytest.mark.parametrize("before", [slow("state_dict"), slow("dry_run"), "checkpoint_helper"])
@engines("fsdp1", "fsdp2")
def test_what_happens_before_the_first_step_changes_nothing(pool: RankPool, engine: str, before: str) -> None:
    case = on(pool, engine)
    results = trained(pool, replace(case, before=before))
    undisturbed = pool.run(engine_cases.run, case, timeout=60)
    for result, other in zip(results, undisturbed, strict=True):
        assert furthest(result["end"], other["end"]) == 0.0
        for name, count in result["counts_by_name"].items():
            assert count == 10.0, name
    moved(results[0])


@pytest.mark.parametrize(("step", "by_torch"), [slow(0, False), slow(4, False), (4, True)], ids=["0", "4", "4-torch"])
@engines("fsdp1", "tensor_x_fsdp2")
def test_a_second_optimizer_goes_on_from_the_state_of_the_first(
    pool: RankPool, engine: str, step: int, by_torch: bool
) -> None:
    """Also through torch's checkpoint helpers, which want all parameters of an FSDP1 unit to have the same states."""
    case = on(pool, engine)
    results = trained(pool, replace(case, reload=step, by_torch=by_torch))
    undisturbed = pool.run(engine_cases.run, case, timeout=60)
    for result, other in zip(results, undisturbed, strict=True):
        assert furthest(result["end"], other["end"]) == 0.0
        assert result["counts_by_name"] == other["counts_by_name"]


@engines("fsdp2", without=("fsdp1_flat", "fsdp1", "hybrid"))
def test_a_model_that_is_moved_between_steps_goes_on(pool: RankPool, engine: str) -> None:
    """torch swaps the contents of DTensors, which weak references would forbid."""
    case = on(pool, engine)
    results = trained(pool, replace(case, move=4))
    assert furthest(results[0]["end"], pool.run(engine_cases.run, case, timeout=60)[0]["end"]) == 0.0


@engines("fsdp1_flat", "fsdp1", "hsdp")
def test_attach_may_be_called_for_any_engine_and_again(pool: RankPool, engine: str) -> None:
    for result in pool.run(engine_more_cases.attached, on(pool, engine), timeout=60):
        assert result["said"] == [None] * 4
        assert sum(result["counts"].values()) == 9, "a second call makes MARS forget"


# -------------------------------------------------------------------------------------------- what a step costs; tables


@engines("fsdp1", "fsdp2", "tensor_x_fsdp2")
def test_no_step_after_the_first_waits_for_a_value(pool: RankPool, engine: str) -> None:
    for result in pool.run(engine_more_cases.without_waiting, on(pool, engine), timeout=60):
        assert any(e == "FSDP1" or e.startswith("DTensor") for e in result["engines"]), result["engines"]
        assert sum(result["counts"].values()) == 9


def test_torch_refuses_tied_weights_in_two_groups(pool: RankPool) -> None:
    for said in pool.run(engine_more_cases.tied_in_two_groups, "", timeout=60):
        assert "shared with a parameter already managed by another FSDP group" in said


def test_two_equal_meshes_cost_no_further_exchange(pool: RankPool) -> None:
    """torch caches by what a mesh looks like, and then gives parameters of one model the groups of another mesh."""
    if pool.world_size < 4:
        assert [r["engines"] for r in trained(pool, ENGINES["fsdp2"])] == [
            {"DTensor (Shard(dim=0),)"}
        ] * pool.world_size
        return
    for result in pool.run(engine_more_cases.two_equal_meshes, "", timeout=60):
        assert [len(c) for c in result["collectives"]] == [4, 2, 2]


@pytest.mark.parametrize("kind", ["line", "hybrid", "square", "strided"])
def test_the_table_says_where_the_contents_are_from(pool: RankPool, kind: str) -> None:
    kind = kind if pool.world_size == 4 else "line"
    for rank, found in enumerate(pool.run(engine_more_cases.tables_and_contents, kind, timeout=60)):
        assert len(found) >= len(engine_more_cases.SHAPES) - 3
        wrong = [entry for entry in found if entry[1]]
        assert not wrong, f"rank {rank}: {wrong}"
        assert kind != "strided" or all("_StridedShard" in entry[0] for entry in found)
