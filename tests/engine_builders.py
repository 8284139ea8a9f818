"""PyTorch's engines as a person sets them up, one function each: a net goes in, what trains comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

CPU = torch.device("cpu")


@dataclass
class Built:
    """``model`` is called; ``wrapped`` is what the engine made (the same, but for compiled models).

    ``share`` of ``shares`` is this rank's part of the global batch. ``facts``: what shows that the engine is active.
    """

    model: nn.Module
    wrapped: nn.Module
    share: int
    shares: int
    facts: dict[str, Any]


def every_rank(model: nn.Module, wrapped: nn.Module, **facts: Any) -> Built:
    return Built(model, wrapped, dist.get_rank(), dist.get_world_size(), facts)


@cache  # torch caches by what a mesh looks like: two equal ones would be mixed in one model
def square() -> Any:
    """A mesh of 2 x 2 ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))


@cache
def line() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def checkpointed(net: nn.Module, on: bool) -> nn.Module:
    """Activation checkpointing on every linear layer."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    if on:
        checkpoint_wrapper.apply_activation_checkpointing(net, check_fn=lambda m: isinstance(m, nn.Linear))
    return net


def compiled(model: nn.Module, on: bool) -> Any:
    return torch.compile(model, backend="aot_eager") if on else model


def facts_of(model: nn.Module) -> dict[str, Any]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointWrapper,
    )

    checkpointed = sum(isinstance(m, CheckpointWrapper) for m in model.modules())
    return {
        "checkpointed": checkpointed,
        "computed_in": computed_in(model),
        "compiled": type(model).__name__ == "OptimizedModule",
    }


def computed_in(model: nn.Module) -> set[str]:
    """Filled by each forward pass: the dtypes that linear layers really multiply in."""
    seen: set[str] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: seen.add(str(inputs[0].dtype)))
    return seen


def units_of(net: nn.Module) -> dict[str, Any]:
    """What FSDP2's own units say about offload, and whether they free their parameters after the forward pass."""
    from torch.distributed.fsdp import FSDPModule

    units = [m._get_fsdp_state()._fsdp_param_group for m in net.modules() if isinstance(m, FSDPModule)]
    return {
        "offload": {type(u.offload_policy).__name__ for u in units if u is not None},
        "freed": {u.post_forward_mesh_info is not None for u in units if u is not None},
    }


def ddp(net: nn.Module, compile: bool = False, **options: Any) -> Built:
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(net, **options)
    model = compiled(wrapped, compile)
    return every_rank(model, wrapped, type=type(wrapped).__name__, **facts_of(model))


def fsdp1(
    net: nn.Module,
    strategy: str = "FULL_SHARD",
    original: bool = True,
    nested: bool = False,
    bf16: bool = False,
    checkpoint: bool = False,
) -> Built:
    from torch.distributed import fsdp
    from torch.distributed.fsdp._flat_param import FlatParameter
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    checkpointed(net, checkpoint)
    mixed = fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None
    wrapped = fsdp.FullyShardedDataParallel(
        net,
        sharding_strategy=fsdp.ShardingStrategy[strategy],
        device_mesh=square() if strategy.startswith(("HYBRID", "_HYBRID")) else None,
        use_orig_params=original,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.LayerNorm}) if nested else None,
        mixed_precision=mixed,
        device_id=CPU,
    )
    units = fsdp.FullyShardedDataParallel.fsdp_modules(wrapped)
    flat = sum(isinstance(p, FlatParameter) for p in wrapped.parameters())
    return every_rank(
        wrapped,
        wrapped,
        type=type(wrapped).__name__,
        strategies={unit.sharding_strategy.name for unit in units},
        units=len(units),
        flat=flat,
        **facts_of(wrapped),
    )


def fsdp2(
    net: nn.Module,
    nested: bool = True,
    mesh: str = "line",
    dim: int = 0,
    bf16: bool = False,
    offload: bool = False,
    reshard: bool = True,
    checkpoint: bool = False,
    compile: bool = False,
) -> Built:
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        fully_shard,
    )

    checkpointed(net, checkpoint)
    options: dict[str, Any] = {
        "mesh": {"line": line, "square": square}[mesh](),
        "reshard_after_forward": reshard,
    }
    if dim:
        options["shard_placement_fn"] = on_dimension(dim, dist.get_world_size())
    if bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for module in net.children() if nested else ():
        if any(True for _ in module.parameters()):
            fully_shard(module, **options)
    fully_shard(net, **options)
    model = compiled(net, compile)
    return every_rank(model, net, type=type(net).__name__, **facts_of(model), **units_of(net), **dtensors(net))


def on_dimension(dim: int, ranks: int) -> Any:
    """Placements for FSDP2, which cuts any dimension but the first into equal parts only."""
    from torch.distributed.tensor import Shard

    return lambda p: Shard(dim if p.ndim > dim and p.shape[dim] % ranks == 0 else 0)


def tensor_parallel(net: nn.Module, sequence: bool = False, data: bool = False, dim: int = 0) -> Built:
    """``data``: FSDP2 over the outer dimension of a mesh of 2 x 2, tensor parallelism over the inner one."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = square() if data else None
    inner = mesh["inner"] if mesh is not None else line()
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    if sequence:
        plan["down"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(net, inner, plan)
    if mesh is not None:
        options: dict[str, Any] = {"mesh": mesh["outer"]}
        if dim:
            options["shard_placement_fn"] = on_dimension(dim, mesh["outer"].size())
        for module in net.children():
            fully_shard(module, **options)
        fully_shard(net, **options)
    shares = mesh["outer"].size() if mesh is not None else 1
    share = mesh["outer"].get_local_rank() if mesh is not None else 0
    return Built(
        net,
        net,
        share,
        shares,
        {"type": type(net).__name__, **facts_of(net), **dtensors(net)},
    )


def dtensors(model: nn.Module) -> dict[str, Any]:
    """How many parameters are DTensors, their placements, and the sizes of this rank's parts."""
    from torch.distributed.tensor import DTensor

    found = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return {
        "dtensors": len(found),
        "plain": len(list(model.parameters())) - len(found),
        "placements": {str(p.placements) for p in found.values()},
        "sizes": {name: p.to_local().numel() for name, p in found.items()},
    }


BUILDERS: dict[str, Callable[..., Built]] = {
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "tensor_parallel": tensor_parallel,
}
