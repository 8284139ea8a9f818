"""How a group holds its matrices: (in, out) weights, several matrices side by side; and MARS-M without correction."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference import ReferenceMARS
from torch import Tensor
from torch.nn import Parameter

from mars_dist import MARS
from mars_dist.maths.rules import RULES, MatrixForm, Orthogonalizer

MATRIX_VARIANTS = ("mars-shampoo", "mars-m")
EVERY_MATRIX_VARIANT = pytest.mark.parametrize("mars_type", MATRIX_VARIANTS)
EXACT = Orthogonalizer("svd", 5, None)


def random(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def direction(mars_type: str, x: Tensor, form: MatrixForm, orthogonalize: Orthogonalizer = EXACT) -> Tensor:
    function = RULES[mars_type].matrix_direction
    assert function is not None
    return function(x, 0.05, 1e-8, orthogonalize, form)


def train(mars_type: str, p0: dict[str, Tensor], grads: list[dict[str, Tensor]], **kwargs: Any) -> dict[str, Tensor]:
    params = {name: Parameter(p.clone()) for name, p in p0.items()}
    optimizer = MARS(params.values(), mars_type=mars_type, **kwargs)
    for step in grads:
        for name, p in params.items():
            p.grad = step[name].to(p.dtype)
        optimizer.step()
    labels = {"mars-m": "MARS-M", "mars-shampoo": "MARS-Shampoo", "mars-adamw": "MARS-AdamW", "mars-lion": "MARS-Lion"}
    assert optimizer.rule_counts() == {labels[mars_type]: len(params)}
    return {name: p.detach() for name, p in params.items()}


# ---- the direction


@pytest.mark.parametrize("shape", [(4, 12), (12, 4), (6, 6), (3, 4, 12), (0, 4, 12), (2, 3, 12, 6)], ids=str)
@EVERY_MATRIX_VARIANT
def test_in_out_weights_get_the_direction_of_their_transpose(mars_type: str, shape: tuple[int, ...]) -> None:
    x = random(shape)
    for parts in (1, 2):
        found = direction(mars_type, x, MatrixForm(True, parts))
        wanted = direction(mars_type, x.mT.contiguous(), MatrixForm(False, parts)).mT
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        assert found.shape == x.shape


def test_the_scale_takes_the_transposed_shape() -> None:
    """(in, out) = (4, 16): sqrt(max(1, out / in)) = 2 and not 1. MARS-M's scale is symmetric."""
    x = random((4, 16))
    form = MatrixForm(fan_in_fan_out=True)
    assert torch.linalg.matrix_norm(direction("mars-shampoo", x, form), 2).item() == pytest.approx(2.0)
    assert torch.linalg.matrix_norm(direction("mars-shampoo", x, MatrixForm()), 2).item() == pytest.approx(1.0)
    assert torch.equal(direction("mars-m", x, form), direction("mars-m", x, MatrixForm()))


@pytest.mark.parametrize("fan_in_fan_out", [False, True])
@EVERY_MATRIX_VARIANT
def test_parts_are_matrices_of_their_own(mars_type: str, fan_in_fan_out: bool) -> None:
    parts = [random((4, 5), seed) * 10.0**seed for seed in range(3)]  # of very different size
    dim = 1 if fan_in_fan_out else 0
    for orthogonalize in (EXACT, Orthogonalizer("newton-schulz", 5, None), Orthogonalizer("cans", 5, None)):
        fused = direction(mars_type, torch.cat(parts, dim), MatrixForm(fan_in_fan_out, 3), orthogonalize)
        alone = [direction(mars_type, part, MatrixForm(fan_in_fan_out), orthogonalize) for part in parts]
        torch.testing.assert_close(fused, torch.cat(alone, dim), rtol=0, atol=1e-12)
        together = direction(mars_type, torch.cat(parts, dim), MatrixForm(fan_in_fan_out), orthogonalize)
        assert (together - fused).abs().max() > 0.05


