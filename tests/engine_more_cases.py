"""What else runs on the ranks in the tests of PyTorch's engines: dry runs, planted faults, tables against contents."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests import engine_nets, nets
from tests.engine_builders import Built, line, square
from tests.engine_cases import EngineCase, backward, disturb, exchanges_of, local, rounds_that_travel, run, setup
from tests.zero_cases import norm_of_the_local_piece

# ------------------------------------------------------------------------- what may happen before the first step


def ask_for_the_state(built: Built, optimizer: Any) -> None:
    assert optimizer.state_dict()["state"] == {}


def torchs_checkpoint_helper(built: Built, optimizer: Any) -> None:
    """It creates the states by a step on zero gradients with lr = 0."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    assert not any(optimizer.state.values())
    saved = get_optimizer_state_dict(built.wrapped, optimizer)
    assert saved["state"] and any(optimizer.state.values()), "no dry run took place: this would prove nothing"


def own_dry_run(built: Built, optimizer: Any) -> None:
    """The same by hand, with a scheduler's lr that is put back."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            if p.requires_grad:
                p.grad = torch.zeros_like(p)
    optimizer.step()
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    optimizer.zero_grad()


def move_the_model(built: Built, optimizer: Any) -> None:
    built.wrapped.to("cpu")
    built.wrapped.to(torch.float64)


BEFORE: dict[str, Callable[[Built, Any], None]] = {
    "state_dict": ask_for_the_state,
    "checkpoint_helper": torchs_checkpoint_helper,
    "dry_run": own_dry_run,
    "to": move_the_model,
}


# --------------------------------------------------------------------------------------------------- refusals, faults


def outcome(case: EngineCase) -> dict[str, Any]:
    """What the first step says where it raises, and whether anything moved."""
    said, kind = "", ""
    model = None
    before: list[torch.Tensor] = []
    try:
        _, built, optimizer, _ = setup(case)
        model = built.wrapped
        backward(built, 0)
        disturb(case, 0, model)
        before = [local(p).clone() for p in model.parameters()]
        optimizer.step()
    except RuntimeError as error:
        said, kind = str(error), type(error).__name__
    after = [local(p) for p in model.parameters()] if model is not None else []
    moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return {
        "said": said,
        "kind": kind,
        "moved": moved,
        "empty": not any(t.numel() for t in before),
    }


def with_the_norm_of_the_local_piece(case: EngineCase) -> dict[str, Any]:
    with norm_of_the_local_piece():
        return run(case)


def with_the_group_of_the_replicas(case: EngineCase) -> dict[str, Any]:
    """Planted: HSDP sums over the dimension that replicates, not over the one that cuts."""
    from mars_dist.sharding import dtensor

    right = dtensor.locate

    def wrong(name: str, param: Any) -> Any:
        layout = right(name, param)
        assert len(layout.process_groups) == 1 and param.device_mesh.ndim == 2
        return dataclasses.replace(layout, process_groups=(param.device_mesh.get_group(0),))

    dtensor.locate = wrong
    try:
        return run(case)
    finally:
        dtensor.locate = right


def with_another_plan_on_one_rank(case: EngineCase) -> dict[str, Any]:
    """Planted: the last rank weighs matrices in another way, and would send to other owners."""
    from mars_dist import matrices

    cost = matrices.cost
    other = (lambda *matrix: -cost(*matrix)) if dist.get_rank() == dist.get_world_size() - 1 else cost
    with mock.patch.object(matrices, "cost", other):
        return outcome(case)


def traffic(case: EngineCase) -> dict[str, Any]:
    """What this rank hands to torch's collectives in the second step, beside what the plans say it sends."""
    _, built, optimizer, _ = setup(case)
    calls: list[tuple[str, list[int], int, int]] = []  # name, ranks, elements sent to others, bytes of one element

    def all_to_all_single(
        received: torch.Tensor, packed: torch.Tensor, coming: list[int], sizes: list[int], group: Any
    ) -> Any:
        me = dist.get_rank(group)
        assert sizes[me] == coming[me] == 0 and sum(sizes) == packed.numel() and sum(coming) == received.numel()
        ranks = dist.get_process_group_ranks(group)
        calls.append(("all_to_all_single", ranks, packed.numel(), packed.element_size()))
        return real["all_to_all_single"](received, packed, coming, sizes, group=group)

    def broadcast(tensor: torch.Tensor, group: Any, group_src: int, async_op: bool) -> Any:
        mine = tensor.numel() if group_src == dist.get_rank(group) else 0
        calls.append(("broadcast", dist.get_process_group_ranks(group), mine, tensor.element_size()))
        return real["broadcast"](tensor, group=group, group_src=group_src, async_op=async_op)

    ours: dict[str, Any] = {"all_to_all_single": all_to_all_single, "broadcast": broadcast}
    real = {name: getattr(dist, name) for name in ours}
    for step in range(2):
        optimizer.zero_grad()
        backward(built, step)
        with mock.patch.multiple(dist, **ours) if step else contextlib.nullcontext():
            optimizer.step()
    plans = {id(e.plan): (e.plan, e.rank) for e in exchanges_of(optimizer)}.values()
    states = [
        (local(p), {k: local(s) for k, s in state.items() if k != "step"}) for p, state in optimizer.state.items()
    ]
    return {
        "calls": calls,
        "sent": sum(plan.sent(rank) for plan, rank in plans),
        "rounds": rounds_that_travel(optimizer),
        "cut": sum(m.numel for plan, _ in plans for i, m in enumerate(plan.matrices) if plan.travels(i)),
        "sharded": all(tensor.numel() == p.numel() for p, state in states for tensor in state.values()),
        "rule_counts": optimizer.rule_counts(),
        "engines": optimizer.engines(),
    }


