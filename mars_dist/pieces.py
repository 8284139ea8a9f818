"""What one step works on: the tensors as the engine hands them over, this rank's pieces of parameters in them, and
buckets of pieces that are updated together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mars_dist.kernels import Block, Hyper
from mars_dist.maths.rules import Rule
from mars_dist.sharding.layout import Layout, Segment
from mars_dist.states import STEP

# Elements per block. On a CPU the temporaries of a block should stay in the cache; on an accelerator a block bounds
# the extra memory and should be large enough to make launches rare.
BLOCK_NUMEL = {"cpu": 1 << 18}
BLOCK_NUMEL_ACCELERATOR = 1 << 26


@dataclass
class Shard:
    """One tensor as the engine hands it over: this rank's part of one or of many parameters."""

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    group: Mapping[str, Any]
    layout: Layout
    # Checkpoint libraries and wrappers create states by a step on zero gradients, with lr 0 or at construction. Where
    # this holds (a 0-dim bool tensor when lr is one), a tensor that has taken no step yet is left alone if every
    # gradient of the call is zero.
    may_be_dry_run: bool | Tensor = False
    # This rank has no gradient (``grad`` is zero) where others that hold pieces of the same parameters may have one:
    # the tensor is left alone if nobody has.
    lacks_gradient: bool = False


@dataclass
class Piece:
    """This rank's piece of one parameter in one step."""

    shard: Shard
    segment: Segment
    clip: float | None
    squared_norms: list[Tensor] = field(default_factory=list)
    scale: Tensor | None = None

    def is_flat(self) -> bool:
        return all(t.is_contiguous() for t in (self.shard.param, self.shard.grad, *self.shard.state.values()))

    def views(self, source: Tensor, limit: int) -> Sequence[Tensor]:
        """This piece in ``source`` (value, gradient or state of a flat shard), cut to at most ``limit`` elements."""
        s = self.segment
        flat = source.view(-1)
        if s.numel < flat.numel():
            flat = flat[s.offset : s.offset + s.numel]
        return flat.split(limit) if s.numel > limit else (flat,)


@dataclass
class Bucket:
    """Pieces that share parameter group, rule, dtypes and device; ``masked``: tensors that may be left alone."""

    rule: Rule
    hyper: Hyper
    masked: bool
    pieces: list[Piece] = field(default_factory=list)

    def blocks(self) -> list[Block]:
        """Views of all non-empty pieces, packed into blocks of bounded size."""
        blocks = [Block()]
        filled = 0
        for owner, piece in enumerate(self.pieces):
            if piece.segment.numel == 0:
                continue
            shard = piece.shard
            sources = {"value": shard.param, "grad": shard.grad}
            wanted = (
                ["exp_avg"]
                + ["prev_grad"] * (self.rule.corrected and not self.hyper.one_state)
                + ["exp_avg_sq"] * self.rule.second_moment
            )
            wanted += ["max_exp_avg_sq"] * (self.rule.second_moment and shard.group["amsgrad"])
            sources |= {key: shard.state[key] for key in wanted}
            limit = BLOCK_NUMEL.get(shard.param.device.type, BLOCK_NUMEL_ACCELERATOR)
            flat = piece.is_flat()
            # Element-wise work on a whole tensor of any strides needs no flat view.
            cut = {key: piece.views(tensor, limit) if flat else (tensor,) for key, tensor in sources.items()}
            for i, view in enumerate(cut["value"]):
                if filled and filled + view.numel() > limit:
                    blocks.append(Block())
                    filled = 0
                filled += view.numel()
                for key, views in cut.items():
                    getattr(blocks[-1], key).append(views[i])
                blocks[-1].step.append(shard.state[STEP])
                blocks[-1].owner.append(owner)
                blocks[-1].flat &= flat
        return blocks if blocks[-1].value else blocks[:-1]
