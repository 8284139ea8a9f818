"""DeepSpeed on another number of ranks, and at another ZeRO stage: universal checkpoints, by numbers.

Saved after 4 steps, converted, loaded, 5 more steps. Right after the load every state, whole and by name, is equal to
the one that was saved; on as many ranks the rest of the training is equal to the uninterrupted one, on others it ends
where one process without DeepSpeed does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mars_dist.checkpoint import manifest
from tests import nets
from tests import universal_cases as cases
from tests.ranks import RankError, RankPool
from tests.zero_cases import LR, ZeroCase

BASE = {"weight_decay": 0.05, "clip": 0.1}
MATRIX = {**BASE, "ns_dtype": "float32"}
SHAMPOO, MARS_M = {**MATRIX, "mars_type": "mars-shampoo"}, {**MATRIX, "mars_type": "mars-m"}
LION = {**BASE, "mars_type": "mars-lion"}
EXACT = {**BASE, "is_approx": False, "gamma": 0.3}
SMALL = {"sub_group_size": 60}  # several sub-groups at stage 3
LABELS = {"mars-lion": "MARS-Lion", "mars-shampoo": "MARS-Shampoo", "mars-m": "MARS-M"}
WRAPPERS = {
    1: ("DeepSpeedZeroOptimizer", "ZeRO-1/2"),
    2: ("DeepSpeedZeroOptimizer", "ZeRO-1/2"),
    3: ("DeepSpeedZeroOptimizer_Stage3", "ZeRO-3"),
}
GRAD_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def sub_groups(stage: int) -> dict[str, Any]:
    return SMALL if stage == 3 else {}


CASES = [
    *(ZeroCase(stage, params=params, zero=sub_groups(stage)) for stage in (1, 2, 3) for params in (BASE, SHAMPOO)),
    *(
        slow(ZeroCase(stage, params=params, zero=sub_groups(stage)))
        for stage in (1, 2, 3)
        for params in (LION, MARS_M, EXACT, {**EXACT, "first_step": "paper"})
    ),
    # one state in the place of two
    *(slow(ZeroCase(s, params={**p, "clip": None}, zero=sub_groups(s))) for s in (1, 2, 3) for p in (LION, MARS_M)),
    *(slow(ZeroCase(s, params={**MARS_M, "clip": None, "one_state": False})) for s in (2, 3)),
    # two groups that mix matrices and vectors
    *(slow(ZeroCase(s, params=p, construct="two", zero=sub_groups(s))) for s in (1, 2, 3) for p in (LION, BASE)),
    *(slow(ZeroCase(s, params={**BASE, "amsgrad": True}, zero=sub_groups(s))) for s in (1, 3)),
    ZeroCase(2, params=BASE, construct="two", zero={"round_robin_gradients": True}, extra=cases.SCHEDULE),
    slow(ZeroCase(1, params=BASE, zero={"round_robin_gradients": True})),
    slow(ZeroCase(3, params=BASE, extra=cases.SCHEDULE)),
    *(slow(ZeroCase(s, params=p, offload=True)) for s in (1, 2, 3) for p in (BASE, SHAMPOO)),
    slow(ZeroCase(2, params=BASE, clip=0.1)),
]


def compare_states(ours: dict[str, Any], saved: dict[str, Any]) -> None:
    assert ours.keys() == saved.keys()
    for name, states in saved.items():
        assert ours[name].keys() == states.keys(), name
        for key, value in states.items():
            assert ours[name][key].dtype == value.dtype, (name, key)
            assert torch.equal(ours[name][key], value), (name, key)


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def counts(case: ZeroCase) -> dict[str, int]:
    frozen = case.net == "statistics"  # one matrix and one vector
    label = LABELS.get(case.params.get("mars_type", ""), "MARS-AdamW")
    return {label: nets.MATRICES - frozen, "AdamW": nets.VECTORS - frozen}


def check_run(result: dict[str, Any], case: ZeroCase) -> None:
    """That it was the engine and the rules that the case asks for."""
    wrapper, engine = WRAPPERS[case.stage]
    if case.dtype == "bf16" and case.extra == GRAD_FP32:
        wrapper = "BF16_Optimizer"
    assert (result["wrapper"], result["engines"]) == (wrapper, {engine})
    assert result["rule_counts"] == counts(case)
    assert result["steps"] == [cases.END] and result["own_counters"]


def saved_and_converted(pool: RankPool, size: int, case: ZeroCase, folder: Path) -> dict[str, Any]:
    """The result of rank 0 of the training that was saved, and its universal checkpoint in ``folder / "universal"``."""
    saved = pool.run(cases.as_world, size, cases.save, case, str(folder), True)[0]
    check_run(saved, case)
    facts = pool.run(cases.convert, str(folder), str(folder / "universal"))[0]
    assert facts["world_size"] == size and facts["zero_stage"] == case.stage
    assert facts["variant"] == case.params.get("mars_type", "mars-adamw")
    assert manifest.faults(folder / "universal") == []
    assert (folder / "latest_universal").read_text() == "universal"
    return saved


def load(pool: RankPool, size: int, case: ZeroCase, folder: Path) -> dict[str, Any]:
    result = pool.run(cases.as_world, size, cases.load, case, str(folder))[0]
    check_run(result, case)
    return result


def check_load(result: dict[str, Any], saved: dict[str, Any]) -> None:
    compare_states(result["loaded"], saved["saved"])
    assert result["loaded_facts"] == saved["saved_facts"]
    assert not [m for m in result["messages"] if m.startswith("load_state_dict")], result["messages"]


def tolerance(case: ZeroCase) -> float:
    return 5e-6 if case.params.get("mars_type") in ("mars-shampoo", "mars-m") else 2e-6


@pytest.mark.parametrize("case", CASES, ids=str)
def test_other_numbers_of_ranks(pool: RankPool, case: ZeroCase, tmp_path: Path) -> None:
    saved = saved_and_converted(pool, 2, case, tmp_path)
    expected = cases.on_one_process(case)
    assert furthest(saved["end"], expected) < tolerance(case)
    for size in (1, 3, 2):
        result = load(pool, size, case, tmp_path)
        check_load(result, saved)
        assert furthest(result["end"], expected) < tolerance(case), size
        if size == 2:  # as many ranks: bit by bit, states too
            assert furthest(result["end"], saved["end"]) == 0.0
            compare_states(result["states"], saved["states"])


FROM_FOUR = [
    ZeroCase(1, params=SHAMPOO),
    ZeroCase(3, params=BASE, zero=SMALL),
    *(slow(ZeroCase(s, params=p, zero=sub_groups(s))) for s in (1, 2, 3) for p in (BASE, SHAMPOO, LION, MARS_M, EXACT)),
]


@pytest.fixture(scope="module")
def pools_of_four(pool: RankPool) -> Iterator[dict[int, RankPool]]:
    """Of their own for stage 2: in the processes of ``pool``, after trainings on fewer of them, DeepSpeed's stage 2 on
    four ranks does not train as one process does (before anything is saved)."""
    own = RankPool(4)
    yield {1: pool, 2: own, 3: pool}
    own.close()


@pytest.mark.parametrize("case", FROM_FOUR, ids=str)
def test_from_four_ranks_to_two(pools_of_four: dict[int, RankPool], case: ZeroCase, tmp_path: Path) -> None:
    pool = pools_of_four[case.stage]
    saved = saved_and_converted(pool, 4, case, tmp_path)
    assert furthest(saved["end"], cases.on_one_process(case)) < tolerance(case)
    result = load(pool, 2, case, tmp_path)
    check_load(result, saved)
    assert furthest(result["end"], cases.on_one_process(case)) < tolerance(case)


@pytest.mark.parametrize("stage", [slow(1), 2, 3])
def test_frozen_parameters_and_buffers(pool: RankPool, stage: int, tmp_path: Path) -> None:
    """DeepSpeed's loader leaves both as the new model has them."""
    case = ZeroCase(stage, params=BASE, net="statistics")
    saved = saved_and_converted(pool, 2, case, tmp_path)
    assert saved["saved_facts"]["buffers"] == {"mean": [1.0] * 11, "seen": 4}
    result = load(pool, 3, case, tmp_path)
    check_load(result, saved)
    assert set(result["end"]["narrow.weight"].unique().tolist()) == {0.5}
    assert furthest(result["end"], cases.on_one_process(case)) < 2e-6


