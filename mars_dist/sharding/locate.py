"""Which layout a tensor has that an engine put in the place of the parameters MARS was constructed with."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mars_dist.sharding import torch_native, zero
from mars_dist.sharding.layout import Layout, whole


def trainable_only(originals: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Those that engines put into their flat tensors or copies: trainable, with at least one element."""
    return [(name, p) for name, p in originals if p.requires_grad and getattr(p, "ds_numel", p.numel()) > 0]


def locate(param: Tensor, position: int, handed: Sequence[Tensor], originals: Sequence[tuple[str, Tensor]]) -> Layout:
    """The layout of ``param`` = ``handed[position]``, which is none of the tensors MARS was constructed with.

    Args:
        handed: all tensors of the parameter group as the engine left it.
        originals: name and parameter of every tensor that the group was constructed with.

    Raises:
        RuntimeError: when the shapes cannot be known; the message says what to do.
    """
    originals = trainable_only(originals)
    for name, original in originals:
        torch_native.refuse_slices(name, original)
    layout = zero.locate(param, originals)
    if layout is not None:
        return layout
    # DeepSpeed without ZERO in 16 bits steps on float32 copies in the original shapes and order.
    if [tuple(t.shape) for t in handed] == [tuple(t.shape) for _, t in originals]:
        return whole(originals[position][0], param, engine="copies")
    raise RuntimeError(
        f"MARS was constructed with {len(originals)} trainable tensors in this parameter group, and the engine now "
        f"hands it {len(handed)} others (here one of shape {tuple(param.shape)}) that it cannot match with them. "
        + zero.REMEDY
    )
