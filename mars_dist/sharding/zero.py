"""Layouts under DeepSpeed ZeRO, read off the parameters that MARS was constructed with.

ZeRO replaces the parameters in the optimizer's groups by flat partitions, but the original ``Parameter`` objects stay
in the model and carry where they went: this module reads those attributes and imports nothing of DeepSpeed. They are
private to DeepSpeed (read in 0.19), so every table is compared with the low-precision weights when it is built.

* Stages 1 and 2, BF16_Optimizer: the trainable parameters of a group lie one after the other in one flat tensor
  (permuted under ``round_robin_gradients``), padded at the end; rank r owns elements [r n, (r + 1) n).
  ``p.data.storage_offset()`` is the position of p in it, ``p._dp_group`` the ranks that share it.
* Stage 3: every parameter is cut on its own into ceil(numel / world_size) elements per rank, the last piece padded;
  the pieces of a sub-group lie one after the other in one flat tensor. ``p.ds_shape`` is the shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars_dist.sharding.layout import Layout, Segment
from mars_dist.versions import installed, missing_hook, tested

REMEDY = (
    "MARS needs the shape of every tensor and does not fall back to AdamW. Construct it with the model's own "
    "parameters before deepspeed.initialize (or name it in ds_config.json), not with flat or copied ones."
)


def locate(flat: Tensor, originals: Sequence[tuple[str, Tensor]]) -> Layout | None:
    """The layout of the flat partition ``flat``, or None when it is not one of ZeRO's.

    Args:
        flat: what the engine put into the parameter group.
        originals: name and parameter of every tensor that the group was constructed with.

    Returns: the layout carries a fault where the table does not agree with the weights.

    Raises:
        RuntimeError: when this release of DeepSpeed keeps the pieces under other names.
    """
    try:
        return _locate(flat, originals)
    except AttributeError as error:
        consequence = "MARS cannot see which pieces of which tensors ZeRO hands over"
        raise RuntimeError(missing_hook("deepspeed", error, consequence)) from error


def flats(originals: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
    """The flat tensors of stage 3 that hold pieces of ``originals``; it keeps groups empty between steps.

    Raises:
        RuntimeError: when this release of DeepSpeed keeps them under other names.
    """
    ours = {id(p) for _, p in originals}
    engines = {id(p._z3_optimizer): p._z3_optimizer for _, p in originals if hasattr(p, "_z3_optimizer")}
    try:
        return [
            flat
            for engine in engines.values()
            for flat, members in zip(engine.fp32_partitioned_groups_flat, engine.fp16_groups, strict=True)
            if members and id(members[0]) in ours
        ]
    except AttributeError as error:
        consequence = "MARS cannot see which pieces of which tensors ZeRO hands over"
        raise RuntimeError(missing_hook("deepspeed", error, consequence)) from error


def _locate(flat: Tensor, originals: Sequence[tuple[str, Tensor]]) -> Layout | None:
    sharded = [(name, p) for name, p in originals if hasattr(p, "_z3_optimizer")]
    if sharded:
        layout = _stage3(flat, sharded)
        if layout is not None:
            return layout
    # Who has the attribute was trainable when the flat was made, whatever requires_grad says now.
    partitioned = [(name, p) for name, p in originals if hasattr(p, "_dp_group") and p.numel() > 0]
    if partitioned and flat.ndim == 1:
        return _stage12(flat, partitioned)
    return None


def _stage12(flat: Tensor, originals: Sequence[tuple[str, Tensor]]) -> Layout:
    # Parameters that are frozen now may carry the attributes of an engine that is no more: the flat is another tensor.
    homes = {p.data.untyped_storage().data_ptr() for _, p in originals if p.requires_grad}
    originals = [(n, p) for n, p in originals if not homes or p.data.untyped_storage().data_ptr() in homes]
    group = originals[0][1]._dp_group  # type: ignore[attr-defined]
    first = dist.get_rank(group) * flat.numel()
    last = first + flat.numel()
    segments, faults = [], []
    for name, p in originals:
        begin = int(p.data.storage_offset())
        low, high = max(first, begin), min(last, begin + p.numel())
        if low >= high:
            segments.append(Segment(name, tuple(p.shape), 0, 0, 0))
            continue
        segment = Segment(name, tuple(p.shape), low - begin, high - begin, low - first)
        faults.append(_fault(flat, segment, p.data.flatten()[segment.start : segment.stop], "ZeRO-1/2"))
        segments.append(segment)
    return Layout(tuple(segments), (group,), "ZeRO-1/2", next(filter(None, faults), ""))


def _stage3(flat: Tensor, originals: Sequence[tuple[str, Tensor]]) -> Layout | None:
    engine: Any = originals[0][1]._z3_optimizer  # type: ignore[attr-defined]
    index = next((i for i, t in enumerate(engine.fp32_partitioned_groups_flat) if t is flat), None)
    if index is None:  # the attribute is left from an engine that is no more
        return None
    names = {id(p): name for name, p in originals}
    members = engine.fp16_groups[index]
    group = members[0].ds_process_group
    rank = dist.get_rank(group)
    segments, faults, offset = [], [], 0
    for p in members:
        size = p.partition_numel()
        start = min(rank * size, p.ds_numel)
        stop = min(start + size, p.ds_numel)
        segment = Segment(names.get(id(p), f"ds_id {p.ds_id}"), tuple(p.ds_shape), start, stop, offset)
        # Weights that are swapped out to NVMe leave a placeholder.
        if segment.numel and p.ds_tensor.status.name == "AVAILABLE" and p.ds_tensor.numel() >= segment.numel:
            faults.append(_fault(flat, segment, p.ds_tensor.data.flatten()[: segment.numel], "ZeRO-3"))
        segments.append(segment)
        offset += size
    if offset != flat.numel():
        faults.insert(
            0,
            f"ZeRO-3: the pieces of sub-group {index} add up to {offset} elements, its flat partition has "
            f"{flat.numel()}: DeepSpeed {installed('deepspeed')} lays them out in a way that mars_dist does not know "
            f"({tested('deepspeed')}). {REMEDY}",
        )
    return Layout(tuple(segments), (group,), "ZeRO-3", next(filter(None, faults), ""))


def _fault(flat: Tensor, segment: Segment, weights: Tensor, engine: str) -> str:
    """Compare the flat partition with the weights that the model computes with: what is wrong, or ""."""
    master = flat.detach()[segment.offset : segment.offset + segment.numel].to(weights.dtype)
    if torch.equal(master.nan_to_num(), weights.detach().to(master.device).nan_to_num()):
        return ""
    return (
        f"{engine}: the table of pieces does not agree with the weights of {segment.name} "
        f"(elements {segment.start} to {segment.stop} of shape {segment.shape}). DeepSpeed {installed('deepspeed')} "
        f"lays its partitions out in a way that mars_dist does not know ({tested('deepspeed')}), or the weights were "
        "changed after deepspeed.initialize without its master copy, or the other way round (load weights before it or "
        "through engine.load_checkpoint; use safe_set_full_fp32_param only after the first step). Training with a "
        "wrong table would be silently wrong."
    )
