"""``param_groups``: which tensors of a model take which part of MARS, by name, type and shape, as parameter groups."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from mars_dist.config import Settings
from mars_dist.maths.rules import RULES, rule_for
from mars_dist.sharding import fsdp1

logger = logging.getLogger("mars_dist")

Patterns = str | Sequence[str]

MATRICES, EMBEDDINGS, OTHERS = "matrices", "embeddings and head", "others"
ROLES = {"matrices": MATRICES, "embeddings": EMBEDDINGS, "others": OTHERS}  # by the argument that claims them

# Parts of a path that wrappers put in: torch.compile, FSDP1, activation checkpointing.
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Parts of a path below a layer that PEFT has wrapped.
ADAPTERS = {"base_layer", "original_module", "modules_to_save", "lora_magnitude_vector"}
ADAPTERS |= {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"}

EMBEDDING_NAME = re.compile(r"wte|wpe|embed_tokens|(tok|token|word|pos|position|positional)_?embed(ding)?s?")
HEAD_NAME = re.compile(r"lm_head|head|embed_out|unembed|output_projection")
HEAD_NAME_IF_VOCABULARY = re.compile(r"output|output_layer|proj_out|decoder|(to_)?logits")
BIAS_NAME = re.compile(r"(^|_)bias(_|$)")
NORM_NAME = re.compile(r"norm|^ln(_|\d|$)", re.IGNORECASE)
QKV_NAME = re.compile(r"c_attn|qkv|qkv_proj|Wqkv|in_proj_weight")


@dataclass
class _Tensor:
    """One parameter: its names (several where it is tied), its whole shape, and what was found out about it."""

    param: Tensor
    shape: tuple[int, ...]
    names: list[str] = field(default_factory=list)
    is_embedding: bool = False
    is_norm_or_bias: bool = False
    is_qkv: bool = False
    fan_in_fan_out: bool = False
    parts: int = 1
    claimed: dict[str, str] = field(default_factory=dict)  # argument -> the pattern of it that matches


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups as ``param_groups`` made them: a list of dicts; ``print(groups)`` shows them as a table."""

    def __init__(self, groups: Sequence[dict[str, Any]], variant: str, matrix_ndim: tuple[int, ...]) -> None:
        super().__init__(groups)
        self.variant, self.matrix_ndim = variant, matrix_ndim
        self.shapes: dict[str, tuple[int, ...]] = {}  # whole ones, by name
        self.also: dict[str, list[str]] = {}  # other names of a tied tensor
        self.frozen: list[int] = []  # elements of each tensor that was left out

    def __str__(self) -> str:
        return _table(self)


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
    settings = Settings(mars_type=variant, matrix_ndim=matrix_ndim)  # type: ignore[arg-type]
    tensors = _find(model)
    trainable = [t for t in tensors if t.param.requires_grad]
    if not trainable:
        raise ValueError("param_groups: the model has no trainable parameter (requires_grad is False for all of them)")

    for argument, patterns in {"matrices": matrices, "embeddings": embeddings, "others": others}.items():
        for pattern in _listed(patterns):
            for t in _matching(argument, pattern, tensors):
                _claim(t, argument, pattern)
    roles = {id(t): _role(t, settings.matrix_ndim) for t in trainable}
    if no_decay is None:
        undecayed = {id(t) for t in trainable if t.is_norm_or_bias}
    else:
        undecayed = {id(t) for pattern in _listed(no_decay) for t in _matching("no_decay", pattern, tensors)}
    their_matrices = [t for t in trainable if roles[id(t)] == MATRICES]
    for pattern in _listed(fan_in_fan_out):
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


# --------------------------------------------------------------------------------------------- what a model consists of


