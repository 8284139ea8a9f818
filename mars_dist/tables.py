"""The layouts of the tensors in an optimizer's groups: found when a tensor is first seen, checked, and remembered."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from mars_dist.agreement import New, check_over_ranks, pieces_of_all_ranks
from mars_dist.config import Settings
from mars_dist.maths.rules import MatrixForm, Rule
from mars_dist.matrices import Plans
from mars_dist.sharding import fsdp1, torch_native, zero
from mars_dist.sharding.dtensor import is_dtensor, moved_from
from mars_dist.sharding.layout import WHOLE, Layout, Segment
from mars_dist.sharding.locate import locate, trainable_only
from mars_dist.sharding.norms import is_shared
from mars_dist.step import rule_of

logger = logging.getLogger("mars_dist")

# Key of a parameter group: its number, which outlives what engines and load_state_dict do to group dicts.
GROUP_ID = "mars_group"


def _hold(param: Tensor) -> Callable[[], Tensor | None]:
    """A reference that does not keep ``param`` alive.

    torch swaps the contents of DTensors in place (``model.to()``) and refuses to for tensors with weak references:
    those are kept alive. An engine that replaces them is followed (``Tables.follow``).
    """
    return (lambda: param) if is_dtensor(param) else weakref.ref(param)


def shapes_and_rules(group: Mapping[str, Any], settings: Settings) -> list[tuple[Tensor, tuple[int, ...], Rule]]:
    """Each tensor of ``group`` with its shape and its rule, as it is now (an engine may show pieces only)."""
    shapes = [tuple(getattr(p, "ds_shape", p.shape)) for p in group["params"]]
    rules = [rule_of(Segment("", shape, 0, 0, 0), group, settings) for shape in shapes]
    return list(zip(group["params"], shapes, rules, strict=True))


def check_last_group(groups: list[dict[str, Any]], settings: Settings) -> None:
    """Take the last group out again and raise ``ValueError`` if its ``matrix_parts`` does not fit a tensor."""
    names = groups[-1].get("param_names", range(len(groups[-1]["params"])))
    for name, (_, shape, rule) in zip(names, shapes_and_rules(groups[-1], settings), strict=True):
        if rule.whole_matrix and (fault := MatrixForm.of(groups[-1]).fault(shape)):
            groups.pop()
            raise ValueError(f"parameter {name} of the group: {fault}.")


def _takes_part(p: Tensor) -> bool:
    return p.grad is not None or p.requires_grad and torch_native.is_sharded(p)


class Tables:
    """Which pieces of which parameters are in the tensors that an engine hands to the optimizer.

    Nothing here is saved. The parameters that the groups were constructed with are kept as weak references, so that
    those which an engine has replaced can be freed; under ZeRO the others say where their pieces went.
    """

    def __init__(self) -> None:
        self.originals: dict[int, list[tuple[str, Callable[[], Tensor | None]]]] = {}
        self._named: dict[int, tuple[str, Callable[[], Tensor | None]]] = {}  # the same, by id
        self._shapes: dict[int, list[tuple[int, ...]]] = {}  # of the originals
        self._attached: dict[int, tuple[Tensor, Layout]] = {}
        self._copied: dict[int, tuple[Callable[[], Tensor | None], dist.ProcessGroup]] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._looked_again = False
        self.forget()

    def forget(self) -> None:
        """Find every layout anew: the groups or the settings have changed."""
        self._layouts: dict[int, tuple[Callable[[], Tensor | None], Layout]] = {}
        self._rules: dict[tuple[int, int, str], tuple[str, tuple[int, ...]]] = {}
        self.plans = Plans()
        self._logged = False
        self._alone = 0  # whole matrices that no ranks are known to share
        self._trainable: int | None = None  # how many tensors will be stepped in all, once it is known

    def look_again(self, may_be_dry_run: Sequence[bool | Tensor]) -> None:
        """Forget how the gradients of a first step were placed if it was a dry run, with lr 0: tensor parallelism may
        leave real ones as partial sums. Where lr is a tensor it may have been one: that is looked at again once.
        """
        dtensors = any(layout.gradient_placements is not None or layout.replicas for layout in self.seen())
        unknown = not self._looked_again and any(isinstance(dry, Tensor) for dry in may_be_dry_run)
        if dtensors and (unknown or any(dry is True for dry in may_be_dry_run)):
            self._looked_again = True
            self._layouts, self.plans = {}, Plans()

    def constructed_as(self, group: dict[str, Any]) -> bool:
        """Whether the tensors in ``group`` are the parameters it was constructed with."""
        return all(self._is_original(p) for p in group["params"])

    def _is_original(self, p: Tensor) -> bool:
        return id(p) in self._named and self._named[id(p)][1]() is p

    def remember(self, group: dict[str, Any]) -> None:
        """Keep the names and parameters that ``group`` is constructed with."""
        number, params = group[GROUP_ID], group["params"]
        names = group.get("param_names") or [f"group {number}, parameter {i}" for i in range(len(params))]
        self.originals[number] = [(name, _hold(p)) for name, p in zip(names, params, strict=True)]
        self._shapes[number] = [tuple(p.shape) for p in params]
        self._named |= {id(p): pair for p, pair in zip(params, self.originals[number], strict=True)}

    def attach(self, model: nn.Module, groups: Sequence[dict[str, Any]], copies: dist.ProcessGroup | None) -> None:
        """Keep the layouts of the parameters of ``model`` that FSDP1 owns; ``groups`` must have some of them."""
        found = {id(p): (p, layout) for p, layout in fsdp1.layouts(model)}
        self._copied |= {id(p): (_hold(p), group) for p, group in torch_native.copies(model, copies)}
        ours = {id(p) for group in groups for p in group["params"]}
        if found and not ours & found.keys():
            raise RuntimeError(
                "attach(model): none of MARS's parameters is one of the model's that FullyShardedDataParallel (FSDP1) "
                "trains: it has put flat ones in their place. Build MARS after wrapping, from the wrapped model's "
                "parameters, or wrap with use_orig_params=True."
            )
        # A model that is known already is no reason to find every layout anew: Accelerate attaches more than once.
        if not found.keys() <= self._attached.keys() or any(self._attached[i][1] != f[1] for i, f in found.items()):
            self._attached |= found
            self.forget()

    def layout(self, p: Tensor) -> Layout:
        """The layout of a tensor that was seen before."""
        return self._layouts[id(p)][1]

    def attached(self, p: Tensor) -> Layout | None:
        """What ``attach`` was told of ``p``, stepped or not: a state dict may be saved before the first step."""
        attached = self._attached.get(id(p))
        return attached[1] if attached is not None and attached[0] is p else None

    def expect(self, group: dict[str, Any], position: int) -> Layout:
        """The layout of ``group["params"][position]``, which an engine has made, and which is known from now on.

        A step finds it by itself; what loads states into a new engine by the names of parameters is earlier.

        Raises:
            RuntimeError: when it cannot be known; ``Layout.fault`` is for the caller to raise, on all ranks.
        """
        p = group["params"][position]
        layout = self._build(group, position, p)
        self._attached[id(p)] = (p, layout)
        return layout

    def rules(self, group: Mapping[str, Any], p: Tensor, settings: Settings) -> list[Rule] | None:
        """The rules of the parameters in ``p``; None for a tensor of which a step has to find out what is in it."""
        layout = self.attached(p) or (self.layout(p) if self.is_seen(p) else None)
        if layout is not None:
            return [rule_of(segment, group, settings) for segment in layout.segments]
        if is_dtensor(p) or self._is_original(p) and not fsdp1.is_fsdp1(p):
            return [rule_of(Segment("", tuple(getattr(p, "ds_shape", p.shape)), 0, 0, 0), group, settings)]
        return None

    def name(self, p: Tensor) -> str | None:
        """What a parameter is called that a group was constructed with."""
        return self._named[id(p)][0] if self._is_original(p) else None

    def seen(self) -> list[Layout]:
        """All layouts found so far, in the order in which they were."""
        return [layout for _, layout in self._layouts.values()]

    def always_joins(self, p: Tensor) -> bool:
        """Whether ``p`` takes part in the exchange of a step even without a gradient on this rank."""
        return self.is_seen(p) and self.layout(p).always_joins and p.requires_grad

    def find(self, groups: Sequence[dict[str, Any]], settings: Settings) -> bool:
        """Build and check the layouts of all tensors of ``groups`` that take part in a step and were not seen before.

        Every rank finds the same tensors new in the same call, whether it has a gradient for them or not: the check
        over the ranks is one exchange for each process group.

        Returns: whether there were such tensors.

        Raises:
            RuntimeError: as ``MARS.step()`` says.
        """
        new = []
        for group in groups:
            unseen = [(i, p) for i, p in enumerate(group["params"]) if not self.is_seen(p) and _takes_part(p)]
            if unseen:
                self._follow(group)
            for position, p in unseen:
                layout = self._with_known_groups(self._build(group, position, p))
                layout = replace(layout, gradient_placements=moved_from(p))
                rules = [rule_of(segment, group, settings) for segment in layout.segments]
                if any(rule.whole_matrix for rule in rules):
                    layout = self._shared_out(layout, p, group[GROUP_ID])
                    self._alone += layout.engine == WHOLE and layout.copies is None
                new.append(New(p, group, layout, rules))
        if new:
            check_over_ranks(new, settings)
            new = pieces_of_all_ranks(new, self._groups)
        for tensor in new:
            self._layouts[id(tensor.param)] = (_hold(tensor.param), tensor.layout)
            for segment, rule in zip(tensor.layout.segments, tensor.rules, strict=True):
                # FSDP1's names are those within a model: the tensor tells two models of one optimizer apart.
                owner = id(tensor.param) if tensor.layout.engine == fsdp1.ENGINE else 0
                self._rules[tensor.group[GROUP_ID], owner, segment.name] = (rule.label, segment.shape)
        if not self._logged and self._layouts:
            if self._trainable is None:
                their = (trainable_only(self._named_originals(number)) for number in self.originals)
                self._trainable = sum(len(params) for params in their)
            if not new or len(self._rules) >= self._trainable:
                self._log()
        return bool(new)

    def everything(self, groups: Sequence[dict[str, Any]], settings: Settings) -> list[New]:
        """Each tensor of ``groups`` that trains with its layout, before the first step as well: to save and to load.

        Every rank gets the same tensors in the same order. Those that were not stepped yet are checked over the ranks
        (one exchange for each process group), and found again when they are: only gradients tell how they arrive.

        Raises:
            RuntimeError: as ``MARS.step()`` says.
        """
        found, unseen = [], []
        for group in groups:
            params = group["params"] or zero.flats(self._named_originals(group[GROUP_ID]))  # empty between steps there
            group = {**group, "params": params}
            for position, p in enumerate(params):
                if not p.requires_grad and not self.is_seen(p):
                    continue
                if not self.is_seen(p):
                    self._follow(group)
                layout = self.layout(p) if self.is_seen(p) else self._build(group, position, p)
                found.append(New(p, group, layout, [rule_of(segment, group, settings) for segment in layout.segments]))
                unseen += [] if self.is_seen(p) else [found[-1]]
        if unseen:
            check_over_ranks(unseen, settings)
        return found

    def original(self, group: Mapping[str, Any], name: str) -> Tensor | None:
        """The parameter of that name which ``group`` was constructed with, if it is still there."""
        return next((p for its, p in self._named_originals(group[GROUP_ID]) if its == name), None)

    def _with_known_groups(self, layout: Layout) -> Layout:
        """Groups of the same ranks become one, so that one exchange serves them: two equal meshes have different ones,
        and torch's caches can put both into one model."""
        one = [
            tuple(self._groups.setdefault(tuple(dist.get_process_group_ranks(g)), g) for g in groups)
            for groups in (layout.process_groups, layout.replicas)
        ]
        return replace(layout, process_groups=one[0], replicas=one[1])

    def _shared_out(self, layout: Layout, p: Tensor, number: int) -> Layout:
        """``layout`` of a whole matrix, with the ranks that share out its work, if there are some.

        All of them join every step: one that has no gradient must not leave the others waiting for its results.
        """
        name = layout.segments[0].name
        candidates = [p, *(original for its, original in self._named_originals(number) if its == name)]
        known = [self._copied[id(t)] for t in candidates if id(t) in self._copied]
        copies = layout.copies or next((group for hold, group in known if hold() is not None), None)
        if copies is None or layout.process_groups or not is_shared(copies):
            return replace(layout, copies=None)
        return replace(layout, copies=copies, always_joins=True)

    def is_seen(self, p: Tensor) -> bool:
        return id(p) in self._layouts and self._layouts[id(p)][0]() is p

    def _follow(self, group: dict[str, Any]) -> None:
        """Somebody has put other parameters in the place of those that the group was constructed with.

        DTensors say themselves what they are (Accelerate does that under FSDP2), and parameters of the same shapes are
        taken for new originals. What else an engine may step on is for ``locate`` to find out.
        """
        params, number = group["params"], group[GROUP_ID]
        alike = [tuple(p.shape) for p in params] == self._shapes.get(number)
        if any(is_dtensor(p) for p in params) or alike and all(isinstance(p, nn.Parameter) for p in params):
            if not self.constructed_as(group):
                for name, original in self._named_originals(number):
                    torch_native.refuse_slices(name, original)  # a copy of a slice is one as well
                before = [name for name, _ in self.originals[number]]
                self.remember({"param_names": before, **group} if len(before) == len(params) else group)

    def _build(self, group: dict[str, Any], position: int, p: Tensor) -> Layout:
        attached = self.attached(p)
        if attached is not None:
            return attached
        if self._is_original(p) or torch_native.is_sharded(p):
            name = self._named[id(p)][0] if id(p) in self._named else f"parameter {position}"
            return torch_native.locate(name, p)
        return locate(p, position, group["params"], self._named_originals(group[GROUP_ID]))

    def constructed_with(self, number: int) -> list[Tensor]:
        """The parameters that a group was constructed with, as far as they are still there."""
        return [p for _, p in self._named_originals(number)]

    def _named_originals(self, number: int) -> list[tuple[str, Tensor]]:
        return [(name, p) for name, ref in self.originals[number] if (p := ref()) is not None]

    def with_gradient(self) -> int:
        groups = (trainable_only(self._named_originals(number)) for number in self.originals)
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
        without = max(0, (self._trainable or 0) - len(self._rules))
        parts += [f"{without} without a gradient so far"] if without else []
        logger.info("%s (%s)", ", ".join(parts), ", ".join(sorted(self.engines())))
        if self._alone and self.engines() == {WHOLE} and dist.is_initialized() and dist.get_world_size() > 1:
            logger.info(
                "every rank orthogonalises all %d matrices: under DDP optimizer.attach(model), called once after "
                "wrapping, has each do its share",
                self._alone,
            )
        total = sum(math.prod(shape) for _, shape in self._rules.values())
        larger = sum(math.prod(s) for label, s in self._rules.values() if label == "AdamW" and len(s) > 2)
        if 2 * larger > total:
            logger.warning(
                "plain AdamW trains %.0f %% of all elements, in tensors of 3 and more dimensions (experts, "
                "convolutions): matrix_ndim=(2, 3, 4) or a group with use_mars=True gives them the MARS rule",
                100.0 * larger / total,
            )
