"""Which layout a tensor has that an engine put in the place of the parameters MARS was constructed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mars_dist.sharding import torch_native, zero
from mars_dist.sharding.layout import COPIES, Layout, whole


def trainable_only(originals: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Those that engines put into their flat tensors or copies: trainable, with at least one element."""
    return [(name, p) for name, p in originals if p.requires_grad and getattr(p, "ds_numel", p.numel()) > 0]


def _copy(copy: Tensor, name: str, original: Tensor) -> Layout:
    fault = ""
    if not torch.equal(copy.detach().to(original.dtype).nan_to_num(), original.detach().to(copy.device).nan_to_num()):
        fault = (
            f"DeepSpeed's float32 copy of {name} does not agree with the model's weights: they were changed after "
            "deepspeed.initialize, and the first step would undo that. Load weights before it."
        )
    layout = whole(name, copy, engine=COPIES)
    return replace(layout, fault=fault)


def locate(param: Tensor, position: int, handed: Sequence[Tensor], originals: Sequence[tuple[str, Tensor]]) -> Layout:
    """The layout of ``param`` = ``handed[position]``, which is none of the tensors MARS was constructed with.

    Args:
        handed: all tensors of the parameter group as the engine left it.
        originals: name and parameter of every tensor that the group was constructed with.

    Raises:
        RuntimeError: when the shapes cannot be known; the message says what to do.
    """
    if not originals:
        raise RuntimeError(
            "This MARS optimizer is a copy (deepcopy or pickle) of one whose tensors an engine had replaced by flat "
            "pieces: it cannot know their shapes and does not fall back to AdamW. Copy its state_dict() instead."
        )
    for name, original in originals:
        torch_native.refuse_slices(name, original)
    trainable = trainable_only(originals)
    # DeepSpeed without ZeRO in 16 bits steps on float32 copies in the original shapes and order. Asked first and by
    # shapes alone, so that all ranks decide alike: an earlier ZeRO engine may have left its attributes.
    if [tuple(t.shape) for t in handed] == [tuple(t.shape) for _, t in trainable]:
        return _copy(param, *trainable[position])
    layout = zero.locate(param, originals)
    if layout is not None:
        return layout
    raise RuntimeError(
        f"MARS was constructed with {len(trainable)} trainable tensors in this parameter group, and the engine now "
        f"hands it {len(handed)} others (here one of shape {tuple(param.shape)}) that it cannot match with them. "
        + zero.REMEDY
    )
