"""The parameters of a model: whole shapes, names without wrappers, and what their layers say of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mars_dist.sharding import fsdp1

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
class Found:
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


def find(model: nn.Module) -> list[Found]:
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
    found: dict[int, Found] = {}
    for path, module, last, p in _walk(model):
        shape = shapes.get(id(p)) or tuple(getattr(p, "ds_shape", p.shape))
        t = found.setdefault(id(p), Found(p, shape))
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
