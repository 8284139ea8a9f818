"""How a previous gradient says that there is none: -0.0 in every element.

With ``first_step="reference"`` h = 0 is all that a first step needs; "paper" takes h = g, and ``step`` does not tell
that h is missing (a state of AdamW, a look-ahead that failed). Said in the elements themselves it survives every cut,
precision and format of file, and whoever does not know of it reads h = 0. A gradient that is kept has no -0.0 where
that would matter: ``kept`` makes it 0.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ABSENT = -0.0
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def absent_like(param: Any, dtype: torch.dtype) -> Any:
    """A previous gradient of ``param`` that is not there."""
    return torch.full_like(param, ABSENT, dtype=dtype, requires_grad=False)


def is_absent(previous: Tensor) -> Tensor:
    """For every element, whether there is no previous gradient: the sign bit alone, in one comparison."""
    bits = INTEGERS[previous.element_size()]
    return previous.view(bits) == torch.iinfo(bits).min


def is_wholly_absent(previous: Tensor) -> bool:
    """Whether no element of a local tensor is there. Reads from the device."""
    flat = previous.reshape(-1)
    return bool(flat.numel()) and bool(is_absent(flat[:1]).all()) and bool(is_absent(flat).all())


def kept(gradients: list[Tensor]) -> list[Tensor]:
    """Copies of ``gradients`` that can be kept as previous ones: the same numbers, with 0.0 for -0.0."""
    return list(torch._foreach_add(gradients, 0.0))
