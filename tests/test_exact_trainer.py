"""``ExactTrainer``: exact mode in the Trainer by numbers, in its engines; masks, callbacks, resuming, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

import mars_dist
from mars_dist.integrations.exact_loop import mars_of
from mars_dist.integrations.exact_trainer import ExactTrainer
from tests import exact_trainer_cases, nets
from tests.exact_cases import Watcher
from tests.exact_trainer_cases import SETTINGS, Model, arguments, data, groups_of, names_of
from tests.ranks import RankPool
from tests.reference import ReferenceMARS
from tests.test_engines import furthest

ROWS = 22  # of the data: with 4 in an update the last one of an epoch is short


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


def trainer(folder: Path, **more: Any) -> tuple[ExactTrainer, Model, Rates]:
    torch.manual_seed(3)
    model, rates = Model(), Rates()
    made = ExactTrainer(model=model, args=arguments(folder, **more), train_dataset=data(ROWS), callbacks=[rates])
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
    names = names_of(mars, model)
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

    groups = groups_of(mars, names)
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
    made = Trainer(model=Model(), args=arguments(tmp_path), train_dataset=data(ROWS))
    with pytest.raises(RuntimeError, match=r"is_approx=False.*exact_trainer\.ExactTrainer in its place"):
        made.train()


def test_without_exact_mode_it_says_so(tmp_path: Path) -> None:
    made = ExactTrainer(model=Model(), args=arguments(tmp_path, optim_args="gamma=0.3"), train_dataset=data(ROWS))
    with pytest.raises(ValueError, match="is_approx=False"):
        made.train()


# ------------------------------------------------------------------------------------------------- several processes

STAGE3 = ("DeepSpeedEngine", "DeepSpeedOptimizerWrapper", "DeepSpeedZeroOptimizer_Stage3", {"ZeRO-3"})
ACTIVE = {
    "ddp": ("DistributedDataParallel", "AcceleratedOptimizer", "MARS", {"whole tensors"}),
    "fsdp2": ("FSDPModel", "AcceleratedOptimizer", "MARS", {"DTensor (Shard(dim=0),)"}),
    "zero2": ("DeepSpeedEngine", "DeepSpeedOptimizerWrapper", "DeepSpeedZeroOptimizer", {"ZeRO-1/2"}),
    "zero3": STAGE3,
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same global batches on one process."""
    return exact_trainer_cases.run("one", str(tmp_path_factory.mktemp("alone")))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_on_two_ranks(pool: RankPool, alone: dict[str, Any], kind: str, tmp_path: Path) -> None:
    results = pool.run(exact_trainer_cases.run, kind, str(tmp_path), timeout=100)
    resumed = pool.run(exact_trainer_cases.run, kind, str(tmp_path), 0.0, True, timeout=100)
    for result in results:
        assert tuple(result[key] for key in ("model", "optimizer", "zero", "engines")) == ACTIVE[kind]
        assert result["class"] is mars_dist.MARS
        assert result["rule_counts"] == alone["rule_counts"] == {"MARS-AdamW": nets.MATRICES, "AdamW": nets.VECTORS}
        # 11 micro-batches in an epoch, 2 in an update: 6 updates, the last one of 1; the first of an epoch has no h.
        assert result["steps"] == 12 and result["counts"] == [12] and result["calls"] == ["begin", "end"] * 12
        assert result["evaluations"] == len(result["passes"]) == len(result["masks"]) == 2 * 11 + 2 * 9
        assert result["hooks"] % 12 == 0 < result["hooks"] and result["counters"] in (None, (12, 0))
        assert result["rates"] == alone["rates"] and len(set(result["rates"])) > 5
        assert furthest(result["end"], results[0]["end"]) == 0.0
    result = results[0]
    assert [bool(h) for h in result["ahead"]] == ([False] + [True] * 5) * 2
    for those in ("gradients", "ahead"):  # of the first updates: the same batches, summed alike and clipped
        for one, other in zip(result[those][:3], alone[those][:3], strict=True):
            assert not one and not other or furthest(one, other) < 1e-5
    assert all(sum(g.square().sum().item() for g in h.values()) ** 0.5 < 0.1 + 1e-6 for h in result["ahead"])
    reference = ReferenceMARS(result["start"], result["groups"], lr=1e-2, lr_1d=1e-2, is_approx=False, **SETTINGS)
    for t, gradient in enumerate(result["gradients"]):
        zeros = {name: torch.zeros_like(g) for name, g in gradient.items()}
        reference.step(gradient, lr=result["rates"][t], previous=result["ahead"][t] or zeros if t else None)
    assert furthest(reference.params, result["end"]) < 2e-6
    assert furthest(result["end"], alone["end"]) < 2e-5
    assert furthest(result["start"], result["end"]) > 1e-2
    for again in resumed:
        assert again["steps"] == 12 and [at for at, _ in again["passes"]][0] == exact_trainer_cases.SAVED + 1
        assert furthest(again["end"], result["end"]) == 0.0, "the continued training is another one"


@pytest.mark.timeout(240)
def test_masks_on_two_ranks(pool: RankPool, tmp_path: Path) -> None:
    for result in pool.run(exact_trainer_cases.run, "ddp", str(tmp_path), 0.5, timeout=100):
        masks: dict[tuple[int, bool], list[bytes]] = {}
        for one, mask in zip(result["passes"], result["masks"], strict=True):
            masks.setdefault(one, []).append(mask)
        assert all(masks[number, True] == masks[number, False] for number in range(12) if number % 6)
        drawn = [mask for number in range(12) for mask in masks[number, False]]
        assert len({hash(mask) for mask in drawn}) == len(drawn) == 22
