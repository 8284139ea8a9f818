"""What runs in the Trainer tests: one short recorded training of a tiny GPT-2 under each engine of the Trainer."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import cpu_fsdp, orthogonalised
from tests.ddp_cases import messages
from tests.zero_cases import Recorder

SEQUENCE, VOCABULARY, BATCH = 8, 64, 12
LR, DECAY = 1e-2, 0.1
STEPS, SAVED = 10, 5  # a checkpoint is saved half-way, and a second training continues from it
MARKS = ("ACCELERATE_", "FSDP_")  # environment variables by which transformers and Accelerate talk to each other


@dataclass(frozen=True)
class TrainerCase:
    """``zero``: the stage, or None for no DeepSpeed. ``block``: the configuration's optimizer block, or None."""

    optim: str | None = "mars_adamw"
    optim_args: str | None = "gamma=0.05"
    zero: int | None = None
    block: dict[str, Any] | None = None
    offload: bool = False
    fsdp: bool = False
    fsdp1: bool | None = None  # whether it keeps the original parameters
    lora: bool = False
    checkpointing: bool = False
    accumulation: int = 1
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The engine on several ranks."""
        if self.zero is not None:
            return f"zero{self.zero}"
        return "fsdp2" if self.fsdp else "fsdp1" if self.fsdp1 is not None else "ddp"

    def __str__(self) -> str:
        words = [self.kind, str(self.optim)] + ["block"] * (self.block is not None) + ["offload"] * self.offload
        words += ["lora"] * self.lora + ["checkpointing"] * self.checkpointing
        return "-".join(words + [f"accumulate{self.accumulation}"] * (self.accumulation > 1))


def model(lora: bool = False) -> Any:
    """A GPT-2 with random weights, the same at every call; with ``lora`` only the adapters are trainable."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1234)
    net = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=SEQUENCE,
            n_layer=2,
            n_embd=32,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )
    net.loss_type = "ForCausalLM"
    if not lora:
        return net
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    net = get_peft_model(net, config)
    with torch.no_grad():  # B starts at zero, and A has no gradient then
        for name, p in net.named_parameters():
            if "lora_B" in name:
                p.normal_(0.0, 0.02)
    return net


def dataset(size: int = 240) -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, VOCABULARY, (size, SEQUENCE), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in tokens]


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def arguments(case: TrainerCase, folder: str | Path, **more: Any) -> Any:
    from transformers import TrainingArguments

    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH // world_size() // case.accumulation,
        "gradient_accumulation_steps": case.accumulation,
        "learning_rate": LR,
        "weight_decay": DECAY,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "save_strategy": "steps",
        "save_steps": SAVED,
        "logging_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "gradient_checkpointing": case.checkpointing,
        "optim_args": case.optim_args,
        **case.more,
        **more,
    }
    if case.optim is not None:
        given["optim"] = case.optim
    if case.zero is not None:
        given["deepspeed"] = configuration(case)
    if case.fsdp:
        given |= {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"]}}
    if case.fsdp1 is not None:
        # Weights are broadcast between accelerators only.
        layers = {"transformer_layer_cls_to_wrap": ["GPT2Block"], "sync_module_states": False}
        given |= {"fsdp": True, "fsdp_config": {"version": 1, "use_orig_params": case.fsdp1, **layers}}
    return TrainingArguments(**given)


def configuration(case: TrainerCase) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case.zero}
    if case.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    out: dict[str, Any] = {**dict.fromkeys(names, "auto"), "zero_optimization": zero, "steps_per_print": 10**9}
    if case.block is not None:
        out["optimizer"] = {"type": case.block.get("type", "MARS"), "params": dict(case.block["params"])}
    return out


def inside(optimizer: Any) -> Any:
    """The optimizer inside the wrappers of Accelerate and DeepSpeed."""
    for _ in range(4):
        optimizer = getattr(optimizer, "optimizer", optimizer)
    return optimizer