def _find(model: nn.Module) -> list[_Tensor]:
    """Every parameter of ``model`` once, in its order."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"param_groups takes a model (torch.nn.Module), got {type(model).__name__}")
    if any(fsdp1.is_flat(p) for p in model.parameters()):
        raise ValueError(
            "param_groups: FSDP1 (FullyShardedDataParallel) has melted parameters of all groups into flat ones: wrap "
            "with use_orig_params=True, or use fully_shard (FSDP2)."
        )
    shapes = {id(p): layout.segments[0].shape for p, layout in fsdp1.layouts(model)}
    embedding_modules, head_modules = _embeddings(model), _heads(model)
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    found: dict[int, _Tensor] = {}
    for path, module, last, p in _walk(model):
        shape = shapes.get(id(p)) or tuple(getattr(p, "ds_shape", p.shape))
        t = found.setdefault(id(p), _Tensor(p, shape))
        t.names.append(".".join([*path, last]))
        layer = _layer(path)
        t.is_norm_or_bias |= bool(BIAS_NAME.search(last)) or _is_norm(module)
        t.is_norm_or_bias |= len(shape) < 2 and bool(NORM_NAME.search(layer))
        t.is_embedding |= id(module) in embedding_modules or id(module) in head_modules
        name = layer if last == "weight" or _is_adapter(path) else last
        t.is_embedding |= bool(EMBEDDING_NAME.fullmatch(name) or HEAD_NAME.fullmatch(name))
        t.fan_in_fan_out |= last == "weight" and _is_conv1d(module)
        if HEAD_NAME_IF_VOCABULARY.fullmatch(name):
            t.is_embedding |= len(shape) == 2 and shape[1 if t.fan_in_fan_out else 0] in vocabularies
        fused = QKV_NAME.fullmatch(layer if last == "weight" else last)
        t.is_qkv |= bool(fused) and not any(part.startswith("lora_") for part in path)
    return list(found.values())


def _walk(model: nn.Module) -> Iterator[tuple[list[str], nn.Module, str, Tensor]]:
    """The path of a module without the wrappers' parts, the module, the name of a parameter in it, the parameter."""
    root = model
    while [name for name, _ in root.named_children()] in (["module"], ["_orig_mod"], ["_fsdp_wrapped_module"]):
        root = next(root.children())  # DDP and the like
    for prefix, module in root.named_modules(remove_duplicate=False):
        path = [part for part in prefix.split(".") if part and part not in WRAPPERS]
        for last, p in module.named_parameters(recurse=False, remove_duplicate=False):
            yield path, module, last, p


def _is_adapter(path: Sequence[str]) -> bool:
    return any(part in ADAPTERS for part in path)


def _layer(path: Sequence[str]) -> str:
    """The name of the layer that a parameter belongs to; PEFT's adapters belong to the layer that they adapt."""
    cut = next((i for i, part in enumerate(path) if part in ADAPTERS), len(path))
    return path[cut - 1] if cut else ""


def _type_names(module: nn.Module) -> list[str]:
    """Of the class and those it is made from: ``fully_shard`` gives a layer a class of its own."""
    return [f"{c.__module__}.{c.__name__}" for c in type(module).__mro__]


def _is_norm(module: nn.Module) -> bool:
    return any("norm" in name.rpartition(".")[2].lower() for name in _type_names(module))


def _is_conv1d(module: nn.Module) -> bool:
    return "transformers.pytorch_utils.Conv1D" in _type_names(module)