BF16 = [
    ZeroCase(1, "bf16", params=BASE, extra=GRAD_FP32),
    slow(ZeroCase(3, "bf16", params=BASE, zero=SMALL)),
    slow(ZeroCase(2, "bf16", params=BASE)),
    slow(ZeroCase(1, "bf16", params=SHAMPOO, extra=GRAD_FP32)),
    slow(ZeroCase(2, "bf16", params=LION, offload=True)),
]


@pytest.mark.parametrize("case", BF16, ids=str)
def test_sixteen_bits(pool: RankPool, case: ZeroCase, tmp_path: Path) -> None:
    """Masters, moments and previous gradients in the precision they were saved in; another cut rounds otherwise."""
    saved = saved_and_converted(pool, 2, case, tmp_path)
    result = load(pool, 2, case, tmp_path)
    check_load(result, saved)
    assert furthest(result["end"], saved["end"]) == 0.0
    check_load(load(pool, 3, case, tmp_path), saved)


ACROSS = [(2, 3), (3, 2), slow(1, 3), slow(3, 1), slow(1, 2), slow(2, 1)]


@pytest.mark.parametrize(("saved_at", "loaded_at"), ACROSS)
@pytest.mark.parametrize("params", [SHAMPOO, pytest.param(BASE, marks=pytest.mark.slow)], ids=str)
def test_across_stages(pool: RankPool, saved_at: int, loaded_at: int, params: dict[str, Any], tmp_path: Path) -> None:
    """Groups that mix matrices and vectors, with values of their own."""
    case = ZeroCase(saved_at, params=params, construct="two", zero=sub_groups(saved_at))
    saved = saved_and_converted(pool, 2, case, tmp_path)
    there = replace(case, stage=loaded_at, zero=sub_groups(loaded_at))
    result = load(pool, 3, there, tmp_path)
    check_load(result, saved)
    assert furthest(result["end"], cases.on_one_process(case)) < tolerance(case)


