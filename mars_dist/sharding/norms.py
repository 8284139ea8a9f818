"""Sums over the ranks that share a tensor: one small vector, one all-reduce."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Set by tests on machines with one accelerator, so that the collectives run there as well.
KEEP_COLLECTIVES = os.environ.get("MARS_DIST_KEEP_COLLECTIVES", "0") == "1"


def is_shared(group: ProcessGroup | None) -> bool:
    """Whether a tensor of ``group`` is spread over more than one rank."""
    return group is not None and (dist.get_world_size(group) > 1 or KEEP_COLLECTIVES)


def communication_device(tensor: Tensor, group: ProcessGroup) -> torch.device:
    """The device on which ``group`` can reduce a tensor that lies where ``tensor`` does.

    With CPU offload the state is on the CPU while NCCL takes only accelerator tensors.
    """
    if tensor.device.type == "cpu" and "cpu:" not in dist.get_backend_config(group):
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None, "a process group that cannot reduce CPU tensors needs an accelerator"
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return tensor.device


def sum_over_ranks(vector: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of ``vector`` over ``group``, on the device of ``vector``. One all-reduce; none on one rank."""
    if not is_shared(group):
        return vector
    moved = vector.to(communication_device(vector, group))
    dist.all_reduce(moved, group=group)
    return moved.to(vector.device)


# Sent instead of a fingerprint by a rank that has found a fault.
FAULT = 2**63 - 1


def check_same(number: int, group: ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of ``group`` hold the same non-negative 63-bit ``number``. One all-reduce, one host read."""
    pair = torch.tensor([number, -number], dtype=torch.int64, device=device)
    pair = pair.to(communication_device(pair, group))
    dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
    highest, negated_lowest = pair.tolist()
    return bool(highest == -negated_lowest)
