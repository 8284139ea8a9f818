"""The orthogonalisations against float64 references made from singular values, and what they cost.

The reference applies the published polynomials to the singular values that LAPACK finds: no product of the iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mars_dist.config import ORTHOGONALIZERS
from mars_dist.maths import orthogonalize, schedules
from mars_dist.maths.orthogonalize import cans, flops, newton_schulz, polar_express, polar_factor
from mars_dist.maths.rules import Orthogonalizer

ITERATIONS: dict[str, Callable[..., Tensor]] = {
    "newton-schulz": newton_schulz,
    "polar-express": polar_express,
    "cans": cans,
}
# In float32. Rounding (6e-8) is amplified by the slope of what follows: at singular values that matter up to 68
# (Newton-Schulz) and 225 (Polar Express, CANS); CANS also sends some of the largest values near 0 in between, as its
# intervals end there, and brings them back. Of a matrix of rank 1 the largest element is all there is.
ROUNDING = {"newton-schulz": 5e-6, "polar-express": 1e-5, "cans": 6e-5, "svd": 5e-6}
EVERY_ITERATION = pytest.mark.parametrize("method", ITERATIONS)
EVERY_METHOD = pytest.mark.parametrize("method", ORTHOGONALIZERS)
# 1 x n, n x 1, 1 x 1, square, nearly square, long enough for the small form, batches.
SHAPES = [
    (1, 7),
    (7, 1),
    (1, 1),
    (6, 6),
    (7, 5),
    (5, 7),
    (8, 16),
    (24, 80),
    (80, 24),
    (3, 4, 6),
    (3, 4, 16),
    (2, 3, 9, 4),
]
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


def random(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_values(kind: str, rows: int, cols: int, seed: int = 0) -> Tensor:
    """A matrix that is "random", has "condition 1e4", is "rank-deficient" (half the rank) or has "rank 1"."""
    x = random((rows, cols), seed)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    if kind == "condition 1e4":
        s = torch.logspace(0, -4, len(s), dtype=torch.float64)
    elif kind == "rank-deficient":
        s[len(s) // 2 :] = 0
    elif kind == "rank 1":
        s[1:] = 0
    return (u * s) @ vh


KINDS = ("random", "condition 1e4", "rank-deficient", "rank 1")


def expected(x: Tensor, method: str, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """The polynomials on the singular values of every matrix of ``x``, in float64."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    if method == "svd":
        kept = s > s.amax(-1, keepdim=True) * max(x.shape[-2:]) * torch.finfo(x.dtype).eps
        return (u * kept.unsqueeze(-2)) @ vh
    if method == "newton-schulz":
        schedule = [(3.4445, -4.7750, 2.0315)] * steps
        s = s / (s.norm(dim=-1, keepdim=True) + eps)
    elif method == "polar-express":
        schedule = list(schedules.polar_express(steps))
        s = s / (1.01 * s.norm(dim=-1, keepdim=True) + eps)
    else:
        schedule = list(schedules.cans(steps))
        s = s / ((s**8).sum(-1, keepdim=True) ** 0.125 + eps)
    for a, b, c in schedule:
        s = a * s + b * s**3 + c * s**5
    return (u * s.unsqueeze(-2)) @ vh


def orthogonalizer(method: str, dtype: torch.dtype | None = None, steps: int = 5) -> Callable[..., Tensor]:
    """As the rules call it."""
    made = Orthogonalizer(method, steps, dtype)
    return lambda x, eps=1e-7, variant="mars-m": made(x, eps, variant)


# ---- values


@EVERY_SHAPE
@EVERY_METHOD
def test_values_in_float64(method: str, shape: tuple[int, ...]) -> None:
    x = random(shape)
    for variant in ("mars-m", "mars-shampoo"):
        y = orthogonalizer(method)(x, 1e-7, variant)
        assert (y.dtype, y.shape) == (torch.float64, x.shape)
        torch.testing.assert_close(y, expected(x, method), rtol=0, atol=1e-12)


@EVERY_SHAPE
@EVERY_METHOD
def test_values_in_float32(method: str, shape: tuple[int, ...]) -> None:
    x = random(shape).float()
    for variant in ("mars-m", "mars-shampoo"):
        y = orthogonalizer(method)(x, 1e-7, variant)
        assert (y.dtype, y.shape) == (torch.float32, x.shape)
        torch.testing.assert_close(
            y.double(), expected(x, method), rtol=0, atol=3e-5 if 1 in shape else ROUNDING[method]
        )


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 8, 9])
@EVERY_ITERATION
def test_values_with_other_numbers_of_steps(method: str, steps: int) -> None:
    for shape in ((5, 7), (4, 12)):
        x = random(shape, seed=steps)
        y = ITERATIONS[method](x, steps)
        torch.testing.assert_close(y, expected(x, method, steps), rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "cols"), [(64, 64), (64, 256), (256, 64)], ids=str)