def test_three_sub_groups_and_two_groups(pool: RankPool, tmp_path: Path) -> None:
    """DeepSpeed's loader has one counter for all sub-groups, which one step would raise by 3 and more, and writes the
    first group's values over all groups."""
    case = ZeroCase(3, params=BASE, construct="two", zero={"sub_group_size": 60})
    saved = saved_and_converted(pool, 2, case, tmp_path)
    assert saved["flats"] >= 3
    result = pool.run(cases.as_world, 1, cases.load, case, str(tmp_path), None, cases.SAVED + 1)[0]
    assert result["flats"] >= 3 and result["own_counters"]
    assert result["steps"] == [cases.SAVED + 1]
    check_load(result, saved)
    (_, first), (_, second) = sorted(result["loaded_facts"]["groups"], key=lambda pair: pair[1]["lr"], reverse=True)
    own = {k: v for k, v in cases.SECOND.items() if k != "lr_1d"}
    assert {k: second[k] for k in own} == own and second["lr_1d_ratio"] == pytest.approx(0.2)
    assert (first["lr"], first["weight_decay"], first["betas"]) == (LR["lr"], 0.05, (0.95, 0.99))


# ------------------------------------------------------------------------------------------------ what is refused


def a_checkpoint(pool: RankPool, folder: Path, stage: int = 2, params: dict[str, Any] = BASE) -> ZeroCase:
    case = ZeroCase(stage, params=params)
    pool.run(cases.as_world, 2, cases.save, case, str(folder), False)
    return case


def errors(
    pool: RankPool, size: int, case: ZeroCase, folder: Path, extra: Any = cases.UNIVERSAL, tag: Any = None
) -> str:
    """The error on rank 0; every rank has one, and no rank was changed."""
    results = pool.run(cases.as_world, size, cases.load_fails, case, str(folder), extra, tag)[:size]
    for text, unchanged in results:
        assert text and unchanged, results
    return str(results[0][0])


def test_what_does_not_fit_is_refused_and_changes_nothing(pool: RankPool, tmp_path: Path) -> None:
    case = a_checkpoint(pool, tmp_path)
    # another number of ranks without a conversion
    text = errors(pool, 3, case, tmp_path, {}, cases.TAG)
    assert "of 2 ranks" in text and "mars-dist checkpoint convert" in text
    # nothing converted, and what is no universal checkpoint
    assert "mars-dist checkpoint convert" in errors(pool, 1, case, tmp_path)
    assert "no universal checkpoint" in errors(pool, 1, case, tmp_path, tag=cases.TAG)
    pool.run(cases.convert, str(tmp_path), str(tmp_path / "universal"))
    assert "load_universal" in errors(pool, 1, case, tmp_path, {}, "universal")
    assert "leads out" in errors(pool, 1, case, tmp_path, tag="../elsewhere")
    # another variant, another model
    assert "mars_type='mars-adamw'" in errors(pool, 2, replace(case, params=LION), tmp_path)
    text = errors(pool, 2, replace(case, net="statistics"), tmp_path)
    assert "trained only there: linear.bias, narrow.weight" in text
    # a newer format, whatever is in it
    sealed = tmp_path / "universal" / manifest.NAME
    kept = sealed.read_text()
    sealed.write_text(json.dumps({"format": 2, "kind": "deepspeed-universal"}))
    text = errors(pool, 2, case, tmp_path)
    assert f"{sealed} has format 2" in text and "update mars_dist" in text
    sealed.write_text(kept)
    # a file that was changed, cut, or is gone
    victim = tmp_path / "universal/zero/head.weight/mars_dist/prev_grad.pt"
    content = victim.read_bytes()
    for damaged, word in (
        (content[:-1] + bytes([content[-1] ^ 1]), "another content"),
        (content[:-7], "bytes"),
        (None, "missing"),
    ):
        victim.unlink() if damaged is None else victim.write_bytes(damaged)
        faults = manifest.faults(tmp_path / "universal")
        assert len(faults) == 1 and word in faults[0] and str(victim) in faults[0]
        text = errors(pool, 2, case, tmp_path)
        assert str(victim) in text  # by the manifest, or where its pickle is looked at


