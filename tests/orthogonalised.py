"""How many matrices a rank orthogonalises: with what the ranks share or share out, each one once in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The number of matrices in every batch that is orthogonalised meanwhile."""
    from mars_dist.maths.rules import Orthogonalizer

    counts: list[int] = []
    real = Orthogonalizer.__call__

    def call(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        counts.append(x.shape[:-2].numel())
        return real(self, x, *args, **kwargs)

    with mock.patch.object(Orthogonalizer, "__call__", call):
        yield counts
