"""Tensors that are missing, frozen, empty, strided or of a kind that is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import ReferenceMARS
from small import (
    VARIANTS,
    Tensors,
    assert_close,
    assert_identical,
    copies,
    gradients,
    parameters,
    set_gradients,
    snapshot,
    train,
)
from torch import Tensor, nn
from torch.nn import Parameter

from mars_dist import MARS

EVERY_VARIANT = pytest.mark.parametrize("mars_type", VARIANTS)


@EVERY_VARIANT
def test_missing_gradients_leave_their_tensor_alone(mars_type: str) -> None:
    params = parameters(torch.float64)
    optimizer = MARS(params.values(), mars_type=mars_type, ns_dtype="float64", weight_decay=0.1)
    reference = ReferenceMARS(params, mars_type=mars_type, weight_decay=0.1)
    missing = {0: {"wide"}, 1: {"bias", "tall"}, 2: set(params), 4: {"wide"}}
    for step in range(6):
        grads = {name: g for name, g in gradients(step, params).items() if name not in missing.get(step, set())}
        set_gradients(params, grads)
        optimizer.step()
        reference.step(grads)
    assert_close(params, reference.params, atol=1e-12)
    assert {name: int(optimizer.state[p]["step"]) for name, p in params.items()} == {
        name: state["step"] for name, state in reference.state.items()
    }


def test_a_step_without_any_gradient_does_nothing() -> None:
    params = parameters()
    optimizer = MARS(params.values())
    optimizer.step()
    assert not any(optimizer.state.values())
    assert_identical(snapshot(optimizer, params), snapshot(optimizer, parameters()))


def test_frozen_parameters_are_left_alone_and_may_be_thawed_later() -> None:
    params = parameters(torch.float64)
    frozen = ("wide", "bias")
    for name in frozen:
        params[name].requires_grad_(False)
    optimizer, reference = MARS(params.values()), ReferenceMARS(params)
    for step in range(4):
        if step == 2:
            for name in frozen:
                params[name].requires_grad_(True)
        grads = {name: g for name, g in gradients(step, params).items() if params[name].requires_grad}
        set_gradients(params, grads)
        optimizer.step()
        reference.step(grads)
        assert all((params[name] in optimizer.state) == (step >= 2) for name in frozen)
    assert_close(params, reference.params)


def test_a_parameter_frozen_in_the_middle_keeps_its_state_for_later() -> None:
    params = parameters(torch.float64)
    optimizer, reference = MARS(params.values()), ReferenceMARS(params)
    for step in range(5):
        params["wide"].requires_grad_(step not in (2, 3))
        grads = {name: g for name, g in gradients(step, params).items() if params[name].requires_grad}
        set_gradients(params, grads)
        optimizer.step()
        reference.step(grads)
    assert_close(params, reference.params)


@pytest.mark.parametrize(
    "kwargs", [{}, {"optimize_1d": True}, {"skip_nonfinite": True}, {"matrix_ndim": (2, 3)}], ids=str
)
@EVERY_VARIANT
def test_empty_tensors_are_stepped_over(mars_type: str, kwargs: dict[str, Any]) -> None:
    shapes = {"none": (0,), "no_rows": (0, 5), "no_columns": (5, 0), "no_experts": (0, 2, 3), "some": (3, 2)}
    params, alone = parameters(torch.float64, shapes), parameters(torch.float64, {"some": (3, 2)})
    alone["some"].data.copy_(params["some"].data)
    optimizer, other = MARS(params.values(), mars_type=mars_type, **kwargs), MARS(alone.values(), mars_type=mars_type)
    for step in range(3):
        grads = gradients(step, params)
        set_gradients(params, grads)
        set_gradients(alone, grads)
        optimizer.step()
        other.step()
    assert_close(params, {**{name: p.detach() for name, p in params.items()}, "some": alone["some"].detach()})
    assert all(int(optimizer.state[p]["step"]) == 3 for p in params.values())


def test_an_optimizer_of_nothing_but_empty_tensors_steps() -> None:
    params = parameters(shapes={"none": (0,), "no_rows": (0, 5)})
    for mars_type in VARIANTS:
        optimizer = MARS(params.values(), mars_type=mars_type, skip_nonfinite=True, first_step="paper")
        train(optimizer, params, range(2))


# How a tensor lies in memory, as a function from a contiguous one to an equal one.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim >= 2 else x.clone(),
    "every_second": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "channels_last": lambda x: x.clone(memory_format=torch.channels_last) if x.ndim == 4 else x.clone(),
    "with_an_offset": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),
}
LAID_OUT = {"kernel": (4, 3, 2, 2), "wide": (3, 5), "bias": (5,), "scalar": ()}


def lay_out(tensors: Tensors, layout: str) -> Tensors:
    out = {name: LAYOUTS[layout](t.detach()) for name, t in tensors.items()}
    assert all(torch.equal(out[name], t) for name, t in tensors.items())
    return out


@pytest.mark.parametrize("of_gradients", LAYOUTS)
@pytest.mark.parametrize("of_parameters", LAYOUTS)
@EVERY_VARIANT
def test_the_layout_in_memory_does_not_matter(mars_type: str, of_parameters: str, of_gradients: str) -> None:
    kwargs: dict[str, Any] = {"mars_type": mars_type, "matrix_ndim": (2, 4), "lr_1d": 3e-3}
    start = parameters(torch.float64, LAID_OUT)
    params = {name: Parameter(p) for name, p in lay_out(dict(start), of_parameters).items()}
    optimizer, reference = MARS(params.values(), **kwargs), ReferenceMARS(start, **kwargs)
    for step in range(3):
        grads = gradients(step, start)
        for name, g in lay_out(grads, of_gradients).items():
            params[name].grad = g
        optimizer.step()
        reference.step(grads)
    assert_close(params, reference.params, atol=1e-12)
    assert {name: p.stride() for name, p in params.items()} == {
        name: p.stride() for name, p in lay_out(dict(start), of_parameters).items()
    }


@pytest.mark.parametrize(("first", "then"), [("channels_last", "contiguous"), ("contiguous", "channels_last")])
@pytest.mark.parametrize("optimize_1d", [False, True])
def test_the_layout_may_change_between_steps(first: str, then: str, optimize_1d: bool) -> None:
    """As after ``model.to(memory_format=...)``."""
    start = parameters(torch.float64, LAID_OUT)
    params = {name: Parameter(p) for name, p in lay_out(dict(start), first).items()}
    optimizer = MARS(params.values(), optimize_1d=optimize_1d)
    reference = ReferenceMARS(start, optimize_1d=optimize_1d)
    for step, layout in enumerate((first, first, then, then)):
        grads = gradients(step, start)
        for name, p in params.items():
            p.data = LAYOUTS[layout](p.data)
            p.grad = LAYOUTS[layout](grads[name])
        optimizer.step()
        reference.step(grads)
    assert_close(params, reference.params)


@pytest.mark.parametrize("first", ["contiguous", "transposed"])
def test_exact_mode_takes_the_two_gradients_in_any_layout(first: str) -> None:
    second = {"contiguous": "transposed", "transposed": "contiguous"}[first]
    start = parameters(torch.float64)
    params = copies(start)
    optimizer, reference = MARS(params.values(), is_approx=False), ReferenceMARS(start, is_approx=False)
    for step in range(4):
        previous = gradients(50 + step, start)
        for name, p in params.items():
            p.grad = LAYOUTS[first](previous[name])
        if step:
            optimizer.update_previous_grad()
            optimizer.update_last_grad()
        grads = gradients(step, start)
        for name, p in params.items():
            p.grad = LAYOUTS[second](grads[name])
        optimizer.step()
        reference.step(grads, previous=previous if step else None)
    assert_close(params, reference.params)


def test_a_gradient_that_is_one_number_seen_many_times_is_read_but_not_written() -> None:
    start = parameters(torch.float64)
    params = copies(start)
    optimizer, reference = MARS(params.values(), maximize=True), ReferenceMARS(start, maximize=True)
    for step in range(3):
        number = torch.tensor(0.5 + step, dtype=torch.float64)
        for p in params.values():
            p.grad = number.expand(p.shape)
        optimizer.step()
        reference.step({name: number.expand(p.shape) for name, p in params.items()})
        assert number == 0.5 + step
    assert_close(params, reference.params)


@pytest.mark.parametrize("skip_nonfinite", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@EVERY_VARIANT
def test_gradients_are_never_written(mars_type: str, maximize: bool, skip_nonfinite: bool) -> None:
    params = parameters()
    optimizer = MARS(params.values(), mars_type=mars_type, maximize=maximize, skip_nonfinite=skip_nonfinite)
    for step in range(3):
        grads = gradients(step, params)
        set_gradients(params, grads)
        optimizer.step()
        assert_identical({name: p.grad for name, p in params.items()}, grads)


# ---- what is refused


@EVERY_VARIANT
def test_sparse_gradients_are_refused_with_a_way_out(mars_type: str) -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = MARS(embedding.parameters(), mars_type=mars_type)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse.*\(10, 4\).*sparse=False"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)


@pytest.mark.parametrize("shape", [(2, 3), (3,)], ids=str)
def test_complex_gradients_are_refused_with_a_way_out(shape: tuple[int, ...]) -> None:
    p = Parameter(torch.ones(shape, dtype=torch.complex64))
    optimizer = MARS([p])
    p.grad = torch.ones(shape, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match=r"complex.*complex64.*real"):
        optimizer.step()
    assert torch.equal(p, torch.ones(shape, dtype=torch.complex64))


def test_a_refused_gradient_leaves_all_other_tensors_alone() -> None:
    params = parameters()
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = MARS([*params.values(), embedding.weight])
    before = {name: p.detach().clone() for name, p in params.items()}
    set_gradients(params, gradients(0, params))
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert_identical({name: p.detach() for name, p in params.items()}, before)


def test_slices_of_tensor_parallelism_are_refused() -> None:
    """DeepSpeed AutoTP and Megatron keep plain tensors: the norm would be that of the slice."""
    p = Parameter(torch.ones(4, 3))
    p.tensor_model_parallel = True  # type: ignore[attr-defined]
    optimizer = MARS([("layer.weight", p)])
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"layer.weight of shape \(4, 3\) is one rank's slice.*autotp_size"):
        optimizer.step()
    copy = Parameter(p.detach().clone())  # as a wrapper without ZeRO does
    copy.grad = torch.ones_like(copy)
    optimizer.param_groups[0]["params"] = [copy]
    with pytest.raises(RuntimeError, match="is one rank's slice"):
        optimizer.step()


def test_a_state_of_another_shape_is_refused() -> None:
    big, small = Parameter(torch.ones(10, 10)), Parameter(torch.ones(5, 5))
    ours, theirs = MARS([small]), MARS([big])
    big.grad = torch.ones_like(big)
    theirs.step()
    with pytest.raises(ValueError, match=r"shape \(10, 10\), its parameter \(5, 5\)"):
        ours.load_state_dict(theirs.state_dict())


def test_adamws_file_keeps_what_it_does_not_say() -> None:
    """A no-decay group of AdamW stays undecayed, and the ratio of the two learning rates that of the group."""
    p, q = Parameter(torch.ones(3)), Parameter(torch.ones(2, 2))
    groups = [{"params": [p], "weight_decay": 0.0, "lr_1d": 1e-3, "lr": 1e-3}, {"params": [q]}]
    adamw = torch.optim.AdamW([{"params": [p], "weight_decay": 0.0}, {"params": [q]}], lr=1e-3)
    mars = MARS(groups, lr=2e-3, lr_1d=4e-3)
    mars.load_state_dict(adamw.state_dict())
    assert mars.param_groups[0]["weight_decay_1d"] == 0.0
    assert mars.param_groups[0]["lr_1d_ratio"] == 1.0 and mars.param_groups[1]["lr_1d_ratio"] == 2.0
    assert mars.param_groups[1]["gamma"] == 0.025 and mars.param_groups[0]["lr"] == 1e-3
