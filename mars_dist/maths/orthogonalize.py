"""The orthogonal factor of a matrix: by an iteration of matrix products, or exactly.

All iterations apply odd quintics to the singular values, X <- a X + (b A + c A A) X with A = X X^T, and leave the
singular vectors alone; they differ in the coefficients (``schedules.py``) and in how X is scaled first. Matrices come
as (..., rows, cols): leading dimensions are a batch of independent matrices of one shape, iterated together.

In the small form, for matrices at least ``SMALL_FORM_ASPECT`` times as long as wide and in float32 or better, the
same polynomials are taken of A alone (short x short) and X is multiplied at the ends of segments of 2, 3, 3, ... steps
only. Equal in real arithmetic, and in float32 to a few roundings. Without the segments the rounding of A would be
amplified by the whole composition (1e-5 to 2e-4 instead of 7e-6 on matrices of condition 1e4), and in bfloat16 singular
values of 10 and more were seen even with them. ``python -m mars_dist.bench --orthogonalize`` shows what each method
costs and how far from the exact factor it ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mars_dist.maths import schedules
from mars_dist.maths.schedules import Quintic

# As in the code of the MARS authors (github.com/AGI-Arena/MARS).
COEFFICIENTS: Quintic = (3.4445, -4.7750, 2.0315)

SMALL_FORM_ASPECT = 2.0


def newton_schulz(
    x: Tensor, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype | None = None, variant: str = "mars-m"
) -> Tensor:
    """Approximate orthogonal factor of ``x`` by the quintic Newton-Schulz iteration of the MARS authors.

    Formula: X_0 = x / (||x||_F + eps); X <- a X + (b A + c A A) X with A = X X^T, ``steps`` times with the same
    coefficients, tall matrices transposed first. The singular values end in about [0.7, 1.2], not at 1: that is the
    published behaviour.

    Args:
        x: shape (..., rows, cols), floating point. Leading dimensions are a batch of independent matrices.
        steps: number of iterations.
        eps: added to the Frobenius norm.
        dtype: precision of the iteration; None takes bfloat16 on accelerators, and float32 on CPUs (where bfloat16
            products are emulated), or float64 for float64 input there.
        variant: the published code of MARS-Shampoo ("mars-shampoo") takes the norm before the cast to ``dtype`` and
            multiplies A (A X); that of MARS-M ("mars-m") takes it after the cast and multiplies (A A) X. Equal in
            real arithmetic, several per cent apart in bfloat16, where both are followed to the letter.

    Returns:
        A tensor of the shape and dtype of ``x``. A zero matrix gives zero, NaN or inf in a matrix gives NaN in it.

    Raises:
        IndexError: ``x`` has fewer than two dimensions. Integers and complex numbers are not refused here but where
            MARS gets its parameters.

    Source: the authors' code (github.com/AGI-Arena/MARS: MARS-Shampoo of arXiv 2411.10438, MARS-M of arXiv
    2510.21800), where the coefficients and ``eps`` come from; the papers define the exact factor, see
    ``polar_factor``.
    """
    dtype = _precision(x, dtype)
    scaled, power = _scaled(x)
    y = scaled.to(dtype)
    norm = _norm(scaled if variant == "mars-shampoo" else y)
    y = _divided(y, (norm.to(torch.promote_types(norm.dtype, power.dtype)) + eps / power).to(norm.dtype))
    y, tall = _wide(y)
    schedule = (COEFFICIENTS,) * steps
    if uses_small_form(y):
        y = _compose_small(y, schedule)
    elif variant == "mars-shampoo":
        for a, b, c in schedule:
            gram = y @ y.mT
            gram_y = gram @ y
            y = a * y + b * gram_y + (c * gram) @ gram_y
    else:
        y = _compose(y, schedule)
    return (y.mT if tall else y).to(x.dtype)


def polar_express(x: Tensor, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype | None = None) -> Tensor:
    """Approximate orthogonal factor of ``x`` by the Polar Express.

    Formula: X_0 = x / (1.01 ||x||_F + eps), then ``steps`` quintics, each the best one for where the one before has
    left singular values that began in [1e-3, 1] (``schedules.polar_express``). More steps converge to the exact factor.

    Args and returns: as ``newton_schulz``.

    Source: arXiv 2505.16932 (Amsel, Persson, Musco, Gower), with its table of coefficients and its safety factor.
    """
    dtype = _precision(x, dtype)
    y, power = _scaled(x)
    y = y.to(torch.promote_types(dtype, power.dtype))
    y, tall = _wide(_divided(y, schedules.SAFETY * _norm(y) + eps / power).to(dtype))
    compose = _compose_small if uses_small_form(y) else _compose
    y = compose(y, schedules.polar_express(steps))
    return (y.mT if tall else y).to(x.dtype)


def cans(x: Tensor, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype | None = None) -> Tensor:
    """Approximate orthogonal factor of ``x`` by the Chebyshev-optimised Newton-Schulz iteration (CANS).

    Formula: X_0 = x / (s + eps) with s = ||(x x^T)^2||_F^(1/4), which is at least the largest singular value and much
    nearer to it than ||x||_F, and costs no product, because the first step needs A A as well; then ``steps`` quintics
    that end all singular values above a bound in [0.9, 1.1] with the lowest possible bound (``schedules.cans``). More
    steps lower that bound; they do not narrow the interval. In bfloat16 that reaches the rounding noise in directions
    that a matrix lacks: at 5 steps it ends as large as what the matrix has.

    Args and returns: as ``newton_schulz``.

    Source: arXiv 2506.10935 (Grishina, Smirnov, Rakhuba); the coefficients are derived by its method.
    """
    dtype = _precision(x, dtype)
    y, power = _scaled(x)
    y = y.to(torch.promote_types(dtype, power.dtype))
    norm = _norm(y)
    y, tall = _wide(_divided(y, norm).to(dtype))
    gram = y @ y.mT
    square = gram @ gram
    # The largest singular value of y is at most s; eps is in the units of x.
    divisor = _norm(square.to(norm.dtype)).sqrt().sqrt() + eps / power / torch.where(norm == 0, 1.0, norm)
    products = _divided(gram, divisor**2), _divided(square, divisor**4)
    compose = _compose_small if uses_small_form(y) else _compose
    y = compose(_divided(y, divisor), schedules.cans(steps), products)
    return (y.mT if tall else y).to(x.dtype)


def polar_factor(x: Tensor) -> Tensor:
    """The orthogonal polar factor of ``x``, exactly: what the iterations approximate.

    Formula: U V^T, where x = U S V^T. Directions whose singular value is zero to rounding (at most the largest one
    times max(rows, cols) times the machine epsilon) are left out, so that a zero matrix gives zero.

    Args:
        x: shape (..., rows, cols), floating point. Leading dimensions are a batch of independent matrices. float16
            and bfloat16 are computed in float32.

    Returns:
        A tensor of the shape and dtype of ``x``. NaN or inf in a matrix gives NaN in it.

    Raises:
        RuntimeError: ``x`` has fewer than two dimensions.

    Source: the definition of MARS-Shampoo in the paper, arXiv 2411.10438. The decomposition is
    ``torch.linalg.svd``; on a GPU it waits for the result.
    """
    if x.numel() == 0:
        return torch.zeros_like(x)
    wide = _scaled(x)[0].to(torch.promote_types(x.dtype, torch.float32))
    # On a CPU the decomposition raises for NaN and inf. The other ranks would wait for the results of one that did.
    finite = torch.isfinite(wide).flatten(-2).all(dim=-1)[..., None, None]
    u, s, vh = torch.linalg.svd(torch.where(finite, wide, 0.0), full_matrices=False)
    floor = s.amax(dim=-1, keepdim=True) * max(x.shape[-2:]) * torch.finfo(wide.dtype).eps
    factor = (u * (s > floor).to(u.dtype).unsqueeze(-2)) @ vh
    return torch.where(finite, factor, torch.nan).to(x.dtype)


def uses_small_form(y: Tensor) -> bool:
    """Whether matrices of the shape and precision of ``y`` are iterated on A alone."""
    return torch.finfo(y.dtype).bits >= 32 and max(y.shape[-2:]) >= SMALL_FORM_ASPECT * min(y.shape[-2:])


def flops(
    rows: int,
    cols: int,
    steps: int = 5,
    method: str = "newton-schulz",
    variant: str = "mars-m",
    dtype: torch.dtype = torch.float32,
) -> int:
    """Floating-point operations of one matrix's orthogonalisation: of its matrix products, a multiply-add being two.

    Args:
        rows, cols: of the matrix.
        steps: iterations; without effect on "svd".
        method: "newton-schulz", "polar-express", "cans" or "svd".
        variant: the published code that Newton-Schulz follows (its order of products).
        dtype: the precision of the iteration, which decides on the small form.

    For "svd", which is no sequence of products, the customary count for U, S and V of a matrix with m >= n:
    6 m n^2 + 20 n^3 (Golub and Van Loan, Matrix Computations, R-SVD), and the final product. It says nothing about
    time: no device runs a decomposition at the speed of products.
    """
    short, long = min(rows, cols), max(rows, cols)
    if method == "svd":
        return 6 * long * short**2 + 20 * short**3 + 2 * long * short**2
    with_x, of_squares = 2 * short**2 * long, 2 * short**3
    if not uses_small_form(torch.empty(rows, cols, dtype=dtype, device="meta")):
        if method == "newton-schulz" and variant == "mars-shampoo":
            return steps * 3 * with_x
        return steps * (2 * with_x + of_squares)
    total = 0
    for first, last in _segments(steps):
        n = last - first
        total += 2 * with_x + (n + (n - 1) * 3) * of_squares  # A A in each; between two steps Q and twice A
    return total


def _precision(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else torch.bfloat16


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each matrix divided by a power of two, so that its largest element is near 1, and that power.

    It changes no digit of the result, but squares of elements neither overflow nor vanish. Zero matrices: by 1.
    """
    if x.numel() == 0:
        return x, torch.ones((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = wide.abs().amax(dim=(-2, -1), keepdim=True)
    power = torch.where(largest == 0, 1.0, largest / (2.0 * torch.frexp(largest).mantissa))
    return (wide / power).to(x.dtype), power


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)


def _divided(y: Tensor, divisor: Tensor) -> Tensor:
    """y / divisor, rounded once to the precision of y; a divisor of 0 (a zero matrix, eps 0) leaves zeros."""
    wide = y.to(torch.promote_types(divisor.dtype, torch.float32))
    return (wide / torch.where(divisor == 0, 1.0, divisor)).to(y.dtype)


def _wide(y: Tensor) -> tuple[Tensor, bool]:
    """y with no more rows than columns, and whether it is transposed: the iteration commutes with that."""
    tall = y.shape[-2] > y.shape[-1]
    return (y.mT if tall else y), tall


def _polynomial(gram: Tensor, square: Tensor | None, b: float, c: float) -> Tensor:
    """b A + c A A."""
    return b * gram + ((c * gram) @ gram if square is None else c * square)


Products = tuple[Tensor, Tensor]  # A and A A of the first step, where they are known already


def _compose(y: Tensor, schedule: Sequence[Quintic], products: Products | None = None) -> Tensor:
    """The quintics of ``schedule`` applied to y in turn."""
    gram, square = products or (None, None)
    for a, b, c in schedule:
        gram = y @ y.mT if gram is None else gram
        y = a * y + _polynomial(gram, square, b, c) @ y
        gram = square = None
    return y


def _segments(steps: int) -> list[tuple[int, int]]:
    """Steps of the small form between two products with X: 2, then 3 and 3 (the first quintics are the steepest)."""
    ends = [*range(2, steps, 3), steps]
    return list(zip([0, *ends], ends, strict=False))


def _compose_small(y: Tensor, schedule: Sequence[Quintic], products: Products | None = None) -> Tensor:
    """As ``_compose``: a segment's quintics are multiplied up to Q from A alone, then y <- Q y."""
    gram, square = products or (None, None)
    for first, last in _segments(len(schedule)):
        gram = y @ y.mT if gram is None else gram
        q = factor = None
        for a, b, c in schedule[first:last]:
            if factor is not None:
                gram = (factor @ gram) @ factor
            polynomial = _polynomial(gram, square, b, c)
            square = None
            factor = polynomial.clone()
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            q = factor if q is None else a * q + polynomial @ q
        assert q is not None
        y, gram = q @ y, None
    return y
