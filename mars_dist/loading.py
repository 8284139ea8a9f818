"""What a state dict means for an optimizer: checked whole, and its states copied, before anything is changed.

What is refused, and what is made up:

| in the state dict | |
|---|---|
| another variant, a newer format, settings that are not known, other groups, tensors or shapes | refused |
| a state that is no dense tensor of real floating-point numbers, a step that is no count | refused |
| ``step``, ``exp_avg`` or ``exp_avg_sq`` missing where the rule needs it | refused (``step`` may stand in the group) |
| ``prev_grad`` missing (a state of AdamW, or a converter that dropped it) | a first step, with a warning |
| states that no rule of the tensor uses | left out; nothing would ever update them. Warned of if not MARS's |
| other hyper-parameters | those loaded hold, as in torch.optim, with a warning |
| hyper-parameters that it does not name | stay as given |
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars_dist.config import GROUP_DEFAULTS, SETTINGS_KEY, Default, Settings, check_group, pair_of_betas
from mars_dist.maths.absent import absent_like, is_wholly_absent
from mars_dist.maths.rules import Rule
from mars_dist.one_state import GAMMA, check_form
from mars_dist.previous import NEXT, PREVIOUS
from mars_dist.sharding.dtensor import copy_as, local
from mars_dist.states import STEP, needed
from mars_dist.tables import GROUP_ID, Tables, shapes_and_rules

logger = logging.getLogger("mars_dist")

Groups = list[dict[str, Any]]

MOST_STEPS = 1 << 53
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
# How torch.optim, DeepSpeed and apex were told to compute: nothing that MARS would read, and torch's helpers raise
# KeyError where an optimizer has group keys that the next one lacks.
THEIR_FLAGS = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "bias_correction"}


@dataclass
class Loaded:
    """What is to be put in place: settings, groups as torch.optim reads them, own copies of the states."""

    settings: Settings
    groups: Groups
    states: dict[Tensor, dict[str, Any]]
    remarks: list[str] = field(default_factory=list)

    def say(self) -> None:
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        if self.remarks and rank == 0:
            logger.warning("load_state_dict: %s", " ".join(self.remarks))


class Reader:
    """Reads a state dict for an optimizer with ``groups``, of which nothing is changed here."""

    def __init__(self, groups: Groups, defaults: Mapping[str, Any], settings: Settings, tables: Tables) -> None:
        self._groups, self._defaults, self._given, self._tables = groups, defaults, settings, tables
        self._without = 0  # tensors without h, which their rule needs
        self._corrected = 0  # tensors whose rule corrects the gradient
        self._unused: Counter[str] = Counter()
        self._unknown: Counter[str] = Counter()

    def read(self, state_dict: Any) -> Loaded:
        """Raises ``ValueError`` with the name of what does not fit."""
        try:
            return self._read(state_dict)
        except ValueError as error:
            raise ValueError(f"load_state_dict: the state is not loaded, and nothing was changed: {error}") from error

    def _read(self, state_dict: Any) -> Loaded:
        saved_groups, saved_states = self._parts(state_dict)
        settings = self._settings(saved_groups)
        is_ours = settings is not None
        settings = settings or self._given
        merged = [self._group(i, *pair) for i, pair in enumerate(zip(self._groups, saved_groups, strict=True))]
        of = {
            key: (group, saved, p, name)
            for group, was, saved in zip(merged, self._groups, saved_groups, strict=True)
            for key, p, name in zip(saved["params"], group["params"], self._names(was, saved), strict=True)
        }
        strange = [key for key in saved_states if key not in of]
        if strange:
            raise ValueError(f"it has states of {strange[:3]}, which its groups do not name")
        values = {key: self._values(saved_states[key], *its[1:]) for key, its in of.items() if key in saved_states}
        values = {key: state for key, state in values.items() if state}
        for group, was, saved in zip(merged, self._groups, saved_groups, strict=True):
            present = {p: values[key] for key, p in zip(saved["params"], group["params"], strict=True) if key in values}
            self._take_form(group, was, saved, present, settings)
        # Copies of what is checked: whatever fails here as well (memory, say) fails before anything is changed.
        states = {of[key][2]: self._own(state, *of[key], settings, is_ours) for key, state in values.items()}
        for group, saved in zip(merged, saved_groups, strict=True):
            group["params"] = list(saved["params"])  # torch.optim puts the tensors in their place
            group[SETTINGS_KEY] = settings.to_text()
        return Loaded(settings, merged, states, self._remarks(settings, merged, is_ours))

    # ------------------------------------------------------------------------------------- groups and settings

    def _parts(self, state_dict: Any) -> tuple[Groups, Mapping[Any, Any]]:
        groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
        states = state_dict.get("state") if isinstance(state_dict, Mapping) else None
        if not isinstance(groups, (list, tuple)) or not isinstance(states, Mapping):
            raise ValueError('it is no state dict of an optimizer, which has "state" and "param_groups"')
        if not all(isinstance(group, Mapping) and "params" in group for group in groups):
            raise ValueError('it has param_groups without "params"')
        if not all(isinstance(group["params"], (list, tuple)) for group in groups):
            raise ValueError('it has param_groups whose "params" are no list')
        keys = [key for group in groups for key in group["params"]]
        if not all(isinstance(key, Hashable) for key in keys) or len(set(keys)) < len(keys):
            raise ValueError('its param_groups name a tensor twice, or one of their "params" is no number and no name')
        if len(groups) != len(self._groups):
            raise ValueError(f"it has {len(groups)} parameter groups, this optimizer has {len(self._groups)}")
        for i, (group, saved) in enumerate(zip(self._groups, groups, strict=True)):
            if len(group["params"]) != len(saved["params"]):
                raise ValueError(
                    f"parameter group {i} has {len(saved['params'])} tensors in it, and {len(group['params'])} in "
                    f"this optimizer{_difference(group, saved)}"
                )
        return list(groups), states

    def _settings(self, saved_groups: Groups) -> Settings | None:
        texts = {str(group[SETTINGS_KEY]): None for group in saved_groups if SETTINGS_KEY in group}
        if not texts:
            return None
        if len(texts) > 1:
            raise ValueError(f"its groups were saved by different optimizers: {' and '.join(texts)}")
        settings = Settings.from_text(next(iter(texts)))
        if settings.mars_type != self._given.mars_type:
            raise ValueError(
                f"it was saved by mars_type={settings.mars_type!r}, and this optimizer is "
                f"{self._given.mars_type!r}: their states mean different things. Construct MARS with "
                f"mars_type={settings.mars_type!r}, or begin with new optimizer states"
            )
        return settings

    def _group(self, number: int, was: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        """The group as it will be: what ``saved`` does not say stays as it was."""
        group = {key: value for key, value in saved.items() if key in was or key not in THEIR_FLAGS}
        group |= {key: was[key] for key in self._defaults if key in was and key not in saved}
        if "weight_decay_1d" not in saved and isinstance(self._defaults["weight_decay_1d"], Default):
            group["weight_decay_1d"] = saved.get("weight_decay", was["weight_decay_1d"])
        group |= {"params": was["params"], GROUP_ID: was[GROUP_ID]}
        try:
            for name in ("betas", "betas_1d"):
                group[name] = pair_of_betas(name, group[name])  # some formats of files know lists only
            check_group(group)
        except (TypeError, ValueError) as error:
            raise ValueError(f"parameter group {number}: {error}") from error
        return group

    def _names(self, group: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        """What the tensors of a group are called, for messages."""
        # torch's helpers put names in the place of numbers. Under ZeRO all names belong to one flat tensor.
        for names in (group.get("param_names"), saved.get("param_names"), saved["params"]):
            if names and len(names) == len(group["params"]) and all(isinstance(name, str) for name in names):
                return list(names)
        return [self._tables.name(p) or f"tensor {i} of the group" for i, p in enumerate(group["params"])]

    def _take_form(
        self,
        group: dict[str, Any],
        was: Mapping[str, Any],
        saved: Mapping[str, Any],
        its: Mapping[Tensor, Mapping[str, Any]],
        settings: Settings,
    ) -> None:
        """Which form the loaded states of ``group`` have (one_state.py).

        Raises:
            ValueError: when something on the way has dropped the previous gradient of the form with two states.
        """
        if GAMMA not in saved:  # before there were two forms, or another optimizer, whose momentum is b for h = 0
            one = was[GAMMA] is not None and not any(PREVIOUS in state for state in its.values())
            group |= {"one_state": one, GAMMA: group["gamma"] if one else None}
        elif saved[GAMMA] is None and was[GAMMA] is not None:
            for p, _, rule in shapes_and_rules(group, settings):
                if rule.can_keep_one_state and p in its and PREVIOUS not in its[p]:
                    raise ValueError(
                        "its states were saved with one_state=False and come without prev_grad, which the optimizer "
                        "they are loaded into had no place for: construct it with one_state=False"
                    )
        check_form(group, settings, began=bool(its))

    # ------------------------------------------------------------------------------------------------- states

    def _values(self, state: Any, saved: Mapping[str, Any], p: Tensor, name: str) -> dict[str, Any]:
        """The values of one state that MARS knows, checked."""
        if not isinstance(state, Mapping):
            raise ValueError(f"the state of {name} is a {type(state).__name__}")
        # torch's flat form gives {} for what is not there
        state = {key: value for key, value in state.items() if not (isinstance(value, Mapping) and not value)}
        if state and STEP not in state and STEP in saved:  # DeepSpeed's and apex's FusedAdam
            state[STEP] = saved[STEP]
        known = {key: state[key] for key in (STEP, *MOMENTS, PREVIOUS, NEXT) if key in state}
        self._unknown.update(str(key) for key in state.keys() - known.keys())
        if not known:
            return {}
        if STEP not in known:
            raise ValueError(f"the state of {name} has no step")
        known[STEP] = _count(known[STEP], name)
        for key in known.keys() - {STEP}:
            _check_state(key, known[key], p, name)
        return known

    def _own(
        self,
        values: dict[str, Any],
        group: dict[str, Any],
        saved: Mapping[str, Any],
        p: Tensor,
        name: str,
        settings: Settings,
        is_ours: bool,
    ) -> dict[str, Any]:
        """Own copies of ``values`` that share memory with nobody.

        h in the precision it was saved in; moments in that of states.py: where torch.optim kept them in 16 bits that is
        exact, and float32 moments of 16-bit parameters stay.
        """
        rules = self._tables.rules(group, p, settings)
        keys = set(values) if rules is None else {*needed(rules, group["amsgrad"], group["one_state"])}
        has_begun = values[STEP] > 0
        if has_begun:
            self._check_complete(values, keys if rules is not None else None, name, settings)
        if not is_ours and rules is not None:
            self._unused.update(values.keys() - keys - {STEP, NEXT})
        if rules is not None and PREVIOUS in keys:
            keys.add(NEXT)
        out: dict[str, Any] = {STEP: torch.tensor(values[STEP], dtype=torch.float32, device=p.device)}
        wide = torch.promote_types(p.dtype, torch.float32)
        for key in values:  # in one order on every rank: cutting a DTensor in another way is a collective
            if key in keys and key != STEP:
                out[key] = copy_as(p, values[key].to(wide) if key in MOMENTS else values[key])
        if rules is not None and PREVIOUS in keys and PREVIOUS not in out and "exp_avg" in out:
            # Here already, so that what is saved before the next step has it.
            out[PREVIOUS] = absent_like(p, getattr(p, "grad_dtype", None) or p.dtype)
        if has_begun:
            self._count_absent(self._rules_of(rules, group, settings), out, saved)
        return out

    def _check_complete(self, values: Mapping[str, Any], keys: set[str] | None, name: str, settings: Settings) -> None:
        if keys is None:
            keys = {"exp_avg", "exp_avg_sq"} if settings.mars_type == "mars-adamw" else {"exp_avg"}
        missing = [key for key in ("exp_avg", "exp_avg_sq") if key in keys and key not in values]
        if missing:
            raise ValueError(
                f"the state of {name} has no {' and no '.join(missing)} (it has {', '.join(sorted(values))}), which "
                f"its rule under mars_type={settings.mars_type!r} needs after {values[STEP]:g} steps: it is one of "
                "another optimizer. Begin with new optimizer states, or take the variant that saved it"
            )

    def _rules_of(self, rules: list[Rule] | None, group: dict[str, Any], settings: Settings) -> list[Rule]:
        if rules is not None:
            return rules
        originals = self._tables.constructed_with(group[GROUP_ID])
        return [rule for _, _, rule in shapes_and_rules({**group, "params": originals}, settings)]

    def _count_absent(self, rules: list[Rule], state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Count a tensor that comes without h, where its rule needs one."""
        if not any(rule.corrected for rule in rules):
            return
        self._corrected += 1
        if PREVIOUS in state:
            self._without += NEXT not in state and is_wholly_absent(local(state[PREVIOUS]))
        else:  # b is there in the form with one state
            self._without += saved.get(GAMMA) is None

    # ------------------------------------------------------------------------------------------ what is said

    def _remarks(self, settings: Settings, merged: Groups, is_ours: bool) -> list[str]:
        pairs = [(self._given.to_dict(), settings.to_dict()), *zip(self._groups, merged, strict=True)]
        changes = _changes(pairs, is_ours)
        out = []
        if changes:
            out.append(
                f"the values of the loaded state hold, not those given: {', '.join(changes)}. For others set them in "
                "optimizer.param_groups after loading, or begin with new optimizer states."
            )
        if self._without:
            h = "h = g" if settings.first_step == "paper" else "h = 0"
            out.append(
                f"{self._without} of {self._corrected} tensors come without the gradient of the step before "
                f"(prev_grad), as from AdamW or a conversion: they take the next step as a first one ({h}, "
                f"first_step={settings.first_step!r}); moments and step counters go on."
            )
        if self._unused:
            out.append(f"left out, because the rule of the tensor does not use it: {_listed(self._unused)}.")
        if self._unknown:
            out.append(f"left out, because MARS has no such states: {_listed(self._unknown)}.")
        return out


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{key} of {n} tensors" for key, n in sorted(counts.items()))


