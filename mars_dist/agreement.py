"""What is asked once about tensors that are new to an optimizer: do the ranks agree on them, are they supported."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mars_dist.config import GROUP_DEFAULTS, Settings
from mars_dist.maths.rules import MatrixForm, Rule
from mars_dist.sharding.layout import Layout, Segment
from mars_dist.sharding.norms import FAULT, check_same, is_shared, segments_of_ranks


@dataclass(frozen=True)
class New:
    """A tensor that is stepped for the first time; ``rules`` has one rule for each segment of ``layout``."""

    param: Tensor
    group: dict[str, Any]
    layout: Layout
    rules: list[Rule]

    def fingerprint(self) -> list[object]:
        """What must be equal on all ranks that share the tensor (all numbers of the group but lr)."""
        numbers = [(key, self.group[key]) for key in GROUP_DEFAULTS if key in self.group and key != "lr"]
        labels = [rule.label for rule in self.rules]
        placements = str(self.layout.gradient_placements)
        return [[(s.name, s.shape) for s in self.layout.segments], labels, placements, numbers]


def check_over_ranks(new: Sequence[New], settings: Settings) -> None:
    """Raise on every rank when one has found a fault or the ranks would not step alike, so that nobody hangs.

    One exchange of two numbers for each process group. With several groups (the dimensions of a mesh) what one of them
    has found goes on to the next, so that all ranks of the mesh raise.

    Raises:
        RuntimeError: with the fault of this rank, or saying that another rank has one.
    """
    fault = next((tensor.layout.fault for tensor in new if tensor.layout.fault), "")
    unsupported = next(filter(None, (_unsupported(tensor, settings) for tensor in new)), "")
    agree = True
    for process_group in dict.fromkeys(g for tensor in new for g in _sharing(tensor.layout)):
        if not is_shared(process_group):
            continue
        theirs = [tensor for tensor in new if process_group in _sharing(tensor.layout)]
        number = FAULT if fault or not agree else _hash([settings, [tensor.fingerprint() for tensor in theirs]])
        agree = check_same(number, process_group, theirs[0].param.device) and agree
        # Ranks that have all found a fault agree on it.
        agree = agree and number != FAULT
    if fault or unsupported and agree:
        raise RuntimeError(fault or unsupported)
    if not agree:
        first = next(tensor for tensor in new if _sharing(tensor.layout))
        names = [segment.name for tensor in new for segment in tensor.layout.segments]
        raise RuntimeError(
            "MARS: the ranks that share these tensors do not agree on the names, shapes or order of the parameters in "
            f"them (this rank sees {len(names)}, the first is {first.layout.segments[0].name} of shape "
            f"{first.layout.segments[0].shape}) or on MARS's settings ({settings}, clip={first.group['clip']}): build "
            "the same model, groups and optimizer on every rank. Or another rank lacks a gradient that the others have "
            "as partial sums, or has found a fault: see its message."
        )


def _sharing(layout: Layout) -> tuple[ProcessGroup, ...]:
    """The groups whose ranks must step the tensor alike: those that share its pieces, and those that hold the same."""
    return (*layout.process_groups, *layout.replicas)


def _hash(content: object) -> int:
    """63 bits of ``content``, equal on ranks where its repr is."""
    return int.from_bytes(hashlib.sha256(repr(content).encode()).digest()[:8], "big") >> 1


def _unsupported(tensor: New, settings: Settings) -> str:
    """Why the rule of the tensor cannot take its shape, the same on every rank; or ""."""
    layout = tensor.layout
    for segment, rule in zip(layout.segments, tensor.rules, strict=True):
        if rule.whole_matrix and (fault := MatrixForm.of(tensor.group).fault(segment.shape)):
            return f"{segment.name}: {fault}."
    return ""


def pieces_of_all_ranks(new: Sequence[New], known: dict[tuple[int, ...], ProcessGroup]) -> list[New]:
    """``new`` with ``Layout.together`` and ``on_ranks`` for the tensors that hold pieces of matrices.

    One all-gather of a few numbers for each piece and process group. Where several groups cut a tensor, the group of
    all its ranks is looked up in ``known``, and made if it is not there.
    """
    homes = {id(t): _together(t.layout, known) for t in new if any(rule.whole_matrix for rule in t.rules)}
    tables: dict[int, tuple[tuple[Segment, ...], ...]] = {}
    for group in dict.fromkeys(group for group in homes.values() if group is not None):
        theirs = [tensor for tensor in new if homes.get(id(tensor)) is group]
        segments = [segment for tensor in theirs for segment in tensor.layout.segments]
        on_ranks = segments_of_ranks(segments, group, theirs[0].param.device)
        for tensor in theirs:
            n = len(tensor.layout.segments)
            tables[id(tensor)] = tuple(tuple(its[:n]) for its in on_ranks)
            on_ranks = [its[n:] for its in on_ranks]
    return [
        replace(t, layout=replace(t.layout, together=homes[id(t)], on_ranks=tables[id(t)])) if id(t) in tables else t
        for t in new
    ]


def _together(layout: Layout, known: dict[tuple[int, ...], ProcessGroup]) -> ProcessGroup | None:
    groups = [group for group in layout.process_groups if is_shared(group)]
    if len(groups) < 2:
        return groups[0] if groups else None
    if layout.ranks not in known:
        # Only these ranks have come here.
        made = dist.new_group(list(layout.ranks), use_local_synchronization=True)
        known[layout.ranks] = made
    return known[layout.ranks]
