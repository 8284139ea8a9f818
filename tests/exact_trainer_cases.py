"""What runs in the tests of ``ExactTrainer``: a small model without attention, and a recorded training under an engine.

Without attention, because a gradient that is zero but for rounding (the keys' bias) takes whole steps under Adam.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments

from mars_dist.integrations.exact_loop import mars_of
from mars_dist.integrations.exact_trainer import ExactTrainer
from tests import cpu_fsdp, nets, trainer_cases
from tests.exact_cases import Watcher
from tests.zero_cases import ZeroCase, parameters

SETTINGS = {"gamma": 0.3, "clip": 0.1}
ROWS = 44  # of the data of ``run``: 4 in a micro-batch over all ranks, 2 micro-batches in an update, the last one short
SAVED = 4  # of 12 updates, 6 in an epoch


class Model(nets.Net):
    """Gives the Trainer a dictionary; drops a part of one layer and keeps the masks."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.dropout = dropout
        self.masks: list[Tensor] = []

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.norm(torch.tanh(self.linear(self.embedding(tokens))))
        mask = nn.functional.dropout(torch.ones_like(x), self.dropout, self.training)
        self.masks.append(mask.detach().clone())
        x = x * mask + torch.tanh(self.narrow(x)) @ self.gain + self.shift
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def data(rows: int) -> list[dict[str, Tensor]]:
    tokens, targets = nets.batch(0, rows)
    return [{"tokens": t, "labels": u} for t, u in zip(tokens, targets, strict=True)]


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "optim": "mars_adamw",
        "optim_args": "is_approx=False," + ",".join(f"{k}={v}" for k, v in SETTINGS.items()),
        "learning_rate": 1e-2,
        "weight_decay": 0.05,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "max_grad_norm": 0.1,
        "warmup_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
        **more,
    }
    return TrainingArguments(output_dir=str(folder), **options)


def names_of(mars: Any, model: nn.Module) -> dict[str, str]:
    """The Trainer gives its groups without names: those that MARS invents, and the model's own."""
    found = {id(p): name for name, p in model.named_parameters()}
    names = {}
    for group, refs in zip(mars.param_groups, mars._tables.originals.values(), strict=True):
        for i, (name, ref) in enumerate(refs):
            # ZeRO puts flat tensors into the groups; FSDP2 and Accelerate put others there than MARS was made with.
            names[name] = found.get(id(ref())) or found[id(group["params"][i])]
    return names


def groups_of(mars: Any, names: dict[str, str]) -> list[dict[str, Any]]:
    """The groups that the Trainer has made, for the reference."""
    keys = ("weight_decay", "weight_decay_1d")
    return [
        {"names": [names[name] for name, _ in refs], **{k: group[k] for k in keys}}
        for group, refs in zip(mars.param_groups, mars._tables.originals.values(), strict=True)
    ]


class Record(TrainerCallback):  # type: ignore[misc]
    """Watches MARS from the beginning of the training on, when its engine has it."""

    def __init__(self, trainer: ExactTrainer, model: nn.Module) -> None:
        self.trainer, self.model = trainer, model
        self.rates: list[float] = []
        self.calls: list[str] = []
        self.passes: list[tuple[int, bool]] = []  # of each pass: its update, and whether it is a look-ahead

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.mars = mars_of(self.trainer.optimizer)
        self.names = names_of(self.mars, self.model)
        self.watcher, take = Watcher(self.mars), self.trainer.training_step

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.watcher.step = self.trainer.state.global_step + self.trainer._looking
            self.passes.append((self.watcher.step, self.trainer._looking))
            return take(*args, **kwargs)

        self.trainer.training_step = watched  # type: ignore[method-assign]

    def on_step_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        self.calls.append("begin")
        self.rates.append(max(group["lr"] for group in optimizer.param_groups))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.calls.append("end")


def run(kind: str, folder: str, dropout: float = 0.0, resume: bool = False) -> dict[str, Any]:
    """Two epochs under ``kind``: "one" process, "ddp", "fsdp2", "zero2" or "zero3".

    A checkpoint is saved after ``SAVED`` updates; ``resume``: from the one that is in ``folder``.
    """
    trainer_cases.prepare()
    if kind == "fsdp2":
        cpu_fsdp.install()
    try:
        with trainer_cases.clean_environment():
            return _run(kind, folder, dropout, resume)
    finally:
        cpu_fsdp.remove()


def _run(kind: str, folder: str, dropout: float, resume: bool) -> dict[str, Any]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    more: dict[str, Any] = {"per_device_train_batch_size": 4 // world, "save_strategy": "steps", "save_steps": SAVED}
    stage = int(kind[-1]) if kind.startswith("zero") else None
    if stage is not None:
        more["deepspeed"] = trainer_cases.configuration(trainer_cases.TrainerCase(zero=stage))
    if kind == "fsdp2":
        more |= {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["Linear"]}}
    args = arguments(Path(folder), **more)
    torch.manual_seed(3)
    model = Model(dropout)
    start = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    trainer = ExactTrainer(model=model, args=args, train_dataset=data(ROWS))
    record = Record(trainer, model)
    trainer.add_callback(record)
    trainer.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{SAVED}") if resume else None)
    mars, names, wrapped = record.mars, record.names, trainer.model_wrapped
    both = record.watcher.gathered({key: start[name] for key, name in names.items()})
    if stage is not None:
        end = parameters(model, wrapped, ZeroCase(stage=stage))
    else:
        end = {name: trainer_cases.whole(p) for name, p in model.named_parameters()}
    result = {
        "start": start,
        "end": end,
        "gradients": [{names[k]: g for k, g in one.items()} for one in both[0]],
        "ahead": [{names[k]: g for k, g in one.items()} for one in both[1]],
        "groups": groups_of(mars, names),
        "rates": record.rates,
        "calls": record.calls,
        "class": type(mars),
        "model": type(wrapped).__name__,
        "optimizer": type(trainer.optimizer).__name__,
        "zero": type(getattr(trainer.optimizer, "optimizer", None)).__name__,
        "engines": mars.engines(),
        "rule_counts": mars.rule_counts(),
        "counts": sorted({float(s["step"]) for s in mars.state.values() if s}),
        "hooks": record.watcher.hooks,
        "steps": trainer.state.global_step,
        "evaluations": trainer.gradient_evaluations,
        "passes": record.passes,
        "masks": [mask.numpy().tobytes() for mask in model.masks],
        "counters": (wrapped.global_steps, wrapped.skipped_steps) if stage is not None else None,
    }
    if stage is not None:
        wrapped.destroy()
    return result
