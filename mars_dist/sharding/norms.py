"""Sums over the ranks that share a tensor: one small vector, one all-reduce."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mars_dist.sharding.layout import Segment

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


def segments_of_ranks(segments: Sequence[Segment], group: ProcessGroup, device: torch.device) -> list[list[Segment]]:
    """For each rank of ``group``, its pieces of the parameters that ``segments`` are this rank's pieces of.

    One all-gather of 2 numbers for each segment and 2 for each of its dimensions; one host read.
    """
    numbers: list[int] = []
    for s in segments:
        numbers += [s.start, s.stop] + [i for interval in s.region or ((-1, -1),) * len(s.shape) for i in interval]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    mine = mine.to(communication_device(mine, group))
    gathered = mine.new_empty(dist.get_world_size(group) * len(numbers))
    dist.all_gather_into_tensor(gathered, mine, group=group)
    return [_segments(segments, its) for its in gathered.view(-1, len(numbers)).tolist()]


def _segments(alike: Sequence[Segment], numbers: list[int]) -> list[Segment]:
    out, at = [], 0
    for s in alike:
        start, stop, *ends = numbers[at : at + 2 + 2 * len(s.shape)]
        at += 2 + 2 * len(s.shape)
        region = tuple(zip(ends[::2], ends[1::2], strict=True)) if ends and ends[0] >= 0 else None
        out.append(Segment(s.name, s.shape, start, stop, -1, region))  # where it lies is known to its rank alone
    return out


# Sent instead of a fingerprint by a rank that has found a fault.
FAULT = 2**63 - 1


def check_same(number: int, group: ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of ``group`` hold the same non-negative 63-bit ``number``. One all-reduce, one host read."""
    pair = torch.tensor([number, -number], dtype=torch.int64, device=device)
    pair = pair.to(communication_device(pair, group))
    dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
    highest, negated_lowest = pair.tolist()
    return bool(highest == -negated_lowest)
