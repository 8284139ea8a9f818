"""``mars_dist.MARS`` on one process against every recorded trajectory, to the tolerances in golden/README.md."""

import golden_cases
import pytest
import torch
from golden_cases import GoldenCase, Tensors
from torch.nn import Parameter

from mars_dist import MARS

# What a rule needs besides `step` and `exp_avg`; anything more would be memory that is never read.
EXTRA_STATES = {
    "MARS-AdamW": {"exp_avg_sq", "prev_grad"},
    "MARS-Lion": {"prev_grad"},
    "MARS-Shampoo": {"prev_grad"},
    "MARS-M": {"prev_grad"},
    "AdamW": {"exp_avg_sq"},
}


def build(case: GoldenCase, dtype: torch.dtype) -> tuple[dict[str, Parameter], MARS]:
    params = {name: Parameter(p.to(dtype, copy=True)) for name, p in case.p0.items()}
    return params, MARS(case.param_groups(dict(params)), **case.kwargs)


def set_grads(params: dict[str, Parameter], grads: Tensors) -> None:
    """Write into the same buffers at every step: an optimizer that keeps one of them as h goes wrong here."""
    for name, p in params.items():
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(grads[name])


def take_step(case: GoldenCase, t: int, params: dict[str, Parameter], optimizer: MARS) -> None:
    previous = case.previous[t]
    if previous is not None:
        set_grads(params, previous)
        optimizer.update_previous_grad()  # as at the point before, on the batch of this step
        optimizer.update_last_grad()
    for group in optimizer.param_groups:
        group["lr"] = case.meta["lrs"][t]
    set_grads(params, case.grads[t])
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", golden_cases.names())
def test_optimizer_follows_the_golden_trajectory(name: str, dtype: torch.dtype) -> None:
    case = golden_cases.case(name)
    params, optimizer = build(case, dtype)
    for t in range(case.meta["steps"]):
        take_step(case, t, params, optimizer)
        for tensor, expected in case.params[t].items():
            error = (params[tensor].detach().double() - expected).abs().max().item()
            assert error <= case.tolerance(t, dtype), f"{tensor} after step {t}"

    rtol, atol = (1e-12, 1e-14) if dtype == torch.float64 else (1e-5, 1e-6)
    for key, states in case.states.items():
        for tensor, expected in states.items():
            state = optimizer.state[params[tensor]][key]
            torch.testing.assert_close(state.double(), expected, rtol=rtol, atol=atol)
    assert {rule: count for rule, count in optimizer.rule_counts().items() if count} == case.rules


@pytest.mark.parametrize("name", golden_cases.names())
def test_states_are_those_of_the_rule(name: str) -> None:
    case = golden_cases.case(name)
    params, optimizer = build(case, torch.float64)
    for t in range(case.meta["steps"]):
        take_step(case, t, params, optimizer)
    for tensor, p in params.items():
        state = optimizer.state[p]
        assert state["step"].shape == () and state["step"].item() == case.meta["steps"]
        rule = case.rule_of[tensor]
        extra = set(state) - {"step", "exp_avg"}
        optional = {"max_exp_avg_sq"} if case.kwargs.get("amsgrad") else set()
        if case.meta["exact"] and rule != "AdamW":
            optional.add("next_prev_grad")  # h of the step after this one
        if case.kwargs["gamma"] == 0.0:
            optional.add("prev_grad")  # multiplied by zero: it may be kept for a later change of gamma, or left out
        assert EXTRA_STATES[rule] - optional <= extra <= EXTRA_STATES[rule] | optional, tensor
        if "prev_grad" in extra:
            if not case.meta["exact"]:
                assert torch.equal(state["prev_grad"], case.grads[-1][tensor])
            assert p.grad is not None and state["prev_grad"].data_ptr() != p.grad.data_ptr()
