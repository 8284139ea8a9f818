"""Layouts of DTensors: FSDP2 (``fully_shard``), HSDP, tensor parallelism, and any product of them.

A DTensor says itself how it is cut: its global shape, the mesh of ranks, and one placement for each dimension of the
mesh. Its pieces are summed over the mesh dimensions that cut it; a dimension that replicates it (HSDP) holds the same
pieces again. Steps work on the local tensors: no operation of DTensor is dispatched in a step.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from mars_dist.sharding.layout import Layout, Segment
from mars_dist.versions import missing_hook, tested


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Their module is slow to import, and there can be none without it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor, in the same memory; whatever else it is, itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def copy_as(param: Any, value: Any) -> Any:
    """An own copy of ``value``, of the same global shape as ``param``: in its own dtype, cut as ``param`` is."""
    out = torch.empty_like(param, dtype=value.dtype, requires_grad=False)
    local(out).copy_(local(_placed_as(param, value)))
    return out


def _placed_as(param: Any, value: Any) -> Any:
    """``value`` cut as ``param`` is.

    A plain tensor that belongs to a DTensor is the whole one, the same on every rank: that needs no collective.
    """
    from torch.distributed.tensor import distribute_tensor

    if is_dtensor(value) and not is_dtensor(param):
        return value.full_tensor()
    if not is_dtensor(param):
        return value
    if not is_dtensor(value):
        return distribute_tensor(value.to(local(param).device), param.device_mesh, param.placements, src_data_rank=None)
    same = value.device_mesh == param.device_mesh and value.placements == param.placements
    return value if same else value.redistribute(param.device_mesh, param.placements)


def moved_from(param: Tensor) -> Any:
    """The placements of the gradient of a DTensor where a collective brings them into the parameter's; else None.

    What is replicated is cut without one.
    """
    grad: Any = param.grad
    if grad is None or not is_dtensor(param) or not is_dtensor(grad):
        return None
    pairs = zip(grad.placements, param.placements, strict=True)  # type: ignore[attr-defined]
    moves = any(theirs != ours and not theirs.is_replicate() for theirs, ours in pairs)
    return grad.placements if moves else None


def local_gradient(param: Any, name: str, arrives: Any = None) -> Tensor:
    """The gradient of this rank's part of ``param``; zeros where there is none on this rank.

    Tensor parallelism may leave the gradient of a replicated parameter as partial sums (or cut in another way): it is
    then brought into the parameter's placements, which costs the collective that the engine has left out.

    Args:
        arrives: what ``moved_from`` said of this parameter: a rank without a gradient joins that collective with zeros.

    Raises:
        RuntimeError: when one of the two is a DTensor and the other is not.
    """
    grad = param.grad
    if grad is None:
        if arrives is None:
            return torch.zeros_like(local(param))
        grad = _zeros(param, arrives)
    if is_dtensor(param) != is_dtensor(grad):
        raise RuntimeError(
            f"{name} is a {type(param).__name__} and its gradient a {type(grad).__name__}: MARS cannot know which part "
            "of the gradient belongs to this rank. Assign gradients of the same kind (distribute_tensor)."
        )
    if not is_dtensor(param) or grad.placements == param.placements:
        return local(grad)
    moved = grad.redistribute(placements=param.placements).to_local()
    return moved.wait() if hasattr(moved, "wait") else moved  # its collective may still be running


def _zeros(param: Any, placements: Any) -> Any:
    from torch.distributed.tensor import DTensor

    sizes, _ = _sizes_and_offsets(param.shape, param.device_mesh, placements)
    zeros = torch.zeros(sizes, dtype=param.dtype, device=local(param).device)
    shape, stride = param.shape, param.stride()
    return DTensor.from_local(zeros, param.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def locate(name: str, param: Any) -> Layout:
    """The layout of the DTensor ``param``.

    Raises:
        RuntimeError: for a parameter that is a pending sum (``Partial``), which no engine makes.
    """
    mesh, placements = param.device_mesh, tuple(param.placements)
    engine = f"DTensor {placements}"
    if any(placement.is_partial() for placement in placements):
        raise RuntimeError(f"{name} has the placements {placements}: a parameter must be sharded or replicated.")
    cuts = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    shape = tuple(param.shape)
    sizes, offsets = _sizes_and_offsets(shape, mesh, placements)
    fault = ""
    if tuple(sizes) != tuple(local(param).shape):
        fault = (
            f"{name}: this rank holds {tuple(local(param).shape)} of a DTensor of shape {shape} with {placements}, "
            f"where {tuple(sizes)} was expected. mars_dist was {tested('torch')}."
        )
    if mesh.get_coordinate() is None:  # a mesh of other ranks: this one holds nothing of it
        return Layout((_segment(name, shape, (0,), (0,)),), (), engine)
    groups = tuple(mesh.get_group(i) for i in cuts)
    replicas = tuple(mesh.get_group(i) for i in range(mesh.ndim) if i not in cuts)
    ranks: tuple[int, ...] = ()
    if len(cuts) > 1:  # those that differ from this one in the dimensions that cut
        mine = tuple(slice(None) if i in cuts else at for i, at in enumerate(mesh.get_coordinate()))
        ranks = tuple(mesh.mesh[mine].flatten().tolist())
    segments = (_segment(name, shape, sizes, offsets),)
    return Layout(segments, groups, engine, fault, always_joins=True, replicas=replicas, ranks=ranks)


def _sizes_and_offsets(shape: Any, mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of this rank's part of a DTensor, in every dimension."""
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError as error:
        name = "torch.distributed.tensor._utils.compute_local_shape_and_global_offset"
        raise RuntimeError(
            missing_hook("torch", name, "MARS cannot see which part of a DTensor a rank holds")
        ) from error
    sizes, offsets = compute_local_shape_and_global_offset(tuple(shape), mesh, placements)
    return tuple(sizes), tuple(offsets)


def _segment(name: str, shape: tuple[int, ...], sizes: tuple[int, ...], offsets: tuple[int, ...]) -> Segment:
    numel = math.prod(sizes)
    if numel == 0:
        return Segment(name, shape, 0, 0, 0)
    # An interval: one index in each of the leading dimensions, a range in one, all of the dimensions after it.
    ranged = next((i for i, size in enumerate(sizes) if size > 1), len(sizes))
    if all(size == whole for size, whole in zip(sizes[ranged + 1 :], shape[ranged + 1 :], strict=True)):
        start = sum(o * math.prod(shape[i + 1 :]) for i, o in enumerate(offsets))
        return Segment(name, shape, start, start + numel, 0)
    region = tuple((o, o + size) for o, size in zip(offsets, sizes, strict=True))
    return Segment(name, shape, 0, numel, 0, region)
