"""h, the gradient of the step before, is MARS's own: nobody who writes, zeroes or reuses gradients can change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference import ReferenceMARS
from small import VARIANTS, Parameters, Tensors, assert_close, gradients, parameters, set_gradients
from torch import Tensor, nn

from mars_dist import MARS

STEPS = 5
EVERY_VARIANT = pytest.mark.parametrize("mars_type", VARIANTS)


def fresh(params: Parameters, grads: Tensors) -> None:
    set_gradients(params, grads)


def zeroed_in_place(params: Parameters, grads: Tensors) -> None:
    """As after ``zero_grad(set_to_none=False)``: backward adds to the buffer of the step before."""
    for name, p in params.items():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.zero_()
        p.grad.add_(grads[name])


def overwritten(params: Parameters, grads: Tensors) -> None:
    """Persistent buffers, written over at every step."""
    for name, p in params.items():
        if p.grad is None:
            p.grad = torch.full_like(p, torch.nan)
        p.grad.copy_(grads[name])


def views_of_one_flat(params: Parameters, grads: Tensors) -> None:
    """Gradients that are views of one bucket, as under DDP with ``gradient_as_bucket_view=True``."""
    first = next(iter(params.values())).grad
    if first is None:
        flat = torch.empty(sum(p.numel() for p in params.values()), dtype=next(iter(params.values())).dtype)
        for p, view in zip(params.values(), flat.split([p.numel() for p in params.values()]), strict=True):
            p.grad = view.view_as(p)
    overwritten(params, grads)


FEEDERS = [fresh, zeroed_in_place, overwritten, views_of_one_flat]
EVERY_FEEDER = pytest.mark.parametrize("feed", FEEDERS)
Feeder = Callable[[Parameters, Tensors], None]


@EVERY_FEEDER
@pytest.mark.parametrize("spoil", [False, True], ids=["", "spoilt_after_the_step"])
@pytest.mark.parametrize(
    "kwargs", [{}, {"skip_nonfinite": True}, {"first_step": "paper"}, {"lr": torch.tensor(3e-3)}], ids=str
)
@EVERY_VARIANT
def test_h_is_the_gradient_of_the_step_before_whatever_becomes_of_its_buffer(
    mars_type: str, kwargs: dict[str, Any], spoil: bool, feed: Feeder
) -> None:
    params = parameters(torch.float64)
    ours = {"mars_type": mars_type, "optimize_1d": True, "gamma": 0.3, "clip": 30.0, **kwargs}
    optimizer = MARS(params.values(), **ours)
    theirs: dict[str, Any] = {k: float(v) if k == "lr" else v for k, v in ours.items() if k != "skip_nonfinite"}
    reference = ReferenceMARS(params, **theirs)
    for step in range(STEPS):
        grads = gradients(step, params)
        feed(params, grads)
        optimizer.step()
        reference.step(grads)
        if spoil:
            for p in params.values():
                assert p.grad is not None
                p.grad.fill_(torch.nan)
        for name, p in params.items():
            assert torch.equal(optimizer.state[p]["prev_grad"], grads[name]), name
    assert_close(params, reference.params, atol=1e-9 if "lr" in kwargs else 1e-12)


def memory(tensors: Iterator[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


@EVERY_FEEDER
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_approx", [True, False], ids=["approximate", "exact"])
def test_no_state_shares_memory_with_a_gradient_a_parameter_or_another_state(
    is_approx: bool, dtype: torch.dtype, feed: Feeder
) -> None:
    params = parameters(dtype)
    optimizer = MARS(params.values(), is_approx=is_approx, optimize_1d=True, amsgrad=True)
    for step in range(3):
        feed(params, gradients(step, params))
        optimizer.step()
        feed(params, gradients(10 + step, params))
        optimizer.update_previous_grad()
        optimizer.update_last_grad()
    states = [t for state in optimizer.state.values() for t in state.values()]
    assert len(memory(iter(states))) == len(states), "two states share memory"
    outside = memory(p for p in params.values()) | memory(p.grad for p in params.values() if p.grad is not None)
    assert not memory(iter(states)) & outside


def test_zero_grad_in_a_real_loop_gives_the_same_run_either_way() -> None:
    results = []
    for set_to_none in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = MARS(net.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=set_to_none)
            x = torch.linspace(-1.0, 1.0, 12).view(3, 4) * (step + 1)
            net(x).square().mean().backward()
            optimizer.step()
        results.append([p.detach() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_accumulated_gradients_are_one_gradient() -> None:
    """Backward twice into one buffer, then one step: h is the sum."""
    params = parameters(torch.float64)
    optimizer, reference = MARS(params.values()), ReferenceMARS(params)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        halves = gradients(2 * step, params), gradients(2 * step + 1, params)
        for half in halves:
            loss = sum(((p * half[name]).sum() for name, p in params.items()), torch.zeros((), dtype=torch.float64))
            loss.backward()
        optimizer.step()
        reference.step({name: halves[0][name] + halves[1][name] for name in params})
    assert_close(params, reference.params)


# ---- norms of half-precision gradients


def one_large(n: int) -> Tensor:
    x = torch.full((n, n), 4e-3)
    x[0, 0] = 40.0
    return x


# What a norm in half precision gets wrong: by overflow, by underflow, by a sum that stops growing.
NORM_CASES: dict[str, tuple[torch.dtype, Callable[[], Tensor]]] = {
    "float16_squares_overflow": (torch.float16, lambda: torch.full((4, 3), 300.0)),
    "float16_squares_of_many_underflow": (torch.float16, lambda: torch.full((1024, 1024), 1e-3)),
    "float16_one_large_among_many_small": (torch.float16, lambda: one_large(512)),
    "bfloat16_sum_of_many_stops_growing": (torch.bfloat16, lambda: torch.full((512, 512), 0.01)),
    "bfloat16_large": (torch.bfloat16, lambda: torch.full((4, 3), 1e15)),
    "float32_many_small": (torch.float32, lambda: torch.full((1024, 1024), 1e-3)),
}


@pytest.mark.parametrize("case", NORM_CASES)
@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_the_clip_is_by_a_norm_summed_in_float32_or_better(case: str, skip_nonfinite: bool) -> None:
    """Summed one after the other in float32, the squares of equal numbers are already off by 4e-5."""
    dtype, make = NORM_CASES[case]
    p = nn.Parameter(torch.zeros_like(make(), dtype=dtype))
    optimizer, reference = MARS([p], skip_nonfinite=skip_nonfinite), ReferenceMARS({"p": p.detach()})
    for factor in (1.5, 1.0):
        grad = (factor * make()).to(dtype)
        assert 1.4 * grad.double().norm() > 1, "the case must be clipped"
        p.grad = grad.clone()
        optimizer.step()
        reference.step({"p": grad})
    state, expected = optimizer.state[p], reference.state["p"]
    assert int(state["step"]) == 2
    for moment in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(state[moment].double(), expected[moment], rtol=2e-6, atol=0.0)
