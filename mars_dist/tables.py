"""The layouts of the tensors in an optimizer's groups: found when a tensor is first seen, checked, and remembered."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars_dist.config import GROUP_DEFAULTS, Settings
from mars_dist.maths.rules import Rule
from mars_dist.sharding import torch_native
from mars_dist.sharding.layout import WHOLE, Layout
from mars_dist.sharding.locate import locate, trainable_only
from mars_dist.sharding.norms import FAULT, check_same, is_shared
from mars_dist.step import rule_of

logger = logging.getLogger("mars_dist")

# Key of a parameter group: its number, which outlives what engines and load_state_dict do to group dicts.
GROUP_ID = "mars_group"


class Tables:
    """Which pieces of which parameters are in the tensors that an engine hands to the optimizer.

    Nothing here is saved. The parameters that the groups were constructed with are kept as weak references, so that
    those which an engine has replaced can be freed; under ZeRO the others say where their pieces went.
    """

    def __init__(self) -> None:
        self.originals: dict[int, list[tuple[str, weakref.ref[Tensor]]]] = {}
        self._named: dict[int, tuple[str, weakref.ref[Tensor]]] = {}  # the same, by id
        self.forget()

    def forget(self) -> None:
        """Find every layout anew: the groups or the settings have changed."""
        self._layouts: dict[int, tuple[weakref.ref[Tensor], Layout]] = {}
        self._rules: dict[tuple[int, str], tuple[str, tuple[int, ...]]] = {}
        self._logged = False
        self._trainable: int | None = None  # how many tensors will be stepped in all, once it is known

    def constructed_as(self, group: dict[str, Any]) -> bool:
        """Whether the tensors in ``group`` are the parameters it was constructed with."""
        return all(id(p) in self._named and self._named[id(p)][1]() is p for p in group["params"])

    def remember(self, group: dict[str, Any]) -> None:
        """Keep the names and parameters that ``group`` is constructed with."""
        number, params = group[GROUP_ID], group["params"]
        names = group.get("param_names") or [f"group {number}, parameter {i}" for i in range(len(params))]
        self.originals[number] = [(name, weakref.ref(p)) for name, p in zip(names, params, strict=True)]
        self._named |= {id(p): pair for p, pair in zip(params, self.originals[number], strict=True)}

    def layout(self, p: Tensor) -> Layout:
        """The layout of a tensor that was seen before."""
        return self._layouts[id(p)][1]

    def seen(self) -> list[Layout]:
        """All layouts found so far, in the order in which they were."""
        return [layout for _, layout in self._layouts.values()]

    def find(self, group: dict[str, Any], position: int, p: Tensor, settings: Settings) -> Layout:
        """The layout of ``p`` = ``group["params"][position]``, built and checked the first time ``p`` is seen.

        Raises:
            RuntimeError: as ``MARS.step()`` says.
        """
        known = self._layouts.get(id(p))
        if known is not None and known[0]() is p:
            if not self._logged:
                self._log()
            return known[1]
        name, original = self._named.get(id(p), ("", None))
        if original is not None and original() is p:
            layout = torch_native.locate(name, p)
        else:
            layout = locate(p, position, group["params"], self._constructed_with(group[GROUP_ID]))
        rules = [rule_of(segment, group, settings) for segment in layout.segments]
        _check_over_ranks(layout, rules, group, settings, p.device)
        _refuse_what_needs_whole_tensors(layout, rules, settings)
        self._layouts[id(p)] = (weakref.ref(p), layout)
        for segment, rule in zip(layout.segments, rules, strict=True):
            self._rules[group[GROUP_ID], segment.name] = (rule.label, segment.shape)
        if not self._logged:
            if self._trainable is None:
                groups = (trainable_only(self._constructed_with(number)) for number in self.originals)
                self._trainable = sum(len(params) for params in groups)
            if len(self._rules) >= self._trainable:
                self._log()
        return layout

    def _constructed_with(self, number: int) -> list[tuple[str, Tensor]]:
        return [(name, p) for name, ref in self.originals[number] if (p := ref()) is not None]

    def with_gradient(self) -> int:
        groups = (trainable_only(self._constructed_with(number)) for number in self.originals)
        return sum(p.grad is not None for group in groups for _, p in group)

    def rule_counts(self) -> dict[str, int]:
        return dict(Counter(label for label, _ in self._rules.values()).most_common())

    def engines(self) -> set[str]:
        return {layout.engine for layout in self.seen()}

    def _log(self) -> None:
        """Say once, on rank 0, which rule how many tensors take."""
        self._logged = True
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        if rank != 0:
            return
        counts = self.rule_counts()
        plain = counts.pop("AdamW", 0)
        parts = []
        for label, n in counts.items():
            all_matrices = all(len(shape) == 2 for rule, shape in self._rules.values() if rule == label)
            parts.append(f"{label} on {n} {'matrices' if all_matrices else 'tensors'}")
        parts += [f"AdamW on {plain} other tensors"] if plain else []
        logger.info("%s (%s)", ", ".join(parts), ", ".join(sorted(self.engines())))
        total = sum(math.prod(shape) for _, shape in self._rules.values())
        larger = sum(math.prod(s) for label, s in self._rules.values() if label == "AdamW" and len(s) > 2)
        if 2 * larger > total:
            logger.warning(
                "plain AdamW trains %.0f %% of all elements, in tensors of 3 and more dimensions (experts, "
                "convolutions): matrix_ndim=(2, 3, 4) or a group with use_mars=True gives them the MARS rule",
                100.0 * larger / total,
            )


def _check_over_ranks(
    layout: Layout, rules: Sequence[Rule], group: dict[str, Any], settings: Settings, device: torch.device
) -> None:
    """Raise on every rank when one has found a fault or the ranks would not step alike, so that nobody hangs."""
    agree = True
    if layout.process_group is not None and is_shared(layout.process_group):
        labels = [rule.label for rule in rules]
        numbers = [(key, group[key]) for key in GROUP_DEFAULTS if key in group and key != "lr"]
        number = FAULT if layout.fault else layout.fingerprint(labels, settings, numbers)
        agree = check_same(number, layout.process_group, device)
    if layout.fault:
        raise RuntimeError(layout.fault)
    if not agree:
        first = layout.segments[0]
        raise RuntimeError(
            "MARS: the ranks that share this tensor do not agree on the names, shapes or order of the parameters in it "
            f"(this rank sees {len(layout.segments)}, the first is {first.name} of shape {first.shape}) or on MARS's "
            f"settings ({settings}, clip={group['clip']}): build the same model, groups and optimizer on every rank. "
            "Or another rank has found a fault: see its message."
        )


def _refuse_what_needs_whole_tensors(layout: Layout, rules: Sequence[Rule], settings: Settings) -> None:
    if not settings.is_approx and layout.engine != WHOLE:
        raise RuntimeError(
            f"exact mode (is_approx=False) is not supported under {layout.engine} yet, where the gradients of the next "
            "batch do not reach the optimizer: use it on one process or under DDP in float32, or is_approx=True here."
        )
    for segment, rule in zip(layout.segments, rules, strict=True):
        if rule.whole_matrix and is_shared(layout.process_group):
            raise RuntimeError(
                f"{rule.label} needs whole matrices, and {layout.engine} spreads {segment.name} of shape "
                f"{segment.shape} over {dist.get_world_size(layout.process_group)} ranks: this version supports the "
                "matrix variants on whole tensors only (one process, DDP, ZeRO stage 0). Use "
                'mars_type="mars-adamw" or "mars-lion" here.'
            )
