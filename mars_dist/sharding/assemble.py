"""Whole matrices from the pieces that the ranks hold, and back.

Every matrix has one owner among the ranks that share it. The pieces of its momentum go there, all of a round's in one
packed all-to-all with uneven splits, and the pieces of the result come back in another. A matrix that one rank holds
whole stays there. Where every rank holds every matrix (DDP) nothing has to go to the owners: each broadcasts its
results.

The plan is computed from the table of all ranks' pieces alone, so it is the same on every rank, and nothing in it
depends on values. It knows nothing of what the owners do with their matrices.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mars_dist.sharding.layout import Segment


@dataclass(frozen=True)
class Part:
    """One rank's part of one matrix: elements [begin, end) of its flattened shape, or a block of it (``region``)."""

    rank: int
    begin: int
    end: int
    region: tuple[tuple[int, int], ...] | None = None

    @property
    def numel(self) -> int:
        return self.end - self.begin

    def within(self, matrix: Tensor) -> Tensor:
        """This part of the whole (contiguous) ``matrix``, in the same memory."""
        if self.region is None:
            return matrix.view(-1)[self.begin : self.end]
        return matrix[tuple(slice(*interval) for interval in self.region)]


@dataclass(frozen=True)
class Matrix:
    """One matrix: a parameter, or one of those that a parameter of three dimensions stacks.

    Attributes:
        source: the number of the parameter it belongs to, in the order that all ranks agree on.
        item: which of the stacked matrices it is; 0 for any other parameter.
        shape: as the parameter has it; more than two dimensions are a convolution's.
        parts: those of the ranks that hold something of it, by rank.
    """

    source: int
    item: int
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of the matrix that the rules see."""
        return self.shape[0], math.prod(self.shape[1:])

    def part_of(self, rank: int) -> Part | None:
        return next((part for part in self.parts if part.rank == rank), None)


@dataclass(frozen=True)
class Plan:
    """Who orthogonalises which matrix, and in which order.

    Attributes:
        matrices: all of them.
        owners: the rank (of the process group) that orthogonalises each.
        rounds: numbers of matrices, one tuple for each round.
        world_size: ranks of the process group.
        copies: every rank holds every matrix whole.
    """

    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]
    world_size: int
    copies: bool = False

    def travels(self, number: int) -> bool:
        """Whether pieces of the matrix are sent at all."""
        return any(part.rank != self.owners[number] for part in self.matrices[number].parts)

    def fingerprint(self) -> int:
        """63 bits that are equal on ranks with the same plan."""
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:8], "big") >> 1

    def loads(self, cost: Callable[[Matrix], float]) -> list[float]:
        """What the matrices of each rank cost together."""
        loads = [0.0] * self.world_size
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            loads[owner] += cost(matrix)
        return loads

    def sent(self, rank: int) -> int:
        """Elements that ``rank`` sends in a step: pieces to the owners, and pieces of its own results back."""
        if self.copies:
            return sum(m.numel for m, owner in zip(self.matrices, self.owners, strict=True) if owner == rank)
        out = 0
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            out += sum(part.numel for part in matrix.parts if (part.rank == rank) != (owner == rank))
        return out


def matrices_of(source: int, on_ranks: Sequence[Segment]) -> list[Matrix]:
    """The matrices of one parameter, of which rank r holds the piece ``on_ranks[r]``. Three dimensions are a stack."""
    shape = on_ranks[0].shape
    stacked = len(shape) == 3
    inner = shape[1:] if stacked else shape
    size, items = math.prod(inner), shape[0] if stacked else 1
    parts: list[list[Part]] = [[] for _ in range(items)]
    for rank, s in enumerate(on_ranks):
        if s.numel == 0:
            continue
        if s.region is None:
            for item in range(s.start // size, (s.stop - 1) // size + 1):
                first = item * size
                parts[item].append(Part(rank, max(s.start - first, 0), min(s.stop - first, size)))
        else:
            which, region = (s.region[0], s.region[1:]) if stacked else ((0, 1), s.region)
            numel = math.prod(end - begin for begin, end in region)
            for item in range(*which):
                parts[item].append(Part(rank, 0, numel, region))
    return [Matrix(source, item, inner, tuple(held)) for item, held in enumerate(parts) if size]


def make_plan(
    matrices: Sequence[Matrix],
    world_size: int,
    cost: Callable[[Matrix], float],
    numel_per_round: int,
    copies: bool = False,
) -> Plan:
    """Owners balanced by ``cost``, and rounds in which no rank owns or sends more than about ``numel_per_round``.

    A matrix that one rank holds whole is owned by it. The others go, the dearest first, to the rank with the least to
    do, and among such ranks to the one that holds most of it. A matrix that is larger than a round has one to itself.
    """
    loads = [0.0] * world_size
    owners = [-1] * len(matrices)
    costs = [cost(matrix) for matrix in matrices]
    for i, matrix in enumerate(matrices):
        if len(matrix.parts) == 1 and not copies:
            owners[i] = matrix.parts[0].rank
            loads[owners[i]] += costs[i]
    for i in sorted((i for i, owner in enumerate(owners) if owner < 0), key=lambda i: (-costs[i], i)):
        held = {part.rank: part.numel for part in matrices[i].parts}
        least = min(loads)
        owners[i] = max((r for r, load in enumerate(loads) if load == least), key=lambda r: (held.get(r, 0), -r))
        loads[owners[i]] += costs[i]
    # Copies: every rank receives all results of a round.
    limit = numel_per_round // world_size if copies else numel_per_round
    rounds = _rounds(matrices, owners, world_size, limit, copies)
    return Plan(tuple(matrices), tuple(owners), rounds, world_size, copies)


def _rounds(
    matrices: Sequence[Matrix], owners: Sequence[int], world_size: int, limit: int, copies: bool
) -> tuple[tuple[int, ...], ...]:
    waiting: list[deque[int]] = [deque() for _ in range(world_size)]
    # Equal shapes next to each other: they are orthogonalised as one batch.
    for i in sorted(range(len(matrices)), key=lambda i: (-matrices[i].numel, matrices[i].shape, i)):
        waiting[owners[i]].append(i)
    rounds = []
    while any(waiting):
        chosen: list[int] = []
        sent = [0] * world_size
        for owner, its in enumerate(waiting):
            owned = 0
            while its:
                matrix = matrices[its[0]]
                leaving = [part for part in matrix.parts if part.rank != owner and not copies]
                full = owned and owned + matrix.numel > limit
                if full or any(sent[p.rank] and sent[p.rank] + p.numel > limit for p in leaving):
                    break
                owned += matrix.numel
                for part in leaving:
                    sent[part.rank] += part.numel
                chosen.append(its.popleft())
        rounds.append(tuple(chosen))
    return tuple(rounds)


class Exchange:
    """The collectives of one round of a plan.

    Args:
        plan, chosen: the plan, and the numbers of the round's matrices.
        group: the process group, or None where nothing travels.
        dtype, device: of what is sent.
    """

    def __init__(
        self, plan: Plan, chosen: Sequence[int], group: ProcessGroup | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.plan, self.group, self.dtype, self.device = plan, group, dtype, device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.mine = [i for i in chosen if plan.owners[i] == self.rank]
        self.moving = [i for i in chosen if group is not None and (plan.copies or plan.travels(i))]
        ranks = range(plan.world_size)
        # What goes between this rank and each other one, in the order of the round on both sides.
        self.to_owner: list[list[tuple[int, Part]]] = [[] for _ in ranks]
        self.to_me: list[list[tuple[int, Part]]] = [[] for _ in ranks]
        for i in () if plan.copies else self.moving:
            owner = plan.owners[i]
            for part in plan.matrices[i].parts:
                if part.rank == self.rank != owner:
                    self.to_owner[owner].append((i, part))
                elif owner == self.rank != part.rank:
                    self.to_me[part.rank].append((i, part))

    def collect(self, piece: Callable[[int, Part], Tensor], whole: dict[int, Tensor]) -> None:
        """Fill ``whole[i]``, of the matrix's shape, for every matrix that this rank owns.

        ``piece(i, part)`` is this rank's part of matrix i, with the part's number of elements.
        """
        for i in self.mine:
            part = self.plan.matrices[i].part_of(self.rank)
            if part is not None:
                target = part.within(whole[i])
                target.copy_(piece(i, part).view(target.shape))
        if self.plan.copies or not self.moving:
            return
        pieces = [[piece(i, part) for i, part in entries] for entries in self.to_owner]
        for entries, received in zip(self.to_me, self._all_to_all(pieces, self.to_me), strict=True):
            for i, part, flat in _unpacked(entries, received):
                target = part.within(whole[i])
                target.copy_(flat.view(target.shape))

    def hand_out(self, whole: dict[int, Tensor], take: Callable[[int, Part, Tensor], None]) -> None:
        """``take(i, part, values)`` is called once for each part that this rank holds of a matrix of the round.

        ``whole[i]``: the result for every matrix that this rank owns.
        """
        if self.plan.copies and self.moving:
            self._broadcast(whole, take)
            return
        for i in self.mine:
            part = self.plan.matrices[i].part_of(self.rank)
            if part is not None:
                take(i, part, part.within(whole[i]).reshape(-1))
        if self.moving:
            pieces = [[part.within(whole[i]).reshape(-1) for i, part in entries] for entries in self.to_me]
            for entries, received in zip(self.to_owner, self._all_to_all(pieces, self.to_owner), strict=True):
                for i, part, flat in _unpacked(entries, received):
                    take(i, part, flat)

    def _all_to_all(self, pieces: list[list[Tensor]], expected: list[list[tuple[int, Part]]]) -> list[Tensor]:
        """Send ``pieces[r]`` to each rank r; what came from each."""
        sizes = [sum(p.numel() for p in to_rank) for to_rank in pieces]
        coming = [sum(part.numel for _, part in entries) for entries in expected]
        packed = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        flat = [p for to_rank in pieces for p in to_rank]
        for target, source in zip(packed.split([p.numel() for p in flat]), flat, strict=True):
            target.copy_(source)
        received = torch.empty(sum(coming), dtype=self.dtype, device=self.device)
        dist.all_to_all_single(received, packed, coming, sizes, group=self.group)
        return list(received.split(coming))

    def _broadcast(self, whole: dict[int, Tensor], take: Callable[[int, Part, Tensor], None]) -> None:
        """Each owner sends all its results of the round to everybody, in one message."""
        owned: dict[int, list[int]] = {}
        for i in self.moving:
            owned.setdefault(self.plan.owners[i], []).append(i)
        sent: list[tuple[list[int], tuple[Tensor, ...], Any]] = []
        for owner, numbers in sorted(owned.items()):
            sizes = [self.plan.matrices[i].numel for i in numbers]
            packed = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
            if owner == self.rank:
                torch.cat([whole[i].reshape(-1).to(self.dtype) for i in numbers], out=packed)
            work = dist.broadcast(packed, group=self.group, group_src=owner, async_op=True)
            sent.append((numbers, packed.split(sizes), work))
        for numbers, results, work in sent:
            work.wait()
            for i, flat in zip(numbers, results, strict=True):
                # The owner as well takes what was sent, rounded to its dtype: the copies stay equal.
                take(i, Part(self.rank, 0, flat.numel()), flat)


def _unpacked(entries: list[tuple[int, Part]], received: Tensor) -> list[tuple[int, Part, Tensor]]:
    views = received.split([part.numel for _, part in entries]) if entries else ()
    return [(i, part, view) for (i, part), view in zip(entries, views, strict=True)]
