"""One step of MARS over the tensors that an engine hands to the optimizer, however they are sharded.

Pass 1 writes nothing: the squared norm of c for every tensor, summed over the ranks that share it by ONE all-reduce
per process group. Pass 2: moments, values, previous gradient. Matrix rules then move their values by the whole
matrix. No value is read back to the host: scales, counters and the decision to skip a step stay on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mars_dist import kernels
from mars_dist.config import Settings
from mars_dist.kernels import Block, Hyper, Scratch
from mars_dist.maths.rules import Rule, rule_for
from mars_dist.matrices import Plans, move_matrices
from mars_dist.pieces import Bucket, Piece, Shard
from mars_dist.sharding.layout import Segment
from mars_dist.sharding.norms import is_shared, sum_over_ranks
from mars_dist.states import STEP

Groups = tuple[ProcessGroup, ...]


def rule_of(segment: Segment, group: Mapping[str, Any], settings: Settings) -> Rule:
    """The rule that a parameter takes, by its global shape, its group and the optimizer's settings."""
    return rule_for(segment.shape, settings.mars_type, settings.matrix_ndim, group["use_mars"], group["optimize_1d"])


def check_gradient(p: Tensor, grad: Tensor) -> None:
    """Raise ``RuntimeError`` for a gradient that MARS cannot take."""
    if grad.is_sparse:
        raise RuntimeError(
            f"MARS does not support sparse gradients (parameter of shape {tuple(p.shape)}): use dense ones, for "
            "example nn.Embedding(..., sparse=False)."
        )
    if grad.shape != p.shape:  # torch forbids it, but FSDP1 sets what a parameter shows by itself
        raise RuntimeError(
            f"a gradient of shape {tuple(grad.shape)} belongs to a parameter that shows {tuple(p.shape)}: under FSDP1 "
            "with no_sync() it has not been summed over the ranks. Leave no_sync() for the last backward pass before "
            "each step()."
        )
    if grad.is_complex():
        raise RuntimeError(
            f"MARS does not support complex gradients (parameter of shape {tuple(p.shape)}, {grad.dtype}): train "
            "the real and imaginary parts as real parameters."
        )


def take_step(shards: Sequence[Shard], settings: Settings, plans: Plans) -> None:
    """One step of MARS, in place, over what the engine handed over in this call; the states exist already."""
    masked = settings.skip_nonfinite or any(s.may_be_dry_run is not False for s in shards)
    buckets, pieces = _buckets(shards, settings, masked)
    is_first = {id(s): s.state[STEP] == 0 for s in shards} if masked else {}

    blocks = [bucket.blocks() for bucket in buckets]
    scratch = Scratch()
    for bucket, its_blocks in zip(buckets, blocks, strict=True):
        if bucket.hyper.clip is not None or masked:
            _squared_norms(bucket, its_blocks, scratch)
    known, present = _exchange(shards, pieces, masked)
    taken = _taken(known, shards, settings, is_first) if masked else {}
    for key, some_rank_has_it in present.items():
        taken[key] = taken[key] & some_rank_has_it if key in taken else some_rank_has_it
    _count_step([s for s in shards if id(s) not in taken], [s for s in shards if id(s) in taken], taken)

    for bucket, its_blocks in zip(buckets, blocks, strict=True):
        owners = [id(p.shard) for p in bucket.pieces]
        per_tensor = {
            "scale": [p.scale for p in bucket.pieces if p.scale is not None],
            "taken": [taken[o] for o in owners] if bucket.masked else [],
        }
        for block in its_blocks:
            kernels.update(block, bucket.rule, bucket.hyper, scratch, **per_tensor)
    move_matrices(buckets, pieces, settings, taken, plans)


def all_finite(shards: Sequence[Shard]) -> Tensor:
    """Whether every gradient of ``shards`` is finite on every rank that shares one, as a 0-dim bool on the device."""
    device = _device(shards)
    bad = torch.stack([(~torch.isfinite(s.grad).all()).to(device) for s in shards]).sum(dtype=torch.float64)
    for group in dict.fromkeys(g for shard in shards for g in shard.layout.process_groups):
        bad = sum_over_ranks(bad.reshape(1), group).reshape(())
    return bad == 0


