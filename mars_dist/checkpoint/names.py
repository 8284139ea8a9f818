"""Which parameter of the model each piece belongs to that an engine hands to an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from mars_dist.config import GROUP_DEFAULTS, Settings
from mars_dist.maths.rules import rule_for
from mars_dist.optimizer import MARS
from mars_dist.sharding import fsdp1
from mars_dist.sharding.layout import COPIES, Layout, Segment
from mars_dist.states import needed
from mars_dist.tables import GROUP_ID, Tables

# What wrappers put into the path of a parameter: always, and as the child "module" of one of these classes.
IN_PATHS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
HOLDERS = {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine"}
PREVIOUS, NEXT = "prev_grad", "next_prev_grad"
TABLES = "_mars_dist_tables"  # of another optimizer than MARS, which ``remember`` was told of


@dataclass(frozen=True)
class Held:
    """A parameter and this rank's piece of it, which may be empty.

    Attributes:
        name, aliases: in the model; a parameter that is tied has further names.
        tensor: what the engine hands to the optimizer; the piece lies in it as ``segment`` says.
        group: the parameter group of it.
        is_mars: whether MARS trains it, and not an optimizer of torch's.
    """

    name: str
    aliases: tuple[str, ...]
    tensor: Tensor
    segment: Segment
    layout: Layout
    group: Mapping[str, Any]
    is_mars: bool

    def keys(self, group: Mapping[str, Any], settings: Settings) -> list[str]:
        """The states, beside the counter, that MARS keeps of it with these numbers of its group and these settings."""
        ours = (settings.mars_type, settings.matrix_ndim, group["use_mars"], group["optimize_1d"])
        keys = needed([rule_for(self.segment.shape, *ours)], group["amsgrad"], group["one_state"])
        return keys + [NEXT] * (PREVIOUS in keys)

    @property
    def is_copy(self) -> bool:
        """Whether the model computes with another tensor than the optimizer updates."""
        return self.layout.engine == COPIES or self.layout.engine.startswith("ZeRO")


def inner(optimizer: Any) -> Optimizer:
    """The optimizer that holds the states, out of the wrappers that frameworks put around it (or a DeepSpeed engine).

    Raises:
        TypeError: when there is none.
    """
    found = optimizer
    while hasattr(found, "optimizer"):
        found = found.optimizer
    if not isinstance(found, Optimizer):
        raise TypeError(f"an optimizer, or what an engine made of it, is needed, got {type(optimizer).__name__}")
    return found


def remember(optimizer: Optimizer) -> None:
    """Keep the parameters of an optimizer of torch's by identity, before DeepSpeed puts flat tensors in their place.

    MARS does that by itself. Needed under ZeRO only: in PyTorch's own engines the parameters say what they are.
    """
    tables = Tables()
    for group in _numbered(optimizer):
        tables.remember(group)
    setattr(optimizer, TABLES, tables)


def table(optimizer: Any, model: nn.Module) -> list[Held]:
    """Every parameter that trains, in an order that is the same on every rank; collective before the first step.

    Raises:
        RuntimeError: when the pieces cannot be known, or a parameter is none of the model's.
    """
    found = inner(optimizer)
    if isinstance(found, MARS):
        tables, groups, settings = found._tables, found.param_groups, found.settings
    else:
        if not hasattr(found, TABLES):
            remember(found)
        tables, groups, settings = getattr(found, TABLES), _numbered(found), Settings()
    model = unwrapped(model)
    _refuse_whole_ones(tables, groups)
    names = _names(model)
    of_units = dict((id(p), layout) for p, layout in fsdp1.layouts(model))
    if of_units:
        tables.attach(model, groups, None)
    held: list[Held] = []
    for entry in tables.everything(groups, settings):
        unit = of_units.get(id(entry.param))
        for segment in (unit or entry.layout).segments:  # those of the unit are named as in this model
            if 0 in segment.shape:
                continue  # an engine with flat tensors has no place for it
            if unit is not None:
                all_names = [segment.name] if fsdp1.is_flat(entry.param) else names.get(id(entry.param), [])
            else:
                own = names.get(id(entry.param)) if len(entry.layout.segments) == 1 else None
                original = tables.original(entry.group, segment.name)
                all_names = own or names.get(id(original), [])
            if not all_names:
                raise RuntimeError(
                    f"the optimizer trains {segment.name} of shape {segment.shape}, which is no parameter of the "
                    f"{type(model).__name__} that was given: give the model whose parameters the optimizer was built "
                    "with. (Of torch's own optimizers mars_dist.checkpoint.remember(optimizer) has to be told before "
                    "deepspeed.initialize.)"
                )
            found_names = all_names[0], tuple(all_names[1:])
            held.append(Held(*found_names, entry.param, segment, entry.layout, entry.group, isinstance(found, MARS)))
    _refuse_twins(held)
    return held


Place = tuple[Any, int, int]


def holders(held: list[Held]) -> list[Place]:
    """Who holds each piece: something that is equal for those with the same holders, my number among them, how many.

    Layouts say it, unless a mesh or a group of ranks does not reach over all (FSDP2 on one dimension of a mesh): one
    exchange then, in which every rank has to take part.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [((), 0, 1)] * len(held)
    places = [_place(one.layout) for one in held]
    unknown = [i for i, place in enumerate(places) if place is None]
    mine = [(s.name, s.start, s.stop, s.region) for s in (held[i].segment for i in unknown)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    ranks: dict[Any, list[int]] = {}
    for rank, theirs in enumerate(everyone):
        for piece in theirs:
            ranks.setdefault(piece, []).append(rank)
    for i, piece in zip(unknown, mine, strict=True):
        places[i] = (tuple(ranks[piece]), ranks[piece].index(dist.get_rank()), len(ranks[piece]))
    return [place for place in places if place is not None]


def _place(layout: Layout) -> Place | None:
    """What the layout says, where its groups reach over all ranks."""
    groups: tuple[Any, ...] = layout.replicas
    if not layout.process_groups and not groups and not layout.engine.startswith("DTensor"):
        groups = (layout.copies,)  # None is all ranks
    number, count, cut = 0, 1, 1
    for group in groups:
        number = number * dist.get_world_size(group) + dist.get_rank(group)
        count *= dist.get_world_size(group)
    for group in layout.process_groups:
        cut *= dist.get_world_size(group)
    return (groups, number, count) if count * cut == dist.get_world_size() else None


def unwrapped(model: Any) -> nn.Module:
    """The model inside DDP, a DeepSpeed engine or torch.compile."""
    while isinstance(model, nn.Module):
        if _is_holder(model):
            model = model.module
        elif type(model).__name__ == "OptimizedModule":
            model = model._orig_mod
        else:
            return model
    raise TypeError(f"a torch.nn.Module is needed as the model, got {type(model).__name__}")


def _is_holder(module: Any) -> bool:
    return any(kind.__name__ in HOLDERS for kind in type(module).__mro__)


def _names(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter by its identity, the first one first."""
    out: dict[int, list[str]] = {}
    for path, p in model.named_parameters(remove_duplicate=False):
        name = _clean(path, model)
        names = out.setdefault(id(p), [])
        if name not in names:
            names.append(name)
    return out


def _clean(path: str, model: nn.Module) -> str:
    parts: list[str] = []
    module: Any = model
    for part in path.split("."):
        if part not in IN_PATHS and not (part == "module" and _is_holder(module)):
            parts.append(part)
        module = getattr(module, part, None)
    return ".".join(parts)


def _numbered(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups of an optimizer of torch's, as tables read them."""
    return [
        {**GROUP_DEFAULTS, "use_mars": False, **group, GROUP_ID: number}
        for number, group in enumerate(optimizer.param_groups)
    ]


def _refuse_whole_ones(tables: Tables, groups: list[dict[str, Any]]) -> None:
    for p in (p for group in groups for p in group["params"]):
        layout = tables.attached(p)
        if layout is not None and layout.held not in (None, p.numel()):
            raise RuntimeError(
                f"{layout.segments[0].name}: FSDP1 shows whole tensors now ({p.numel()} elements, this rank's piece "
                f"has {layout.held}): take and load states by name outside of summon_full_params."
            )


def _refuse_twins(held: list[Held]) -> None:
    seen: dict[str, Held] = {}
    for one in held:
        other = seen.setdefault(one.name, one)
        if other is not one:
            raise RuntimeError(
                f"two tensors of the optimizer are called {one.name} (shapes {other.segment.shape} and "
                f"{one.segment.shape}): give the one model that holds both"
            )


def groups_in(settings: Any) -> list[Mapping[str, Any]]:
    """The groups in what ``settings_of`` of named.py has given.

    Raises:
        ValueError: when it is something else.
    """
    groups = settings.get("groups") if isinstance(settings, Mapping) else None
    whole = isinstance(groups, list) and all(isinstance(g, Mapping) and {"names", "values"} <= g.keys() for g in groups)
    if groups is None or not whole:
        raise ValueError("its settings are not what settings_of gives (a dict with format, optimizer and groups)")
    return list(groups)


def few(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
