"""What runs on the ranks in test_groups.py: models as engines leave them, and trainings on ``param_groups``."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests import engine_cases, nets, zero_cases
from tests.engine_builders import BUILDERS
from tests.zero_cases import Recorder, ZeroCase

# Every number differs, so that none can be taken for another.
NUMBERS: dict[str, Any] = {
    "lr": 1e-2,
    "lr_1d": 4e-3,
    "lr_embeddings": 7e-3,
    "weight_decay": 0.05,
    "weight_decay_1d": 0.02,
    "weight_decay_embeddings": 0.03,
    "no_decay": "bias",
}


def gpt2() -> nn.Module:
    """Two layers, the head tied to the embedding, matrices kept as (in, out)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def with_lora(model: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    modules = {"target_modules": ["c_attn", "wte"], "modules_to_save": ["lm_head"]}
    return get_peft_model(model, LoraConfig(r=4, fan_in_fan_out=True, **modules))  # type: ignore[arg-type]


def wrapped(how: str, net: nn.Module) -> Any:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.nn.parallel import DistributedDataParallel

    blocks = net.base_model.model.transformer.h if how.startswith("lora") else net.transformer.h  # type: ignore[union-attr]
    layers = [m for block in blocks for m in block.modules() if type(m).__name__ in ("Conv1D", "LayerNorm")]
    if how == "compile":
        return torch.compile(net)
    if how == "ddp":
        return DistributedDataParallel(net)
    if how == "compile of ddp":
        return torch.compile(DistributedDataParallel(net))
    if how == "ddp of compile":
        return DistributedDataParallel(torch.compile(net))  # type: ignore[arg-type]
    if how.startswith("fsdp1") or how == "lora, fsdp1":
        policy = ModuleWrapPolicy({type(blocks[0])})
        return FullyShardedDataParallel(
            net, use_orig_params="flat" not in how, auto_wrap_policy=policy, device_id=torch.device("cpu")
        )
    if how == "checkpointed fsdp2":
        checkpoint_wrapper.apply_activation_checkpointing(net, check_fn=lambda m: m in list(blocks))
    for layer in layers:
        fully_shard(layer)
    return fully_shard(net)


def tables(ways: list[str], variant: str) -> dict[str, tuple[str, tuple[str, int], str, str]]:
    """For each way of wrapping: the model's type, type and dimensions of a matrix in it, tables before and after."""
    import mars_dist

    out = {}
    for how in ways:
        torch.compiler.reset()
        lora = how.startswith("lora")  # its biases are frozen, and so are the fused weights
        arguments = {k: v for k, v in NUMBERS.items() if k != "no_decay"} if lora else {**NUMBERS, "split_qkv": True}
        net = with_lora(gpt2()) if lora else gpt2()
        before = str(mars_dist.param_groups(net, variant, **arguments))
        model = wrapped(how, net)
        try:
            after = str(mars_dist.param_groups(model, variant, **arguments))
        except ValueError as error:
            after = f"ValueError: {error}"
        matrix = next((p for n, p in model.named_parameters() if "c_attn" in n and "bias" not in n), torch.empty(0))
        out[how] = (type(model).__name__, (type(matrix).__name__, matrix.ndim), before, after)
    return out


def groups_of(named: Any) -> list[dict[str, Any]]:
    """The groups that ``param_groups`` made, as tests/reference.py takes them."""
    out = []
    for group in named:
        kept = {key: group[key] for key in ("lr", "weight_decay", "weight_decay_1d", "use_mars") if key in group}
        ratio = {"lr_1d": group["lr_1d"]} if "lr_1d" in group else {}
        out.append({"names": [name for name, _ in group["params"]], **kept, **ratio})
    return out


def train(engine: str, variant: str, options: dict[str, Any]) -> dict[str, Any]:
    """Ten steps of ``nets.Net`` under one of PyTorch's engines, on groups made from the wrapped model."""
    import mars_dist

    net = nets.build()
    start = {name: p.detach().double().clone() for name, p in net.named_parameters()}
    expected = groups_of(mars_dist.param_groups(net, variant, **NUMBERS))
    built = BUILDERS[engine](net, **options)
    groups = mars_dist.param_groups(built.model, variant, **NUMBERS)
    optimizer = mars_dist.MARS(groups, mars_type=variant, clip=0.1, ns_dtype="float32")
    optimizer.attach(built.wrapped)
    gradients = []
    for step in range(10):
        optimizer.zero_grad()
        engine_cases.backward(built, step)
        gradients.append(engine_cases.whole_gradients(built))
        optimizer.step()
    return {
        "start": start,
        "groups": expected,
        "same": groups_of(groups) == expected,
        "gradients": gradients,
        "end": engine_cases.whole_parameters(built),
        "rule_counts": optimizer.rule_counts(),
        "engines": optimizer.engines(),
        "facts": built.facts,
    }


def train_with_deepspeed(stage: int, zero_init: bool, variant: str, frozen: tuple[str, ...]) -> dict[str, Any]:
    """The same as a client optimizer of DeepSpeed; ``zero_init``: the model is born in pieces."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import mars_dist

    case = ZeroCase(stage, construct="instance")
    config = zero_cases.config(case)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=zero_init):
        net = nets.build()
    for name, p in net.named_parameters():
        p.requires_grad_(not name.startswith(frozen) if frozen else True)
    shapes = sorted({tuple(p.shape) for p in net.parameters()})
    with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=zero_init):
        start = {n: p.detach().double().clone() for n, p in net.named_parameters()}
    numbers = {key: value for key, value in NUMBERS.items() if key != "no_decay" or not frozen}
    groups = mars_dist.param_groups(net, variant, **numbers)
    expected, table = groups_of(groups), str(groups)
    optimizer = mars_dist.MARS(groups, mars_type=variant, clip=0.1, ns_dtype="float32")
    engine, wrapper, *_ = deepspeed.initialize(model=net, config=config, optimizer=optimizer)
    recorder = Recorder(optimizer, net)
    for step in range(case.steps):
        tokens, targets = nets.batch(step)
        mine = torch.arange(len(tokens)).view(dist.get_world_size(), -1)[dist.get_rank()]
        engine.backward(engine(tokens[mine], targets[mine]))
        engine.step()
        recorder.end_of_update()
    result = {
        "start": start,
        "groups": expected,
        "table": table,
        "shapes": shapes,
        "gradients": recorder.gathered(),
        "end": zero_cases.parameters(net, engine, case),
        "rule_counts": optimizer.rule_counts(),
        "engines": optimizer.engines(),
        "wrapper": type(wrapper).__name__,
        "inner": wrapper.optimizer is optimizer,
    }
    engine.destroy()
    return result
