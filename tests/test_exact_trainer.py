"""``ExactTrainer``: exact mode in the Trainer by numbers, in its engines; masks, callbacks, resuming, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from mars_dist.integrations.exact_loop import mars_of
from mars_dist.integrations.exact_trainer import ExactTrainer
from tests import nets, trainer_cases
from tests.exact_cases import Watcher
from tests.ranks import RankPool
from tests.reference import ReferenceMARS
from tests.test_engines import furthest

SETTINGS = {"gamma": 0.3, "clip": 0.1}
ROWS = 22  # of the data: with 4 in an update the last one of an epoch is short


class Model(nets.Net):
    """Gives the Trainer a dictionary; drops half of one layer and keeps the masks."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.norm(torch.tanh(self.linear(self.embedding(tokens))))
        mask = nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        self.masks.append(mask.detach().clone())
        x = x * mask + torch.tanh(self.narrow(x)) @ self.gain + self.shift
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def data() -> list[dict[str, Tensor]]:
    tokens, targets = nets.batch(0, ROWS)
    return [{"tokens": t, "labels": u} for t, u in zip(tokens, targets, strict=True)]


class Rates(TrainerCallback):  # type: ignore[misc]
    """What a callback is told, and the learning rates of each update."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.rates: list[list[float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.calls.append("begin")

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.calls.append("end")


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


def trainer(folder: Path, **more: Any) -> tuple[ExactTrainer, Model, Rates]:
    torch.manual_seed(3)
    model, rates = Model(), Rates()
    made = ExactTrainer(model=model, args=arguments(folder, **more), train_dataset=data(), callbacks=[rates])
    return made, model, rates


def test_replay_masks_and_what_callbacks_are_told(tmp_path: Path) -> None:
    made, model, rates = trainer(tmp_path)
    start = {name: p.detach().double() for name, p in model.named_parameters()}
    made.create_optimizer()
    mars = mars_of(made.optimizer)
    watcher = Watcher(mars)
    seen: list[tuple[int, bool]] = []
    step = made.training_step

    def watched(*args: Any, **kwargs: Any) -> Any:
        watcher.step = made.state.global_step + made._looking
        seen.append((watcher.step, made._looking))
        return step(*args, **kwargs)

    made.training_step = watched  # type: ignore[method-assign]
    made.train()
    found = {id(p): name for name, p in model.named_parameters()}
    names = {  # the Trainer gives its groups without names
        f"group {g}, parameter {i}": found[id(p)]
        for g, group in enumerate(mars.param_groups)
        for i, p in enumerate(group["params"])
    }
    both_passes = watcher.gathered({key: start[name] for key, name in names.items()})
    gradients, ahead = ([{names[k]: g for k, g in one.items()} for one in those] for those in both_passes)

    # 11 micro-batches in an epoch, 2 in an update: 6 updates, the last one of 1; the first of an epoch has no h.
    assert made.state.global_step == 12 and rates.calls == ["begin", "end"] * 12
    assert made.gradient_evaluations == len(seen) == 2 * 11 + 2 * 9
    assert [bool(h) for h in ahead] == ([False] + [True] * 5) * 2
    masks: dict[int, list[tuple[Tensor, ...]]] = {}
    for looked in (True, False):
        for number in range(12):
            those = [m for m, (at, was) in zip(model.masks, seen, strict=True) if (at, was) == (number, looked)]
            masks.setdefault(number, []).append(tuple(those))
    for number, (looked_at, used) in masks.items():
        assert len(used) == (1 if number % 6 == 5 else 2)
        if number % 6:
            assert all(torch.equal(a, b) for a, b in zip(looked_at, used, strict=True))
    first = [used[0].numpy().tobytes() for _, used in masks.values()]
    assert len(set(first)) == 12

    groups = [
        {"names": [found[id(p)] for p in g["params"]], **{k: g[k] for k in ("weight_decay", "weight_decay_1d")}}
        for g in mars.param_groups
    ]
    assert [g["weight_decay"] for g in groups] == [0.05, 0.0]
    reference = ReferenceMARS(start, groups, lr=1e-2, lr_1d=1e-2, is_approx=False, **SETTINGS)
    for t, gradient in enumerate(gradients):
        zeros = {name: torch.zeros_like(g) for name, g in gradient.items()}
        reference.step(gradient, lr=rates.rates[t], previous=ahead[t] or zeros if t else None)
    assert len({tuple(r) for r in rates.rates}) > 5, "the schedule moved"
    assert mars.rule_counts() == {"MARS-AdamW": nets.MATRICES, "AdamW": nets.VECTORS}
    end = {name: p.detach().double() for name, p in model.named_parameters()}
    assert furthest(reference.params, end) < 2e-6
    for both in zip(gradients, ahead, strict=True):  # clipped alike in both passes
        for whole in both:
            assert not whole or sum(g.square().sum() for g in whole.values()).sqrt() < 0.1 + 1e-6


@pytest.mark.parametrize("at", [4, 6], ids=["in an epoch", "between two epochs"])
def test_resumed_is_uninterrupted_bit_by_bit(at: int, tmp_path: Path) -> None:
    through, whole, _ = trainer(tmp_path / "through")
    through.train()
    saving, _, _ = trainer(tmp_path / "saved", save_strategy="steps", save_steps=at)
    saving.train()
    again, resumed, _ = trainer(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "saved" / f"checkpoint-{at}"))
    assert again.state.global_step == through.state.global_step == 12
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_an_ordinary_trainer_says_what_to_take(tmp_path: Path) -> None:
    made = Trainer(model=Model(), args=arguments(tmp_path), train_dataset=data())
    with pytest.raises(RuntimeError, match=r"is_approx=False.*exact_trainer\.ExactTrainer in its place"):
        made.train()


def test_without_exact_mode_it_says_so(tmp_path: Path) -> None:
    made = ExactTrainer(model=Model(), args=arguments(tmp_path, optim_args="gamma=0.3"), train_dataset=data())
    with pytest.raises(ValueError, match="is_approx=False"):
        made.train()


class Plain(nets.Net):
    """Gives the Trainer a dictionary."""

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": super().forward(tokens, labels)}


def trained(zero: int | None, folder: str) -> dict[str, Any]:
    """Two epochs of 6 updates, on each rank its part of the same batches."""
    trainer_cases.prepare()
    case = trainer_cases.TrainerCase(zero=zero, accumulation=2)
    more = {"deepspeed": trainer_cases.configuration(case)} if zero is not None else {}
    more |= {"per_device_train_batch_size": 4 // trainer_cases.world_size()}
    tokens, labels = nets.batch(0, 48)
    rows = [{"tokens": t, "labels": u} for t, u in zip(tokens, labels, strict=True)]
    with trainer_cases.clean_environment():
        torch.manual_seed(3)
        net = Plain()
        made = ExactTrainer(model=net, args=arguments(Path(folder), **more), train_dataset=rows)
        made.train()
        mars = trainer_cases.inside(made.optimizer)
        out = {
            "end": trainer_cases.values(net, case),
            "evaluations": made.gradient_evaluations,
            "updates": {made.state.global_step, *(int(s["step"]) for s in mars.state.values() if "step" in s)},
            "rule_counts": mars.rule_counts(),
            "ran": (type(made.model_wrapped).__name__, mars.engines()),
        }
        if zero is not None:
            out["updates"] |= {made.model_wrapped.global_steps}
            made.model_wrapped.destroy()
    return out


@pytest.mark.timeout(300)
def test_ddp_and_deepspeed_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    ran = {
        None: ("DistributedDataParallel", {"whole tensors"}),
        2: ("DeepSpeedEngine", {"ZeRO-1/2"}),
        3: ("DeepSpeedEngine", {"ZeRO-3"}),
    }
    alone = trained(None, str(tmp_path))
    pool = RankPool(2)
    try:
        for zero, expected in ran.items():
            for result in pool.run(trained, zero, str(tmp_path), timeout=200):
                assert result["ran"] == expected and result["updates"] == {12}
                assert result["evaluations"] == alone["evaluations"] == 2 * (12 + 10)
                assert result["rule_counts"] == {"MARS-AdamW": nets.MATRICES, "AdamW": nets.VECTORS}
                assert furthest(result["end"], alone["end"]) < 2e-5
    finally:
        pool.close()
