"""The orthogonal factor of a matrix: by Newton-Schulz iteration, or exactly."""

from __future__ import annotations

import torch
from torch import Tensor

# X <- a X + (b A + c A A) X with A = X X^T, as in the code of the MARS authors (github.com/AGI-Arena/MARS).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(
    x: Tensor, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype | None = None, variant: str = "mars-m"
) -> Tensor:
    """Approximate orthogonal factor of ``x`` by the quintic Newton-Schulz iteration.

    Formula: X_0 = x / (||x||_F + eps); X <- a X + (b A + c A A) X with A = X X^T, ``steps`` times, tall matrices
    transposed first. The singular values end in about [0.7, 1.2], not at 1: that is the published behaviour.

    Args:
        x: shape (..., rows, cols), floating point. Leading dimensions are a batch of independent matrices.
        steps: number of iterations.
        eps: added to the Frobenius norm.
        dtype: precision of the iteration; None takes bfloat16 on accelerators, and float32 on CPUs (where bfloat16
            products are emulated), or float64 for float64 input there.
        variant: the published code of MARS-Shampoo ("mars-shampoo") takes the norm before the cast to ``dtype`` and
            multiplies A (A X); that of MARS-M ("mars-m") takes it after the cast and multiplies (A A) X. Equal in
            real arithmetic, several per cent apart in bfloat16.

    Returns:
        A tensor of the shape and dtype of ``x``. A zero matrix gives zero, NaN or inf in a matrix gives NaN in it.

    Raises:
        IndexError: ``x`` has fewer than two dimensions. Integers and complex numbers are not refused here but where
            MARS gets its parameters.

    Source: the authors' code (github.com/AGI-Arena/MARS: MARS-Shampoo of arXiv 2411.10438, MARS-M of arXiv
    2510.21800), where the coefficients and ``eps`` come from; the papers define the exact factor, see
    ``polar_factor``.
    """
    if dtype is None:
        dtype = torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else torch.bfloat16
    a, b, c = COEFFICIENTS
    y = x.to(dtype)
    norm = torch.linalg.vector_norm(x if variant == "mars-shampoo" else y, dim=(-2, -1), keepdim=True) + eps
    y = (y.to(torch.promote_types(norm.dtype, torch.float32)) / norm).to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    y = y.mT if tall else y
    for _ in range(steps):
        gram = y @ y.mT
        if variant == "mars-shampoo":
            gram_y = gram @ y
            y = a * y + b * gram_y + (c * gram) @ gram_y
        else:
            y = a * y + (b * gram + (c * gram) @ gram) @ y
    return (y.mT if tall else y).to(x.dtype)


def polar_factor(x: Tensor) -> Tensor:
    """The orthogonal polar factor of ``x``, exactly: what ``newton_schulz`` approximates.

    Formula: U V^T, where x = U S V^T. Directions whose singular value is zero to rounding (at most the largest one
    times max(rows, cols) times the machine epsilon) are left out, so that a zero matrix gives zero.

    Args:
        x: shape (..., rows, cols), floating point, not empty. Leading dimensions are a batch of independent matrices.
            float16 and bfloat16 are computed in float32.

    Returns:
        A tensor of the shape and dtype of ``x``.

    Raises:
        torch.linalg.LinAlgError: ``x`` has NaN or inf on a CPU, for which the decomposition does not converge.
        RuntimeError: ``x`` has fewer than two dimensions.
        IndexError: ``x`` has no elements.

    Source: the definition of MARS-Shampoo in the paper, arXiv 2411.10438. The decomposition is
    ``torch.linalg.svd``; on a GPU it waits for the result.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    u, s, vh = torch.linalg.svd(wide, full_matrices=False)
    floor = s.amax(dim=-1, keepdim=True) * max(x.shape[-2:]) * torch.finfo(wide.dtype).eps
    return ((u * (s > floor).to(u.dtype).unsqueeze(-2)) @ vh).to(x.dtype)
