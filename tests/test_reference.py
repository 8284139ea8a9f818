"""The float64 reference against the recorded trajectories, and the identities that hold for one process."""

import math

import golden_cases
import pytest
import torch
from golden_cases import GoldenCase
from reference import ReferenceMARS, as_matrices, newton_schulz, polar_factor
from torch import Tensor

MATRIX_TYPES = ("mars-shampoo", "mars-m")
ALL_TYPES = ("mars-adamw", "mars-lion", *MATRIX_TYPES)


def randn(seed: int, *shape: int, norm: float | None = None) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x if norm is None else x * (norm / x.norm())


def run(params: dict[str, Tensor], grads: list[dict[str, Tensor]], **kwargs) -> ReferenceMARS:
    reference = ReferenceMARS(params, **kwargs)
    for g in grads:
        reference.step(g)
    return reference


def replay(case: GoldenCase, **changes) -> tuple[ReferenceMARS, list[float]]:
    """The reference after the whole trajectory, and the largest |dp| after each step."""
    reference = ReferenceMARS(case.p0, case.groups, **{**case.kwargs, **changes})
    errors = []
    for t, lr in enumerate(case.meta["lrs"]):
        reference.step(case.grads[t], lr=lr, previous=case.previous[t])
        errors.append(max((reference.params[name] - p).abs().max().item() for name, p in case.params[t].items()))
    return reference, errors


# ---- against the authors' numbers


@pytest.mark.parametrize("name", golden_cases.names())
def test_reference_follows_the_golden_trajectory(name: str) -> None:
    case = golden_cases.case(name)
    reference, errors = replay(case)
    for t, error in enumerate(errors):
        assert error <= case.tolerance(t, torch.float64), f"step {t}"
    for key, states in case.states.items():
        for tensor, state in states.items():
            torch.testing.assert_close(reference.state[tensor][key], state, rtol=1e-12, atol=1e-14)
    assert reference.rules == case.rule_of


@pytest.mark.parametrize("name", ["shampoo_approx", "shampoo_exact", "shampoo_1d", "mars_m", "mars_m_gamma0"])
def test_a_matrix_under_the_float64_iteration_agrees_to_rounding(name: str) -> None:
    # The recorded tolerance of 2e-6 is there for the AdamW inside the authors' MARS-M, not for the matrices.
    case = golden_cases.case(name)
    reference, _ = replay(case)
    for tensor, rule in reference.rules.items():
        if rule in ("MARS-Shampoo", "MARS-M"):
            assert (reference.params[tensor] - case.params[-1][tensor]).abs().max() < 1e-13


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("adamw_approx", {"gamma": 0.95, "betas": (0.025, 0.99)}),  # (gamma, beta1) in the wrong order
        ("adamw_approx", {"clip": None}),
        ("adamw_approx", {"first_step": "paper"}),
        ("adamw_approx", {"optimize_1d": True}),
        ("adamw_approx", {"matrix_ndim": (2, 4)}),
        ("adamw_approx", {"lr_1d": 3e-3}),
        ("adamw_amsgrad", {"amsgrad": False}),
        ("adamw_two_groups", {"weight_decay_1d": None}),  # then norms and biases in the no-decay group would not decay
        ("lion_approx", {"gamma": 0.0}),
        ("shampoo_approx", {"orthogonalizer": "svd"}),
        ("shampoo_approx", {"ns_steps": 4}),
        ("shampoo_1d", {"optimize_1d": False}),
        ("mars_m", {"gamma": 0.0}),
        ("mars_m", {"betas": (0.9, 0.99)}),
    ],
)
def test_golden_files_notice_a_wrong_option(name: str, change: dict) -> None:
    case = golden_cases.case(name)
    _, errors = replay(case, **change)
    assert errors[-1] > 10 * case.tolerance(len(errors) - 1, torch.float64)


def test_amsgrad_reaches_the_adamw_tensors_too() -> None:
    case = golden_cases.case("adamw_amsgrad")
    reference, _ = replay(case, amsgrad=False)
    for tensor in ("bias", "norm", "conv"):
        assert (reference.params[tensor] - case.params[-1][tensor]).abs().max() > 1e-5


