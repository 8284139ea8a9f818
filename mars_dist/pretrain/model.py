"""GPT-2 from transformers as the published runs had it, and which of its tensors take which part of the optimizer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mars_dist.optimizer import MARS
from mars_dist.pretrain.tokenizer import END_OF_TEXT_ID

if TYPE_CHECKING:
    from mars_dist.pretrain.recipe import AdamWOptimizer, MarsOptimizer, Model

MATRIX_VARIANTS = ("mars-shampoo", "mars-m")
EMBEDDINGS = ("transformer.wte.weight", "transformer.wpe.weight")  # wte is the head as well

# Dense bf16 FLOP/s of one GPU, from the vendors' data sheets (without sparsity).
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12}


def build(section: Model) -> nn.Module:
    """transformers' ``GPT2LMHeadModel`` with random weights (N(0, 0.02), residual projections by 1/sqrt(2 layers)).

    Without biases every bias is zero and frozen, which is the same model. Dropout is 0, attention is SDPA scaled by
    the inverse of the layer's number, the head is tied to the embedding.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=section.vocabulary,
        n_positions=section.sequence_length,
        n_layer=section.layers,
        n_head=section.heads,
        n_embd=section.width,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        scale_attn_by_inverse_layer_idx=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default, said explicitly: transformers warns when it has to guess
    if not section.bias:
        for name, p in model.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(p).requires_grad_(False)
    if section.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)  # older releases: gradient_...
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    if section.compile:
        model.compile()
    return model


def loss(model: Any, sequences: Tensor) -> Tensor:
    """Mean cross entropy in nats of every token given those before it.

    Args:
        sequences: (batch, length + 1) token ids; the first ``length`` of each are read, the last ``length`` predicted.
    """
    logits = model(input_ids=sequences[:, :-1]).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), sequences[:, 1:].flatten())


def parameter_groups(model: nn.Module, section: AdamWOptimizer | MarsOptimizer) -> list[dict[str, Any]]:
    """Matrices; embeddings, which are decayed by ``weight_decay_embeddings`` and are no matrices to matrix variants;
    all others. Every trainable parameter is in exactly one group; the learning rate of the first is the recipe's.

    MARS-Shampoo and Muon scale an update by sqrt(max(1, rows / columns)), rows being the outputs, as in the published
    runs' ``nn.Linear``. transformers' GPT-2 keeps the transpose, (inputs, outputs), so there the factor between the
    two scales, sqrt(outputs / inputs), goes into the learning rate, and weight decay is divided by it: a group for
    each factor. The orthogonal factor itself does not depend on it.
    """
    mars_type = getattr(section, "mars_type", None)
    matrices: dict[float, list[tuple[str, nn.Parameter]]] = {1.0: []}
    embeddings: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, p in model.named_parameters():
        if p.requires_grad and name in EMBEDDINGS:
            embeddings.append((name, p))
        elif p.requires_grad and p.ndim == 2:
            scaled = mars_type == "mars-shampoo"
            matrices.setdefault(math.sqrt(p.shape[1] / p.shape[0]) if scaled else 1.0, []).append((name, p))
        elif p.requires_grad:
            others.append((name, p))
    groups: list[dict[str, Any]] = [
        {"params": members, "lr": section.lr * factor, "weight_decay": section.weight_decay / factor}
        for factor, members in matrices.items()
    ]
    groups.append({"params": embeddings, "weight_decay": section.weight_decay_embeddings})
    if mars_type in MATRIX_VARIANTS:
        groups[-1] |= {"use_mars": False, "weight_decay_1d": section.weight_decay_embeddings}
    groups.append({"params": others, "weight_decay": section.weight_decay_1d})
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, section: AdamWOptimizer | MarsOptimizer) -> torch.optim.Optimizer:
    """The optimizer that the recipe names, on the groups of ``parameter_groups``."""
    groups = parameter_groups(model, section)
    if section.name == "adamw":
        return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)
    keywords = section.model_dump(exclude={"name", "weight_decay_embeddings", "exact"})
    return MARS(groups, mars_type=section.mars_type, is_approx=not section.exact, **keywords)


def count(model: nn.Module) -> int:
    """Trainable parameters; frozen biases are none. ZeRO-3 keeps the whole size of what it has cut up."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)


def flops_per_token(model: nn.Module, section: Model) -> float:
    """Forward and backward: 6 per parameter, and 12 layers width length for attention (Chowdhery et al. 2022, app. B).

    The position table is looked up, not multiplied.
    """
    multiplied = count(model) - section.sequence_length * section.width
    return 6.0 * multiplied + 12.0 * section.layers * section.width * section.sequence_length


def peak_flops(device: torch.device) -> float | None:
    """Of this process's GPU, or None where it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for known, flops in PEAK_FLOPS.items() if known in name), None)