def two_equal_meshes(_: str) -> dict[str, Any]:
    """A second mesh that looks like the first: torch's caches mix the two in the parameters of one model."""
    case = EngineCase("tensor_parallel", {"data": True, "dim": 1}, "layers", steps=3)
    run(case)
    square.cache_clear()
    run(EngineCase("fsdp2", {"mesh": "square"}, steps=1))
    return run(EngineCase("tensor_parallel", {"data": True}, "layers", steps=3))


def tied_in_two_groups(_: str) -> str:
    """What torch says of a weight that two FSDP2 groups share."""
    from torch.distributed.fsdp import fully_shard

    net: Any = engine_nets.build("tied")
    try:
        fully_shard(net.embedding)
        fully_shard(net.head)
        fully_shard(net)
        net(*nets.batch(0)).backward()
    except ValueError as error:
        return str(error)
    return ""


def attached(case: EngineCase) -> dict[str, Any]:
    """``attach`` before, between and after steps, on every engine: what changes."""
    _, built, optimizer, _ = setup(case)
    said = [optimizer.attach(built.wrapped), optimizer.attach(built.wrapped)]
    for step in range(2):
        optimizer.zero_grad()
        backward(built, step)
        optimizer.step()
        said.append(optimizer.attach(built.wrapped))
    return {
        "said": said,
        "counts": optimizer.rule_counts(),
        "engines": optimizer.engines(),
    }


def without_waiting(case: EngineCase) -> dict[str, Any]:
    """Steps after the first in which no value may be read."""
    from tests.test_no_sync import no_host_sync

    _, built, optimizer, _ = setup(case)
    for step in range(4):
        optimizer.zero_grad()
        backward(built, step)
        with no_host_sync() if step else contextlib.nullcontext():
            optimizer.step()
    return {"engines": optimizer.engines(), "counts": optimizer.rule_counts()}


# ------------------------------------------------------------------------------------ the table against the contents

SHAPES = ((13, 6), (3, 5), (1, 7), (7, 1), (2, 3, 5), (1,), (9,), (5, 4, 3, 2), (3, 8))


def tables_and_contents(kind: str) -> list[tuple[str, str]]:
    """(shape and placements, what is wrong or "") of tensors whose elements say where they are from."""
    out = []
    for shape in SHAPES:
        for param in cut(kind, torch.arange(float(math.prod(shape))).view(shape)):
            out.append((f"{shape} {param.placements}", wrong(param, shape)))
    return out


def wrong(param: Any, shape: tuple[int, ...]) -> str:
    from mars_dist.sharding.dtensor import locate

    layout = locate("w", param)
    (segment,) = layout.segments
    if layout.fault or segment.shape != shape or segment.offset:
        return f"{layout.fault} {segment}"
    whole = torch.arange(float(math.prod(shape))).view(shape)
    if segment.region is None:
        expected = whole.view(-1)[segment.start : segment.stop]
    else:
        expected = whole[tuple(slice(*interval) for interval in segment.region)].flatten()
    mine = local(param).flatten()
    if not torch.equal(mine, expected):
        return f"this rank holds {mine.tolist()}, the table says {segment}: {expected.tolist()}"
    # The pieces of the groups together are every element once.
    here: list[Any] = [mine.tolist()]
    for group in layout.process_groups:
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, here, group=group)
        here = [x for one in everyone for x in one]
    together = sorted(x for one in here for x in one)
    return "" if together == whole.flatten().tolist() else f"the pieces together are {together}"


def cut(kind: str, whole: torch.Tensor) -> list[Any]:
    """``whole`` as DTensors, cut in every way of ``kind``."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dims = range(whole.ndim)
    if kind == "line":
        return [distribute_tensor(whole, line(), [Shard(d)]) for d in dims]
    if kind == "hybrid":
        return [distribute_tensor(whole, square(), [Replicate(), Shard(d)]) for d in dims]
    if kind == "square":
        return [distribute_tensor(whole, square(), [Shard(a), Shard(b)]) for a in dims for b in dims if a != b]
    assert kind == "strided"  # as tensor parallelism and FSDP2 on the same dimension make it
    mesh = square()
    out = []
    for d in dims:
        if d and whole.shape[d] % 4:  # FSDP2 cuts any dimension but the first into equal parts only
            continue
        module = nn.Module()
        module.w = nn.Parameter(distribute_tensor(whole, mesh["inner"], [Shard(d)]))
        fully_shard(module, mesh=mesh["outer"], shard_placement_fn=lambda p, d=d: Shard(d))  # type: ignore[misc]
        out.append(module.w)
    return out
