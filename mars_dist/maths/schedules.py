"""Coefficients of odd quintics p(x) = a x + b x^3 + c x^5 whose composition pushes singular values towards 1.

Each polynomial is the minimax approximation of 1 on the interval in which the previous one has left the values
(Remez exchange, in plain Python: a few milliseconds, once per process).
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import chain, repeat

Quintic = tuple[float, float, float]

# Smallest quintic that fixes 1 with two vanishing derivatives: the limit of the minimax quintics on [1 - e, 1 + e].
LIMIT: Quintic = (15 / 8, -10 / 8, 3 / 8)

# arXiv 2505.16932 (Amsel, Persson, Musco, Gower: The Polar Express), appendix A: optimal for values in [1e-3, 1], with
# the first steps held back ("cushion") so that no value is lost to rounding in bfloat16.
POLAR_EXPRESS: tuple[Quintic, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    LIMIT,
)
SAFETY = 1.01  # values are shrunk by it before each step: rounding may have left them above the interval


def polar_express(steps: int) -> tuple[Quintic, ...]:
    """The published schedule for ``steps`` iterations: its table with the safety factor, then the last row again."""
    safe = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in POLAR_EXPRESS[:-1]]
    return tuple(coefficients for coefficients, _ in zip(chain(safe, repeat(LIMIT)), range(steps), strict=False))


@lru_cache
def cans(steps: int, delta: float = 0.1) -> tuple[Quintic, ...]:
    """The schedule of CANS, arXiv 2506.10935 (Grishina, Smirnov, Rakhuba), for ``steps`` quintics.

    Minimax quintics one after the other, from the widest interval [lower, 1] whose values all end in [1 - delta,
    1 + delta] (found by bisection): of all such compositions the one with the largest slope at 0. Each interval is
    taken 1 % longer at its upper end, for values that rounding has left above it. The paper takes delta 0.3 for Muon.
    With 0.1, 5 steps in float32 ended eight test matrices at 0.07 to 0.08 from the exact factor (0.3: 0.19 to 0.23),
    and the largest slope above 0.02, which amplifies rounding, is 200 (0.3: 614).
    """
    low, high = -40.0, 0.0  # logarithm of ``lower``
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _compose(math.exp(middle), steps)[1] <= delta else (middle, high)
    return _compose(math.exp(high), steps)[0]


def _compose(lower: float, steps: int) -> tuple[tuple[Quintic, ...], float]:
    """``steps`` minimax quintics for values in [lower, 1], and how far from 1 the values end."""
    schedule = []
    upper, error = 1.0, 1.0
    for _ in range(steps):
        coefficients, error = minimax_quintic(lower, SAFETY * upper)
        schedule.append(coefficients)
        lower, upper = 1.0 - error, 1.0 + error
    return tuple(schedule), error


def minimax_quintic(lower: float, upper: float) -> tuple[Quintic, float]:
    """The odd quintic nearest to 1 on [lower, upper], and its largest distance from 1 there.

    The error has four extrema of equal size and alternating sign: the two ends and the two zeros of the derivative,
    which the exchange moves until they stay.
    """
    if lower >= (1.0 - 5e-6) * upper:  # the linear system is singular to rounding
        a, b, c = LIMIT
        middle = (lower + upper) / 2
        return (a / middle, b / middle**3, c / middle**5), max(1.0 - lower / middle, 0.0) ** 3
    inner = (3 * lower + upper) / 4, (lower + 3 * upper) / 4
    error, before = 0.0, math.inf
    a = b = c = 0.0
    for _ in range(100):
        a, b, c, error = _solve(
            [[x, x**3, x**5, sign, 1.0] for x, sign in zip((lower, *inner, upper), SIGNS, strict=True)]
        )
        if abs(error - before) <= 1e-15 + 1e-13 * abs(error):
            break
        before = error
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
    return (a, b, c), error


SIGNS = (1.0, -1.0, 1.0, -1.0)  # p(lower) = 1 - error, and so on in turn


def _solve(rows: list[list[float]]) -> list[float]:
    """The solution of a small linear system (each row ends with its right side), by elimination with pivots."""
    n = len(rows)
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for k in range(n):
            if k != i:
                rows[k] = [value - rows[k][i] * mine for value, mine in zip(rows[k], rows[i], strict=True)]
    return [row[-1] for row in rows]
