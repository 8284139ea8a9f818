"""Validation losses that the authors of MARS published, as data, and what a run has at the same numbers of tokens.

Source: README of AGI-Arena/MARS at 4831e28. GPT-2 on OpenWebText, 480 sequences of 1,024 tokens a step, 100,000 steps
(49.15 B tokens, which the source rounds to 50 B); best validation loss up to 5, 20 and 50 B tokens, in nats a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

TOKENS = (5_000_000_000, 20_000_000_000, 50_000_000_000)
NOTE = "published: best validation loss so far, OpenWebText, 480 sequences of 1,024 tokens a step, no biases"
NEAR = 0.98  # a run that ends within 2 % of a published count is compared there: the published "50 B" are 49.15 B

Losses = dict[str, tuple[float, float, float]]  # by optimizer: at each of TOKENS
LOSSES: dict[str, Losses] = {
    "gpt2-small": {
        "AdamW": (3.193, 3.024, 2.885),
        "Muon": (3.165, 3.006, 2.901),
        "MARS": (3.108, 2.981, 2.849),
        "MARS exact": (3.107, 2.980, 2.847),
    },
    "gpt2-medium": {
        "AdamW": (3.084, 2.821, 2.691),
        "Muon": (3.009, 2.813, 2.688),
        "MARS": (2.969, 2.763, 2.636),
    },
    "gpt2-large": {
        "AdamW": (3.013, 2.741, 2.561),
        "Muon": (2.915, 2.691, 2.573),
        "MARS": (2.876, 2.647, 2.518),
    },
}


def losses(size: str) -> Losses:
    """The losses at ``TOKENS`` by optimizer, of a size such as "gpt2-large".

    Raises:
        ValueError: for a size without published losses; the message lists those that have some.
    """
    if size not in LOSSES:
        raise ValueError(f"no published losses of {size!r}; there are some of {', '.join(LOSSES)}")
    return LOSSES[size]


def at(curve: Sequence[tuple[float, float]], tokens: float) -> float | None:
    """Loss at ``tokens`` on the straight line between the two points (tokens, loss) of ``curve`` around it.

    A curve that ends at most 2 % earlier counts with its last loss; None where it does not reach or begins later.
    """
    for (before, loss), (after, next_loss) in itertools.pairwise(curve):
        if before <= tokens <= after:
            return loss + (next_loss - loss) * (tokens - before) / (after - before)
    return curve[-1][1] if curve and NEAR * tokens <= curve[-1][0] <= tokens else None


def draw(axes: Any, losses: Losses) -> None:
    """Draw ``losses`` into the axes of a matplotlib figure whose horizontal axis is tokens."""
    for (name, values), marker in zip(losses.items(), "s^D*", strict=False):
        style = {"marker": marker, "ls": ":", "lw": 0.8, "ms": 5, "color": "0.35", "mfc": "none"}
        axes.plot(TOKENS, values, label=f"{name}, published", **style)
