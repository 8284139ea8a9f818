"""MARS under DeepSpeed ZeRO-0/1/2/3 on 2 and 3 gloo ranks: the numbers, the rules, the collectives.

REPLAY: the gradients that reached MARS, gathered whole by name at every step, go through the float64 reference; the
model's own parameters must agree. END TO END: the same training on one process.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import nets, zero_cases
from tests.ranks import RankPool
from tests.reference import ReferenceMARS
from tests.zero_cases import LR, ZeroCase

STEPS = 10
REPLAY_TOLERANCE = 2e-6
WRAPPERS = {
    (0, "fp32"): ("MARS", "whole tensors"),
    (0, "bf16"): ("FP16_UnfusedOptimizer", "copies"),
    (1, "fp32"): ("DeepSpeedZeroOptimizer", "ZeRO-1/2"),
    (1, "bf16"): ("DeepSpeedZeroOptimizer", "ZeRO-1/2"),
    (2, "fp32"): ("DeepSpeedZeroOptimizer", "ZeRO-1/2"),
    (2, "bf16"): ("DeepSpeedZeroOptimizer", "ZeRO-1/2"),
    (3, "fp32"): ("DeepSpeedZeroOptimizer_Stage3", "ZeRO-3"),
    (3, "bf16"): ("DeepSpeedZeroOptimizer_Stage3", "ZeRO-3"),
}
LABELS = {"mars-adamw": "MARS-AdamW", "mars-lion": "MARS-Lion"}
MATRIX_LABELS = {"mars-shampoo": "MARS-Shampoo", "mars-m": "MARS-M"}


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3], ids=["2ranks", "3ranks"])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(request.param)
    yield pool
    pool.close()


def settings(variant: str, optimize_1d: bool) -> dict[str, Any]:
    # A clip of 0.1: in these nets c is seldom longer than 1, and a clip that never acts would not be tested.
    return {"mars_type": variant, "optimize_1d": optimize_1d, "weight_decay": 0.05, "clip": 0.1}


MATRIX = [
    ZeroCase(stage, dtype, offload, settings(variant, optimize_1d))
    for stage, dtype, offload, variant, optimize_1d in itertools.product(
        (0, 1, 2, 3), ("fp32", "bf16"), (False, True), LABELS, (False, True)
    )
    if not (offload and stage == 0)
]


def marked(case: ZeroCase) -> Any:
    """In the default tier every engine takes both variants, one of them on 1-D tensors too; in 16 bits the other.

    Stage 1 with offload or in 16 bits is what stage 2 is: the same engine.
    """
    lion, optimize_1d, bf16 = case.params["mars_type"] == "mars-lion", case.params["optimize_1d"], case.dtype == "bf16"
    is_again = case.stage == 1 and (case.offload or bf16)
    return case if (lion == optimize_1d) != bf16 and not is_again else pytest.param(case, marks=pytest.mark.slow)


BASE = settings("mars-adamw", False)
SMALL_CLIP = {**BASE, "clip": 0.01}  # beside a global clip of 0.1
MORE = [
    *(ZeroCase(stage, params=SMALL_CLIP, clip=0.1) for stage in (0, 1, 2, 3)),
    *(ZeroCase(stage, offload=True, params=SMALL_CLIP, clip=0.1) for stage in (2, 3)),
    *(ZeroCase(stage, params=BASE, accumulation=2) for stage in (0, 1, 2, 3)),
    ZeroCase(2, "bf16", params=SMALL_CLIP, accumulation=2, clip=0.1),
    *(ZeroCase(stage, params=BASE, construct="groups") for stage in (0, 1, 2, 3)),
    ZeroCase(3, params=BASE, construct="groups", zero={"sub_group_size": 60}),
    ZeroCase(2, params=BASE, construct="groups", zero={"round_robin_gradients": True}),
    *(ZeroCase(s, params=BASE, construct=c) for s in (2, 3) for c in ("instance", "callable", "partial")),
    *(ZeroCase(s, params=BASE, construct="instance") for s in (0, 1)),
    ZeroCase(2, offload=True, params=BASE, construct="instance"),
    ZeroCase(1, params=BASE, net="only_padding"),
    ZeroCase(2, params=BASE, net="only_padding"),
    ZeroCase(3, params=BASE, net="only_padding"),
    ZeroCase(2, params={**BASE, "amsgrad": True}),
    ZeroCase(2, params={**BASE, "clip": None}),
    ZeroCase(3, params={**BASE, "first_step": "paper", "skip_nonfinite": True}),
]

SHAMPOO = {**settings("mars-shampoo", False), "ns_dtype": "float32"}
MARS_M = {**settings("mars-m", False), "ns_dtype": "float32"}
MATRIX_VARIANTS = [
    ZeroCase(1, params=MARS_M),
    ZeroCase(2, "bf16", params=SHAMPOO, clip=0.1),
    ZeroCase(2, offload=True, params=MARS_M, construct="instance"),
    ZeroCase(3, "bf16", offload=True, params=MARS_M, construct="groups", zero={"sub_group_size": 60}),
    ZeroCase(3, params=SHAMPOO, accumulation=2),
    ZeroCase(1, params=SHAMPOO, net="only_padding"),
    ZeroCase(3, params={**MARS_M, "matrix_buffer_mb": 1e-5, "skip_nonfinite": True}),
]


def replay(result: dict[str, Any], case: ZeroCase) -> dict[str, torch.Tensor]:
    """The float64 reference on the gradients that reached MARS."""
    groups = None
    net = nets.build(case.net)
    if case.construct == "groups":
        first, second = zero_cases.group_names(net)
        groups = [{"names": first}, {"names": second, **zero_cases.SECOND_SETTINGS}]
    ignored = ("skip_nonfinite", "ns_dtype", "matrix_buffer_mb")  # the reference iterates in float64
    kwargs = {k: v for k, v in {**LR, **case.params}.items() if k not in ignored}
    reference = ReferenceMARS(result["start"], groups, **kwargs)
    for gradients in result["gradients"]:
        reference.step({name: g.view(result["start"][name].shape) for name, g in gradients.items()})
    return reference.params


def clipped(result: dict[str, Any]) -> set[str]:
    """The tensors whose c was longer than the clip at some step (gamma, betas and h as by default)."""
    k = 0.025 * 0.95 / 0.05
    names, out = set(result["start"]), set()
    previous = {name: torch.zeros(()) for name in names}
    for gradients in result["gradients"]:
        c = {name: g + k * (g - previous[name]) for name, g in gradients.items()}
        out |= {name for name in names if c[name].norm() > 1.01 * result["groups"][0]["clip"]}
        previous = gradients
    return out


def cut_over_ranks(results: list[dict[str, Any]]) -> set[str]:
    held = [{name for name, start, stop in r["pieces"] if stop > start} for r in results]
    return {name for name in set().union(*held) if sum(name in h for h in held) > 1}


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("case", [marked(case) for case in MATRIX] + MORE + MATRIX_VARIANTS, ids=str)
def test_replay(pool: RankPool, case: ZeroCase) -> None:
    results = pool.run(zero_cases.run, case)
    result = results[0]

    # The engine under test really was active, and every tensor took the rule of its global shape.
    wrapper, engine = WRAPPERS[case.stage, case.dtype]
    assert (result["wrapper"], result["engines"], result["stage"]) == (wrapper, {engine}, case.stage)
    variant = case.params["mars_type"]
    label = {**LABELS, **MATRIX_LABELS}[variant]
    matrices, vectors = (nets.MATRICES, nets.VECTORS) if case.net == "net" else (1, 0)
    counts = {label: matrices + vectors} if case.params["optimize_1d"] else {label: matrices, "AdamW": vectors}
    counts = {k: n for k, n in counts.items() if n}
    assert all(r["rule_counts"] == counts for r in results)
    noun = "tensors" if counts[label] > matrices else "matrices"
    text = f"{label} on {counts[label]} {noun}" + f", AdamW on {counts.get('AdamW')} other tensors" * (
        "AdamW" in counts
    )
    assert [m for m in result["messages"] if " on " in m] == [f"{text} ({engine})"]
    assert all(not r["messages"] for r in results[1:])

    # REPLAY: every update was recorded, every element of every tensor reached MARS exactly once.
    assert len(result["gradients"]) == case.steps and result["steps"] == [float(case.steps)]
    for gradients in result["gradients"]:
        assert {n: g.numel() for n, g in gradients.items()} == {n: p.numel() for n, p in result["start"].items()}
    assert furthest(replay(result, case), result["end"]) < (5e-6 if variant in MATRIX_LABELS else REPLAY_TOLERANCE)
    moved = min((result["end"][n] - result["start"][n]).abs().max().item() for n in result["start"])
    assert moved > 1e-3, "a tensor did not move: the comparison would prove nothing"
    if case.stage and case.params["clip"] is not None:
        cut = cut_over_ranks(results)
        assert not cut or clipped(result) & cut, "no tensor that is cut was clipped"
    for other in results[1:]:
        assert furthest(other["end"], result["end"]) == 0.0, "the ranks hold different parameters"


@pytest.mark.parametrize("case", [ZeroCase(s, params=BASE, steps=1, record_public=True) for s in (1, 2, 3)], ids=str)
def test_recorded_gradients_are_those_of_deepspeeds_public_call(pool: RankPool, case: ZeroCase) -> None:
    result = pool.run(zero_cases.run, case)[0]
    assert result["public_gradients"].keys() == result["start"].keys()
    assert furthest(result["gradients"][0], result["public_gradients"]) < 1e-7


@pytest.mark.parametrize("case", [ZeroCase(s, params=BASE) for s in (0, 1, 2, 3)], ids=str)
def test_collectives(pool: RankPool, case: ZeroCase) -> None:
    """One all-reduce of one number per MARS tensor and call; the first call of a flat also compares the tables."""
    result = pool.run(zero_cases.run, case)[0]
    if case.stage == 0:
        assert result["collectives"] == [[]] * STEPS
        return
    # Built by name: one flat of matrices, one of vectors; the latter needs no norm.
    first = [[("all_reduce", 2), ("all_reduce", nets.MATRICES)], [("all_reduce", 2)]]
    later = [[("all_reduce", nets.MATRICES)], []]
    assert result["collectives"] == first + later * (STEPS - 1)


def test_collectives_with_the_nonfinite_flag(pool: RankPool) -> None:
    """``skip_nonfinite``: the same single all-reduce, with a number for the AdamW tensors as well, and two of what the
    rank knows from other process groups (whether some gradient is not finite, whether some is not zero)."""
    case = ZeroCase(2, params={**BASE, "skip_nonfinite": True}, construct="instance")
    result = pool.run(zero_cases.run, case)[0]
    assert result["collectives"][1:] == [[("all_reduce", nets.MATRICES + nets.VECTORS + 2)]] * (STEPS - 1)


@pytest.mark.parametrize("variant", LABELS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_clip_by_the_local_piece_would_be_found(pool: RankPool, stage: int, variant: str) -> None:
    case = ZeroCase(stage, params=settings(variant, False))
    result = pool.run(zero_cases.run_with_the_norm_of_the_local_piece, case)[0]
    assert furthest(replay(result, case), result["end"]) > 100 * REPLAY_TOLERANCE


def test_the_cuts_are_the_awkward_ones(pool: RankPool) -> None:
    """Tensors that straddle a cut, in the middle of a row; tensors that some rank has nothing of; only padding."""
    for stage in (1, 2, 3):
        results = pool.run(zero_cases.run, ZeroCase(stage, params=BASE, steps=1))
        cut = cut_over_ranks(results)
        assert len(cut) >= 2
        rows = {name: p.shape[-1] for name, p in nets.build().named_parameters()}
        starts = [(name, start) for r in results for name, start, stop in r["pieces"] if stop > start and name in cut]
        assert any(start % rows[name] for name, start in starts), "no cut inside a row"
        holders = [[n for n, start, stop in r["pieces"] if n == "gain" and stop > start] for r in results]
        assert [] in holders, "gain has one element: some rank holds nothing of it"
        if stage < 3 and pool.world_size == 3:
            results = pool.run(zero_cases.run, ZeroCase(stage, params=BASE, net="only_padding", steps=1))
            assert not any(stop > start for _, start, stop in results[2]["pieces"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_client_optimizer_gives_the_same_run(pool: RankPool, stage: int) -> None:
    by_name = pool.run(zero_cases.run, ZeroCase(stage, params=BASE))[0]
    for construct in ("instance", "callable", "partial"):
        other = pool.run(zero_cases.run, ZeroCase(stage, params=BASE, construct=construct))[0]
        assert furthest(other["end"], by_name["end"]) < 1e-6, construct


@pytest.mark.parametrize(
    "key, zero",
    [
        ("super_offload", {"offload_optimizer": {"device": "cpu", "super_offload": True}}),
        ("zenflow", {"zenflow": {"topk_ratio": 0.1}, "offload_optimizer": {"device": "cpu"}}),
    ],
)
def test_features_that_take_the_update_over_are_refused(pool: RankPool, key: str, zero: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=rf"MARS: zero_optimization\.\S*{key} = .*DeepSpeed would update"):
        pool.run(zero_cases.run, ZeroCase(3 if key == "super_offload" else 2, params=BASE, zero=zero))


END_TO_END = [
    pytest.param(
        ZeroCase(stage, offload=offload, params=settings(variant, optimize_1d), clip=clip, accumulation=accumulation),
        # the order of summing, which this checks beyond replay, is the engine's: not that of a variant
        marks=[pytest.mark.slow] if variant == "mars-lion" and (optimize_1d or accumulation > 1) else [],
    )
    for stage, offload in ((0, False), (1, False), (2, False), (3, False), (2, True), (3, True))
    for variant, optimize_1d, clip, accumulation in (
        ("mars-adamw", False, 0.1, 1),
        ("mars-adamw", True, 0.0, 1),
        ("mars-lion", True, 0.0, 1),
        ("mars-lion", False, 0.0, 1),
        ("mars-adamw", False, 0.0, 2),
        ("mars-lion", False, 0.0, 2),
    )
    if not (offload and (optimize_1d or variant == "mars-lion"))
]


END_TO_END += [
    ZeroCase(1, params=SHAMPOO),
    ZeroCase(2, params=MARS_M, accumulation=2),
    ZeroCase(2, offload=True, params=SHAMPOO, clip=0.1),
    ZeroCase(3, params=MARS_M),
]


@pytest.mark.parametrize("case", END_TO_END, ids=str)
def test_end_to_end(pool: RankPool, case: ZeroCase) -> None:
    """The same training on one process, in float32, with the reference as the optimizer."""
    result = pool.run(zero_cases.run, case)[0]
    net = nets.build(case.net)
    params = {k: v for k, v in case.params.items() if k != "ns_dtype"}
    reference = ReferenceMARS({n: p.detach().double() for n, p in net.named_parameters()}, **LR, **params)
    for step in range(case.steps):
        net.zero_grad()
        net(*nets.batch(step)).backward()
        if case.clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        reference.step({n: p.grad.double() for n, p in net.named_parameters() if p.grad is not None})
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_(reference.params[name])
    assert furthest(result["end"], reference.params) < (2e-5 if case.accumulation > 1 else 5e-6)


def test_states_under_lion_are_not_allocated_where_no_tensor_needs_them(pool: RankPool) -> None:
    case = ZeroCase(2, params=settings("mars-lion", True))
    assert pool.run(zero_cases.run, case)[0]["state_keys"] == ["exp_avg", "prev_grad", "step"]


@pytest.mark.parametrize("case", [ZeroCase(s, params=MARS_M) for s in (1, 2, 3)], ids=str)
def test_collectives_of_matrix_variants(pool: RankPool, case: ZeroCase) -> None:
    """The all-reduce of the norms, pieces to the owners, pieces of their results back; one state less."""
    results = pool.run(zero_cases.run, case)
    first, *later = (calls for calls in results[0]["collectives"] if len(calls) > 1)
    kinds = ["all_reduce", "all_to_all_single", "all_to_all_single"]
    assert [[name for name, _ in calls] for calls in later] == [kinds] * (STEPS - 1)
    # The first step compares the tables and the plans, and tells the others which pieces this rank holds.
    assert Counter(n for n, _ in first) == Counter([*kinds, "all_gather_into_tensor", "all_reduce", "all_reduce"])
    assert results[0]["collectives"][1:2] == [[("all_reduce", 2)]], "the flat of vectors has nothing to exchange"
    matrices = {n: p.numel() for n, p in nets.build().named_parameters() if p.ndim == 2}
    for result in results:
        its = [calls for calls in result["collectives"] if len(calls) > 1]
        received = sum(n for name, n in its[1] if name == "all_to_all_single")
        assert received <= 2 * sum(matrices.values())
    assert results[0]["state_keys"] == ["exp_avg", "exp_avg_sq", "prev_grad", "step"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_without_zero_the_ranks_share_out_the_matrices(pool: RankPool, dtype: str) -> None:
    """Every rank holds all of them: each is orthogonalised by one rank, which broadcasts its results."""
    for result in pool.run(zero_cases.run, ZeroCase(0, dtype, params=SHAMPOO, steps=3)):
        for calls in result["collectives"][1:]:
            assert [name for name, _ in calls] == ["broadcast"] * pool.world_size
            assert sum(n for _, n in calls) == sum(p.numel() for p in nets.build().parameters() if p.ndim == 2)
