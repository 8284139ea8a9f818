"""Every row of engines/ under the real engine: REPLAY, END TO END against one process, collectives; or a refusal.

The net is uneven on purpose: shards are cut inside rows of tensors and between them, some are empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import engine_nets, nets
from tests.engine_cases import BASE, EngineCase, in_groups, run
from tests.engine_more_cases import (
    traffic,
    with_another_plan_on_one_rank,
    with_the_group_of_the_replicas,
    with_the_norm_of_the_local_piece,
)
from tests.engines import ROWS
from tests.engines.__main__ import README, written
from tests.engines.launched import ACCELERATE, TRAINER
from tests.engines.row import Row
from tests.processes import ROOT
from tests.ranks import RankPool
from tests.reference import ReferenceMARS

pytestmark = pytest.mark.timeout(300)
LABELS = {
    "mars-adamw": "MARS-AdamW",
    "mars-lion": "MARS-Lion",
    "mars-shampoo": "MARS-Shampoo",
    "mars-m": "MARS-M",
}
MATRIX_VARIANTS = ("mars-shampoo", "mars-m")


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    pools = {size: RankPool(size) for size in (2, 3, 4)}  # a pool starts its processes when it is first used
    yield pools
    for pool in pools.values():
        pool.close()


def runs() -> Iterator[object]:
    """In the default tier the largest number of ranks: MARS-AdamW and one matrix variant in every row, the other two
    variants in the first row of each engine."""
    first = {row.engine: row for row in reversed(ROWS) if row.cases}
    for size in (2, 3, 4):
        for number, row in enumerate(ROWS):
            seen: set[str] = set()
            wanted = MATRIX_VARIANTS if row is first.get(row.engine) else (MATRIX_VARIANTS[number % 2],)
            for case in row.cases if size in row.ranks else ():
                variant = case.params.get("mars_type", "mars-adamw")
                again = variant == "mars-lion" and row is not first[row.engine]
                if variant in MATRIX_VARIANTS:
                    aside = (
                        case.before or {"compile", "checkpoint", "bf16"} & case.options.keys()
                    )  # not of the exchange
                    again = bool(variant in seen or variant not in wanted or aside)
                    seen.add(variant)
                marks = [pytest.mark.slow] if size < max(row.ranks) or again else []
                yield pytest.param(row, case, size, id=f"{case}-{size}ranks", marks=marks)


def reference(start: dict[str, torch.Tensor], case: EngineCase) -> ReferenceMARS:
    ignored = ("skip_nonfinite", "ns_dtype", "matrix_buffer_mb")  # the reference iterates in float64
    groups = None
    if case.groups:
        groups = in_groups(case, [(name, None) for name in start])
        groups = [{**group, "names": [name for name, _ in group.pop("params")]} for group in groups]
    return ReferenceMARS(
        start,
        groups,
        **{k: v for k, v in {**BASE, **case.params}.items() if k not in ignored},
    )


def replayed(result: dict[str, Any], case: EngineCase) -> ReferenceMARS:
    """The reference on the gradients that reached MARS."""
    model = reference(result["start"], case)
    for gradients in result["gradients"]:
        finite = all(g.isfinite().all() for g in gradients.values())
        if finite or not case.params.get("skip_nonfinite"):
            model.step(gradients)
    return model


def alone(case: EngineCase) -> dict[str, torch.Tensor]:
    """The same training on one process, in float32, with the reference as the optimizer."""
    net = engine_nets.build(case.net)
    model = reference({name: p.detach().double() for name, p in net.named_parameters()}, case)
    for step in range(case.steps):
        net.zero_grad()
        net(*nets.batch(step)).backward()
        model.step({name: p.grad.double() for name, p in net.named_parameters() if p.grad is not None})
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_(model.params[name])
    return model.params


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    errors = [(a[name] - b[name]).abs().max() for name in a if a[name].numel()]
    assert all(error.isfinite() for error in errors)
    return max(error.item() for error in errors)


def counts_of(model: ReferenceMARS) -> dict[str, int]:
    """How many tensors took each rule: those that have had a gradient."""
    rules = [rule for name, rule in model.rules.items() if model.state[name]]
    return {rule: rules.count(rule) for rule in set(rules)}


def moved(result: dict[str, Any]) -> None:
    """Tensors with a gradient moved and all others stayed: or the comparison would prove nothing."""
    trained = set().union(*result["gradients"])
    for name, start in result["start"].items():
        distance = (result["end"][name] - start).abs().max()
        assert distance > 1e-3 if name in trained else distance == 0.0, f"{name}: {distance}"


@pytest.mark.parametrize(("row", "case", "size"), runs())
def test_row(pools: dict[int, RankPool], row: Row, case: EngineCase, size: int) -> None:
    results = pools[size].run(row.function or run, case, timeout=90)
    if row.answer == "refused":
        for rank, result in enumerate(results):
            assert row.message in result["said"], f"rank {rank} says {result['said']!r}"
            assert not result["moved"]
        if case.net == "single" and case.options.get("original", True):  # a flat parameter is padded
            assert [result["empty"] for result in results] == [False] + [True] * (size - 1)
        return
    result = results[0]
    model = replayed(result, case)
    matrix = case.params.get("mars_type") in MATRIX_VARIANTS
    for each in results:
        for fact, value in row.active:
            assert each["facts"][fact] == value, f"{fact}: {each['facts']}"
        options = case.options
        if options.get("compile"):
            assert each["graphs"] > 0, "nothing was compiled"
        elif case.before != "to":
            computed_in = "torch.bfloat16" if options.get("bf16") else "torch.float32"
            assert each["facts"]["computed_in"] == {computed_in}
        if "freed" in each["facts"]:
            assert each["facts"]["freed"] == {options.get("reshard", True)}
            assert each["facts"]["offload"] == {"CPUOffloadPolicy" if options.get("offload") else "OffloadPolicy"}
        if case.engine == "fsdp2" and case.net == "net" and not {"mesh", "dim", "checkpoint"} & options.keys():
            sizes = [r["facts"]["sizes"] for r in results]
            assert any(0 in s.values() for s in sizes) and len({s["linear.weight"] for s in sizes}) > 1, "uneven, empty"
        assert each["optimizer"] == "MARS"
        assert each["engines"] == set(row.engines)
        assert each["rule_counts"] == counts_of(model)
        assert each["counts"] in ([], [case.steps])
        assert furthest(each["end"], result["end"]) == 0.0, "the ranks hold different parameters"
        first, *later = each["collectives"]
        exchange = exchange_of_matrices(row, case, results, each)
        assert {len(calls) for calls in later} == {row.collectives + exchange.total()}
        assert len(first) == row.collectives + exchange.total() + exchanges(row, case, exchange)
        for calls in each["collectives"]:
            assert {name: calls.count(name) for name in EXCHANGES} == {name: exchange[name] for name in EXCHANGES}
        hint = matrix and case.engine == "ddp" and not case.attach
        assert len(each["messages"]) == (each is result) * (1 + hint), each["messages"]
        assert not (hint and each is result) or "optimizer.attach(model)" in each["messages"][1]
    if matrix and case.engine == "ddp":
        ranks = case.params.get("matrix_ndim", (2,))
        of_one_step = sum(t.shape[0] if t.ndim == 3 else 1 for t in result["start"].values() if t.ndim in ranks)
        times = 1 if case.attach else size
        assert sum(each["orthogonalised"] for each in results) == times * case.steps * of_one_step
    assert furthest(model.params, result["end"]) < (5e-6 if matrix else 2e-6)
    if row.same_as_one_process:
        assert furthest(alone(case), result["end"]) < 5e-6
    moved(result)


EXCHANGES = ("alltoall_base", "broadcast")


def exchange_of_matrices(
    row: Row, case: EngineCase, results: list[dict[str, Any]], result: dict[str, Any]
) -> Counter[str]:
    """The collectives by which a step brings pieces of matrices to their owners and back."""
    if case.params.get("mars_type") not in MATRIX_VARIANTS:
        return Counter()
    matrices = result["rule_counts"][LABELS[case.params["mars_type"]]]
    if case.engine == "ddp" or case.options.get("strategy") == "NO_SHARD":
        return Counter(broadcast=min(len(results), matrices) if case.attach else 0)
    ranks = case.params.get("matrix_ndim", (2,))
    wholes = {name: t for name, t in result["start"].items() if t.ndim in ranks}
    cut = {n for n, whole in wholes.items() for r in results if 0 < r["held"].get(n, 0) < whole.numel()}
    if row.in_rounds:
        assert result["rounds"] > 1
    else:
        assert result["rounds"] == (row.groups if cut else 0), "nothing is sent for what ranks hold whole"
    return Counter(alltoall_base=2 * result["rounds"])


def exchanges(row: Row, case: EngineCase, exchange: Counter[str]) -> int:
    """The first step asks once in each process group whether the ranks agree, those of replicas included; with matrices
    which pieces the others hold, and whether they agree on the plan."""
    square = case.options.get("mesh") == "square" or case.options.get("data")
    asked = 2 if square or "HYBRID" in case.options.get("strategy", "") else min(row.collectives, 1)
    if exchange["broadcast"]:
        return 1
    return asked + 2 * row.groups * (case.params.get("mars_type") in MATRIX_VARIANTS and bool(row.collectives))


# ------------------------------------------------------------------------------------------- matrices: what is sent

MARS_M = {"mars_type": "mars-m", "ns_dtype": "float32"}
TRAFFIC = [
    (EngineCase("fsdp2", params=MARS_M), "DTensor (Shard(dim=0),)"),
    (
        EngineCase("fsdp2", params={**MARS_M, "matrix_buffer_mb": 1e-5, "ns_dtype": "bfloat16"}),
        "DTensor (Shard(dim=0),)",
    ),
    (EngineCase("fsdp1", {"nested": True}, "kernels", params={**MARS_M, "matrix_ndim": (2, 3)}), "FSDP1"),
    (EngineCase("fsdp2", {"mesh": "square"}, params=MARS_M), "DTensor (Replicate(), Shard(dim=0))"),
    (EngineCase("tensor_parallel", {"data": True}, "layers", params=MARS_M), "DTensor (Shard(dim=0), Shard(dim=1))"),
    (EngineCase("ddp", params=MARS_M), "whole tensors"),
]


@pytest.mark.parametrize(("case", "engine"), TRAFFIC, ids=str)
def test_real_ranks_send_what_the_plan_says(pools: dict[int, RankPool], case: EngineCase, engine: str) -> None:
    """To the owners and back, in float32 unless the iteration is narrower; HSDP inside the shard group."""
    results = pools[4].run(traffic, case, timeout=60)
    for rank, result in enumerate(results):
        assert engine in result["engines"] and result["rule_counts"]["MARS-M"] >= 4
        assert result["sharded"], "the momentum is no larger than the rank's part of the values"
        calls = result["calls"]
        assert sum(sent for _, _, sent, _ in calls) == result["sent"]
        assert {size for *_, size in calls} == {2 if case.params["ns_dtype"] == "bfloat16" else 4}
        if case.engine == "ddp":
            assert [(name, ranks) for name, ranks, *_ in calls] == [("broadcast", [0, 1, 2, 3])] * 4
        else:
            assert len(calls) == 2 * result["rounds"] > 0 and {name for name, *_ in calls} == {"all_to_all_single"}
            assert "matrix_buffer_mb" not in case.params or result["rounds"] > 2
        if case.options.get("mesh") == "square":
            assert [ranks for _, ranks, *_ in calls] == [[0, 1] if rank < 2 else [2, 3]] * 2
    if case.engine != "ddp" and "mesh" not in case.options and "data" not in case.options:
        total = sum(result["sent"] for result in results)
        assert results[0]["cut"] <= total <= 2 * results[0]["cut"], "what the owner holds itself is not sent"


@pytest.mark.parametrize("case", [EngineCase("fsdp2", params=MARS_M), EngineCase("ddp", params=MARS_M)], ids=str)
def test_ranks_that_plan_otherwise_all_raise(pools: dict[int, RankPool], case: EngineCase) -> None:
    for result in pools[4].run(with_another_plan_on_one_rank, case, timeout=60):
        assert "the ranks do not agree on the 5 matrices that they share" in result["said"]
        assert "the same settings" in result["said"]


def test_a_row_is_run_or_says_what_shows_it() -> None:
    assert {row.answer for row in ROWS} == {"works", "refused", "untested"}
    for row in ROWS:
        assert bool(row.cases) != bool(row.shown_by) or row.answer == "untested", row.feature
        assert bool(row.message) == (row.answer == "refused"), row.feature


def test_a_row_names_the_variants_that_its_cases_run() -> None:
    for row in ROWS:
        run = {case.params.get("mars_type", "mars-adamw") for case in row.cases}
        assert not row.cases or run == set(row.variants), row.feature


def test_what_shows_a_row_is_there() -> None:
    for row in ROWS:
        file, _, function = row.shown_by.partition("::")
        assert not file or f"def {function}(" in (ROOT / file).read_text(), row.feature


def test_the_launched_rows_name_what_their_cases_run() -> None:
    """Engine by engine the variants and numbers of ranks of the row are those of the cases."""
    from tests import test_accelerate as prepared
    from tests import test_trainer_training as trained

    run: dict[tuple[str, str], set[tuple[str, int]]] = {}
    on = [(prepared.CASES, (2, 3, 4)), (prepared.VARIANTS, (2, 3, 4)), (prepared.SLOW, (2,)), (prepared.HSDP, (4,))]
    for case, ranks in ((case, ranks) for cases, ranks in on for case in cases):
        variant = case.params.get("mars_type", "mars-adamw")
        run.setdefault((ACCELERATE, case.engine.partition("-")[0]), set()).update((variant, n) for n in ranks)
    by_trainer = [(trained.DISTRIBUTED, (2, 3, 4)), (trained.VARIANTS, (2, 3, 4)), (trained.REPEATED, (2,))]
    for training, ranks in ((case, ranks) for cases, ranks in by_trainer for case in cases):
        variant = (training.optim or "mars_adamw").replace("_", "-")
        run.setdefault((TRAINER, training.kind), set()).update((variant, n) for n in ranks)
    rows: dict[tuple[str, str], set[tuple[str, int]]] = {}
    for row in (row for row in ROWS if row.kind and row.kind != "alone"):
        rows.setdefault((row.engine, row.kind), set()).update((v, n) for v in row.variants for n in row.ranks)
    assert rows == run


def test_the_readme_shows_the_table_of_today() -> None:
    text = README.read_text()
    assert written(text) == text, "run `python -m tests.engines --write`"


# ----------------------------------------------------------------------------------------------------- planted faults


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        (with_the_norm_of_the_local_piece, EngineCase("fsdp2")),
        (with_the_norm_of_the_local_piece, EngineCase("fsdp1")),
        (with_the_norm_of_the_local_piece, EngineCase("tensor_parallel", net="layers")),
        (with_the_group_of_the_replicas, EngineCase("fsdp2", {"mesh": "square"})),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_replay_finds_a_norm_over_the_wrong_ranks(pools: dict[int, RankPool], fault: Any, case: EngineCase) -> None:
    result = pools[4].run(fault, case, timeout=60)[0]
    assert furthest(replayed(result, case).params, result["end"]) > 1e-3
