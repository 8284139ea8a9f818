"""Values and states by parameter name: out of one engine into another, by numbers; what is refused; files.

END TO END: four steps in one engine, five in another (other ranks, groups in another order, wrong numbers until they
are loaded), against nine steps on one process.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import named_cases
from tests.named_cases import Case
from tests.ranks import RankPool

pytestmark = pytest.mark.timeout(600)
ZERO = "DeepSpeedZeroOptimizer"
ACTIVE = {
    "ddp": ("DistributedDataParallel", {"whole tensors"}),
    "fsdp2": ("FSDPNet", {"DTensor (Shard(dim=0),)"}),
    "fsdp1": ("FullyShardedDataParallel", {"FSDP1"}),
    "fsdp1-flat": ("FullyShardedDataParallel", {"FSDP1"}),
    "hsdp": ("FSDPNet", {"DTensor (Replicate(), Shard(dim=0))"}),
    "zero0": ("MARS", {"whole tensors"}),
    "zero1": (ZERO, {"ZeRO-1/2"}),
    "zero2": (ZERO, {"ZeRO-1/2"}),
    "zero3": (f"{ZERO}_Stage3", {"ZeRO-3"}),
    "zero2-offload": (ZERO, {"ZeRO-1/2"}),
    "zero3-offload": (f"{ZERO}_Stage3", {"ZeRO-3"}),
    "zero0-bf16": ("FP16_UnfusedOptimizer", {"copies"}),
    "zero2-bf16": (ZERO, {"ZeRO-1/2"}),
    "zero3-bf16": (f"{ZERO}_Stage3", {"ZeRO-3"}),
    "bf16-optimizer": ("BF16_Optimizer", {"ZeRO-1/2"}),
    "tensor": (
        "Layers",
        {"DTensor (Shard(dim=0),)", "DTensor (Shard(dim=1),)", "DTensor (Replicate(),)", "whole tensors"},
    ),
    "tensor-fsdp2": (
        "FSDPLayers",
        {
            "DTensor (Shard(dim=0),)",
            "DTensor (Shard(dim=0), Replicate())",
            "DTensor (Shard(dim=0), Shard(dim=1))",
            "DTensor (_StridedShard(dim=0, sf=2), Shard(dim=0))",
        },
    ),
}
ENGINES = ("ddp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload")
SIXTEEN = ("zero0-bf16", "zero2-bf16", "zero3-bf16", "bf16-optimizer")
LABELS = {"mars-adamw": "MARS-AdamW", "mars-lion": "MARS-Lion", "mars-shampoo": "MARS-Shampoo", "mars-m": "MARS-M"}
ADAMW: dict[str, Any] = {"mars_type": "mars-adamw"}
SHAMPOO: dict[str, Any] = {"mars_type": "mars-shampoo", "ns_dtype": "float32"}
LION: dict[str, Any] = {"mars_type": "mars-lion"}
M: dict[str, Any] = {"mars_type": "mars-m", "ns_dtype": "float32"}
EXACT: dict[str, Any] = {"mars_type": "mars-adamw", "is_approx": False, "gamma": 0.3}
TOLERANCE = {"mars-adamw": 2e-6, "mars-lion": 2e-6, "mars-shampoo": 5e-6, "mars-m": 5e-6}


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    pools = {ranks: RankPool(ranks) for ranks in (2, 3, 4)}  # a pool starts when it is first used
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def taken(pools: dict[int, RankPool]) -> Any:
    """What ``take`` gave for a case on a number of ranks (1: this process); each is trained once."""
    known: dict[tuple[int, str], dict[str, Any]] = {}

    def of(ranks: int, *cases: Case) -> list[dict[str, Any]]:
        missing = [case for case in cases if (ranks, repr(case)) not in known]
        if missing and ranks == 1:
            results = [named_cases.take(case) for case in missing]
        elif missing:
            results = pools[ranks].run(named_cases.many, [("take", case) for case in missing], timeout=300.0)[0]
        for case, result in zip(missing, results if missing else [], strict=True):
            assert_active(case, result)
            known[ranks, repr(case)] = result
        return [known[ranks, repr(case)] for case in cases]

    return of


def assert_active(case: Case, result: dict[str, Any]) -> None:
    variant = case.params["mars_type"]
    assert result["optimizer"] == "MARS"
    assert result["rule_counts"] == {LABELS[variant]: 5, "AdamW": 4}
    if case.engine in ACTIVE:
        kind, engines = ACTIVE[case.engine]
        kind = "FSDPLayers" if (kind, case.net) == ("FSDPNet", "layers") else kind
        assert (result["type"], result["engines"]) == (kind, engines)


def plain(params: dict[str, Any], net: str = "net", groups: bool = True) -> Case:
    return Case("plain", params, net, groups)


def furthest(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


def flattened(states: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}/{key}": value for name, its in states["tensors"].items() for key, value in its.items()}


def numbers_by_name(states: dict[str, Any]) -> dict[str, Any]:
    return {name: group["values"] for group in states["settings"]["groups"] for name in group["names"]}


def check_loaded(case: Case, source: dict[str, Any], result: dict[str, Any]) -> None:
    """What is there right after the load, before any step, is what was loaded: bit for bit."""
    assert_active(case, result)
    before, after = flattened(source["states"]), flattened(result["again"])
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype and torch.equal(value, after[name]), name
    assert numbers_by_name(source["states"]) == numbers_by_name(result["again"])
    assert furthest(result["weights"], {n: s["param"] for n, s in source["states"]["tensors"].items()}) == 0.0


# ------------------------------------------------------------------------------------------ engine to engine


def check_sources(taken: Any, ranks: int, cases: list[Case]) -> None:
    """The states of each engine, by name, are those of one process."""
    for case, source in zip(cases, taken(ranks, *cases), strict=True):
        (single,) = taken(1, plain(case.params, case.net, case.groups))
        here, there = flattened(source["states"]), flattened(single["states"])
        assert {n: (v.shape, v.dtype) for n, v in here.items()} == {n: (v.shape, v.dtype) for n, v in there.items()}
        for name, value in here.items():
            tolerance = TOLERANCE[case.params["mars_type"]]
            assert (value - there[name]).abs().max().item() <= tolerance, (case.engine, name)
        assert numbers_by_name(source["states"]) == numbers_by_name(single["states"])
        assert source["states"]["settings"]["mars_settings"] == single["states"]["settings"]["mars_settings"]


def check_pairs(pools: Any, taken: Any, pairs: list[tuple[int, Case, int, Case]]) -> None:
    """``pairs``: ranks and case of the source, ranks and case of the engine that goes on."""
    for to in {pair[2] for pair in pairs}:
        theirs = [pair for pair in pairs if pair[2] == to]
        calls, sources = [], []
        for i, (ranks, source, _, case) in enumerate(theirs):
            sources.append(taken(ranks, source)[0])
            calls.append(("go_on", case, sources[-1]["states"], i % 2 == 1))
        results = pools[to].run(named_cases.many, calls, timeout=500.0)[0]
        for (ranks, origin, _, case), source, result in zip(theirs, sources, results, strict=True):
            check_loaded(case, source, result)
            (single,) = taken(1, plain(case.params, case.net, case.groups))
            if (ranks, origin) == (to, case):
                assert furthest(result["end"], source["end"]) == 0.0, (origin, case)
            tolerance = TOLERANCE[case.params["mars_type"]]
            assert furthest(result["end"], single["end"]) <= tolerance, (origin, case)


def test_states_are_those_of_one_process(taken: Any) -> None:
    check_sources(taken, 2, [Case(engine, ADAMW) for engine in ENGINES])
    check_sources(taken, 2, [Case(engine, SHAMPOO) for engine in ("fsdp2", "zero3")])


def test_the_same_engine_goes_on_bit_for_bit(pools: Any, taken: Any) -> None:
    cases = [Case(engine, ADAMW) for engine in ("fsdp1", "zero1", "zero2-offload")]
    cases += [Case("fsdp2", SHAMPOO), Case("zero3", SHAMPOO)]
    check_pairs(pools, taken, [(2, case, 2, case) for case in cases])


def test_another_engine_on_another_number_of_ranks_goes_on(pools: Any, taken: Any) -> None:
    pairs = []
    for i, engine in enumerate(ENGINES):
        pairs.append((2, Case(ENGINES[(i + 3) % len(ENGINES)], ADAMW), 3, Case(engine, ADAMW)))
    pairs += [
        (2, Case("zero3", SHAMPOO), 3, Case("fsdp2", SHAMPOO)),
        (2, Case("fsdp2", SHAMPOO), 3, Case("zero3", SHAMPOO)),
    ]
    check_pairs(pools, taken, pairs)


def test_one_process_and_engines_pass_states_to_each_other(pools: Any, taken: Any) -> None:
    check_pairs(pools, taken, [(1, plain(ADAMW), 2, Case("zero3", ADAMW))])
    source, single = taken(2, Case("zero3", ADAMW))[0], taken(1, plain(ADAMW))[0]
    result = named_cases.go_on(plain(ADAMW), source["states"])
    check_loaded(plain(ADAMW), source, result)
    assert furthest(result["end"], single["end"]) <= 2e-6


def test_tensor_parallelism_passes_states_to_other_engines(pools: Any, taken: Any) -> None:
    tensor, fsdp2, zero3 = (Case(engine, ADAMW, "layers") for engine in ("tensor", "fsdp2", "zero3"))
    check_sources(taken, 2, [tensor])
    check_pairs(pools, taken, [(2, tensor, 2, zero3), (1, plain(ADAMW, "layers"), 3, tensor), (2, tensor, 3, fsdp2)])


def test_exact_mode_between_a_look_ahead_and_its_step(pools: Any, taken: Any) -> None:
    chain = ("fsdp2", "zero3", "zero1", "ddp", "fsdp2")
    cases = [Case(engine, EXACT) for engine in chain[:-1]]
    check_sources(taken, 2, cases)
    assert all("linear.weight/next_prev_grad" in flattened(source["states"]) for source in taken(2, *cases))
    pairs = [(2, Case(a, EXACT), 2, Case(b, EXACT)) for a, b in itertools.pairwise(chain)]
    check_pairs(pools, taken, [*pairs, (2, Case("zero1", EXACT), 2, Case("zero1", EXACT))])


@pytest.mark.parametrize(
    "engine", [pytest.param(e, marks=pytest.mark.slow) if e == "zero2-bf16" else e for e in SIXTEEN]
)
def test_sixteen_bit_weights_follow_the_master(engine: str, pools: Any, taken: Any) -> None:
    """``weights`` compares what the model computes with and the master on every rank."""
    case = Case(engine, ADAMW)
    (source,) = taken(2, case)
    (result,) = pools[2].run(named_cases.many, [("go_on", case, source["states"])])[0]
    check_loaded(case, source, result)
    assert furthest(result["end"], source["end"]) == 0.0


@pytest.mark.parametrize("engine", ["zero2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_adamw_of_torch_under_zero(engine: str, pools: Any) -> None:
    for result in pools[2].run(named_cases.adamw, engine):
        assert result["type"] == ACTIVE[engine][0]
        states = result["states"]["tensors"]
        assert all({*its} == {"param", "exp_avg", "exp_avg_sq", "step"} for its in states.values()) and len(states) == 9
        assert furthest(result["weights"], {name: its["param"] for name, its in states.items()}) == 0.0
        assert furthest(result["end"], result["expected"]) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("params", [ADAMW, SHAMPOO, LION, M, EXACT], ids=lambda p: "-".join(map(str, p.values())))
@pytest.mark.parametrize("to", [2, 3])
def test_every_engine_into_every_other(params: dict[str, Any], to: int, pools: Any, taken: Any) -> None:
    cases = [Case(engine, params) for engine in ENGINES]
    check_sources(taken, 2, cases)
    for case in cases:
        check_pairs(pools, taken, [(2, source, to, case) for source in cases])


@pytest.mark.slow
@pytest.mark.parametrize("params", [ADAMW, SHAMPOO, LION, M], ids=lambda p: p["mars_type"])
def test_meshes_and_flat_parameters(params: dict[str, Any], pools: Any, taken: Any) -> None:
    hsdp, flat = Case("hsdp", params), Case("fsdp1-flat", params, groups=False)
    mesh, tensor = Case("tensor-fsdp2", params, "layers"), Case("tensor", params, "layers")
    check_sources(taken, 4, [hsdp, mesh])
    check_sources(taken, 2, [flat, tensor])
    check_pairs(pools, taken, [(4, hsdp, 4, hsdp), (4, mesh, 4, mesh), (2, flat, 2, flat)])
    pairs = [
        (4, hsdp, 2, Case("zero3", params)),
        (2, Case("zero3", params), 4, hsdp),
        (2, Case("ddp", params), 4, hsdp),
    ]
    pairs += [(4, mesh, 3, tensor), (2, tensor, 4, mesh), (4, mesh, 2, Case("zero1", params, "layers"))]
    pairs += [(2, flat, 3, Case("zero2", params, groups=False)), (2, Case("fsdp2", params, groups=False), 3, flat)]
    check_pairs(pools, taken, pairs)


# -------------------------------------------------------------------------------------------------- files


def test_files_of_all_ranks_hold_each_element_once(pools: Any, taken: Any, tmp_path: Path) -> None:
    from mars_dist.checkpoint import Reader

    engines = {"ddp": "zero3", "zero3": "fsdp2", "zero1": "ddp", "fsdp2": "zero1"}
    single = taken(1, plain(ADAMW))[0]
    for a, b in engines.items():
        (folder := tmp_path / a).mkdir()
        saved = [one[0] for one in pools[3].run(named_cases.many, [("save_files", Case(a, ADAMW), str(folder))])]
        assert_active(Case(a, ADAMW), saved[0])
        reader = Reader(folder)
        whole = flattened(taken(1, plain(ADAMW))[0]["states"])
        assert reader.names() == sorted(whole)
        sizes = [one["bytes"] for one in saved]
        assert sum(sizes) == sum(value.numel() * value.element_size() for value in whole.values()), "something twice"
        if a != "fsdp2":  # which cuts by rows, and these tensors have few: see test_checkpoint_tensors.py
            assert max(sizes) <= 1.1 * sum(sizes) / len(sizes), (a, sizes)
        (result,) = pools[2].run(named_cases.many, [("load_files", Case(b, ADAMW), str(folder))])[0]
        assert_active(Case(b, ADAMW), result)
        assert furthest(result["end"], single["end"]) <= 2e-6


# ----------------------------------------------------------------------------------- faults that are planted


def test_faults_that_are_planted_are_seen(taken: Any) -> None:
    """One process: states of other parameters, without h, one step off: the end is another by far more than allowed."""
    (source,) = taken(1, plain(ADAMW))

    def end_of(change: Any) -> tuple[float, list[str]]:
        states = copy.deepcopy(source["states"])
        change(states["tensors"])
        result = named_cases.go_on(plain(ADAMW), states)
        return furthest(result["end"], source["end"]), result["messages"]

    def swap(tensors: dict[str, Any]) -> None:
        a, b = tensors["norm.weight"], tensors["norm.bias"]
        a["exp_avg"], b["exp_avg"] = b["exp_avg"], a["exp_avg"]

    def drop(tensors: dict[str, Any]) -> None:
        for states in tensors.values():
            states.pop("prev_grad", None)

    def off(tensors: dict[str, Any]) -> None:
        for states in tensors.values():
            states["step"] += 1

    assert end_of(lambda tensors: None)[0] == 0.0
    for change in (swap, drop, off):
        far, said = end_of(change)
        assert far > 1e-4, change
        assert any("5 of 5 tensors come without the gradient of the step before" in t for t in said) == (change is drop)


# ----------------------------------------------------------------------------------------- what is refused


def changed(states: dict[str, Any], **changes: Any) -> dict[str, Any]:
    out = copy.deepcopy(states)
    for name, value in changes.items():
        parameter, _, key = name.replace("__", ".").rpartition("/")
        if value is None:
            del out["tensors"][parameter][key]
        else:
            out["tensors"].setdefault(parameter, {})[key] = value
    return out


def bad_states(states: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """States that do not fit, each with a part of what is said."""
    without = copy.deepcopy(states)
    del without["tensors"]["norm.weight"]
    regrouped = copy.deepcopy(states)
    regrouped["settings"]["groups"][0]["names"].remove("embedding.weight")
    alone = {"names": ["embedding.weight"], "values": {**regrouped["settings"]["groups"][0]["values"], "lr": 0.25}}
    regrouped["settings"]["groups"].append(alone)
    variant = copy.deepcopy(states)
    variant["settings"]["mars_settings"] = variant["settings"]["mars_settings"].replace("mars-adamw", "mars-m")
    newer = copy.deepcopy(states)
    newer["settings"]["format"] = 2
    newest = {**states, "format": 2}

    def of_dtype(key: str, dtype: torch.dtype) -> dict[str, Any]:
        return changed(states, **{f"linear.weight/{key}": states["tensors"]["linear.weight"][key].to(dtype)})

    return [
        (without, "only in this model: norm.weight"),
        (changed(states, **{"other.weight/param": torch.ones(2)}), "only in what is loaded: other.weight"),
        (changed(states, **{"norm.weight/param": None}), "norm.weight"),
        (changed(states, **{"norm.bias/exp_avg": torch.ones(4)}), "norm.bias/exp_avg has shape (4,)"),
        (changed(states, **{"norm.bias/step": torch.ones(11)}), "norm.bias/step has shape (11,)"),
        (changed(states, **{"linear.weight/exp_avg_sq": None}), "linear.weight has no exp_avg_sq"),
        (regrouped, "embedding.weight with lr=0.25"),
        (variant, "mars-m"),
        (
            changed(states, **{"linear.weight/step": None}),
            "linear.weight has exp_avg, exp_avg_sq, prev_grad and no step",
        ),
        (of_dtype("param", torch.complex64), "linear.weight/param is of torch.complex64"),
        (of_dtype("param", torch.int64), "linear.weight/param is of torch.int64"),
        (of_dtype("exp_avg", torch.int64), "linear.weight/exp_avg is of torch.int64"),
        (changed(states, **{"norm.bias/exp_avg": 3}), "norm.bias/exp_avg is no dense tensor with values (int)"),
        (changed(states, **{"norm.bias/exp_avg": torch.ones(11, device="meta")}), "(torch.strided on meta)"),
        (changed(states, **{"norm.bias/exp_avg": torch.ones(11).to_sparse()}), "(torch.sparse_coo on cpu)"),
        ({**states, "tensors": [1]}, "no dict of dicts"),
        ({**states, "settings": "x"}, "not what settings_of gives"),
        ({**states, "settings": {"format": 1}}, "not what settings_of gives"),
        (newer, "format 2"),
        (newest, "format 2"),
    ]


def test_what_does_not_fit_is_refused_and_changes_nothing(taken: Any) -> None:
    for states, expected in bad_states(taken(1, plain(ADAMW))[0]["states"]):
        assert expected in named_cases.refused(plain(ADAMW), states)


def test_what_does_not_fit_is_refused_on_every_rank(pools: Any, taken: Any) -> None:
    bad = bad_states(taken(1, plain(ADAMW))[0]["states"])
    calls = [(engine, states, expected) for engine in ("zero3", "fsdp2") for states, expected in bad[:8:3]]
    for engine, states, expected in calls:
        said = pools[2].run(named_cases.refused, Case(engine, ADAMW), states)
        assert all(expected in text for text in said), (engine, said)


def test_counters_that_differ_have_no_place_in_a_flat_tensor(pools: Any, taken: Any) -> None:
    (source,) = taken(1, plain(ADAMW))
    states = copy.deepcopy(source["states"])
    states["tensors"]["linear.weight"]["step"] -= 1
    for engine, refuses in (("zero3", True), ("zero1", True), ("fsdp2", False), ("ddp", False)):
        said = pools[2].run(named_cases.refused, Case(engine, ADAMW), states)
        assert all(("3 of linear.weight" in text) == refuses and bool(text) == refuses for text in said), said


def test_states_are_not_taken_while_fsdp1_shows_whole_tensors(pools: Any) -> None:
    for said in pools[2].run(named_cases.summoned, Case("fsdp1", ADAMW)):
        assert "outside of summon_full_params" in said