@EVERY_ITERATION
def test_values_of_ill_conditioned_and_rank_deficient_matrices(method: str, rows: int, cols: int, kind: str) -> None:
    x = with_values(kind, rows, cols)
    torch.testing.assert_close(ITERATIONS[method](x), expected(x, method), rtol=0, atol=1e-12)
    low = x.float()
    error = (ITERATIONS[method](low).double() - expected(low, method)).abs().max().item()
    assert error <= (5e-5 if kind == "rank 1" else 2 * ROUNDING[method])


@pytest.mark.parametrize("kind", ["random", "rank-deficient"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@EVERY_METHOD
def test_half_precision_tensors_are_computed_in_float32_on_a_cpu(method: str, dtype: torch.dtype, kind: str) -> None:
    for shape in ((16, 20), (16, 40)):
        x = with_values(kind, *shape).to(dtype)
        y = orthogonalizer(method)(x, 1e-7, "mars-m")
        assert y.dtype == dtype
        if method != "svd":  # what rounding makes of a rank is only seen in the precision of the matrix
            error = (y.double() - expected(x, method)).norm() / expected(x, method).norm()
            assert error <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", KINDS)
@EVERY_ITERATION
def test_in_bfloat16_the_iterations_stay_bounded(method: str, kind: str) -> None:
    """What a GPU computes, here emulated: the error is that of bfloat16, and nothing grows."""
    for shape in ((32, 32), (32, 128)):
        x = with_values(kind, *shape).float()
        y = ITERATIONS[method](x, dtype=torch.bfloat16).double()
        assert torch.linalg.matrix_norm(y, 2) <= 1.4
        if kind == "random":
            assert (y - polar_factor(x.double())).norm() <= 0.4 * y.norm()


@EVERY_METHOD
def test_a_batch_is_its_matrices_one_by_one(method: str) -> None:
    for shape in ((5, 4, 6), (5, 6, 3), (5, 3, 3), (2, 5, 4, 10)):
        x = random(shape)
        x.view(-1, *shape[-2:])[1] = 0
        f = orthogonalizer(method)
        alone = torch.stack([f(matrix) for matrix in x.view(-1, *shape[-2:])]).view(shape)
        torch.testing.assert_close(f(x), alone, rtol=0, atol=1e-13)
        strided = x.mT.contiguous().mT
        torch.testing.assert_close(f(strided), alone, rtol=0, atol=1e-13)


@EVERY_METHOD
def test_an_empty_batch_and_empty_matrices(method: str) -> None:
    for shape in ((0, 4, 6), (0, 3), (3, 0), (2, 0, 5), (0, 0)):
        for dtype in (torch.float32, torch.bfloat16):
            y = orthogonalizer(method)(torch.ones(shape, dtype=dtype))
            assert (y.shape, y.dtype) == (torch.Size(shape), dtype)


# ---- zero, tiny, huge, not finite


@pytest.mark.parametrize("eps", [1e-7, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (3, 12), (9, 2), (1, 5)], ids=str)
@EVERY_METHOD
def test_zero_gives_zero_also_within_a_batch(
    method: str, shape: tuple[int, int], dtype: torch.dtype, eps: float
) -> None:
    for variant in ("mars-m", "mars-shampoo"):
        f = orthogonalizer(method, dtype)
        assert torch.equal(f(torch.zeros(shape), eps, variant), torch.zeros(shape))
        x = random((3, *shape)).float()
        x[1] = 0
        y = f(x, eps, variant)
        assert y[1].count_nonzero() == 0
        for i in (0, 2):
            assert torch.isfinite(y[i]).all() and y[i].norm() > 0.5
            torch.testing.assert_close(
                y[i], f(x[i], eps, variant), rtol=0, atol=0.02 if dtype == torch.bfloat16 else 1e-5
            )


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-3, 1e3, 1e30])
@pytest.mark.parametrize("shape", [(4, 5), (3, 12)], ids=str)
@EVERY_METHOD
def test_tiny_and_huge_matrices_in_float32(method: str, shape: tuple[int, int], scale: float) -> None:
    """Squares of 1e30 overflow in float32 and squares of 1e-30 vanish; what eps leaves of tiny matrices is the same."""
    x = (scale * random(shape)).float()
    for eps in (1e-7, 0.0):
        for variant in ("mars-m", "mars-shampoo"):
            y = orthogonalizer(method)(x, eps, variant)
            wanted = expected(x, method, eps=eps)
            torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


