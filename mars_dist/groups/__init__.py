"""``param_groups``: which tensors of a model take which part of MARS, by name, type and shape, as parameter groups."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from mars_dist.config import Settings
from mars_dist.groups.listing import EMBEDDINGS, MATRICES, OTHERS, ROLES, ParamGroups
from mars_dist.groups.tensors import Found, find
from mars_dist.maths.rules import RULES, rule_for

logger = logging.getLogger("mars_dist")

Patterns = str | Sequence[str]


def param_groups(
    model: nn.Module,
    variant: str = "mars-adamw",
    *,
    lr: float = 3e-3,
    lr_1d: float | None = None,
    lr_embeddings: float | None = None,
    weight_decay: float = 0.0,
    weight_decay_1d: float | None = None,
    weight_decay_embeddings: float | None = None,
    matrix_ndim: int | tuple[int, ...] = 2,
    matrices: Patterns = (),
    embeddings: Patterns = (),
    others: Patterns = (),
    no_decay: Patterns | None = None,
    fan_in_fan_out: Patterns = (),
    split_qkv: bool = False,
    matrix_parts: Mapping[str, int] | None = None,
    verbose: bool = False,
) -> ParamGroups:
    """The trainable parameters of ``model`` as groups for ``MARS(groups, mars_type=variant)``; each is in exactly one.

    .. code-block:: python

        groups = mars_dist.param_groups(model, "mars-m", lr=2e-3, weight_decay=0.01, verbose=True)
        optimizer = mars_dist.MARS(groups, mars_type="mars-m")

    What is claimed as what, first that applies:

    - by a pattern of ``matrices``, ``embeddings`` or ``others``;
    - others: norms (by the type of their layer; vectors also by its name, as ``ln_1``) and biases (by name);
    - embeddings and head, with at least two dimensions: what lies in an ``nn.Embedding``, is tied to one, lies in what
      ``get_output_embeddings()`` of a transformers model returns, or has the name of one (``wte``, ``pos_embed``,
      ``lm_head``, ``head``, ...; ``output`` and ``decoder`` if they have as many outputs as an embedding has rows);
    - matrices: the rest, if its number of dimensions is in ``matrix_ndim``; else others.

    ======================  ================================  ==================================
    group                   mars-adamw, mars-lion             mars-shampoo, mars-m
    ======================  ================================  ==================================
    matrices                the variant's rule, ``lr``        the variant's rule, ``lr``
    embeddings and head     as matrices, ``lr_embeddings``    plain AdamW, ``lr_embeddings``
    others                  plain AdamW, ``lr_1d``            plain AdamW, ``lr_1d``
    ======================  ================================  ==================================

    Each is split where some of it is not decayed, or is kept in another form. The shape that counts is the whole one,
    also after ``fully_shard``, FSDP1 with ``use_orig_params=True`` and under ``deepspeed.zero.Init``. Tied parameters
    count once; frozen ones are left out (DeepSpeed's ZeRO-1/2 fails on a group with nothing to train). Names are those
    of the model without what DDP, FSDP1, torch.compile and activation checkpointing put in front.

    Args:
        model: wrapped or not; with FSDP1 and ``fully_shard``: after wrapping.
        variant: what ``MARS(mars_type=...)`` will be.
        lr: of matrices.
        lr_1d: of the others. Not given: ``lr``. Give it for mars-shampoo, whose rates are no measure for AdamW's.
        lr_embeddings: of embeddings and head. Not given: ``lr``, or ``lr_1d`` where they take plain AdamW.
        weight_decay, weight_decay_1d, weight_decay_embeddings: the latter two are ``weight_decay`` if not given.
        matrix_ndim: as in MARS, which must be given the same; (2, 3) makes matrices of 3-D expert weights.
        matrices, embeddings, others: regular expressions, one or a list, searched in the names.
        no_decay: which of all are not decayed; None: norms and biases; an empty list: none.
        fan_in_fan_out: which matrices are kept as (in, out), besides those of transformers' ``Conv1D``.
        split_qkv: treat the fused query, key and value weights (layers named ``c_attn``, ``qkv``, ``qkv_proj`` or
            ``Wqkv``, weights named ``in_proj_weight``) as three matrices, which lie one after the other in the output
            dimension. Off by default: the published runs orthogonalised them as one.
        matrix_parts: the same by pattern and number, as ``{"gate_up_proj": 2}``.
        verbose: print the table of the groups (on rank 0). ``print(groups)`` does at any time.

    Returns: a list of dicts, to construct MARS with, for a loop, the Trainer's ``optimizers=`` or DeepSpeed's
        ``optimizer=``. Parameters are (name, parameter) pairs; ``role`` says what they are. The forms of matrices
        (``fan_in_fan_out``, parts) are set for matrix variants only: to the others they make no difference.

    Raises:
        ValueError: a pattern that matches no trainable parameter, or claims one that a pattern of another argument
            claims; a claim that the shape does not allow; fused weights that cannot be cut; nothing to train; FSDP1
            with ``use_orig_params=False``, which melts tensors of all groups together.
    """
    if matrix_parts is not None and not isinstance(matrix_parts, Mapping):
        raise TypeError(f"param_groups: matrix_parts must be a dict of pattern and number, got {matrix_parts!r}")
    settings = Settings(mars_type=variant, matrix_ndim=matrix_ndim)  # type: ignore[arg-type]
    tensors = find(model)
    trainable = [t for t in tensors if t.param.requires_grad]
    if not trainable:
        raise ValueError("param_groups: the model has no trainable parameter (requires_grad is False for all of them)")

    for argument, patterns in {"matrices": matrices, "embeddings": embeddings, "others": others}.items():
        for pattern in _listed(argument, patterns):
            for t in _matching(argument, pattern, tensors):
                _claim(t, argument, pattern)
    roles = {id(t): _role(t, settings.matrix_ndim) for t in trainable}
    if no_decay is None:
        undecayed = {id(t) for t in trainable if t.is_norm_or_bias}
    else:
        undecayed = {
            id(t) for pattern in _listed("no_decay", no_decay) for t in _matching("no_decay", pattern, tensors)
        }
    their_matrices = [t for t in trainable if roles[id(t)] == MATRICES]
    for pattern in _listed("fan_in_fan_out", fan_in_fan_out):
        for t in _matching("fan_in_fan_out", pattern, tensors, their_matrices):
            t.fan_in_fan_out = True
    _set_parts(tensors, their_matrices, split_qkv, matrix_parts or {})

    whole_matrix = RULES[variant].whole_matrix
    if variant == "mars-shampoo" and lr_1d is None and lr > 3e-3:
        logger.warning(
            "param_groups: lr_1d was not given: under mars-shampoo plain AdamW trains embeddings, norms and biases "
            "with lr = %g. Give lr_1d (the default of MARS is 3e-3).",
            lr,
        )
    rates = {MATRICES: lr_1d, EMBEDDINGS: lr_1d if lr_embeddings is None else lr_embeddings, OTHERS: lr_1d}
    decays = {MATRICES: weight_decay, EMBEDDINGS: weight_decay_embeddings, OTHERS: weight_decay_1d}
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for t in trainable:
        role = roles[id(t)]
        use_mars = None
        if role != MATRICES and len(t.shape) in settings.matrix_ndim and (whole_matrix or role == OTHERS):
            use_mars = False
        rule = rule_for(t.shape, variant, settings.matrix_ndim, use_mars, optimize_1d=False)
        formed = whole_matrix and role == MATRICES
        form = (t.fan_in_fan_out, t.parts) if formed else (False, 1)
        key = (list(ROLES.values()).index(role), id(t) in undecayed, use_mars is None, rule.label, form)
        if key not in groups:
            decay = weight_decay if decays[role] is None else decays[role]
            label, decay = (f"{role}, no decay", 0.0) if id(t) in undecayed else (role, decay)
            group = {"params": [], "role": label, "lr": lr, "weight_decay": decay, "weight_decay_1d": decay}
            if use_mars is not None:
                group["use_mars"] = use_mars
            if not rule.corrected:  # a ratio of 1 holds for lr = 0 as well
                group |= {"lr_1d_ratio": 1.0} if rates[role] is None else {"lr_1d": rates[role]}
            elif role == EMBEDDINGS and lr_embeddings is not None:
                group["lr"] = lr_embeddings
            if form[0]:
                group["fan_in_fan_out"] = True
            if form[1] > 1:
                group["matrix_parts"] = form[1]
            groups[key] = group
        groups[key]["params"].append((t.names[0], t.param))

    made = ParamGroups([groups[key] for key in sorted(groups)], variant, settings.matrix_ndim)
    made.shapes = {t.names[0]: t.shape for t in trainable}
    made.also = {t.names[0]: t.names[1:] for t in trainable if len(t.names) > 1}
    made.frozen = [math.prod(t.shape) for t in tensors if not t.param.requires_grad]
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if verbose and rank == 0:
        print(made, flush=True)
    return made


def _listed(argument: str, patterns: Patterns) -> list[str]:
    if not isinstance(patterns, (str, list, tuple)):
        raise TypeError(f"param_groups: {argument} must be a regular expression or a list of them, got {patterns!r}")
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _matching(
    argument: str, pattern: str, tensors: Sequence[Found], allowed: Sequence[Found] | None = None
) -> list[Found]:
    """The trainable tensors (of ``allowed``) that have a name in which ``pattern`` is found; at least one."""
    try:
        expression = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"param_groups: {argument}: {pattern!r} is no regular expression ({error})") from None
    matched = [t for t in tensors if any(expression.search(name) for name in t.names)]
    trainable = [t for t in matched if t.param.requires_grad]
    out = trainable if allowed is None else [t for t in trainable if any(t is a for a in allowed)]
    if not out:
        if not matched:
            near = ", ".join(repr(t.names[0]) for t in tensors[:3])
            what = f"no parameter (of {len(tensors)}: {near}, ...)"
        elif not trainable:
            what = f"only frozen parameters, which are left out ({matched[0].names[0]!r})"
        else:
            what = f"no matrix (but {trainable[0].names[0]!r} of shape {trainable[0].shape})"
        raise ValueError(f"param_groups: {argument}: the pattern {pattern!r} matches {what}")
    return out


def _claim(t: Found, argument: str, pattern: str) -> None:
    for other, its_pattern in t.claimed.items():
        if other != argument:
            raise ValueError(
                f"param_groups: {t.names[0]!r} is claimed twice: by {its_pattern!r} of {other} and by {pattern!r} of "
                f"{argument}. Make one of the patterns narrower."
            )
    t.claimed[argument] = pattern


def _role(t: Found, matrix_ndim: tuple[int, ...]) -> str:
    for argument, pattern in t.claimed.items():
        if argument == "matrices" and len(t.shape) not in matrix_ndim:
            allowed = ", ".join(map(str, matrix_ndim))
            raise ValueError(
                f"param_groups: matrices: the pattern {pattern!r} matches {t.names[0]!r} of shape {t.shape}, but a "
                f"matrix has {allowed} dimensions. Make it narrower, or give matrix_ndim here and to MARS."
            )
        return ROLES[argument]
    if t.is_norm_or_bias:
        return OTHERS
    if t.is_embedding and len(t.shape) >= 2:
        return EMBEDDINGS
    return MATRICES if len(t.shape) in matrix_ndim else OTHERS


def _set_parts(
    tensors: Sequence[Found], matrices: Sequence[Found], split_qkv: bool, matrix_parts: Mapping[str, int]
) -> None:
    given: dict[int, str] = {}
    for pattern, parts in matrix_parts.items():
        if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
            raise ValueError(
                f"param_groups: matrix_parts[{pattern!r}] must be a whole number of at least 1, got {parts!r}"
            )
        for t in _matching("matrix_parts", pattern, tensors, matrices):
            if given.setdefault(id(t), pattern) != pattern and t.parts != parts:
                raise ValueError(
                    f"param_groups: matrix_parts: {t.names[0]!r} is claimed twice: by {given[id(t)]!r} ({t.parts} "
                    f"parts) and by {pattern!r} ({parts} parts). Make one of the patterns narrower."
                )
            t.parts = parts
            outputs, _ = _outputs_and_inputs(t)
            if outputs % parts:
                raise ValueError(
                    f"param_groups: {t.names[0]!r} has {outputs} outputs, which {parts} parts do not divide"
                )
    if not split_qkv:
        return
    fused = [t for t in matrices if t.is_qkv and id(t) not in given]
    if not fused and not any(t.is_qkv for t in matrices):
        raise ValueError(
            "param_groups: split_qkv=True found no fused weights to train (c_attn, qkv, qkv_proj, Wqkv, "
            "in_proj_weight). Name them: matrix_parts={'my_attention.weight': 3}."
        )
    for t in fused:
        outputs, inputs = _outputs_and_inputs(t)
        if outputs != 3 * inputs:
            raise ValueError(
                f"param_groups: split_qkv=True: {t.names[0]!r} has {outputs} outputs for {inputs} inputs, no three "
                f"equal matrices. Say what it is by matrix_parts={{{t.names[0]!r}: 1}} (1: leave it whole)."
            )
        t.parts = 3


def _outputs_and_inputs(t: Found) -> tuple[int, int]:
    rows, cols = (t.shape[0], math.prod(t.shape[1:])) if len(t.shape) > 3 else t.shape[-2:]
    return (cols, rows) if t.fan_in_fan_out else (rows, cols)
