"""``MARS``, a torch optimizer: the same on one process, under DDP, FSDP, tensor parallelism and DeepSpeed ZeRO."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from mars_dist import states
from mars_dist.config import (
    GROUP_DEFAULTS,
    LR_1D,
    SETTINGS_KEY,
    WEIGHT_DECAY_1D,
    Settings,
    check_keywords,
    resolve_defaults,
    resolve_group,
)
from mars_dist.one_state import check_form, choose_form
from mars_dist.pieces import Shard
from mars_dist.previous import Previous
from mars_dist.saving import SavedOptimizer
from mars_dist.sharding.dtensor import is_dtensor, local, local_gradient
from mars_dist.sharding.layout import COPIES
from mars_dist.step import all_finite, check_gradient, learning_rate, rule_of, take_step
from mars_dist.tables import GROUP_ID, Tables, check_last_group, shapes_and_rules

logger = logging.getLogger("mars_dist")


class MARS(SavedOptimizer):
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
        ns_steps, ns_dtype: iterations of all but "svd" and their precision ("bfloat16", "float32", "float64"; None:
            bfloat16 on accelerators, at least float32 on CPUs).
        orthogonalizer: "newton-schulz" (the authors'), "polar-express", "cans" (maths/orthogonalize.py), "svd" (exact).
        matrix_ndim: the number of dimensions that makes a tensor a matrix, or a tuple of numbers. Matrix variants
            take rank 3 as a batch of matrices and flatten higher ranks to (d0, -1); c is clipped per tensor.
        skip_nonfinite: leave parameters, states and counters alone in a step whose gradients are not all finite. The
            decision stays on the device. It is one for each call of ``step()``: ZeRO makes a call for each parameter
            group (stage 3: sub-group), and skips non-finite steps as a whole by itself. False lets NaN through, as
            torch.optim does (mars-lion: into the momentum; sign(NaN) is 0, so that the tensor stays where it is).
        use_mars: True or False decides for all tensors (of a group); None goes by shape.
        maximize: ascend instead of descend.
        matrix_buffer_mb: matrix variants: the MiB of whole matrices, and of pieces to send, that a rank holds at once
            (at least one matrix). A smaller number takes more rounds of messages.
        one_state: without ``clip`` (and with a constant gamma, approximate h, ``first_step="reference"``) mars-lion
            and the matrix variants need no previous gradient: ``exp_avg`` then holds the momentum less gamma * g.
            None does that where it is the same; False keeps the previous gradient.
        fan_in_fan_out, matrix_parts: how matrices are held, for the matrix variants only (the others ignore it): as
            (in, out), as by transformers' Conv1D, so that the scale takes the transposed shape; and how many matrices
            of equal size lie side by side along the outputs (fused query, key and value: 3), each a matrix of its own.

    State per tensor: ``step`` (0-dim), ``exp_avg``, and what its rule needs of ``exp_avg_sq``, ``max_exp_avg_sq`` and
    ``prev_grad`` (h, in the gradient's dtype, never sharing memory with a gradient; -0.0 where there is none).
    Created at the first step.

    Raises:
        ValueError, TypeError: for a value out of range or an unknown keyword, naming it and the nearest known one;
            for ``matrix_parts`` that do not divide a matrix (RuntimeError where only the first step knows its shape).
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
        matrix_buffer_mb: float = 256.0,
        one_state: bool | None = None,
        fan_in_fan_out: bool = False,
        matrix_parts: int = 1,
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
            matrix_buffer_mb=matrix_buffer_mb,
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
            "one_state": one_state,
            "fan_in_fan_out": fan_in_fan_out,
            "matrix_parts": matrix_parts,
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
        group |= {GROUP_ID: len(self._tables.originals), SETTINGS_KEY: self.settings.to_text()}
        choose_form(group, self.settings)
        super().add_param_group(group)
        check_last_group(self.param_groups, self.settings)
        self._tables.remember(group)

    def attach(self, model: nn.Module, process_group: ProcessGroup | None = None) -> None:
        """Tell MARS what it cannot see by itself: how FSDP1 and DDP spread ``model`` over the ranks.

        FSDP1 (``FullyShardedDataParallel``) cannot be asked where the pieces are without the model. Under DDP
        (``DistributedDataParallel``) everything works without the call, but every rank orthogonalises every matrix;
        with it each does its share, and hands the results to the others. Call it once after wrapping, before the
        first step, on every rank; Accelerate, the Trainer and DeepSpeed do it by themselves once mars_dist is
        imported. It does nothing for any other engine, and may be called again, also for a second model.

        Args:
            model: the wrapped model.
            process_group: ranks that hold the same parameters and get the same gradients, where something else than
                DDP sees to that.

        Raises:
            RuntimeError: when FSDP1 trains other parameters than those MARS was built with, does not look as in the
                tested releases of torch, or wraps tensor parallelism.
        """
        self._tables.attach(model, self.param_groups, process_group)

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
                does not agree with the weights, or ranks that do not agree with each other (on every rank);
                ``matrix_parts`` that do not divide a matrix; exact mode without a new previous gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_form(group, self.settings, began=any(p in self.state for p in group["params"]))
        is_first_look = self._find()
        joined = self._shards()
        shards = [shard for _, shard in joined]
        if self._previous.looking:
            self._keep(joined)
            return loss
        if shards:
            if not self.settings.is_approx:
                self._previous.before_step([(p, s.state) for p, s in joined], self.settings.first_step)
            take_step(shards, self.settings, self._tables.plans)
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
        states.ensure(state, p, grad, rules, group["amsgrad"], group["one_state"])
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
            raise RuntimeError(f"looking_ahead() is for exact mode: {self.how_to_be_exact()}")
        return self._previous.look(self)

    def forget_previous(self) -> None:
        """Exact mode: the step that comes has no h, whatever was kept: its data begins anew."""
        self._previous.forget(self)

    def next_batch(self) -> None:
        """Exact mode: a batch begins, in which every tensor takes one step. ExactMode says so; a second is an error."""
        self._previous.next_batch()

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
            rules = [rule for p, _, rule in shapes_and_rules(group, self.settings) if p.requires_grad]
            most = max(most, len(states.needed(rules, group["amsgrad"], group["one_state"])))
        return most


KEYWORDS = tuple(
    name
    for name, parameter in inspect.signature(MARS.__init__).parameters.items()
    if name not in ("self", "params") and parameter.kind is not inspect.Parameter.VAR_KEYWORD
)
