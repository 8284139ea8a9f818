"""What a state dict of MARS shows beyond torch.optim's, and what is said when it is loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars_dist import states
from mars_dist.config import GROUP_DEFAULTS, Settings
from mars_dist.step import rule_of
from mars_dist.tables import Tables

logger = logging.getLogger("mars_dist")

Groups = Iterable[dict[str, Any]]


def complete_units(saved: dict[int, dict[str, Any]], groups: Groups, tables: Tables, settings: Settings) -> None:
    """Give all tensors of an FSDP1 unit with original parameters the same states in ``saved``, by position.

    torch's helpers demand that of them, and one dtype: zeros where a tensor has none, and the moments' dtype, in which
    a gradient of 16 bits is exact.
    """
    groups = list(groups)
    positions = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
    for p, keys in _in_units(groups, tables, settings):
        state = saved.get(positions[id(p)])
        if state:
            zeros = {key: torch.zeros_like(state["exp_avg"]) for key in sorted(keys) if key not in state}
            present = {k: v.to(state["exp_avg"].dtype) if k == "prev_grad" else v for k, v in state.items()}
            saved[positions[id(p)]] = {**present, **zeros}


def undo_units(loaded: Mapping[Tensor, dict[str, Any]], groups: Groups, tables: Tables, settings: Settings) -> None:
    """h in the parameter's dtype again, after ``complete_units``."""
    for p, _ in _in_units(groups, tables, settings):
        if p in loaded and "prev_grad" in loaded[p]:
            loaded[p]["prev_grad"] = loaded[p]["prev_grad"].to(p.dtype)


def _in_units(groups: Groups, tables: Tables, settings: Settings) -> Iterator[tuple[Tensor, set[str]]]:
    """Each trainable tensor of an FSDP1 unit, with the states that some tensor of the unit has by its own group."""
    units: dict[int, tuple[set[str], list[Tensor]]] = {}
    for group in groups:
        for p in group["params"]:
            layout = tables.attached(p)
            if layout is None or layout.unit is None or not p.requires_grad:
                continue
            keys, members = units.setdefault(layout.unit, (set(), []))
            rules = [rule_of(s, group, settings) for s in layout.segments]
            keys |= set(states.needed(rules, group["amsgrad"], group["one_state"]))
            members.append(p)
    for keys, members in units.values():
        yield from ((member, keys) for member in members)


def warn_of_other_values(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """As in torch.optim the values of a loaded state win: where they are not those given, nobody should guess.

    Args:
        pairs: settings and groups, before and after loading.
    """
    known = {*Settings.__dataclass_fields__, *GROUP_DEFAULTS, "lr_1d_ratio"} - {"lr"}
    changes = {
        f"{key} {new[key]} (given: {old[key]})": None
        for old, new in pairs
        for key in old
        if key in known and new[key] != old[key]
    }
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if changes and rank == 0:
        logger.warning(
            "load_state_dict: the values of the loaded state hold, not those given: %s. For others set them in "
            "optimizer.param_groups after loading, or begin with new optimizer states.",
            ", ".join(changes),
        )