def test_a_part_of_zeros_stays_zero() -> None:
    x = torch.cat([random((4, 5)), torch.zeros(4, 5, dtype=torch.float64), random((4, 5), 1)])
    for mars_type in MATRIX_VARIANTS:
        found = direction(mars_type, x, MatrixForm(parts=3), Orthogonalizer("newton-schulz", 5, None))
        assert found[4:8].count_nonzero() == 0 and found.isfinite().all()


@pytest.mark.parametrize("form", [MatrixForm(), MatrixForm(True), MatrixForm(False, 2), MatrixForm(True, 2)], ids=str)
@EVERY_MATRIX_VARIANT
def test_matrices_without_elements(mars_type: str, form: MatrixForm) -> None:
    for shape in ((0, 4), (4, 0), (0, 2, 4), (2, 0, 0)):
        x = torch.ones(shape)
        assert direction(mars_type, x, form, Orthogonalizer("newton-schulz", 5, None)).shape == x.shape


# ---- the optimizer


@pytest.mark.parametrize(
    "kwargs", [{"fan_in_fan_out": True}, {"matrix_parts": 3}, {"fan_in_fan_out": True, "matrix_parts": 3}]
)
@pytest.mark.parametrize("orthogonalizer", ["newton-schulz", "svd"])
@EVERY_MATRIX_VARIANT
def test_against_the_reference(mars_type: str, orthogonalizer: str, kwargs: dict[str, Any]) -> None:
    shapes = {
        "tall": (24, 6),
        "wide": (6, 24),
        "square": (12, 12),
        "experts": (2, 9, 6),
        "long": (6, 60),
        "conv": (6, 3, 2, 2),
    }
    p0 = {name: random(shape) for name, shape in shapes.items()}
    grads = [{name: random(p.shape, 100 * step + i) for i, (name, p) in enumerate(p0.items())} for step in range(10)]
    common: dict[str, Any] = {
        "lr": 0.01,
        "weight_decay": 0.1,
        "orthogonalizer": orthogonalizer,
        "matrix_ndim": (2, 3, 4),
    }
    reference = ReferenceMARS(p0, mars_type=mars_type, **common, **kwargs)
    for step in grads:
        reference.step(step)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        params = train(mars_type, {name: p.to(dtype) for name, p in p0.items()}, grads, **common, **kwargs)
        if dtype == torch.float32:  # replay: the same gradients as the float32 parameters saw
            reference = ReferenceMARS(
                {name: p.float() for name, p in p0.items()}, mars_type=mars_type, **common, **kwargs
            )
            for step in grads:
                reference.step({name: g.float() for name, g in step.items()})
        for name, p in params.items():
            torch.testing.assert_close(p.double(), reference.params[name], rtol=0, atol=tolerance)
    plain = train(mars_type, p0, grads, **common)
    moved = max((plain[name] - reference.params[name]).abs().max().item() for name in p0)
    if (mars_type, kwargs) != ("mars-m", {"fan_in_fan_out": True}):  # a symmetric scale
        assert moved > 1e-3


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion"])
def test_the_element_wise_variants_ignore_both(mars_type: str) -> None:
    p0, grads = {"w": random((4, 6))}, [{"w": random((4, 6), step)} for step in range(3)]
    forms = [{}, {"fan_in_fan_out": True, "matrix_parts": 5}]
    one, other = (train(mars_type, p0, grads, **form) for form in forms)
    assert torch.equal(one["w"], other["w"])


def test_a_group_has_its_own_form_which_is_saved() -> None:
    params = [Parameter(random((6, 4))), Parameter(random((4, 6)))]
    groups: list[dict[str, Any]] = [
        {"params": params[:1]},
        {"params": params[1:], "fan_in_fan_out": True, "matrix_parts": 2},
    ]
    optimizer = MARS(groups, mars_type="mars-m")
    assert [(g["fan_in_fan_out"], g["matrix_parts"]) for g in optimizer.param_groups] == [(False, 1), (True, 2)]
    other = MARS([{"params": [p]} for p in params], mars_type="mars-m")
    other.load_state_dict(optimizer.state_dict())
    assert [(g["fan_in_fan_out"], g["matrix_parts"]) for g in other.param_groups] == [(False, 1), (True, 2)]
    old = optimizer.state_dict()
    for group in old["param_groups"]:  # of a version before these keys
        del group["fan_in_fan_out"], group["matrix_parts"]
    optimizer.load_state_dict(old)
    assert [(g["fan_in_fan_out"], g["matrix_parts"]) for g in optimizer.param_groups] == [(False, 1), (True, 2)]


