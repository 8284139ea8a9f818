"""Layouts of PyTorch's own engines: whole tensors (one process, DDP), DTensors (FSDP2, HSDP, TP), FSDP1."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mars_dist.sharding import dtensor, fsdp1
from mars_dist.sharding.layout import Layout, whole


def locate(name: str, param: Tensor) -> Layout:
    """The layout of ``param`` where it says itself what it is, or is the parameter it was constructed as: whole.

    Raises:
        RuntimeError: for parameters whose pieces are spread in a way that cannot be seen through.
    """
    refuse_slices(name, param)
    if dtensor.is_dtensor(param):
        return dtensor.locate(name, param)
    if fsdp1.is_fsdp1(param):
        raise fsdp1.refusal(name)
    return whole(name, param)


def copies(model: nn.Module, process_group: ProcessGroup | None) -> Iterator[tuple[Tensor, ProcessGroup]]:
    """The parameters of ``model`` that the ranks of a process group hold alike: that of DDP, or ``process_group``."""
    if process_group is not None:
        # DeepSpeed marks experts, of which a rank has its own.
        yield from ((p, process_group) for p in model.parameters() if getattr(p, "allreduce", True))
    parallel = sys.modules["torch.nn.parallel"].DistributedDataParallel
    for module in model.modules():
        if isinstance(module, parallel):
            named = module.module.named_parameters()
            yield from ((p, module.process_group) for n, p in named if n not in module.parameters_to_ignore)


def is_sharded(param: Tensor) -> bool:
    """Whether other ranks may hold pieces of ``param``, with gradients that this rank has not."""
    return dtensor.is_dtensor(param) or fsdp1.is_fsdp1(param)


def refuse_slices(name: str, param: Tensor) -> None:
    """Tensor parallelism that keeps one rank's slice as a plain tensor (DeepSpeed AutoTP, Megatron) marks it so."""
    if getattr(param, "tensor_model_parallel", False):
        shape = tuple(getattr(param, "ds_shape", param.shape))
        raise RuntimeError(
            f"{name} of shape {shape} is one rank's slice of a larger tensor (tensor parallelism): MARS "
            "would take the norm of the slice for that of the tensor. This version does not support it: set "
            'tensor_parallel.autotp_size to 1 (or remove "tensor_parallel") and shard with ZeRO instead, or use '
            "PyTorch's parallelize_module, whose slices are DTensors."
        )