# ---- identities


@pytest.mark.parametrize("norm", [0.9, 30.0])
def test_gamma_zero_is_torch_adamw_on_the_clipped_gradient(norm: float) -> None:
    p0 = randn(0, 6, 5)
    grads = [randn(t + 1, 6, 5, norm=norm) for t in range(6)]
    ours = run({"w": p0}, [{"w": g} for g in grads], lr=0.01, betas=(0.9, 0.97), eps=1e-6, weight_decay=0.2, gamma=0.0)

    def adamw(gradients: list[Tensor]) -> Tensor:
        p = torch.nn.Parameter(p0.clone())
        optimizer = torch.optim.AdamW([p], lr=0.01, betas=(0.9, 0.97), eps=1e-6, weight_decay=0.2)
        for g in gradients:
            p.grad = g.clone()
            optimizer.step()
        return p.detach()

    clipped = [g / max(1.0, norm) for g in grads]
    torch.testing.assert_close(ours.params["w"], adamw(clipped), rtol=0, atol=1e-14)  # 6 steps, |p| < 4, ulp 4e-16
    if norm > 1:  # the clip stays, and shows through eps
        assert (ours.params["w"] - adamw(grads)).abs().max() > 1e-8


def test_other_tensors_get_torch_adamw() -> None:
    p0 = {"b": randn(0, 7), "conv": randn(1, 2, 3, 2), "s": randn(2)}
    grads = [{name: 50 * randn(10 * t + i, *p.shape) for i, (name, p) in enumerate(p0.items())} for t in range(5)]
    ours = run(p0, grads, lr=0.01, lr_1d=0.004, betas_1d=(0.8, 0.9), weight_decay_1d=0.3, eps=1e-6)
    theirs = {name: torch.nn.Parameter(p.clone()) for name, p in p0.items()}
    optimizer = torch.optim.AdamW(list(theirs.values()), lr=0.004, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    for g in grads:
        for name, p in theirs.items():
            p.grad = g[name].clone()
        optimizer.step()
    for name, p in theirs.items():
        torch.testing.assert_close(ours.params[name], p.detach(), rtol=0, atol=1e-14)
        assert ours.rules[name] == "AdamW"


def test_default_correction_factor_is_0_475() -> None:
    g = randn(0, 4, 4, norm=0.5)
    first = run({"w": g}, [{"w": g}])
    torch.testing.assert_close(first.state["w"]["exp_avg"], 0.05 * 1.475 * g, rtol=1e-14, atol=0)
    paper = run({"w": g}, [{"w": g}], first_step="paper")
    torch.testing.assert_close(paper.state["w"]["exp_avg"], 0.05 * g, rtol=1e-14, atol=0)


def test_clip_is_one_factor_for_the_whole_tensor() -> None:
    g = torch.cat([randn(0, 2, 4, norm=30.0), randn(1, 2, 4, norm=0.1)])
    clipped = run({"w": g}, [{"w": g}], gamma=0.0).state["w"]["exp_avg"]
    torch.testing.assert_close(clipped, 0.05 * g / g.norm(), rtol=1e-13, atol=0)
    looser = run({"w": g}, [{"w": g}], gamma=0.0, clip=4.0).state["w"]["exp_avg"]
    torch.testing.assert_close(looser, 4 * clipped, rtol=1e-13, atol=0)
    unclipped = run({"w": g}, [{"w": g}], gamma=0.0, clip=None).state["w"]["exp_avg"]
    torch.testing.assert_close(unclipped, 0.05 * g, rtol=1e-13, atol=0)


@pytest.mark.parametrize("seed", range(5))
def test_norm_of_c_from_inner_products(seed: int) -> None:
    g, h = randn(2 * seed, 5, 6), randn(2 * seed + 1, 5, 6)
    for k in (0.0, 0.475, 19.0):
        c = g + k * (g - h)
        gg, gh, hh = (g * g).sum(), (g * h).sum(), (h * h).sum()
        expanded = (1 + k) ** 2 * gg - 2 * k * (1 + k) * gh + k**2 * hh
        torch.testing.assert_close(c.norm() ** 2, expanded, rtol=1e-12, atol=0)
        assert c.norm() <= ((1 + k) * g.norm() + k * h.norm()) * (1 + 1e-15)


def b_form(grads: list[Tensor], beta1: float, gamma: float) -> Tensor:
    """m without a previous gradient: b = beta1 * b + (1 - beta1) * (1 - gamma) * g, m = b + gamma * g."""
    b = torch.zeros_like(grads[0])
    for g in grads:
        b = beta1 * b + (1 - beta1) * (1 - gamma) * g
    return b + gamma * grads[-1]


@pytest.mark.parametrize("mars_type", ["mars-lion", *MATRIX_TYPES])
@pytest.mark.parametrize("gamma", [0.0, 0.025, 1.0])
def test_b_form_needs_no_previous_gradient(mars_type: str, gamma: float) -> None:
    grads = [randn(t, 6, 4, norm=3.0) for t in range(8)]
    options = {"mars_type": mars_type, "gamma": gamma}

    def error(**changes) -> float:
        m = run({"w": randn(99, 6, 4)}, [{"w": g} for g in grads], **options, **changes).state["w"]["exp_avg"]
        return (m - b_form(grads, 0.95, gamma)).abs().max().item()

    assert error(clip=None) < 1e-15
    assert error(clip=1.0) > 1e-2  # the clip is not linear
    if gamma:
        assert error(clip=None, first_step="paper") > 1e-3


def test_exact_mode_with_the_last_gradient_is_the_approximate_mode() -> None:
    grads = [randn(t, 5, 5, norm=2.0) for t in range(5)]
    approximate = run({"w": randn(9, 5, 5)}, [{"w": g} for g in grads], gamma=0.3)
    exact = ReferenceMARS({"w": randn(9, 5, 5)}, gamma=0.3, is_approx=False)
    for t, g in enumerate(grads):
        exact.step({"w": g}, previous={"w": grads[t - 1]} if t else None)
    assert torch.equal(exact.params["w"], approximate.params["w"])


@pytest.mark.parametrize("mars_type", ALL_TYPES)
def test_maximize_is_descent_on_the_negated_gradient(mars_type: str) -> None:
    p0 = {"w": randn(0, 5, 3), "b": randn(1, 3)}
    grads = [{"w": randn(2 * t, 5, 3), "b": randn(2 * t + 1, 3)} for t in range(4)]
    negated = [{name: -x for name, x in g.items()} for g in grads]
    up = run(p0, grads, mars_type=mars_type, maximize=True)
    down = run(p0, negated, mars_type=mars_type)
    for name in p0:
        assert torch.equal(up.params[name], down.params[name])


def test_a_missing_gradient_touches_nothing() -> None:
    p0 = {"w": randn(0, 3, 3), "b": randn(1, 3)}
    reference = run(p0, [{"w": randn(2, 3, 3), "b": randn(3, 3)}])
    before, w = reference.state["w"]["prev_grad"].clone(), reference.params["w"].clone()
    reference.step({"w": None, "b": randn(4, 3)})
    assert torch.equal(reference.params["w"], w)
    assert torch.equal(reference.state["w"]["prev_grad"], before)
    assert (reference.state["w"]["step"], reference.state["b"]["step"]) == (1, 2)


def test_a_dry_run_is_no_first_step() -> None:
    p0 = {"w": randn(0, 3, 3), "b": randn(1, 3)}
    grads = {"w": randn(2, 3, 3), "b": randn(3, 3)}
    zero = {name: torch.zeros_like(p) for name, p in p0.items()}
    reference = ReferenceMARS(p0)
    reference.step(zero, lr=0.0)
    assert reference.state == {"w": {}, "b": {}}
    reference.step(grads)
    plain = run(p0, [grads])
    for name in p0:
        assert torch.equal(reference.params[name], plain.params[name])
    reference.step(zero, lr=0.0)  # in the middle of training it is a step like any other
    assert reference.state["w"]["step"] == 2


def test_a_schedule_moves_both_learning_rates() -> None:
    p0 = {"w": randn(0, 3, 3), "b": randn(1, 3)}
    reference = ReferenceMARS(p0, lr=0.01, lr_1d=0.002, weight_decay=0.5, weight_decay_1d=0.5)
    zero = {name: torch.zeros_like(p) for name, p in p0.items()}  # only the decay moves anything
    reference.step(zero, lr=0.005)
    torch.testing.assert_close(reference.params["w"], p0["w"] * (1 - 0.005 * 0.5), rtol=1e-15, atol=0)
    torch.testing.assert_close(reference.params["b"], p0["b"] * (1 - 0.001 * 0.5), rtol=1e-15, atol=0)
    before = {name: p.clone() for name, p in reference.params.items()}
    reference.step({name: torch.ones_like(p) for name, p in p0.items()}, lr=0.0)
    assert all(torch.equal(reference.params[name], p) for name, p in before.items())


@pytest.mark.parametrize(
    ("constructor", "group", "decay"),
    [
        ({"weight_decay_1d": 0.2}, {"weight_decay_1d": 0.7, "weight_decay": 0.0}, 0.7),
        ({"weight_decay_1d": 0.2}, {"weight_decay": 0.0}, 0.2),
        ({}, {"weight_decay": 0.0}, 0.0),
        ({}, {"weight_decay": 0.3}, 0.3),
        ({"weight_decay": 0.4}, {}, 0.1),
    ],
)
def test_decay_of_a_vector_in_order(constructor: dict, group: dict, decay: float) -> None:
    p0 = {"b": randn(0, 4)}
    reference = ReferenceMARS(p0, [{"names": ["b"], **group}], lr=0.01, lr_1d=0.01, **constructor)
    reference.step({"b": torch.zeros(4)})
    torch.testing.assert_close(reference.params["b"], p0["b"] * (1 - 0.01 * decay), rtol=1e-15, atol=0)


# ---- which rule, and the matrix directions


@pytest.mark.parametrize("mars_type", ALL_TYPES)
def test_rules_by_shape_group_and_option(mars_type: str) -> None:
    mars = {"mars-adamw": "MARS-AdamW", "mars-lion": "MARS-Lion", "mars-shampoo": "MARS-Shampoo", "mars-m": "MARS-M"}[
        mars_type
    ]
    vector = "MARS-AdamW" if mars_type in MATRIX_TYPES else mars
    p0 = {"s": randn(0), "b": randn(0, 3), "w": randn(0, 3, 2), "e": randn(0, 2, 3, 2), "conv": randn(0, 2, 2, 2, 2)}

    def rules(groups: list | None = None, **kwargs) -> list[str]:
        return list(ReferenceMARS(p0, groups, mars_type=mars_type, **kwargs).rules.values())

    adamw = "AdamW"
    assert rules() == [adamw, adamw, mars, adamw, adamw]
    assert rules(optimize_1d=True) == [vector, vector, mars, vector, vector]
    assert rules(matrix_ndim=(2, 3, 4)) == [adamw, adamw, mars, mars, mars]
    assert rules([{"names": list(p0), "use_mars": True}]) == [vector, vector, mars, vector, vector]
    assert rules([{"names": list(p0), "use_mars": False}]) == [adamw] * 5
    assert rules(matrices={"b", "w"}) == [adamw, vector, mars, adamw, adamw]


@pytest.mark.parametrize("mars_type", MATRIX_TYPES)
@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (6, 6)])
def test_matrix_direction_is_the_scaled_polar_factor(mars_type: str, shape: tuple[int, int]) -> None:
    g = randn(3, *shape)
    reference = run({"w": torch.zeros(shape)}, [{"w": g}], mars_type=mars_type, lr=1.0, orthogonalizer="svd")
    rows, cols = shape
    scale = max(1, rows / cols) ** 0.5 if mars_type == "mars-shampoo" else 0.2 * math.sqrt(max(shape))
    d = -reference.params["w"] / scale
    gram = d.T @ d if rows >= cols else d @ d.T
    torch.testing.assert_close(gram, torch.eye(min(shape), dtype=torch.float64), rtol=0, atol=1e-12)
    symmetric = d.T @ g if rows >= cols else d @ g.T  # d is the factor of g: what is left of g is positive definite
    torch.testing.assert_close(symmetric, symmetric.T, rtol=0, atol=1e-12)
    assert torch.linalg.eigvalsh(symmetric).min() > 0


