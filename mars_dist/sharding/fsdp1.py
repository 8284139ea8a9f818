"""Layouts under FullyShardedDataParallel (FSDP1), read off the wrapped model.

FSDP1 lays the parameters of a unit one after the other into one flat parameter (aligned with padding where it keeps
the original parameters) and cuts that into equal parts, padded at the end. The optimizer gets either the flat
parameter, or the original parameters as one-dimensional views of this rank's part of it, empty where it has none.
Neither says what it is: the unit's handle does, through attributes that are private to torch (read in 2.13).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from mars_dist.sharding.layout import Layout, Segment
from mars_dist.versions import missing_hook, tested

ENGINE = "FSDP1"
# What wrappers put into the path of a module.
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def is_fsdp1(param: Tensor) -> bool:
    """Whether FSDP1 owns the parameter, which it marks; its shape then says nothing."""
    return getattr(param, "_fsdp_flattened", False) or is_flat(param)


def is_flat(param: Tensor) -> bool:
    """Whether it is the flat parameter of an FSDP1 unit."""
    return bool(getattr(param, "_is_flat_param", False))


def refusal(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} belongs to FullyShardedDataParallel (FSDP1), which hands over flat pieces of tensors without their "
        "shapes. Call optimizer.attach(model) with the wrapped model once, before the first step (Accelerate and the "
        "Trainer do, after `import mars_dist`). If that was done: MARS was built with parameters that FSDP1 has since "
        "replaced; build it after wrapping, from the wrapped model's parameters. MARS does not fall back to AdamW."
    )


def layouts(model: nn.Module) -> Iterator[tuple[Tensor, Layout]]:
    """Every parameter that an optimizer may get from ``model``'s FSDP1 units, with its layout.

    Raises:
        RuntimeError: when a unit does not look as in the tested releases of torch, or holds slices of tensor
            parallelism.
    """
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return
    for path, unit in model.named_modules():
        if not isinstance(unit, module.FullyShardedDataParallel):
            continue
        try:
            handle: Any = unit._handle
            if handle is not None:
                hybrid = "HYBRID" in handle._sharding_strategy.name
                replicas = (unit._inter_node_pg,) if hybrid else ()
                yield from (
                    (p, replace(layout, replicas=replicas)) for p, layout in _of_unit(_clean(f"{path}."), handle)
                )
        except AttributeError as error:
            consequence = "MARS cannot see which pieces of which tensors FSDP1 hands over"
            instead = "use fully_shard (FSDP2), which needs no private attribute"
            raise RuntimeError(missing_hook("torch", error, consequence, instead)) from error


def _of_unit(path: str, handle: Any) -> Iterator[tuple[Tensor, Layout]]:
    flat = handle.flat_param
    names = [path + _clean(name) for name in flat._fqns]
    if any(extension is not None for extension in flat._param_extensions):
        raise RuntimeError(
            f"{names[0]}: FSDP1 over tensor parallelism flattens slices of tensors, of which MARS would take the norm "
            "for that of the tensor. Use fully_shard (FSDP2) over tensor parallelism instead."
        )
    sharded = handle.uses_sharded_strategy
    groups = (handle.process_group,) if sharded else ()
    copies = None if sharded else handle.process_group
    segments = []
    for name, shape, info in zip(names, flat._shapes, flat._shard_param_infos, strict=True):
        shape = tuple(shape)
        if not info.in_shard:
            segments.append(Segment(name, shape, 0, 0, 0))
            continue
        start = info.intra_param_start_idx
        segments.append(Segment(name, shape, start, start + info.numel_in_shard, info.offset_in_shard))
    if not handle._use_orig_params:
        fault = _fault(segments, flat)
        held = flat.numel()
        yield flat, Layout(tuple(segments), groups, ENGINE, fault, always_joins=sharded, held=held, copies=copies)
        return
    unit = id(handle) if sharded else None
    for param, s in zip(flat._params, segments, strict=True):
        segment = Segment(s.name, s.shape, s.start, s.stop, 0)
        fault = _fault([segment], param, exact=True)
        held = param.numel()
        yield param, Layout((segment,), groups, ENGINE, fault, sharded, unit=unit, held=held, copies=copies)


def _clean(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.lstrip(".")


def _fault(segments: list[Segment], param: Tensor, exact: bool = False) -> str:
    """What the table says against what this rank holds: a flat parameter may have padding, an original one has none."""
    expected = max((s.offset + s.numel for s in segments), default=0)
    fits = all(0 <= s.start <= s.stop <= math.prod(s.shape) for s in segments)
    if fits and (expected == param.numel() if exact else expected <= param.numel()):
        return ""
    return (
        f"FSDP1: the table of pieces ({segments[0].name} of shape {segments[0].shape}, ...) needs {expected} elements "
        f"and this rank holds {param.numel()}. Call optimizer.attach(model) outside of summon_full_params; mars_dist "
        f"was {tested('torch')}."
    )
