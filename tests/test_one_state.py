"""Without the clip one state per tensor is enough: equal to the form with two, refused where it would not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mars_dist import MARS

SHAPES = [(5, 3), (3, 7), (4,)]
VARIANTS = ("mars-lion", "mars-shampoo", "mars-m")


def trained(steps: int = 12, **settings: Any) -> tuple[list[torch.Tensor], MARS]:
    """``steps`` steps in float64 on random gradients; a tensor has none at one of them."""
    generator = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in SHAPES]
    optimizer = MARS(params, **{"lr": 1e-2, "lr_1d": 1e-2, "weight_decay": 0.1, "clip": None, "gamma": 0.3, **settings})
    for step in range(steps):
        for p in params:
            p.grad = 3.0 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        if step == 4:
            params[0].grad = None
        optimizer.step()
    return [p.detach().clone() for p in params], optimizer


@pytest.mark.parametrize("mars_type", VARIANTS)
@pytest.mark.parametrize("more", [{}, {"maximize": True}, {"skip_nonfinite": True}, {"optimize_1d": True}], ids=str)
def test_equal_to_the_form_with_two_states(mars_type: str, more: dict[str, Any]) -> None:
    one, optimizer = trained(mars_type=mars_type, **more)
    two, other = trained(mars_type=mars_type, one_state=False, **more)
    states = [set(optimizer.state[p]) for p in optimizer.param_groups[0]["params"]]
    assert states[0] == states[1] == {"step", "exp_avg"}
    assert all("prev_grad" in other.state[p] for p in other.param_groups[0]["params"][:2])
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0.0)
    other_gamma, _ = trained(mars_type=mars_type, **{**more, "gamma": 0.0})
    assert (one[0] - other_gamma[0]).abs().max() > 1e-4, "gamma does nothing here: the comparison would prove nothing"


def test_a_step_that_is_skipped_changes_nothing() -> None:
    values, optimizer = trained(mars_type="mars-m", skip_nonfinite=True)
    params = optimizer.param_groups[0]["params"]
    before = [t.clone() for p in params for t in (p, *optimizer.state[p].values())]
    for p in params:
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    after = [t for p in params for t in (p, *optimizer.state[p].values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_default_is_one_state_where_it_is_the_same() -> None:
    p = torch.nn.Parameter(torch.zeros(2, 2))
    for settings, expected in [
        ({"mars_type": "mars-m", "clip": None}, True),
        ({"mars_type": "mars-m"}, False),
        ({"mars_type": "mars-adamw", "clip": None}, False),
        ({"mars_type": "mars-lion", "clip": None, "first_step": "paper"}, False),
        ({"mars_type": "mars-lion", "clip": None, "is_approx": False}, False),
    ]:
        assert MARS([p], lr=1e-3, lr_1d=1e-3, **settings).param_groups[0]["one_state"] is expected, settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "clip=1"),
        ({"clip": None, "first_step": "paper"}, "first_step='paper'"),
        ({"clip": None, "is_approx": False}, "exact mode"),
        ({"clip": None, "mars_type": "mars-adamw"}, "second moment"),
    ],
    ids=str,
)
def test_refused_where_it_is_another_rule(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MARS([torch.nn.Parameter(torch.zeros(2, 2))], lr=1e-3, **{"mars_type": "mars-m", "one_state": True, **settings})


def test_a_scheduled_gamma_is_refused_and_changes_nothing() -> None:
    _, optimizer = trained(mars_type="mars-m")
    p = optimizer.param_groups[0]["params"][0]
    optimizer.param_groups[0]["gamma"] = 0.1
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"gamma=0\.1, and the states were made with 0\.3.*one_state=False"):
        optimizer.step()
    assert torch.equal(p, before)
    optimizer.param_groups[0] |= {"gamma": 0.3, "clip": 1.0}
    with pytest.raises(ValueError, match="clip=1"):
        optimizer.step()


def test_gamma_may_be_set_before_the_first_step() -> None:
    _, optimizer = trained(steps=0, mars_type="mars-m")
    optimizer.param_groups[0]["gamma"] = 0.1
    p = optimizer.param_groups[0]["params"][0]
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], 0.05 * 0.9 * torch.ones_like(p))


@pytest.mark.parametrize("saved_with", [True, False])
def test_the_checkpoint_says_which_form_it_holds(saved_with: bool) -> None:
    """A state goes on in the form in which it was saved, whatever the new optimizer would have chosen."""
    _, first = trained(steps=5, mars_type="mars-m", one_state=saved_with)
    saved = first.state_dict()
    assert saved["param_groups"][0]["one_state"] is saved_with
    params = [torch.nn.Parameter(p.detach().clone()) for p in first.param_groups[0]["params"]]
    second = MARS(params, lr=1e-2, mars_type="mars-m", clip=None, one_state=not saved_with)
    second.load_state_dict(saved)
    for optimizer in (first, second):
        generator = torch.Generator().manual_seed(8)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        optimizer.step()
    for a, b in zip(first.param_groups[0]["params"], params, strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_from_before_there_were_two_forms() -> None:
    _, first = trained(steps=5, mars_type="mars-m", one_state=False)
    saved = first.state_dict()
    for key in ("one_state", "one_state_gamma"):
        del saved["param_groups"][0][key]
    second = MARS([torch.nn.Parameter(p.detach().clone()) for p in first.param_groups[0]["params"]], clip=None,
                  mars_type="mars-m", lr=1e-2)  # fmt: skip
    assert second.param_groups[0]["one_state"] is True
    second.load_state_dict(saved)
    assert second.param_groups[0]["one_state"] is False


@pytest.mark.parametrize(("made", "then"), [(True, False), (False, True)])
def test_the_form_of_states_that_are_there_cannot_be_changed(made: bool, then: bool) -> None:
    _, optimizer = trained(steps=3, mars_type="mars-m", one_state=made)
    params = optimizer.param_groups[0]["params"]
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[0]["one_state"] = then
    with pytest.raises(
        ValueError, match=f"one_state={then}, and the states of the group were made with one_state={made}"
    ):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    optimizer.param_groups[0]["one_state"] = None  # whichever it is
    optimizer.step()
    assert optimizer.param_groups[0]["one_state"] is made and ("prev_grad" in optimizer.state[params[0]]) is not made


@pytest.mark.parametrize("orthogonalizer", ["newton-schulz", "svd", "polar-express", "cans"])
def test_a_gradient_that_is_nan_leaves_a_skipped_step_alone(orthogonalizer: str) -> None:
    _, optimizer = trained(steps=3, mars_type="mars-m", skip_nonfinite=True, orthogonalizer=orthogonalizer)
    params = optimizer.param_groups[0]["params"]
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))


@pytest.mark.parametrize(("saved_with", "loaded_into"), [(True, False), (False, True)])
def test_torchs_flat_state_dict_of_the_other_form(saved_with: bool, loaded_into: bool) -> None:
    """torch reads only the states that the new optimizer has: prev_grad would be lost, and that is refused."""
    from torch.distributed.checkpoint import state_dict as helpers

    options = helpers.StateDictOptions(flatten_optimizer_state_dict=True)

    def built(one_state: bool) -> tuple[torch.nn.Module, MARS]:
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 4)
        optimizer = MARS(net.parameters(), lr=1e-2, lr_1d=1e-2, mars_type="mars-m", clip=None, one_state=one_state)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        return net, optimizer

    saved = helpers.get_optimizer_state_dict(*built(saved_with), options=options)
    undisturbed, expected = built(saved_with)
    net, optimizer = built(loaded_into)
    if loaded_into:
        with pytest.raises(ValueError, match="saved with one_state=False and come without prev_grad.*one_state=False"):
            helpers.set_optimizer_state_dict(net, optimizer, saved, options=options)
        assert optimizer.param_groups[0]["one_state"] is True
        return
    helpers.set_optimizer_state_dict(net, optimizer, saved, options=options)
    assert optimizer.param_groups[0]["one_state"] is True and "prev_grad" not in optimizer.state[net.weight]
    for model, its in ((undisturbed, expected), (net, optimizer)):
        for step in range(3):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.5 + step).index_fill(0, torch.tensor([0]), -1.0)
            its.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), undisturbed.parameters(), strict=True))
