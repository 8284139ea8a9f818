"""GPT-2 from transformers as the published runs had it, and the optimizer of a recipe on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mars_dist.groups import param_groups
from mars_dist.optimizer import MARS
from mars_dist.pretrain.tokenizer import END_OF_TEXT_ID

if TYPE_CHECKING:
    from mars_dist.pretrain.recipe import AdamWOptimizer, MarsOptimizer, Model

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


def build_optimizer(model: nn.Module, section: AdamWOptimizer | MarsOptimizer) -> torch.optim.Optimizer:
    """The optimizer that the recipe names. The first group holds matrices: its learning rate is the recipe's."""
    rates: dict[str, Any] = {
        "lr": section.lr,
        "weight_decay": section.weight_decay,
        "weight_decay_1d": section.weight_decay_1d,
        "weight_decay_embeddings": section.weight_decay_embeddings,
    }
    # no_decay=(): the published runs decay norms and biases as well.
    if section.name == "adamw":
        groups = param_groups(model, no_decay=(), **rates)
        plain = [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in groups]
        return torch.optim.AdamW(plain, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)
    groups = param_groups(model, section.mars_type, lr_1d=section.lr_1d, no_decay=(), **rates)
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
