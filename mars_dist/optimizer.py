"""``MARS``, a torch optimizer: the same on one process, under DDP, FSDP, tensor parallelism and DeepSpeed ZeRO."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from mars_dist import states
from mars_dist.config import (
    GROUP_DEFAULTS,
    LR_1D,
    WEIGHT_DECAY_1D,
    Default,
    Settings,
    check_keywords,
    resolve_defaults,
    resolve_group,
)
from mars_dist.previous import Previous
from mars_dist.saving import complete_units, undo_units, warn_of_other_values
from mars_dist.sharding.dtensor import copy_as, is_dtensor, local, local_gradient
from mars_dist.sharding.layout import COPIES, Segment
from mars_dist.step import Shard, all_finite, check_gradient, learning_rate, rule_of, take_step
from mars_dist.tables import GROUP_ID, Tables

logger = logging.getLogger("mars_dist")

STATE_DICT_KEY = "mars_dist"
STATE_DICT_FORMAT = 1


class MARS(Optimizer):
    r"""Variance-reduced, preconditioned training: MARS-AdamW, MARS-Lion, MARS-Shampoo and MARS-M.

    One step for a tensor with value p, gradient g, gradient of the step before h, at step t = 1, 2, ...:

    .. code-block:: text

        k  = gamma * beta1 / (1 - beta1)
        c  = g + k * (g - h)                    h = 0 at the first step
        c~ = c / ||c|| if ||c|| > 1 else c      the norm of the WHOLE tensor, however it is sharded
        m  = beta1 * m + (1 - beta1) * c~
        mars-adamw    v = beta2 * v + (1 - beta2) * c~^2
                      d = m / ((sqrt(v) / sqrt(1 - beta2^t) + eps) * (1 - beta1^t))
        mars-lion     d = sign(m)
        mars-shampoo  d = orth(m / (1 - beta1)) * sqrt(max(1, rows / cols))
        mars-m        d = orth(m) * 0.2 * sqrt(max(rows, cols))
        p  = p - lr * (weight_decay * p + d)

    Tensors with exactly two dimensions take this rule. All others take plain AdamW with ``lr_1d``, ``betas_1d`` and
    ``weight_decay_1d``, unless ``optimize_1d``. The shape that counts is the parameter's, not that of the piece of it
    that a rank holds under ZeRO or FSDP.

    Source: arXiv 2411.10438 and 2510.21800; where the authors' code (AGI-Arena/MARS) differs from the papers, the
    code's behaviour is the default, because the published results came from it.

    Args:
        params: parameters, named parameters (``model.named_parameters()``), or parameter groups. Real floating-point
            dtypes; moments of half-precision parameters are kept in float32.
        lr: learning rate of the tensors under MARS; a number or a tensor of one element. 0 is allowed: the tensors
            under plain AdamW then follow ``lr`` itself.
        betas: decay of the first and the second moment.
        eps: added to the denominator (and to the norm before the orthogonalisation of mars-shampoo).
        weight_decay: decoupled decay of the tensors under MARS.
        amsgrad: use the running maximum of the second moment.
        gamma: strength of the gradient correction.
        is_approx: True takes the gradient of the step before as h. False (exact mode) takes the gradient of the
            CURRENT batch at the previous point: ``mars_dist.exact.ExactMode`` takes it in any loop.
        mars_type: "mars-adamw", "mars-lion", "mars-shampoo" or "mars-m".
        optimize_1d: the MARS rule for all tensors (the matrix variants: MARS-AdamW for those that are no matrices).
        lr_1d: learning rate of the tensors under plain AdamW. Kept as its ratio to ``lr`` (group key
            ``lr_1d_ratio``), so that one schedule acts on both.
        betas_1d, weight_decay_1d: of the tensors under plain AdamW. Where ``weight_decay_1d`` is not given, a group
            that names its own ``weight_decay`` uses that.
        clip: bound of ||c||; None leaves it out.
        first_step: "reference" (h = 0 at the first step) or "paper" (h = g).
        ns_steps, ns_dtype: Newton-Schulz iterations and their precision ("bfloat16", "float32", "float64"; None:
            bfloat16 on accelerators, at least float32 on CPUs).
        orthogonalizer: "newton-schulz", or "svd" for the exact factor.
        matrix_ndim: the number of dimensions that makes a tensor a matrix, or a tuple of numbers. Matrix variants
            take rank 3 as a batch of matrices and flatten higher ranks to (d0, -1); c is clipped per tensor.
        skip_nonfinite: leave parameters, states and counters alone in a step whose gradients are not all finite. The
            decision stays on the device. It is one for each call of ``step()``: ZeRO makes a call for each parameter
            group (stage 3: sub-group), and skips non-finite steps as a whole by itself. False lets NaN through, as
            torch.optim does (mars-lion: into the momentum; sign(NaN) is 0, so that the tensor stays where it is).
        use_mars: True or False decides for all tensors (of a group); None goes by shape.
        maximize: ascend instead of descend.

    State per tensor: ``step`` (0-dim), ``exp_avg``, and what its rule needs of ``exp_avg_sq``, ``max_exp_avg_sq`` and
    ``prev_grad`` (h, in the gradient's dtype, never sharing memory with a gradient). Created at the first step.

    Raises:
        ValueError, TypeError: for a value out of range or an unknown keyword, naming it and the nearest known one.
        RuntimeError: in ``step()`` for sparse or complex gradients, or when an engine hands over tensors whose shapes
            cannot be known; MARS never falls back to AdamW silently.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        gamma: float = 0.025,
        is_approx: bool = True,
        mars_type: str = "mars-adamw",
        optimize_1d: bool = False,
        lr_1d: float = LR_1D,
        betas_1d: tuple[float, float] = (0.9, 0.95),
        weight_decay_1d: float = WEIGHT_DECAY_1D,
        *,
        clip: float | None = 1.0,
        first_step: str = "reference",
        ns_steps: int = 5,
        ns_dtype: str | torch.dtype | None = None,
        orthogonalizer: str = "newton-schulz",
        matrix_ndim: int | tuple[int, ...] = 2,
        skip_nonfinite: bool = False,
        use_mars: bool | None = None,
        maximize: bool = False,
        **unknown: Any,
    ) -> None:
        check_keywords(unknown, KEYWORDS)
        self.settings = Settings(
            mars_type=mars_type,
            is_approx=is_approx,
            first_step=first_step,
            ns_steps=ns_steps,
            ns_dtype=None if ns_dtype is None else str(ns_dtype),
            orthogonalizer=orthogonalizer,
            matrix_ndim=matrix_ndim,  # type: ignore[arg-type]
            skip_nonfinite=skip_nonfinite,
        )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "gamma": gamma,
            "optimize_1d": optimize_1d,
            "lr_1d": lr_1d,
            "betas_1d": betas_1d,
            "weight_decay_1d": weight_decay_1d,
            "clip": clip,
            "use_mars": use_mars,
            "maximize": maximize,
        }
        assert defaults.keys() == GROUP_DEFAULTS.keys()
        self._tables = Tables()
        self.tensor_updates = 0  # a tensor in a step that was left out (skip_nonfinite) counts as well
        self._warned = False  # that there was nothing to step
        self._previous = Previous()
        super().__init__(params, resolve_defaults(defaults))

    # ------------------------------------------------------------------------------------------------ groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its keys are those of the constructor that may differ between groups (see config.py).

        ``lr_1d`` becomes ``lr_1d_ratio``. The dict itself is not changed.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        group = resolve_group(param_group, self.defaults)
        group[GROUP_ID] = len(self._tables.originals)
        super().add_param_group(group)
        self._tables.remember(group)

    def attach(self, model: nn.Module) -> None:
        """Tell MARS where FSDP1 (``FullyShardedDataParallel``) keeps the pieces of ``model``'s parameters.

        FSDP1 cannot be asked without the model. Call it once after wrapping, before the first step, on every rank;
        Accelerate and the Trainer do it by themselves once mars_dist is imported. It does nothing for any other
        engine, and may be called again, also for a second model.

        Raises:
            RuntimeError: when FSDP1 trains other parameters than those MARS was built with, does not look as in the
                tested releases of torch, or wraps tensor parallelism.
        """
        self._tables.attach(model, self.param_groups)

    # -------------------------------------------------------------------------------------------------- step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step for every parameter that has a gradient.

        A gradient that is missing on one rank only counts as zero where the parameter is sharded and another rank has
        one, and is an error where replicas of it would drift apart. Under DDP there is no exchange: a gradient set to
        None on one rank alone is not noticed (DDP itself gives all ranks the same).

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns: what ``closure`` returned, or None.

        Raises:
            RuntimeError: sparse or complex gradients; tensors whose shapes cannot be known; a table of pieces that
                does not agree with the weights, or ranks that do not agree with each other (on every rank); what
                this version does not support on sharded tensors; exact mode without a new previous gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_first_look = self._find()
        joined = self._shards()
        shards = [shard for _, shard in joined]
        if self._previous.looking:
            self._keep(joined)
            return loss
        if shards:
            if not self.settings.is_approx:
                self._previous.before_step([(p, s.state, s.grad) for p, s in joined], self.settings.first_step)
            take_step(shards, self.settings)
            if is_first_look:
                self._tables.look_again([s.may_be_dry_run for s in shards])
            self.tensor_updates += sum(len(s.layout.segments) for s in shards if not s.lacks_gradient)
            if not self.settings.is_approx:
                is_dry = any(s.may_be_dry_run is not False for s in shards)
                self._previous.advance_all(self.param_groups, self.state, is_dry)
        if not shards and self.tensor_updates == 0 and not self._warned:
            self._warned = True
            logger.warning(
                "step() found no gradient in any of the %d tensors of its groups, and changed nothing. If the model "
                "was wrapped after MARS was built (fully_shard, FSDP), it has other parameters now: build MARS after "
                "wrapping.",
                sum(len(group["params"]) for group in self.param_groups),
            )
        return loss

    def _find(self) -> bool:
        """Check the gradients, and find the layouts of tensors that were not seen before."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    check_gradient(p, p.grad)
        return self._tables.find(self.param_groups, self.settings)

    def _shards(self) -> list[tuple[Tensor, Shard]]:
        pairs = ((group, p) for group in self.param_groups for p in group["params"])
        return [(p, self._shard(g, p)) for g, p in pairs if p.grad is not None or self._tables.always_joins(p)]

    def _shard(self, group: dict[str, Any], p: Tensor) -> Shard:
        """What a step works on: this rank's part of ``p``, its gradient and its states, which are made here."""
        layout = self._tables.layout(p)
        name = layout.segments[0].name
        if layout.held is not None and p.numel() != layout.held:
            raise RuntimeError(
                f"{name}: FSDP1 shows whole tensors now ({p.numel()} elements, this rank's piece has {layout.held}): "
                "call step() outside of summon_full_params, and after a backward pass outside of no_sync()."
            )
        grad = local_gradient(p, name, layout.gradient_placements)
        # A rank that holds nothing of the parameter and has no gradient for it (FSDP1) makes no state; one that a dry
        # run has made counts on.
        state = self.state[p] if p.grad is not None or grad.numel() or p in self.state else {}
        is_new = states.STEP not in state
        rules = [rule_of(segment, group, self.settings) for segment in layout.segments]
        states.ensure(state, p, grad, rules, group["amsgrad"])
        may_be_dry_run: bool | Tensor = False
        if layout.engine == COPIES:
            may_be_dry_run = is_new
        elif not layout.engine.startswith("ZeRO"):
            may_be_dry_run = learning_rate(group) == 0.0  # as torch's checkpoint helpers do
        if is_dtensor(p):
            state = {key: local(value) for key, value in state.items()}
        return Shard(local(p), grad, state, group, layout, may_be_dry_run, lacks_gradient=p.grad is None)

    # ------------------------------------------------------------------------------------------- exact mode

    def looking_ahead(self) -> contextlib.AbstractContextManager[None]:
        """Exact mode: inside it ``step()`` keeps the gradients as h of the NEXT step and changes nothing else.

        Enter it with the gradients of the next batch at the present point, call ``step()`` as an ordinary step would
        be (through a GradScaler, or DeepSpeed's wrapper), and zero the gradients before those of the present batch.
        Where no h was kept (the extra pass overflowed), the step of that batch is as a first one, which is logged. With
        ``skip_nonfinite`` an h that is not finite is kept as zeros. ``mars_dist.exact.ExactMode`` does all that in a
        loop. Memory: a second buffer of the size of ``prev_grad``.

        Raises:
            RuntimeError: in approximate mode.
        """
        if self.settings.is_approx:
            raise RuntimeError("looking_ahead() is for exact mode: construct MARS with is_approx=False.")
        return self._previous.look(self)

    def forget_previous(self) -> None:
        """Exact mode: the step that comes has no h, whatever was kept: its data begins anew."""
        self._previous.forget(self)

    def _keep(self, joined: list[tuple[Tensor, Shard]]) -> None:
        shards = [shard for _, shard in joined]
        finite = all_finite(shards) if shards and self.settings.skip_nonfinite else None
        for p, shard in joined:
            if p in self.state:
                self._previous.keep(p, self.state[p], shard.grad, finite)

    @torch.no_grad()
    def update_previous_grad(self) -> None:
        """Exact mode, the authors' call: keep the present ``.grad`` as h of the NEXT step, as ``looking_ahead()`` does.

        Raises:
            RuntimeError: as ``step()`` does for gradients and tensors that it cannot take.
        """
        if self.settings.is_approx:
            return
        self._find()
        joined = self._shards()
        if not joined:
            logger.warning("update_previous_grad() found no gradient: call it before zero_grad()")
        self._keep(joined)

    def update_last_grad(self) -> None:
        """Exact mode, the authors' call: what was kept is h of the step that comes (after ``step()`` none is left)."""
        for p, state in self.state.items():
            self._previous.promote(p, state)

    # ------------------------------------------------------------------------------------- numbers for people

    def rule_counts(self) -> dict[str, int]:
        """How many tensors take each rule, for example ``{"MARS-AdamW": 25, "AdamW": 26}``.

        Counted over the tensors that were really stepped so far, by their global shapes: the same on every rank.
        """
        return self._tables.rule_counts()

    def engines(self) -> set[str]:
        """Where the tensors stepped so far came from: "whole tensors", "FSDP1", "ZeRO-3", ... (see ``Layout``)."""
        return self._tables.engines()

    def tensors_with_gradient(self) -> int:
        """How many of the parameters that the groups were constructed with have a gradient now."""
        return self._tables.with_gradient()

    def most_states(self) -> int:
        """The largest number of states, without ``step``, that a tensor of a group's parameters together will have."""
        most = 0
        for group in self.param_groups:
            shapes = [tuple(getattr(p, "ds_shape", p.shape)) for p in group["params"] if p.requires_grad]
            rules = [rule_of(Segment("", shape, 0, 0, 0), group, self.settings) for shape in shapes]
            most = max(most, len(states.needed(rules, group["amsgrad"])))
        return most

    # ------------------------------------------------------------------------------------- saving and loading

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, and what is one for the optimizer under ``"mars_dist"``.

        Under FSDP1 with original parameters all tensors of a unit show the same states, as torch's helpers demand of
        them: zeros where a tensor has none.
        """
        out = super().state_dict()
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
            self.settings = Settings.from_dict(ours)
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
            if "weight_decay_1d" not in loaded and isinstance(self.defaults["weight_decay_1d"], Default):
                group["weight_decay_1d"] = loaded.get("weight_decay", was["weight_decay_1d"])
            group[GROUP_ID] = was[GROUP_ID]
            for name in ("betas", "betas_1d"):
                group[name] = tuple(group[name])  # some formats of files know lists only
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


KEYWORDS = tuple(
    name
    for name, parameter in inspect.signature(MARS.__init__).parameters.items()
    if name not in ("self", "params") and parameter.kind is not inspect.Parameter.VAR_KEYWORD
)
