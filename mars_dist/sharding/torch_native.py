"""Layouts of PyTorch's own engines: whole tensors on every rank (one process, DDP), and what is refused so far."""

from __future__ import annotations

import sys

from torch import Tensor

from mars_dist.sharding.layout import Layout, whole

REMEDY = "Use DeepSpeed ZeRO-1/2/3 or DDP; MARS does not fall back to AdamW."


def locate(name: str, param: Tensor) -> Layout:
    """The layout of ``param`` when the engine left it the parameter it was: whole on this process.

    Raises:
        RuntimeError: for parameters whose pieces are spread in a way that this version cannot see through.
    """
    refuse(name, param)
    return whole(name, param)


def refuse(name: str, param: Tensor) -> None:
    """Raise for a parameter of an engine that this version does not support."""
    refuse_slices(name, param)
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, and there can be no DTensor without it
    if module is not None and isinstance(param, module.DTensor):
        raise RuntimeError(
            f"{name} is a DTensor ({param.placements}): this version of mars_dist does not support FSDP2 or tensor "
            f"parallelism yet. {REMEDY}"
        )
    if getattr(param, "_fsdp_flattened", False) or type(param).__name__ == "FlatParameter":
        raise RuntimeError(
            f"{name} belongs to FullyShardedDataParallel (FSDP1), which hands over flat pieces of tensors: this "
            f"version of mars_dist cannot see their shapes. {REMEDY}"
        )


def refuse_slices(name: str, param: Tensor) -> None:
    """Tensor parallelism that keeps one rank's slice as a plain tensor (DeepSpeed AutoTP, Megatron) marks it so."""
    if getattr(param, "tensor_model_parallel", False):
        shape = tuple(getattr(param, "ds_shape", param.shape))
        raise RuntimeError(
            f"{name} of shape {shape} is one rank's slice of a larger tensor (tensor parallelism): MARS "
            "would take the norm of the slice for that of the tensor. This version does not support it: set "
            'tensor_parallel.autotp_size to 1 (or remove "tensor_parallel") and shard with ZeRO instead.'
        )
