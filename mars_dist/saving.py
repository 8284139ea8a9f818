"""What a state dict of MARS shows beyond torch.optim's, and what is said when it is loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from mars_dist import states
from mars_dist.config import GROUP_DEFAULTS, Default, Settings
from mars_dist.one_state import GAMMA
from mars_dist.previous import NEXT, PREVIOUS, Previous
from mars_dist.sharding.dtensor import copy_as
from mars_dist.step import rule_of
from mars_dist.tables import GROUP_ID, Tables, shapes_and_rules

logger = logging.getLogger("mars_dist")

Groups = Iterable[dict[str, Any]]
GRADIENTS = (PREVIOUS, NEXT)


def complete_units(saved: dict[int, dict[str, Any]], groups: Groups, tables: Tables, settings: Settings) -> None:
    """Give all tensors of an FSDP1 unit with original parameters the same states in ``saved``, by position.

    torch's helpers demand that of them, and one dtype: zeros where a tensor has none, and the moments' dtype, in which
    a gradient of 16 bits is exact. Exact mode has ``next_prev_grad`` as well right after a step that was left out.
    """
    groups = list(groups)
    positions = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
    in_units = list(_in_units(groups, tables, settings))
    for p, keys in in_units:  # one set of keys for a unit
        keys |= {NEXT} & saved.get(positions[id(p)], {}).keys()
    for p, keys in in_units:
        state = saved.get(positions[id(p)])
        if state:
            zeros = {key: torch.zeros_like(state["exp_avg"]) for key in sorted(keys) if key not in state}
            present = {k: v.to(state["exp_avg"].dtype) if k in GRADIENTS else v for k, v in state.items()}
            saved[positions[id(p)]] = {**present, **zeros}


def undo_units(loaded: Mapping[Tensor, dict[str, Any]], groups: Groups, tables: Tables, settings: Settings) -> None:
    """h in the parameter's dtype again, after ``complete_units``."""
    for p, _ in _in_units(groups, tables, settings):
        loaded.get(p, {}).update({k: v.to(p.dtype) for k, v in loaded.get(p, {}).items() if k in GRADIENTS})


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


STATE_DICT_KEY = "mars_dist"
STATE_DICT_FORMAT = 1


class SavedOptimizer(Optimizer):
    """How MARS is saved, loaded, pickled and copied."""

    settings: Settings
    tensor_updates: int
    _tables: Tables
    _previous: Previous
    _warned: bool
    _mode_is_loaded = False  # by a state whose is_approx was not the one given

    def how_to_be_exact(self) -> str:
        """What to do where exact mode is asked for and this optimizer is in the approximate one."""
        if self._mode_is_loaded:
            return (
                "the state that was loaded was saved in approximate mode (is_approx=True), and the settings of a "
                "loaded state hold. Load one of a run in exact mode, or begin with new optimizer states."
            )
        return "construct MARS with is_approx=False."

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, and what is one for the optimizer under ``"mars_dist"``.

        Under FSDP1 with original parameters all tensors of a unit show the same states, as torch's helpers demand of
        them: zeros where a tensor has none.
        """
        out = super().state_dict()
        out["state"] = {i: self._previous.as_saved(state) for i, state in out["state"].items()}
        complete_units(out["state"], self.param_groups, self._tables, self.settings)
        out[STATE_DICT_KEY] = {"format": STATE_DICT_FORMAT, **self.settings.to_dict()}
        return out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states, groups and settings. States keep the precision they were saved in and are copied.

        Raises:
            ValueError: as torch.optim does, when the groups do not fit; for settings that this version does not know.
        """
        before, settings = [dict(group) for group in self.param_groups], self.settings
        final: dict[str, Any] = {}  # what is really loaded: hooks of the user may have replaced it
        last = self.register_load_state_dict_pre_hook(lambda _, given: final.update(given))
        first = self.register_load_state_dict_post_hook(lambda _: self._restore(final, before), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            first.remove()
        warn_of_other_values(
            [(settings.to_dict(), self.settings.to_dict()), *zip(before, self.param_groups, strict=True)]
        )

    def _restore(self, state_dict: dict[str, Any], before: list[dict[str, Any]]) -> None:
        ours = state_dict.get(STATE_DICT_KEY)
        if ours is not None:
            given, self.settings = self.settings, Settings.from_dict(ours)
            self._mode_is_loaded = self._mode_is_loaded or self.settings.is_approx != given.is_approx
        saved = dict(
            zip(
                (i for group in state_dict["param_groups"] for i in group["params"]),
                (p for group in self.param_groups for p in group["params"]),
                strict=True,
            )
        )
        for i, state in state_dict["state"].items():
            if i in saved:
                self.state[saved[i]] = states.restore(state, saved[i], copy_as)
        undo_units(self.state, self.param_groups, self._tables, self.settings)
        for group, was, loaded in zip(self.param_groups, before, state_dict["param_groups"], strict=True):
            # What the file does not say stays as this group had it (the file of another optimizer, say).
            group |= {key: was[key] for key in self.defaults if key in was and key not in loaded}
            self._take_form(group, was, loaded)
            if "weight_decay_1d" not in loaded and isinstance(self.defaults["weight_decay_1d"], Default):
                group["weight_decay_1d"] = loaded.get("weight_decay", was["weight_decay_1d"])
            group[GROUP_ID] = was[GROUP_ID]
            for name in ("betas", "betas_1d"):
                group[name] = tuple(group[name])  # some formats of files know lists only
        self._tables.forget()
        self._previous = Previous()

    def _take_form(self, group: dict[str, Any], was: dict[str, Any], loaded: dict[str, Any]) -> None:
        """Which form the loaded states of ``group`` have (one_state.py).

        Raises:
            ValueError: when something on the way has dropped the previous gradient of the form with two states.
        """
        states_of = [self.state[p] for p in group["params"] if self.state.get(p)]
        if GAMMA not in loaded:  # before there were two forms, or another optimizer
            old = any("prev_grad" in state for state in states_of)
            group |= {"one_state": False, GAMMA: None} if old else {k: was[k] for k in ("one_state", GAMMA)}
        elif loaded[GAMMA] is None and was[GAMMA] is not None:
            for p, _, rule in shapes_and_rules(group, self.settings):
                if rule.can_keep_one_state and self.state.get(p) and "prev_grad" not in self.state[p]:
                    raise ValueError(
                        "the loaded states were saved with one_state=False and come without prev_grad, which the "
                        "optimizer they are loaded into had no place for: construct it with one_state=False"
                    )

    def __getstate__(self) -> dict[str, Any]:
        constructed = all(self._tables.constructed_as(group) for group in self.param_groups)
        return {**super().__getstate__(), "settings": self.settings, "constructed": constructed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # torch adds it here: a state saved after loading would have a key that a new optimizer lacks, for which
        # torch's set_optimizer_state_dict(full_state_dict=True) raises KeyError.
        self.defaults.pop("differentiable", None)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, float(value) if name == "weight_decay_1d" else value)
        if "settings" in state:  # unpickled or deep-copied, not load_state_dict
            self._tables = Tables()
            self.tensor_updates = 0
            self._warned = False
            self._previous = Previous()
            constructed = self.__dict__.pop("constructed")
            for number, group in enumerate(self.param_groups):
                group[GROUP_ID] = number
                if constructed:
                    self._tables.remember(group)
                else:  # what an engine put in their place has no shapes: step() says so
                    self._tables.originals[number] = []