# ---- parts that do not fit


def test_parts_that_do_not_divide_a_matrix_are_refused_when_the_group_is_added() -> None:
    good, bad = Parameter(torch.ones(6, 4)), Parameter(torch.ones(4, 6))
    vector = Parameter(torch.ones(5))
    message = r"matrix_parts=3 does not divide the 4 outputs of a matrix of shape \(4, 6\).*fan_in_fan_out=True"
    with pytest.raises(ValueError, match=r"parameter 1 of the group: " + message):
        MARS([good, bad, vector], mars_type="mars-m", matrix_parts=3)
    with pytest.raises(ValueError, match=r"parameter proj of the group: " + message):
        MARS([("fused", good), ("proj", bad)], mars_type="mars-shampoo", matrix_parts=3)
    MARS([bad, vector], mars_type="mars-m", matrix_parts=3, fan_in_fan_out=True)
    MARS([good, bad, vector], mars_type="mars-adamw", matrix_parts=3)
    MARS([good, bad, vector], mars_type="mars-m", matrix_parts=3, use_mars=False)
    optimizer = MARS([good, vector], mars_type="mars-m", matrix_parts=3)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1, "as before"
    optimizer.add_param_group({"params": [bad], "matrix_parts": 2})


def test_parts_changed_later_are_refused_in_the_step() -> None:
    """RuntimeError from what is asked once about new tensors, alike on every rank; later a ValueError."""
    for steps_before, kind in ((0, RuntimeError), (1, ValueError)):
        p = Parameter(torch.ones(4, 6))
        p.grad = torch.ones(4, 6)
        optimizer = MARS([p], mars_type="mars-m")
        for _ in range(steps_before):
            optimizer.step()
        optimizer.param_groups[0]["matrix_parts"] = 3
        with pytest.raises(kind, match=r"matrix_parts=3 does not divide the 4 outputs"):
            optimizer.step()


# ---- Muon


def float32_newton_schulz(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """What ``torch.optim.Muon`` computes in bfloat16, in float32."""
    a, b, c = coefficients
    x = grad.T if grad.shape[0] > grad.shape[1] else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.shape[0] > grad.shape[1] else x


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("mars_type", "adjust"), [("mars-m", "match_rms_adamw"), ("mars-shampoo", "original")])
def test_without_correction_and_clip_it_is_muon(
    mars_type: str, adjust: str, weight_decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's momentum is the same average, (1 - momentum) of the gradient added to the rest."""
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", float32_newton_schulz)
    shapes = [(16, 16), (24, 8), (8, 24), (6, 48), (48, 6), (1, 9), (9, 1), (32, 40)]
    p0 = [random(shape, i).float() for i, shape in enumerate(shapes)]
    ours, theirs = ([Parameter(p.clone()) for p in p0] for _ in range(2))
    lr = 0.01
    mars = MARS(ours, lr=lr, mars_type=mars_type, gamma=0.0, clip=None, betas=(0.9, 0.99), weight_decay=weight_decay)
    muon = torch.optim.Muon(theirs, lr=lr, momentum=0.9, nesterov=False, weight_decay=weight_decay, adjust_lr_fn=adjust)
    for step in range(15):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = random(p.shape, 1000 * step + i).float() * 3
            q.grad = p.grad.clone()
        mars.step()
        muon.step()
    assert mars.rule_counts() == {"MARS-M" if mars_type == "mars-m" else "MARS-Shampoo": len(shapes)}
    for p, q, start in zip(ours, theirs, p0, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)
        scale = 0.2 * math.sqrt(max(p.shape)) if mars_type == "mars-m" else 1.0
        assert (p - start).norm() > lr * scale, "it has moved"