def _buckets(shards: Sequence[Shard], settings: Settings, masked: bool) -> tuple[list[Bucket], list[Piece]]:
    """The pieces of ``shards`` in buckets, and in their own order, which is the same on every rank."""
    buckets: dict[Any, Bucket] = {}
    pieces: list[Piece] = []
    for shard in shards:
        left_alone = masked or shard.lacks_gradient
        for segment in shard.layout.segments:
            rule = rule_of(segment, shard.group, settings)
            key = (id(shard.group), rule.label, shard.param.dtype, shard.grad.dtype, shard.param.device, left_alone)
            if key not in buckets:
                buckets[key] = Bucket(rule, _hyper(shard.group, rule, settings), left_alone)
            pieces.append(Piece(shard, segment, buckets[key].hyper.clip))
            buckets[key].pieces.append(pieces[-1])
    return list(buckets.values()), pieces


def _count_step(stepped: Sequence[Shard], masked: Sequence[Shard], taken: dict[int, Tensor]) -> None:
    if stepped:
        torch._foreach_add_([s.state[STEP] for s in stepped], 1.0)
    if masked:
        torch._foreach_add_([s.state[STEP] for s in masked], [taken[id(s)].to(s.state[STEP].dtype) for s in masked])


def learning_rate(group: Mapping[str, Any]) -> float | Tensor:
    """The group's lr: a float, or a 0-dim tensor where the caller keeps it as a tensor of one element."""
    lr = group["lr"]
    return lr.reshape(()) if isinstance(lr, Tensor) else float(lr)


def _hyper(group: Mapping[str, Any], rule: Rule, settings: Settings) -> Hyper:
    lr = learning_rate(group)
    if not rule.corrected:
        beta1, beta2 = group["betas_1d"]
        return Hyper(
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            lr=lr * group["lr_1d_ratio"],
            weight_decay=group["weight_decay_1d"],
            maximize=group["maximize"],
        )
    beta1, beta2 = group["betas"]
    return Hyper(
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        lr=lr,
        weight_decay=group["weight_decay"],
        k=group["gamma"] * beta1 / (1.0 - beta1),
        clip=group["clip"],
        maximize=group["maximize"],
        first_step_is_paper=settings.first_step == "paper",
        keep_gradient=settings.is_approx,
        one_state=group["one_state"] and rule.can_keep_one_state,
        gamma=group["gamma"],
    )


def _squared_norms(bucket: Bucket, blocks: list[Block], scratch: Scratch) -> None:
    """The squared norms of c in every view of ``bucket``, kept with the pieces."""
    for block in blocks:
        norms = kernels.squared_norms(block, bucket.hyper, scratch)
        for owner, norm in zip(block.owner, norms, strict=True):
            bucket.pieces[owner].squared_norms.append(norm)


def _exchange(shards: Sequence[Shard], pieces: Sequence[Piece], masked: bool) -> tuple[Tensor, dict[int, Tensor]]:
    """Sum over the ranks by one all-reduce per process group, and set ``scale`` of every piece that is clipped.

    Each all-reduce also hands on what the rank knows by then of ALL its tensors, so that the ranks of groups that
    overlap (experts on a part of the ranks, say) decide alike whether the step is one.

    Returns: where ``masked``, two numbers that are zero unless some gradient is not finite, and unless some is not
        zero; and for each shard that lacks its gradient, whether some rank has one, as a 0-dim bool.
    """
    norms: dict[Groups, list[Piece]] = {}
    for piece in pieces:
        if piece.clip is not None or masked:
            norms.setdefault(piece.shard.layout.process_groups, []).append(piece)
    joining: dict[Groups, list[Shard]] = {}
    used = {group for shard in shards for group in shard.layout.process_groups}
    for shard in shards:
        if shard.layout.always_joins:
            # Replicas are asked as well where that costs no further all-reduce.
            asked = (*shard.layout.process_groups, *(g for g in shard.layout.replicas if g in used))
            joining.setdefault(asked, []).append(shard)

    vectors = {("norms", groups): _norms(members) for groups, members in norms.items()}
    vectors |= {("gradients", groups): _gradients(members) for groups, members in joining.items()}
    known = _known(vectors) if masked else torch.empty(0, dtype=torch.float64)
    for group in dict.fromkeys(g for _, groups in vectors for g in groups):
        members = [key for key in vectors if group in key[1]]
        device = vectors[members[0]].device
        mine = [vectors[key].to(device) for key in members]
        *totals, known = sum_over_ranks(torch.cat([*mine, known.to(device)]), group).split(
            [*map(len, mine), len(known)]
        )
        vectors |= zip(members, totals, strict=True)
    if masked:
        known = known + _known(vectors).to(known.device)  # a sum of finite numbers may be infinite

    present: dict[int, Tensor] = {}
    for groups, its_shards in joining.items():
        present |= _present(its_shards, vectors["gradients", groups])
    for groups, its_pieces in norms.items():
        _set_scales(its_pieces, vectors["norms", groups].sqrt())
    return known, present


