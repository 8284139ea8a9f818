"""MARS under DistributedDataParallel on 2 and 3 gloo ranks, and the refusal of tensors that it cannot see through."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mars_dist
from tests import ddp_cases, nets
from tests.ddp_cases import LR, DdpCase
from tests.ranks import RankPool
from tests.reference import ReferenceMARS

LABELS = {"mars-adamw": "MARS-AdamW", "mars-lion": "MARS-Lion", "mars-shampoo": "MARS-Shampoo", "mars-m": "MARS-M"}
ELEMENTWISE = ("mars-adamw", "mars-lion")
ENGINES: list[dict[str, Any]] = [
    {},
    {"ddp": {"gradient_as_bucket_view": True}},
    {"ddp": {"static_graph": True}},
    {"set_to_none": False},
    {"ddp": {"gradient_as_bucket_view": True}, "set_to_none": False},
]


@pytest.fixture(
    scope="module",
    params=[pytest.param(size, marks=[] if size == 3 else pytest.mark.slow) for size in (2, 3, 4)],
    ids=["2ranks", "3ranks", "4ranks"],
)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(request.param)
    yield pool
    pool.close()


def params(variant: str, **more: Any) -> dict[str, Any]:
    precision = {} if variant in ELEMENTWISE else {"ns_dtype": "float32"}
    return {"mars_type": variant, "weight_decay": 0.05, **precision, **more}


def reference(start: dict[str, torch.Tensor], case: DdpCase) -> ReferenceMARS:
    ignored = ("skip_nonfinite", "ns_dtype")  # the reference iterates in float64
    return ReferenceMARS(start, **{k: v for k, v in {**LR, **case.params}.items() if k not in ignored})


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def replay(result: dict[str, Any], case: DdpCase) -> dict[str, torch.Tensor]:
    model = reference(result["start"], case)
    for gradients in result["gradients"]:
        finite = all(g.isfinite().all() for g in gradients.values())
        if finite or not case.params.get("skip_nonfinite"):
            model.step(gradients)
    return model.params


MATRIX = [DdpCase(params=params(v), **engine) for v, engine in itertools.product(LABELS, ENGINES)]
MORE = [
    DdpCase(params=params("mars-adamw", optimize_1d=True), ddp={"gradient_as_bucket_view": True}),
    DdpCase(params=params("mars-shampoo", optimize_1d=True), set_to_none=False),
    *(DdpCase(params=params(v), ddp={"find_unused_parameters": True}, unused=True) for v in LABELS),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", MATRIX + MORE, ids=str)
def test_replay(pool: RankPool, case: DdpCase) -> None:
    results = pool.run(ddp_cases.run, case, timeout=60)
    label, one_dimensional = LABELS[case.params["mars_type"]], "AdamW"
    if case.params.get("optimize_1d"):
        one_dimensional = label if case.params["mars_type"] in ELEMENTWISE else "MARS-AdamW"
    counts: dict[str, int] = {}
    for name, n in ((label, nets.MATRICES), (one_dimensional, nets.VECTORS)):
        counts[name] = counts.get(name, 0) + n
    for result in results:
        assert (result["ddp"], result["engines"]) == ("DistributedDataParallel", {"whole tensors"})
        assert result["rule_counts"] == counts
        assert result["collectives"] == [[]] * case.steps, "whole tensors need no communication"
        assert furthest(result["end"], results[0]["end"]) == 0.0, "the ranks hold different parameters"
    assert [len([m for m in r["messages"] if " on " in m]) for r in results] == [1] + [0] * (pool.world_size - 1)

    result = results[0]
    tolerance = 2e-6 if case.params["mars_type"] in ELEMENTWISE else 5e-6
    assert furthest(replay(result, case), result["end"]) < tolerance
    short = sum(case.unused and step % 3 == 1 for step in range(case.steps))
    skipped = dict.fromkeys(("narrow.weight", "gain"), short)
    assert result["counts"] == {n: case.steps - skipped.get(n, 0) for n in result["start"]}
    moved = min((result["end"][n] - result["start"][n]).abs().max().item() for n in result["start"])
    assert moved > 1e-3, "a tensor did not move: the comparison would prove nothing"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_end_to_end(pool: RankPool, case: DdpCase) -> None:
    """The same training on one process, in float32, with the reference as the optimizer."""
    result = pool.run(ddp_cases.run, case, timeout=60)[0]
    net = nets.build()
    model = reference({n: p.detach().double() for n, p in net.named_parameters()}, case)
    for step in range(case.steps):
        net.zero_grad()
        net(*nets.batch(step)).backward()
        model.step({n: p.grad.double() for n, p in net.named_parameters() if p.grad is not None})
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_(model.params[name])
    assert furthest(result["end"], model.params) < 5e-6


POISONED = 3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("variant", ["mars-adamw", "mars-shampoo"])
@pytest.mark.parametrize("step", [0, POISONED])
def test_a_loss_that_is_not_finite_on_one_rank_leaves_everything_untouched_on_all(
    pool: RankPool, step: int, variant: str, value: float
) -> None:
    """Only one vector's gradient is not finite: the other tensors must be left alone as well."""
    case = DdpCase(params=params(variant, skip_nonfinite=True), poison=(step, pool.world_size - 1, value))
    results = pool.run(ddp_cases.run, case, timeout=60)
    for result in results:
        bad = {name for name, g in result["gradients"][step].items() if not g.isfinite().all()}
        assert bad == {"shift"}
        skipped = [i for i, untouched in enumerate(result["untouched"]) if untouched]
        assert skipped == ([step] if step else []), "states are created at the first step, as zeros"
        assert set(result["counts"].values()) == {case.steps - 1.0}
        assert furthest(result["end"], results[0]["end"]) == 0.0
    tolerance = 2e-6 if variant in ELEMENTWISE else 5e-6
    assert furthest(replay(results[0], case), results[0]["end"]) < tolerance