@pytest.mark.parametrize("variant", MATRIX_TYPES)
def test_newton_schulz(variant: str) -> None:
    x = randn(0, 8, 5)
    y = newton_schulz(x, variant=variant, eps=1e-8)
    torch.testing.assert_close(newton_schulz(x.T, variant=variant, eps=1e-8), y.T, rtol=0, atol=1e-14)
    torch.testing.assert_close(
        newton_schulz(100 * x, variant=variant, eps=0.0), newton_schulz(x, variant=variant, eps=0.0)
    )
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    expected = s / (s.norm() + 1e-8)  # a polynomial of a matrix acts on its singular values
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    torch.testing.assert_close(y, u @ torch.diag(expected) @ vt, rtol=0, atol=1e-13)
    assert 0.6 < expected.min() and expected.max() < 1.3
    assert newton_schulz(torch.zeros(3, 4), variant=variant, eps=1e-8).count_nonzero() == 0
    low = newton_schulz(x, variant=variant, eps=1e-8, dtype="bfloat16")
    assert 1e-4 < (low - y).abs().max() < 0.1


def test_polar_factor_of_a_singular_matrix() -> None:
    assert polar_factor(torch.zeros(3, 2)).count_nonzero() == 0
    x = randn(0, 4, 1) @ randn(1, 1, 3)
    torch.testing.assert_close(polar_factor(x), x / x.norm(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("mars_type", MATRIX_TYPES)
def test_higher_ranks_as_matrices(mars_type: str) -> None:
    assert as_matrices(randn(0, 3, 4, 5)).shape == (3, 4, 5)
    assert as_matrices(randn(0, 3, 4, 5, 2)).shape == (1, 3, 40)
    options = {"mars_type": mars_type, "lr": 1.0, "matrix_ndim": (2, 3, 4)}
    experts, conv = randn(1, 3, 6, 2, norm=0.5), randn(2, 3, 4, 2, 2, norm=7.0)
    many = run({"e": experts * 0, "conv": conv * 0}, [{"e": experts, "conv": conv}], **options)
    for i in range(3):
        one = run({"w": experts[i] * 0}, [{"w": experts[i]}], **options)
        torch.testing.assert_close(many.params["e"][i], one.params["w"], rtol=0, atol=1e-13)
    flat = run({"w": conv.reshape(3, 16) * 0}, [{"w": conv.reshape(3, 16)}], **options)
    torch.testing.assert_close(many.params["conv"].reshape(3, 16), flat.params["w"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("mars_type", ALL_TYPES)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (0, 2, 2), (), (1, 1)])
def test_small_shapes(mars_type: str, shape: tuple[int, ...]) -> None:
    p0 = {"w": randn(0, *shape)}
    grads = [{"w": randn(t + 1, *shape)} for t in range(2)]
    after = run(p0, grads, mars_type=mars_type, optimize_1d=True, matrix_ndim=(2, 3))
    assert after.params["w"].shape == shape
    assert after.params["w"].isfinite().all()


def test_inputs_are_copied() -> None:
    p0, g = randn(0, 3, 3), randn(1, 3, 3)
    reference = ReferenceMARS({"w": p0})
    kept = (p0.clone(), g.clone())
    reference.step({"w": g})
    assert torch.equal(p0, kept[0]) and torch.equal(g, kept[1])
    g.zero_()  # a gradient buffer that is reused
    assert torch.equal(reference.state["w"]["prev_grad"], kept[1])
    with pytest.raises(ValueError, match="exact mode"):
        reference.step({"w": g}, previous={"w": g})