class FsdpRecorder:
    """What ``Recorder`` does, with torch's own way to gather: every rank has the whole gradients."""

    def __init__(self, optimizer: Any, net: nn.Module) -> None:
        self.net = net
        self.updates: list[dict[str, Tensor]] = []
        optimizer.register_step_pre_hook(self._before)

    def _before(self, *args: Any) -> None:
        gradients = ((n, whole(p.grad)) for n, p in self.net.named_parameters() if p.grad is not None)
        self.updates.append({n: g.flatten() for n, g in gradients})

    def end_of_update(self) -> None:
        pass

    def gathered(self) -> list[dict[str, Tensor]]:
        return self.updates


def whole(tensor: Any) -> Tensor:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().double().clone()


def recording(records: dict[str, Any], net: nn.Module, case: TrainerCase) -> Any:
    from transformers import TrainerCallback

    class Record(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
            records["inside"] = inside(optimizer)
            records["recorder"] = (FsdpRecorder if case.fsdp else Recorder)(records["inside"], net)

        def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
            records.setdefault("lrs", []).append(max(group["lr"] for group in optimizer.param_groups))

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            records["recorder"].end_of_update()

    return Record()


def train(case: TrainerCase, folder: str | Path, resume: bool = False) -> dict[str, Any]:
    """One training, recorded; with ``resume`` from the checkpoint that is in ``folder``."""
    from transformers import Trainer

    records: dict[str, Any] = {}
    with clean_environment(), messages() as texts, orthogonalised.counted() as counts:
        args = arguments(case, folder)
        net = model(case.lora)
        start = {n: p.detach().double().clone() for n, p in net.named_parameters() if p.requires_grad}
        shapes = {n: tuple(p.shape) for n, p in net.named_parameters() if p.requires_grad}
        trainer = Trainer(model=net, args=args, train_dataset=dataset(), callbacks=[recording(records, net, case)])
        checkpoint = str(Path(folder) / f"checkpoint-{SAVED}") if resume else None
        calls = count_forwards(net)
        trainer.train(resume_from_checkpoint=checkpoint)
        optimizer, wrapped = records["inside"], trainer.model_wrapped
        out = {
            "start": start,
            "shapes": shapes,
            "end": values(net, case),
            "gradients": records["recorder"].gathered() if dist.is_initialized() else alone(records["recorder"]),
            "lrs": records["lrs"],
            "class": type(optimizer),
            "rule_counts": optimizer.rule_counts(),
            "engines": optimizer.engines(),
            "optimizer": type(trainer.optimizer).__name__,
            "zero": type(getattr(trainer.optimizer, "optimizer", None)).__name__,
            "model": type(wrapped).__name__,
            "stage": wrapped.zero_optimization_stage() if case.zero is not None else None,
            "settings": optimizer.settings,
            "messages": texts,
            "orthogonalised": sum(counts),
            "offload": bool(getattr(getattr(trainer.optimizer, "optimizer", None), "cpu_offload", False))
            or bool(getattr(getattr(trainer.optimizer, "optimizer", None), "offload_optimizer", False)),
            "forwards": calls[0] / trainer_steps(trainer, resume) / case.accumulation,
            "counts": sorted({float(s["step"]) for s in optimizer.state.values() if "step" in s}),
            "steps": trainer.state.global_step,
            "fsdp": trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2,
            "pieces": sorted({type(p).__name__ for p in net.parameters()}),
        }
        if case.zero is not None:
            wrapped.destroy()
    return out


def run_fsdp1(case: TrainerCase, folder: str) -> dict[str, Any]:
    """What is built under FSDP1, and two steps of it."""
    from transformers import Trainer

    prepare()
    cpu_fsdp.install()
    try:
        with clean_environment():
            args = arguments(case, folder, max_steps=2, save_strategy="no")
            trainer = Trainer(model=model(), args=args, train_dataset=dataset())
            trainer.train()
            mars = inside(trainer.optimizer)
            return {
                "class": type(mars),
                "engines": mars.engines(),
                "rule_counts": mars.rule_counts(),
                "model": type(trainer.model_wrapped).__name__,
                "groups": [(len(g["params"]), g["weight_decay"], g["weight_decay_1d"]) for g in mars.param_groups],
            }
    finally:
        cpu_fsdp.remove()


def count_forwards(net: nn.Module) -> list[int]:
    """How often the first layer's MLP is computed: twice a step where activations are recomputed."""
    calls = [0]

    def count(*args: Any) -> None:
        calls[0] += 1

    next(m for name, m in net.named_modules() if name.endswith("h.0.mlp")).register_forward_pre_hook(count)
    return calls


def trainer_steps(trainer: Any, resumed: bool) -> int:
    return int(trainer.state.global_step) - SAVED * resumed


def run(case: TrainerCase, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A training, and the second half of it once more from its checkpoint, in a Trainer that knows nothing of it."""
    prepare()
    if case.fsdp:
        cpu_fsdp.install()
    try:
        return train(case, folder), train(case, folder, resume=True)
    finally:
        cpu_fsdp.remove()


def prepare() -> None:
    import mars_dist  # noqa: F401  the only line that MARS needs

    if os.environ.get("DS_ACCELERATOR") == "cpu":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    for name in ("DeepSpeed", "transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


def alone(recorder: Recorder) -> list[dict[str, Tensor]]:
    """What ``gathered`` returns, where there is no process group."""
    return [{n: pieces[0][1] for n, pieces in update.items()} for update in recorder.updates[:-1]]


def values(net: nn.Module, case: TrainerCase) -> dict[str, Tensor]:
    out = {}
    for name, p in net.named_parameters():
        if not p.requires_grad:
            continue
        if case.zero == 3:
            import deepspeed

            with deepspeed.zero.GatheredParameters([p]):
                out[name] = p.detach().double().clone()
        else:
            out[name] = whole(p)
    return out


@contextlib.contextmanager
def clean_environment() -> Iterator[None]:
    """Accelerate keeps its state in classes and in the environment: the next case must not find this one's."""
    kept = {k: v for k, v in os.environ.items() if k.startswith(MARKS)}
    try:
        yield
    finally:
        from accelerate.state import AcceleratorState, GradientState, PartialState
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        AcceleratorState._reset_state()
        GradientState._reset_state()
        PartialState._shared_state.clear()
        for name in [k for k in os.environ if k.startswith(MARKS)]:
            del os.environ[name]
        os.environ.update(kept)


def contradict(folder: str) -> tuple[str, ...]:
    """What is said when arguments with a contradicting block are made; when optim is changed after that; and when
    the configuration comes from `accelerate launch`."""
    from transformers import Trainer

    prepare()
    block = {"params": {"mars_type": "mars-adamw", "lr": "auto"}}
    case = TrainerCase(optim=None, optim_args=None, zero=2, block=block)
    other = TrainerCase(optim="mars_lion", optim_args=None)
    said = []
    with clean_environment():
        with pytest.raises(ValueError) as error:
            arguments(replace(other, zero=2, block=block), folder)
        said.append(str(error.value))
    with clean_environment():
        args = arguments(case, folder)
        args.set_optimizer(name="sgd", learning_rate=LR, weight_decay=DECAY)
        with pytest.raises(ValueError) as error:
            Trainer(model=model(), args=args, train_dataset=dataset()).train()
        said.append(str(error.value))
    with clean_environment():
        file = Path(folder) / f"config{dist.get_rank()}.json"
        file.write_text(json.dumps(configuration(case)))
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
        cpu_fsdp.install()
        try:
            args = arguments(other, folder, use_cpu=False)
            with pytest.raises(ValueError) as error:
                Trainer(model=model(), args=args, train_dataset=dataset())
            said.append(str(error.value))
        finally:
            cpu_fsdp.remove()
    return tuple(said)