def test_a_source_that_cannot_be_converted(pool: RankPool, tmp_path: Path) -> None:
    def convert(source: Path, out: Path, **keywords: Any) -> str:
        with pytest.raises(RankError) as error:
            pool.run(cases.convert, str(source), str(out))
        assert not out.exists() or keywords.get("exists"), "nothing is left behind"
        assert not [p for p in out.parent.iterdir() if p.name.endswith(".converting")]
        return str(error.value)

    for stage, pattern in ((2, "zero_pp_rank_1_*optim_states.pt"), (3, "zero_pp_rank_1_*model_states.pt")):
        folder = tmp_path / f"stage{stage}"
        a_checkpoint(pool, folder, stage)
        (folder / "there").mkdir()
        assert "there exists" in convert(folder, folder / "there", exists=True)
        (folder / cases.TAG / manifest.NAME).unlink(missing_ok=True)  # a seal would show it as well
        gone = next((folder / cases.TAG).glob(pattern))
        kept = gone.read_bytes()
        gone.unlink()
        text = convert(folder, folder / "universal")
        assert str(gone) in text and "is missing: the checkpoint was saved by 2 ranks" in text
        gone.write_bytes(kept[: len(kept) // 2])
        assert gone.name in convert(folder, folder / "universal")
    assert "no *_optim_states.pt" in convert(tmp_path, tmp_path / "universal")


def test_pickles_of_the_source_are_looked_at_first(pool: RankPool, tmp_path: Path) -> None:
    a_checkpoint(pool, tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / cases.TAG / manifest.NAME).unlink(missing_ok=True)  # a seal would show it as well
    torch.save(Payload(str(ran)), tmp_path / cases.TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(RankError, match="--trust-checkpoint"):
        pool.run(cases.convert, str(tmp_path), str(tmp_path / "universal"))
    assert not ran.exists()


class Payload:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.path),))


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_made_by_stock_tools(pool: RankPool, stage: int, tmp_path: Path) -> None:
    """Without prev_grad: a first step with the moments kept, and one warning. At another stage it cannot be loaded."""
    case = a_checkpoint(pool, tmp_path, stage)
    pool.run(cases.convert_with_stock_tools, str(tmp_path / cases.TAG), str(tmp_path / "stock"))
    result = pool.run(cases.as_world, 3, cases.load, case, str(tmp_path))[0]
    check_run(result, case)
    told = [m for m in result["messages"] if m.startswith("load_state_dict")]
    assert len(told) == 1 and "prev_grad" in told[0] and "first one" in told[0], told
    saved = pool.run(cases.as_world, 2, cases.save, case, str(tmp_path / "again"), False)[0]["saved"]
    for name, states in saved.items():
        for key in states.keys() - {"prev_grad"}:
            assert torch.equal(result["loaded"][name][key], states[key]), (name, key)
        if "prev_grad" in states:
            assert result["loaded"][name]["prev_grad"].count_nonzero() == 0
    other = replace(case, stage=5 - stage)
    text = errors(pool, 2, other, tmp_path)
    assert "ds_to_universal" in text and "mars-dist checkpoint convert" in text


def test_a_wrong_order_of_pieces_is_seen(pool: RankPool, tmp_path: Path) -> None:
    """The comparison by name is no formality: pieces put together in another order fail it."""
    case = ZeroCase(3, params=BASE)
    saved = pool.run(cases.as_world, 2, cases.save, case, str(tmp_path), False)[0]
    pool.run(cases.convert_in_a_wrong_order, str(tmp_path), str(tmp_path / "universal"))
    result = pool.run(cases.as_world, 1, cases.load, case, str(tmp_path), None, cases.SAVED)[0]
    with pytest.raises(AssertionError, match="prev_grad"):
        compare_states(result["loaded"], saved["saved"])


def test_the_command(pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mars_dist.cli import main

    a_checkpoint(pool, tmp_path)
    assert main(["checkpoint", "convert", str(tmp_path), str(tmp_path / "out"), "--tag", cases.TAG, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["variant"] == "mars-adamw" and facts["world_size"] == 2 and len(facts["parameters"]) == 9
    assert main(["checkpoint", "convert", str(tmp_path / cases.TAG), str(tmp_path / "other")]) == 0
    assert "9 parameters, saved by 2 ranks at ZeRO stage 2" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(tmp_path / "out")]) == 0
    shutil.rmtree(tmp_path / "out/zero/head.weight")
    assert main(["checkpoint", "verify", str(tmp_path / "out")]) == 1
    assert main(["checkpoint", "convert", str(tmp_path), str(tmp_path / "other")]) == 1
    assert "exists" in capsys.readouterr().err
