"""The table of pieces: which part of which tensor lies where in the tensor that an engine hands to the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

# The engine of a tensor that is the parameter it was constructed as, and of one that DeepSpeed without ZeRO copied.
WHOLE = "whole tensors"
COPIES = "copies"


@dataclass(frozen=True)
class Segment:
    """One rank's piece of one parameter.

    Attributes:
        name: the parameter's name, or its position ("group 0, parameter 3") where the optimizer was given no names.
        shape: the GLOBAL shape of the parameter, whatever the sharding.
        start, stop: the piece is elements [start, stop) of the flattened parameter; empty when equal.
        offset: where the piece begins in the (flattened) tensor that the engine hands to the optimizer.
        region: for a piece that is a block of the parameter and no interval of it (tensor parallelism), the interval
            [begin, end) in every dimension; start and stop then only count its elements.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int
    region: tuple[tuple[int, int], ...] | None = None

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.numel == math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """All segments of one tensor that an engine hands over, in the same order and number on every rank.

    Attributes:
        segments: empty pieces included.
        process_groups: the ranks whose pieces together make each parameter exactly once: a sum over these groups, one
            after the other, is the sum over all pieces. One group as a rule, one for each mesh dimension that cuts a
            DTensor; none when this process holds every parameter whole.
        fault: what is wrong with the table as this rank sees it, or "". Only this rank may see it: all ranks that
            share the tensor must hear of it before one raises, or the others wait for ever.
        engine: which source this table came from, for messages and tests: "whole tensors", "copies", "ZeRO-1/2",
            "ZeRO-3", "FSDP1", "DTensor (Replicate(), Shard(dim=0))".
        always_joins: the tensor takes part in the exchange of a step even where this rank has no gradient for it: in
            PyTorch's sharded engines the other ranks may have one.
        replicas: groups of ranks that hold the same pieces (HSDP, or what tensor parallelism does not cut): no norm is
            summed over them, but they must agree.
        gradient_placements: the placements in which the gradients of a DTensor arrive, where bringing them into its own
            is a collective that every rank has to join.
        unit: which tensors' states are saved together, so that all of them must show the same ones (FSDP1 with
            original parameters): one number for each FSDP1 unit that cuts its parameters, None elsewhere.
        held: how many elements the engine hands over between steps, where it can show others (FSDP1); else None.
        ranks: all ranks that hold pieces, where that takes more than one process group; () elsewhere.
        copies: ranks that hold the same whole tensors and step alike (DDP), if MARS was told of them: they share out
            the work of the matrix rules.
        together: the one group of all ranks that hold pieces, and ``on_ranks[r]`` the segments of its rank r: known of
            tensors with matrices, once they are checked.
    """

    segments: tuple[Segment, ...]
    process_groups: tuple[ProcessGroup, ...]
    engine: str
    fault: str = ""
    always_joins: bool = False
    replicas: tuple[ProcessGroup, ...] = ()
    gradient_placements: Any = None
    unit: int | None = None
    held: int | None = None
    ranks: tuple[int, ...] = ()
    copies: ProcessGroup | None = None
    together: ProcessGroup | None = None
    on_ranks: tuple[tuple[Segment, ...], ...] = ()


def whole(name: str, param: torch.Tensor, engine: str = WHOLE) -> Layout:
    """The layout of a tensor that every process holds whole."""
    shape = tuple(param.shape)
    return Layout((Segment(name, shape, 0, math.prod(shape), 0),), (), engine)