# ------------------------------------------------------------------------------------------------------- refusals


def optimizer_of(*shapes: tuple[int, ...]) -> tuple[list[torch.nn.Parameter], mars_dist.MARS]:
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    return params, mars_dist.MARS(params, **LR)


def replace(optimizer: mars_dist.MARS, tensors: list[torch.Tensor]) -> None:
    """What an engine does that steps on tensors of its own."""
    for t in tensors:
        t.grad = torch.ones_like(t)
    optimizer.param_groups[0]["params"] = tensors


def test_a_flat_tensor_in_place_of_the_parameters_is_refused() -> None:
    params, optimizer = optimizer_of((2, 3), (3,))
    flat = torch.cat([p.detach().flatten() for p in params]).requires_grad_()
    replace(optimizer, [flat])
    with pytest.raises(RuntimeError, match=r"2 trainable tensors .* 1 others .*\(9,\).*does not fall back to AdamW"):
        optimizer.step()
    assert torch.equal(flat, torch.ones(9)) and not any(optimizer.state.values())


@pytest.mark.parametrize("pick", [(0,), (1, 0), (0, 1, 1)], ids=str)
def test_copies_in_another_order_or_number_are_refused(pick: tuple[int, ...]) -> None:
    params, optimizer = optimizer_of((2, 3), (3,))
    copies = [params[i].detach().clone() for i in pick]
    replace(optimizer, copies)
    with pytest.raises(RuntimeError, match="cannot match with them.*Construct it with the model's own parameters"):
        optimizer.step()
    assert all(torch.equal(c, torch.ones_like(c)) for c in copies)


def test_copies_in_the_same_order_keep_the_rules_of_their_shapes() -> None:
    params, optimizer = optimizer_of((2, 3), (3,))
    replace(optimizer, [p.detach().clone() for p in params])
    optimizer.step()
    assert optimizer.rule_counts() == {"MARS-AdamW": 1, "AdamW": 1} and optimizer.engines() == {"copies"}
