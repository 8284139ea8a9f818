"""How MARS is saved, loaded, pickled and copied; loading.py reads what is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from mars_dist import states
from mars_dist.config import SETTINGS_KEY, Settings
from mars_dist.loading import Loaded, Reader
from mars_dist.maths.absent import absent_like
from mars_dist.previous import NEXT, PREVIOUS, Previous
from mars_dist.step import rule_of
from mars_dist.tables import GROUP_ID, Tables

Groups = Iterable[dict[str, Any]]
GRADIENTS = (PREVIOUS, NEXT)


def complete_units(saved: dict[int, dict[str, Any]], groups: Groups, tables: Tables, settings: Settings) -> None:
    """Give all tensors of an FSDP1 unit with original parameters the same states in ``saved``, by position.

    torch's helpers demand that of them, and one dtype: zeros where a tensor has none (for h that it is absent), and the
    moments' dtype, in which a gradient of 16 bits is exact. Exact mode has ``next_prev_grad`` as well right after a
    step that was left out.
    """
    groups = list(groups)
    positions = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
    in_units = list(_in_units(groups, tables, settings))
    for p, keys in in_units:  # one set of keys for a unit
        keys |= {NEXT} & saved.get(positions[id(p)], {}).keys()
    for p, keys in in_units:
        state = saved.get(positions[id(p)])
        if state:
            like, dtype = state["exp_avg"], state["exp_avg"].dtype
            lacking = {
                key: absent_like(like, dtype) if key in GRADIENTS else torch.zeros_like(like)
                for key in sorted(keys)
                if key not in state
            }
            present = {k: v.to(dtype) if k in GRADIENTS else v for k, v in state.items()}
            saved[positions[id(p)]] = {**present, **lacking}


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
        """As in torch.optim; what is one for the optimizer stands in every group, as one text under "mars_settings".

        Under FSDP1 with original parameters all tensors of a unit show the same states, as torch's helpers demand of
        them: where a tensor has none zeros, or a previous gradient that is absent.
        """
        out = super().state_dict()
        complete_units(out["state"], self.param_groups, self._tables, self.settings)
        for group in out["param_groups"]:
            group[SETTINGS_KEY] = self.settings.to_text()
        return out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states, groups and settings: all of it, or nothing. States keep the precision they were saved in.

        The values of the loaded state hold; where they are not those given, one warning lists them. A state of
        torch.optim.AdamW is loaded as well: moments and step counters go on, and the next step has no previous gradient
        (``first_step``). loading.py says what is refused, left out and made up.

        What one rank refuses the others do not hear of: where they load different files, the caller has to tell them
        (``mars_dist.checkpoint.together``). Nothing is exchanged, unless a DTensor has to be cut in another way.

        Raises:
            ValueError: for a state of another variant, of a newer format, of other groups, tensors or shapes, or that
                lacks what cannot be made up, with the name of what differs. Nothing was changed then.
        """
        loaded: list[Loaded] = []

        def check(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            """What is really loaded: hooks of the user may have replaced it. torch.optim sees no states to cast."""
            loaded.append(Reader(self.param_groups, self.defaults, self.settings, self._tables).read(given))
            states = loaded[0].states
            undo_units(states, self.param_groups, self._tables, loaded[0].settings)
            return {**given, "state": {}, "param_groups": loaded[0].groups}

        last = self.register_load_state_dict_pre_hook(check)
        first = self.register_load_state_dict_post_hook(lambda _: self._take(loaded[0]), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            first.remove()
        loaded[0].say()

    def _take(self, loaded: Loaded) -> None:
        self._mode_is_loaded = self._mode_is_loaded or loaded.settings.is_approx != self.settings.is_approx
        self.settings = loaded.settings
        self.state.update(loaded.states)
        self._tables.forget()
        self._previous = Previous()

    def __getstate__(self) -> dict[str, Any]:
        constructed = all(self._tables.constructed_as(group) for group in self.param_groups)
        return {**super().__getstate__(), "settings": self.settings, "constructed": constructed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # torch adds it here: a state saved after loading would have a key that a new optimizer lacks, for which
        # torch's set_optimizer_state_dict(full_state_dict=True) raises KeyError.
        self.defaults.pop("differentiable", None)
        for group in self.param_groups:
            group.setdefault(SETTINGS_KEY, self.settings.to_text())
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
