"""The result of a step does not depend on how tensors are cut over ranks, nor on how many ranks there are.

Ranks are threads here (thread_ranks.py), everything else is the real step. The cuts are any
cuts: in the middle of rows, ranks that hold nothing, ranks that hold only padding. Matrix variants run in rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mars_dist import pieces, states, step
from mars_dist.config import GROUP_DEFAULTS, VARIANTS, Settings, resolve_defaults, resolve_group
from mars_dist.matrices import Plans
from mars_dist.sharding.layout import Layout, Segment
from tests.reference import ReferenceMARS
from tests.thread_ranks import Ranks

STEPS = 3
SHAPES = st.lists(st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple), min_size=1, max_size=5)


@dataclass
class Scenario:
    shapes: list[tuple[int, ...]]
    cuts: list[int]  # boundaries of the ranks in the flat tensor, padding at the end included
    kwargs: dict[str, Any]
    scale: float

    @property
    def world_size(self) -> int:
        return len(self.cuts) - 1


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    shapes = draw(SHAPES)
    total = sum(torch.Size(s).numel() for s in shapes) + draw(st.integers(0, 5))
    inner = draw(st.lists(st.integers(0, total), min_size=0, max_size=4))
    kwargs = {
        "mars_type": draw(st.sampled_from(VARIANTS)),
        "matrix_ndim": draw(st.sampled_from(((2,), (2, 3)))),
        "optimize_1d": draw(st.booleans()),
        "clip": draw(st.sampled_from((1.0, 0.1, None))),
        "amsgrad": draw(st.booleans()),
        "first_step": draw(st.sampled_from(("reference", "paper"))),
        "weight_decay": draw(st.sampled_from((0.0, 0.1))),
        "lr": 1e-2,
        "lr_1d": 5e-3,
    }
    return Scenario(shapes, [0, *sorted(inner), total], kwargs, draw(st.sampled_from((1e-3, 0.3, 30.0))))


def segments_of(scenario: Scenario, rank: int) -> list[Segment]:
    first, last = scenario.cuts[rank], scenario.cuts[rank + 1]
    segments, begin = [], 0
    for i, shape in enumerate(scenario.shapes):
        numel = torch.Size(shape).numel()
        low, high = max(first, begin), min(last, begin + numel)
        piece = (0, 0, 0) if low >= high else (low - begin, high - begin, low - first)
        segments.append(Segment(f"p{i}", shape, *piece))
        begin += numel
    return segments


def run_sharded(scenario: Scenario, p0: list[Tensor], gradients: list[list[Tensor]], block: int) -> list[Tensor]:
    """Every rank steps on its flat piece; the pieces put together again."""
    padded = scenario.cuts[-1]
    settings_keys = Settings().to_dict().keys()
    given = {k: v for k, v in scenario.kwargs.items() if k in settings_keys}
    config = Settings(**given, ns_dtype="float64", matrix_buffer_mb=block * 8 / 2**20)
    given_ = {**GROUP_DEFAULTS, **{k: v for k, v in scenario.kwargs.items() if k not in settings_keys}}
    group = resolve_group({}, resolve_defaults(given_))

    def flatten(tensors: list[Tensor]) -> Tensor:
        flat = torch.cat([t.flatten() for t in tensors])
        return torch.nn.functional.pad(flat, (0, padded - flat.numel()))

    ranks = Ranks(scenario.world_size)
    tables = [segments_of(scenario, r) for r in range(scenario.world_size)]

    def rank(r: int) -> Tensor:
        first, last = scenario.cuts[r], scenario.cuts[r + 1]
        param = flatten(p0)[first:last].clone()
        layout = Layout(tuple(tables[r]), (ranks,), "threads")  # type: ignore[arg-type]
        if scenario.world_size > 1:
            layout = replace(layout, together=ranks, on_ranks=tuple(map(tuple, tables)))  # type: ignore[arg-type]
        state: dict[str, Tensor] = {}
        plans = Plans()
        for grads in gradients:
            shard = pieces.Shard(param, flatten(grads)[first:last].clone(), state, group, layout)
            rules = [step.rule_of(s, group, config) for s in layout.segments]
            states.ensure(state, param, shard.grad, rules, group["amsgrad"])
            step.take_step([shard], config, plans)
        return param

    with mock.patch.dict(pieces.BLOCK_NUMEL, {"cpu": block}):
        results = ranks.run(rank)
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, ConnectionError):
            raise result
    for calls in ranks.calls:
        sums = sum(name == "all_reduce" for name, _ in calls)
        plan_checked = config.mars_type in ("mars-shampoo", "mars-m")
        assert sums <= STEPS + plan_checked, "more than one all-reduce in a step"
    flat = torch.cat(results)
    sizes = [torch.Size(s).numel() for s in scenario.shapes]
    assert not flat[sum(sizes) :].any(), "the padding moved"
    return [t.view(s) for t, s in zip(flat[: sum(sizes)].split(sizes), scenario.shapes, strict=True)]


@pytest.mark.parametrize("block", [1 << 17, 3], ids=["one block", "blocks of 3 elements"])
def test_any_cut_gives_the_unsharded_answer(block: int) -> None:
    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(scenarios(), st.integers(0, 10**6))
    def check(scenario: Scenario, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw() -> list[Tensor]:
            return [torch.randn(s, generator=generator, dtype=torch.float64) for s in scenario.shapes]

        p0 = draw()
        gradients = [[g * scenario.scale for g in draw()] for _ in range(STEPS)]
        reference = ReferenceMARS({f"p{i}": p for i, p in enumerate(p0)}, **scenario.kwargs)
        for grads in gradients:
            reference.step({f"p{i}": g for i, g in enumerate(grads)})
        for i, p in enumerate(run_sharded(scenario, p0, gradients, block)):
            torch.testing.assert_close(p, reference.params[f"p{i}"], atol=1e-12, rtol=0.0)

    check()


def test_clip_by_the_local_piece_would_be_found() -> None:
    """The classic fault: without the sum over the ranks the answer is another one."""
    scenario = Scenario([(6, 7)], [0, 20, 42], {"lr": 1e-2}, 1.0)
    generator = torch.Generator().manual_seed(0)
    p0, gradient = (torch.randn(6, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    reference = ReferenceMARS({"p0": p0}, lr=1e-2)
    for _ in range(STEPS):
        reference.step({"p0": gradient})
        gradient = gradient + 0.1
    gradients = [[gradient - 0.1 * (STEPS - t)] for t in range(STEPS)]
    with mock.patch.object(Ranks, "all_reduce"):
        (wrong,) = run_sharded(scenario, [p0], gradients, 1 << 17)
    assert (wrong - reference.params["p0"]).abs().max() > 1e-5