def _changes(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], is_ours: bool) -> list[str]:
    """Where settings and groups, before and after loading, differ. The learning rate of a run changes all the time."""
    known = {*Settings.__dataclass_fields__, *GROUP_DEFAULTS, "lr_1d_ratio"} - ({"lr"} if is_ours else set())
    changes = {
        f"{key} {_plain(new[key])} (given: {_plain(old[key])})": None
        for old, new in pairs
        for key in old
        if key in known and new[key] != old[key]
    }
    return list(changes)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _difference(group: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """The names that only one of two groups has, where both have names."""
    theirs, mine = saved.get("param_names", saved["params"]), group.get("param_names", ())
    named = len(theirs) == len(saved["params"]) and len(mine) == len(group["params"])
    if not named or not all(isinstance(name, str) for name in theirs):
        return ""
    parts = [
        f"{where}: {', '.join(sorted(names)[:3])}{' ...' if len(names) > 3 else ''}"
        for where, names in (("only there", set(theirs) - set(mine)), ("only here", set(mine) - set(theirs)))
        if names
    ]
    return f" ({'; '.join(parts)})" if parts else ""


def _count(step: Any, name: str) -> float:
    value = local(step) if isinstance(step, Tensor) else step
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 and not value.is_complex() else step
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf or value % 1:
        raise ValueError(f"the state of {name} has step {value!r}, which is no count of steps")
    if value > MOST_STEPS:
        raise ValueError(f"the state of {name} has step {float(MOST_STEPS):g} or more, which no run takes")
    return float(value)


def _check_state(key: str, value: Any, p: Tensor, name: str) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"the state {key!r} of {name} is a {type(value).__name__} and no tensor")
    if not value.is_floating_point() or value.layout != torch.strided or value.is_quantized:
        raise ValueError(
            f"the state {key!r} of {name} is a tensor of {value.dtype} ({value.layout}): states are dense tensors of "
            "real floating-point numbers"
        )
    if value.is_meta and not p.is_meta:
        raise ValueError(f"the state {key!r} of {name} is on the meta device: it has no values")
    if value.shape != p.shape:
        raise ValueError(
            f"the state {key!r} of {name} has shape {tuple(value.shape)}, its parameter {tuple(p.shape)}: it is the "
            "state of another model, or of another number of ranks"
        )