def _embeddings(model: nn.Module) -> set[int]:
    """The modules that hold embeddings: by type, also those that PEFT wraps, with the adapters."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = {id(m) for m in model.modules() if isinstance(m, kinds)}
    for m in model.modules():
        if isinstance(getattr(m, "base_layer", None), kinds):
            found |= {id(inner) for inner in m.modules()}
    return found


def _heads(model: nn.Module) -> set[int]:
    """The modules that a transformers model calls its output embeddings, with what is in them."""
    found: set[int] = set()
    for m in model.modules():
        if hasattr(type(m), "get_output_embeddings"):
            asked: Any = m
            try:
                head = asked.get_output_embeddings()
            except NotImplementedError:  # a model without one
                continue
            if isinstance(head, nn.Module):
                found |= {id(inner) for inner in head.modules()}
    return found


# ------------------------------------------------------------------------------------------------------------- claims


def _listed(patterns: Patterns) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _matching(
    argument: str, pattern: str, tensors: Sequence[_Tensor], allowed: Sequence[_Tensor] | None = None
) -> list[_Tensor]:
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


def _claim(t: _Tensor, argument: str, pattern: str) -> None:
    for other, its_pattern in t.claimed.items():
        if other != argument:
            raise ValueError(
                f"param_groups: {t.names[0]!r} is claimed twice: by {its_pattern!r} of {other} and by {pattern!r} of "
                f"{argument}. Make one of the patterns narrower."
            )
    t.claimed[argument] = pattern


def _role(t: _Tensor, matrix_ndim: tuple[int, ...]) -> str:
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
    tensors: Sequence[_Tensor], matrices: Sequence[_Tensor], split_qkv: bool, matrix_parts: Mapping[str, int]
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


def _outputs_and_inputs(t: _Tensor) -> tuple[int, int]:
    rows, cols = (t.shape[0], math.prod(t.shape[1:])) if len(t.shape) > 3 else t.shape[-2:]
    return (cols, rows) if t.fan_in_fan_out else (rows, cols)


# ------------------------------------------------------------------------------------------------------------ the table


def _table(groups: ParamGroups) -> str:
    ndim = groups.matrix_ndim
    call = f"MARS(groups, mars_type={groups.variant!r}" + (f", matrix_ndim={ndim})" if ndim != (2,) else ")")
    rows = [("group", "rule", "tensors", "elements", "lr", "decay", "names")]
    larger = []
    for group in groups:
        names = [name for name, _ in group["params"]]
        rule = rule_for(groups.shapes[names[0]], groups.variant, ndim, group.get("use_mars"), optimize_1d=False)
        lr = group["lr"] if rule.corrected else group.get("lr_1d", group["lr"] * group.get("lr_1d_ratio", 1.0))
        form = " (in, out)" if group.get("fan_in_fan_out") else ""
        form += f" of {group['matrix_parts']} parts" if "matrix_parts" in group else ""
        elements = sum(math.prod(groups.shapes[name]) for name in names)
        decay = group["weight_decay" if rule.corrected else "weight_decay_1d"]
        shown = (f"{len(names)}", f"{elements:,}", f"{lr:g}", f"{decay:g}")
        rows.append((group["role"] + form, rule.label, *shown, _abbreviated(names, groups.also)))
        if group["role"].startswith(OTHERS):
            larger += [n for n in names if len(groups.shapes[n]) > 2 and not BIAS_NAME.search(n.rpartition(".")[2])]
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = [f"parameter groups for {call}"]
    for row in rows:
        cells = [row[i].ljust(widths[i]) if i < 2 else row[i].rjust(widths[i]) for i in range(6)]
        lines.append("  ".join([*cells, row[6]]))
    if groups.frozen:
        lines.append(f"left out, frozen: {len(groups.frozen)} tensors of {sum(groups.frozen):,} elements")
    if larger:
        ranks = tuple(sorted({*ndim, *(len(groups.shapes[name]) for name in larger)}))
        lines.append(
            f"under AdamW with 3 and more dimensions (experts, convolutions): {_abbreviated(larger, {})}; "
            f"matrix_ndim={ranks} here and in MARS makes matrices of them"
        )
    return "\n".join(lines)


def _abbreviated(names: Sequence[str], also: Mapping[str, Sequence[str]], most: int = 3) -> str:
    """Numbers become *, and of the different names that are left the first few are shown."""
    alike: dict[str, None] = {}
    for name in names:
        alike[" = ".join(re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", n) for n in (name, *also.get(name, ())))] = None
    rest = len(alike) - most
    return ", ".join(list(alike)[:most]) + (f", and {rest} more" if rest > 0 else "")
