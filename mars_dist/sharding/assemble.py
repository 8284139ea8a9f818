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

    def loads(self, costs: Sequence[float]) -> list[float]:
        """What the matrices of each rank cost together, from the cost of each."""
        loads = [0.0] * self.world_size
        for cost, owner in zip(costs, self.owners, strict=True):
            loads[owner] += cost
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
    costs: Sequence[float],
    numel_per_round: int,
    copies: bool = False,
) -> Plan:
    """Owners balanced by ``costs``, and rounds in which no rank owns or sends more than about ``numel_per_round``.

    A matrix that one rank holds whole is owned by it. The others go, the dearest first, to the rank with the least to
    do, and among such ranks to the one that holds most of it. A matrix that is larger than a round has one to itself.
    """
    loads = [0.0] * world_size
    owners = [-1] * len(matrices)
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
    """The collectives of one round of a plan. Holds no data: it is made once and used in every step.

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
        moving = [i for i in chosen if group is not None and (plan.copies or plan.travels(i))]
        self.travels = bool(moving)
        # What stays on this rank, and what goes between it and each other one, in the same order on both sides.
        self.stays: Entries = [(i, part) for i in self.mine if (part := plan.matrices[i].part_of(self.rank))]
        self.to_owner: list[Entries] = [[] for _ in range(plan.world_size)]
        self.to_me: list[Entries] = [[] for _ in range(plan.world_size)]
        self.results: list[Entries] = [[] for _ in range(plan.world_size)]  # of each owner, where there are copies
        for i in moving:
            owner = plan.owners[i]
            if plan.copies:
                self.results[owner].append((i, Part(self.rank, 0, plan.matrices[i].numel)))
                continue
            for part in plan.matrices[i].parts:
                if part.rank == self.rank != owner:
                    self.to_owner[owner].append((i, part))
                elif owner == self.rank != part.rank:
                    self.to_me[part.rank].append((i, part))

    def collect(self, piece: Callable[[int, Part], Tensor], whole: dict[int, Tensor]) -> None:
        """Fill ``whole[i]``, of the matrix's shape, for every matrix that this rank owns.

        ``piece(i, part)`` is this rank's part of matrix i, flat.
        """
        targets = [part.within(whole[i]) for i, part in self.stays]
        sources = [piece(i, part) for i, part in self.stays]
        if self.travels and not self.plan.copies:
            received = self._all_to_all([piece(i, part) for i, part in _flat(self.to_owner)], self.to_owner, self.to_me)
            targets += [part.within(whole[i]) for i, part in _flat(self.to_me)]
            sources += received
        _copy(targets, [source.view(target.shape) for target, source in zip(targets, sources, strict=True)])

    def hand_out(self, whole: dict[int, Tensor]) -> list[tuple[int, Part, Tensor]]:
        """Number, part and values (flat) of every part that this rank holds of a matrix of the round.

        ``whole[i]``: the result for every matrix that this rank owns.
        """
        if self.plan.copies and self.travels:
            return self._broadcast(whole)
        out = [(i, part, part.within(whole[i]).reshape(-1)) for i, part in self.stays]
        if self.travels:
            pieces = [part.within(whole[i]).reshape(-1) for i, part in _flat(self.to_me)]
            received = self._all_to_all(pieces, self.to_me, self.to_owner)
            entries = zip(_flat(self.to_owner), received, strict=True)
            out += [(i, part, values) for (i, part), values in entries]
        return out

    def _all_to_all(self, pieces: list[Tensor], to: list[Entries], coming: list[Entries]) -> list[Tensor]:
        """Send ``pieces``, which are those of ``to``; what arrives, which are those of ``coming``."""
        packed = torch.empty(sum(p.numel() for p in pieces), dtype=self.dtype, device=self.device)
        _copy(list(packed.split([p.numel() for p in pieces])), pieces)
        received = torch.empty(sum(map(_numel, coming)), dtype=self.dtype, device=self.device)
        out_sizes, in_sizes = (list(map(_numel, entries)) for entries in (coming, to))
        dist.all_to_all_single(received, packed, out_sizes, in_sizes, group=self.group)
        return list(received.split([part.numel for _, part in _flat(coming)]))

    def _broadcast(self, whole: dict[int, Tensor]) -> list[tuple[int, Part, Tensor]]:
        """Each owner sends all its results of the round to everybody, in one message."""
        sent: list[tuple[Entries, Tensor, Any]] = []
        for owner, entries in enumerate(self.results):
            if not entries:
                continue
            packed = torch.empty(_numel(entries), dtype=self.dtype, device=self.device)
            if owner == self.rank:
                pieces = [whole[i].reshape(-1) for i, _ in entries]
                _copy(list(packed.split([p.numel() for p in pieces])), pieces)
            work = dist.broadcast(packed, group=self.group, group_src=owner, async_op=True)
            sent.append((entries, packed, work))
        out = []
        for entries, packed, work in sent:
            work.wait()
            views = packed.split([part.numel for _, part in entries])
            # The owner as well takes what was sent, rounded to its dtype: the copies stay equal.
            out += [(i, part, view) for (i, part), view in zip(entries, views, strict=True)]
        return out


Entries = list[tuple[int, Part]]


def _flat(lists: Sequence[Entries]) -> Entries:
    return [entry for entries in lists for entry in entries]


def _numel(entries: Entries) -> int:
    return sum(part.numel for _, part in entries)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
