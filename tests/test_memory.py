"""A step allocates no more than two blocks in one piece, however large the tensors are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mars_dist import MARS, pieces

BLOCK_BYTES = pieces.BLOCK_NUMEL["cpu"] * 4
SHAPE = (64, 16384)  # four blocks


class LargestNew(TorchDispatchMode):
    """The largest storage that any operation returns and that was not there before."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


def largest_new(shape: tuple[int, ...], dtype: torch.dtype, **kwargs: Any) -> int:
    """Bytes of the largest new storage in the second step; the first makes the states."""
    p = Parameter(torch.ones(shape, dtype=dtype))
    optimizer = MARS([p], **kwargs)
    p.grad = torch.ones_like(p)
    optimizer.step()
    with LargestNew([p, p.grad, *optimizer.state[p].values()]) as new:
        optimizer.step()
    return new.nbytes


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"clip": None},
        {"mars_type": "mars-lion"},
        {"amsgrad": True},
        {"weight_decay": 0.1, "maximize": True},
        {"skip_nonfinite": True},
        {"first_step": "paper"},
        {"lr": torch.tensor(0.01)},
        {"lr": torch.tensor(0.01), "mars_type": "mars-lion", "skip_nonfinite": True, "weight_decay": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [SHAPE, (64 * 16384,)], ids=["matrix", "vector"])
def test_a_step_needs_at_most_two_blocks(shape: tuple[int, ...], dtype: torch.dtype, kwargs: dict[str, Any]) -> None:
    assert torch.Size(shape).numel() == 4 * pieces.BLOCK_NUMEL["cpu"]
    assert largest_new(shape, dtype, **{"lr_1d": 3e-3} | kwargs) <= 2 * BLOCK_BYTES


def test_the_measure_sees_a_copy_of_a_whole_tensor() -> None:
    x = torch.ones(SHAPE)
    with LargestNew([x]) as new:
        x.view(-1)[:10].mul_(2)
        assert new.nbytes == 0
        x.mul(2)
    assert new.nbytes == 4 * BLOCK_BYTES