def test_the_smallest_and_the_largest_numbers_of_float32() -> None:
    for value in (1e-45, 3e38):
        x = torch.full((3, 3), value)
        for method in ORTHOGONALIZERS:
            assert torch.isfinite(orthogonalizer(method)(x)).all(), (method, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@EVERY_ITERATION
def test_what_is_not_finite_spoils_its_own_matrix_only(method: str, value: float) -> None:
    x = random((3, 4, 10)).float()
    x[1, 2, 3] = value
    y = ITERATIONS[method](x)
    assert y[1].isnan().all()
    torch.testing.assert_close(y[[0, 2]], ITERATIONS[method](x[[0, 2]]), rtol=0, atol=1e-6)


# ---- the small form


@EVERY_ITERATION
def test_the_small_form_is_the_same_polynomial(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random((2, 12, 40))
    small = {steps: ITERATIONS[method](x, steps) for steps in (1, 2, 3, 5, 7)}
    monkeypatch.setattr(orthogonalize, "SMALL_FORM_ASPECT", math.inf)
    for steps, y in small.items():
        plain = ITERATIONS[method](x, steps)
        torch.testing.assert_close(y, plain, rtol=0, atol=1e-12)
        assert (y - plain).abs().max() > 0, "two different ways"


def test_newton_schulz_in_bfloat16_follows_the_authors_code_for_every_shape() -> None:
    x = random((8, 64)).float()
    for variant in ("mars-m", "mars-shampoo"):
        y = x.bfloat16()
        y = y / ((x if variant == "mars-shampoo" else y).norm() + 1e-7)
        y = y.bfloat16()
        a, b, c = 3.4445, -4.7750, 2.0315
        for _ in range(5):
            gram = y @ y.T
            if variant == "mars-shampoo":
                right = gram @ y
                y = a * y + b * right + (c * gram) @ right
            else:
                y = a * y + (b * gram + (c * gram) @ gram) @ y
        assert torch.equal(newton_schulz(x, dtype=torch.bfloat16, variant=variant), y.float())


@EVERY_ITERATION
def test_the_small_form_needs_its_segments(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the rounding of A would be amplified by all steps at once."""
    x = with_values("condition 1e4", 64, 256).float()
    wanted = expected(x, method)
    with_segments = (ITERATIONS[method](x).double() - wanted).abs().max()
    monkeypatch.setattr(orthogonalize, "SMALL_FORM_ASPECT", math.inf)
    plain = (ITERATIONS[method](x).double() - wanted).abs().max()
    monkeypatch.undo()
    monkeypatch.setattr(orthogonalize, "_segments", lambda steps: [(0, steps)])
    without = (ITERATIONS[method](x).double() - wanted).abs().max()
    assert with_segments <= 1e-5 and with_segments <= 4 * plain
    assert without >= 5 * with_segments


# ---- the schedules


def test_the_table_of_the_polar_express_is_the_minimax_composition_for_values_from_1e_3() -> None:
    """The derivation of the paper: intervals that are not longer than 1 : 0.0241 ("cushion") for each step's optimum,
    which is then scaled so that the values lie evenly around 1."""
    cushion = 0.02407327424182761
    lower, upper = 1e-3, 1.0
    for row in schedules.POLAR_EXPRESS:
        (a, b, c), _ = schedules.minimax_quintic(max(lower, cushion * upper), upper)
        ends = [a * x + b * x**3 + c * x**5 for x in (lower, upper)]
        factor = 2 / sum(ends) if cushion * upper > lower else 1.0
        assert (a * factor, b * factor, c * factor) == pytest.approx(row, rel=1e-10)
        lower = factor * ends[0]
        upper = 2 - lower
    assert schedules.polar_express(9)[-2:] == ((15 / 8, -10 / 8, 3 / 8),) * 2
    assert len(schedules.polar_express(3)) == 3


@pytest.mark.parametrize("lower", [1e-5, 1e-3, 0.05, 0.3, 0.8, 0.99, 0.9999])
def test_a_minimax_quintic_has_four_equal_extrema_of_alternating_sign(lower: float) -> None:
    """By Chebyshev's theorem no other odd quintic comes nearer to 1 on the interval."""
    upper = 1.01
    (a, b, c), error = schedules.minimax_quintic(lower, upper)
    x = torch.linspace(lower, upper, 200_001, dtype=torch.float64)
    distance = a * x + b * x**3 + c * x**5 - 1
    assert distance.abs().max().item() == pytest.approx(error, rel=1e-6, abs=1e-13)
    assert error < 1
    near = distance[distance.abs() >= error * (1 - 1e-4) - 1e-15]
    changes = (near[1:].sign() != near[:-1].sign()).sum().item()
    if lower < 0.99:  # nearer to 1 the error is that of rounding
        assert (near[0] < 0, changes) == (True, 3)


@pytest.mark.parametrize("steps", [1, 2, 4, 5, 7])
def test_cans_ends_in_its_interval_from_the_lowest_possible_bound(steps: int) -> None:
    schedule = schedules.cans(steps)

    def composed(x: Tensor) -> Tensor:
        for a, b, c in schedule:
            x = a * x + b * x**3 + c * x**5
        return x

    x = torch.logspace(-9, math.log10(1.01), 400_001, dtype=torch.float64)
    y = composed(x)
    inside = (y - 1).abs() <= 0.1 + 1e-6
    bound = x[inside][0].item()
    assert inside[x >= bound].all() and bound < 0.9
    # A lower bound would leave the last value further from 1; the interval is used up to its end.
    assert composed(torch.tensor(bound, dtype=torch.float64)).item() == pytest.approx(0.9, abs=1e-3)
    assert y.max().item() == pytest.approx(1.1, abs=1e-3)


def distance(y: Tensor, x: Tensor) -> float:
    """From the exact factor, per direction that ``x`` has: 1 would be no progress at all, or sign errors."""
    exact = polar_factor(x)
    return ((y - exact).norm() / exact.norm()).item()


def test_each_schedule_has_what_it_is_there_for() -> None:
    """At 5 steps both end nearer to the exact factor than Newton-Schulz, CANS nearest, and even with a step fewer; with
    more steps the Polar Express converges to it."""
    for kind in ("random", "condition 1e4", "rank-deficient"):
        x = with_values(kind, 64, 96)
        reached = {method: distance(ITERATIONS[method](x), x) for method in ITERATIONS}
        assert reached["cans"] < reached["polar-express"] < reached["newton-schulz"], (kind, reached)
        assert distance(cans(x, 4), x) < reached["newton-schulz"], kind
    x = random((20, 30))
    torch.testing.assert_close(polar_express(x, steps=9), polar_factor(x), rtol=0, atol=1e-13)


# ---- operations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [1, 2, 5, 6])
@pytest.mark.parametrize("shape", [(6, 6), (6, 9), (9, 6), (4, 8), (16, 4), (1, 5)], ids=str)
@EVERY_ITERATION
def test_operations_are_counted(method: str, shape: tuple[int, int], steps: int, dtype: torch.dtype) -> None:
    for variant in ("mars-m", "mars-shampoo"):
        f = orthogonalizer(method, dtype, steps)
        with FlopCounterMode(display=False) as counter:
            f(torch.ones(3, *shape), 1e-7, variant)
        assert counter.get_total_flops() == 3 * flops(*shape, steps, method, variant, dtype)


def test_the_operations_of_the_exact_factor_are_the_customary_estimate() -> None:
    assert flops(10, 4, method="svd") == flops(4, 10, method="svd") == 6 * 10 * 16 + 20 * 64 + 2 * 10 * 16
    with FlopCounterMode(display=False) as counter:
        polar_factor(torch.ones(10, 4))
    assert counter.get_total_flops() == 2 * 10 * 16, "of which torch can only count the final product"


def test_the_small_form_is_cheaper_wherever_it_is_taken() -> None:
    for aspect in (2, 3, 4, 16):
        for steps in (1, 2, 3, 5, 8, 20):
            small, plain = (flops(32, 32 * aspect, steps, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
            assert small <= plain
            if steps > 1:
                assert small < plain


def test_the_precision_of_the_iteration_follows_the_device() -> None:
    for device, dtype in (("cpu", torch.float32), ("meta", torch.bfloat16)):
        assert orthogonalize._precision(torch.empty(2, 2, device=device), None) == dtype