def _known(vectors: Mapping[Any, Tensor]) -> Tensor:
    norms = [vector for (kind, _), vector in vectors.items() if kind == "norms"]
    everything = torch.cat([vector.to(norms[0].device) for vector in norms])
    return torch.stack([~torch.isfinite(everything).all(), (everything != 0).any()]).double()  # NaN is not 0


def _norms(pieces: Sequence[Piece]) -> Tensor:
    device = _device([piece.shard for piece in pieces])
    return torch.stack([_sum(piece).to(device) for piece in pieces])


def _gradients(shards: Sequence[Shard]) -> Tensor:
    """For each shard whether this rank has its gradient, then for each whether it lacks one that it should have."""
    device = _device(shards)
    has, lacks = (make(len(shards), dtype=torch.float64, device=device) for make in (torch.ones, torch.zeros))
    for i, shard in enumerate(shards):
        if shard.lacks_gradient:
            has[i].zero_()
            # Partial sums have been added up over the ranks: what was missing here is a zero in the sum.
            if shard.param.numel() and shard.layout.gradient_placements is None:
                lacks[i].fill_(1.0)
    return torch.cat([has, lacks])


def _present(shards: Sequence[Shard], sums: Tensor) -> dict[int, Tensor]:
    """For each shard that lacks its gradient, whether some rank has one.

    The missing piece then counts as zero. A rank that holds a replica of it cannot know that, and the replicas would
    drift apart: that is an error, raised on the device (no value is read here).
    """
    has, lacks = sums.view(2, -1)
    replicated = [i for i, s in enumerate(shards) if any(is_shared(g) for g in s.layout.replicas)]
    if replicated:
        lacking = [shards[i] for i in replicated if shards[i].lacks_gradient and shards[i].param.numel()]
        mine = [shard.layout.segments[0].name for shard in lacking]
        here = f"This rank has none for {', '.join(mine[:3])}." if mine else "The message of another rank names it."
        torch._assert_async(
            ~torch.stack([(has[i] > 0) & (lacks[i] > 0) for i in replicated]).any(),
            "MARS: a gradient is missing on one rank only, and other ranks hold replicas of the same tensor, which "
            f"would drift apart. {here} Give every rank a gradient (zeros where a layer was not used).",
        )
    return {id(s): (present > 0).to(s.param.device) for s, present in zip(shards, has, strict=True) if s.lacks_gradient}


def _set_scales(pieces: Sequence[Piece], norms: Tensor) -> None:
    """``scale`` of each piece that is clipped, from the norms of the whole tensors."""
    for limit in {piece.clip for piece in pieces if piece.clip is not None}:
        # A NaN norm is not above the limit: the NaN goes through to the parameters, as in the reference, unless
        # skip_nonfinite leaves the step out.
        scales = torch.where(norms > limit, limit / norms, 1.0).unbind()
        for piece, scale in zip(pieces, scales, strict=True):
            if piece.clip == limit:
                piece.scale = scale.to(piece.shard.param.device)


def _device(shards: Sequence[Shard]) -> torch.device:
    """Where a vector about ``shards`` lives: on the accelerator where one of them does (some may be offloaded)."""
    devices = [s.param.device for s in shards]
    return next((d for d in devices if d.type != "cpu"), devices[0])


def _sum(piece: Piece) -> Tensor:
    if len(piece.squared_norms) > 1:
        return torch.stack(piece.squared_norms).sum()
    if piece.squared_norms:
        return piece.squared_norms[0]
    return torch.zeros((), dtype=torch.float64, device=piece.shard.param.device)


def _taken(
    known: Tensor, shards: Sequence[Shard], settings: Settings, is_first: dict[int, Tensor]
) -> dict[int, Tensor]:
    """For each shard, a 0-dim bool on its device: whether this call is a step for it."""
    some_nonfinite, some_gradient = (known != 0).unbind()
    finite = ~some_nonfinite
    taken = {}
    for s in shards:
        first = is_first[id(s)]
        ok = torch.ones_like(first)
        if settings.skip_nonfinite:
            ok = ok & finite.to(first.device)
        if s.may_be_dry_run is not False:
            real = ~first | some_gradient.to(first.device)
            if isinstance(s.may_be_dry_run, Tensor):
                real = real | ~s.may_be_dry_run.to(first.device)
            ok = ok & real
        taken[id(s)] = ok
    return taken
