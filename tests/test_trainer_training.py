"""Training with ``optim="mars_..."`` in transformers' Trainer: one process, DDP, FSDP2 and DeepSpeed ZeRO.

Each training is replayed by the reference, and its second half is run again from the checkpoint in its middle.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mars_dist
from mars_dist.integrations.trainer_arguments import VARIANT_OF, parse
from tests import trainer_cases
from tests.ranks import RankError, RankPool
from tests.reference import ReferenceMARS
from tests.trainer_cases import DECAY, LR, SAVED, STEPS, TrainerCase

LABELS = {"mars_adamw": "MARS-AdamW", "mars_lion": "MARS-Lion", "mars_shampoo": "MARS-Shampoo", "mars_m": "MARS-M"}
MATRICES, VECTORS, ADAPTERS = 10, 18, 4  # of the tiny GPT-2; its head is its embedding
BLOCK = {"params": {"lr": "auto", "lr_1d": LR, "betas": "auto", "gamma": 0.05, "weight_decay": "auto"}}
BLOCK["params"] |= {"weight_decay_1d": 0.0}


@pytest.fixture(autouse=True)
def _accelerates_state_is_left_clean() -> Iterator[None]:
    with trainer_cases.clean_environment():
        yield


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def replay(result: dict[str, Any], case: TrainerCase) -> dict[str, Tensor]:
    """The gradients that reached MARS through the reference, with the groups that Trainer makes of this model."""
    names = {2: [n for n, s in result["shapes"].items() if len(s) == 2]}
    names[1] = [n for n in result["shapes"] if n not in names[2]]
    groups: list[dict[str, Any]] = [
        {"names": names[2], "weight_decay": DECAY},
        {"names": names[1], "weight_decay": 0.0},
    ]
    variant = VARIANT_OF[case.optim] if case.optim else "mars-adamw"
    given = {"lr_1d": LR, **{k: v for k, v in parse(case.optim_args).items() if k != "ns_dtype"}}
    if case.block is not None:
        given["gamma"] = 0.05
    reference = ReferenceMARS(result["start"], [g for g in groups if g["names"]], lr=LR, mars_type=variant, **given)
    for gradients, lr in zip(result["gradients"], result["lrs"], strict=True):
        whole = {n: g.view(result["shapes"][n]) for n, g in gradients.items()}
        assert whole.keys() == result["start"].keys()
        reference.step(whole, lr=lr)
    return reference.params


MODELS = {"native": ("AcceleratedOptimizer", "MARS", {"whole tensors"})}
MODELS |= {"fsdp2": ("AcceleratedOptimizer", "MARS", {"DTensor (Shard(dim=0),)"})}
MODELS |= {"zero2": ("DeepSpeedOptimizerWrapper", "DeepSpeedZeroOptimizer", {"ZeRO-1/2"})}
MODELS |= {"zero3": ("DeepSpeedOptimizerWrapper", "DeepSpeedZeroOptimizer_Stage3", {"ZeRO-3"})}


def check(results: list[tuple[dict[str, Any], dict[str, Any]]], case: TrainerCase) -> None:
    kind = "native" if case.kind == "ddp" else case.kind
    wrapped = "DeepSpeedEngine" if case.zero is not None else "DistributedDataParallel" if len(results) > 1 else None
    if case.fsdp:
        wrapped = "FSDPPeftModel" if case.lora else "FSDPGPT2LMHeadModel"
    label = LABELS[case.optim or "mars_adamw"]
    variant = VARIANT_OF[case.optim or "mars_adamw"]
    rules = {label: ADAPTERS} if case.lora else {label: MATRICES, "AdamW": VECTORS}
    for rank, (whole, resumed) in enumerate(results):
        for result in (whole, resumed):
            assert result["class"] is mars_dist.MARS and result["settings"].mars_type == variant
            assert (result["optimizer"], result["zero"], result["engines"]) == MODELS[kind]
            assert wrapped is None or result["model"] == wrapped
            assert result["fsdp"] == case.fsdp and (result["pieces"] == ["DTensor"]) == case.fsdp
            assert (result["stage"], result["offload"]) == (case.zero, case.offload)
            assert result["rule_counts"] == rules
            assert result["counts"] == [STEPS] and result["steps"] == STEPS
            assert result["forwards"] == 1 + case.checkpointing
        assert len(whole["gradients"]) == STEPS and len(resumed["gradients"]) == STEPS - SAVED
        assert furthest(whole["end"], results[0][0]["end"]) == 0.0, f"rank {rank} holds other parameters"
        assert furthest(resumed["end"], whole["end"]) == 0.0, "the continued training is another one"
        assert resumed["lrs"] == whole["lrs"][SAVED:] and whole["lrs"][:3] == [0.0, LR / 2, LR]
    if variant in ("mars-shampoo", "mars-m"):
        # To load a state under FSDP2 torch creates it by a step with lr 0.
        for i, steps in enumerate((STEPS, STEPS - SAVED + case.fsdp)):
            assert sum(both[i]["orthogonalised"] for both in results) == steps * MATRICES, "not shared out"
    whole, resumed = results[0]
    tolerance = 2e-6 if variant in ("mars-adamw", "mars-lion") else 5e-6
    assert furthest(replay(whole, case), whole["end"]) < tolerance
    moved = min((whole["end"][n] - whole["start"][n]).abs().max().item() for n in whole["start"])
    assert moved > 1e-3, "a tensor did not move: the comparison would prove nothing"


ALL = "gamma=0.05,lr_1d=4e-3,ns_dtype=float32"


@pytest.mark.parametrize(
    "case",
    [
        *(TrainerCase(optim=name, optim_args=ALL) for name in LABELS),
        TrainerCase(optim="mars_lion", lora=True),
        TrainerCase(checkpointing=True),
        TrainerCase(accumulation=2),
    ],
    ids=str,
)
def test_training_on_one_process(tmp_path: Path, case: TrainerCase) -> None:
    check([trainer_cases.run(case, str(tmp_path))], case)


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)],
    ids=["2ranks", "3ranks", "4ranks"],
)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(request.param)
    yield pool
    pool.close()


BLOCK_ALONE: dict[str, Any] = {"optim": None, "optim_args": None, "block": BLOCK}
DISTRIBUTED = [
    TrainerCase(),
    TrainerCase(fsdp=True),
    TrainerCase(zero=2),
    TrainerCase(zero=3),
    TrainerCase(zero=3, block={"params": {}}),
    TrainerCase(zero=2, offload=True, **BLOCK_ALONE),
    TrainerCase(optim="mars_m", optim_args=ALL, fsdp=True),
    TrainerCase(optim="mars_shampoo", optim_args=ALL, zero=2),
    TrainerCase(optim="mars_m", optim_args=ALL, zero=3),
]
VARIANTS = [
    TrainerCase(optim="mars_shampoo", optim_args=ALL),
    *(TrainerCase(optim=name, optim_args=ALL) for name in ("mars_lion", "mars_m")),
    TrainerCase(optim="mars_shampoo", optim_args=ALL, fsdp=True),
    TrainerCase(optim="mars_m", optim_args=ALL, zero=2),
    TrainerCase(optim="mars_shampoo", optim_args=ALL, zero=3),
    TrainerCase(optim="mars_lion", optim_args=ALL, zero=2),
    TrainerCase(optim="mars_lion", optim_args=ALL, fsdp=True),
    TrainerCase(optim="mars_lion", zero=3),
]
REPEATED = [
    TrainerCase(zero=2, offload=True),
    TrainerCase(zero=2, **BLOCK_ALONE),
    TrainerCase(zero=3, **BLOCK_ALONE),
    TrainerCase(zero=2, block={"params": {}}),
    TrainerCase(zero=3, offload=True),
    TrainerCase(zero=3, offload=True, **BLOCK_ALONE),
    TrainerCase(lora=True),
    TrainerCase(lora=True, fsdp=True),
    TrainerCase(lora=True, zero=2),
    TrainerCase(lora=True, zero=3),
    TrainerCase(checkpointing=True),
    TrainerCase(checkpointing=True, zero=2),
    TrainerCase(checkpointing=True, zero=3),
]
REPEATED += [TrainerCase(accumulation=2, **engine) for engine in ({}, {"fsdp": True}, {"zero": 2})]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", DISTRIBUTED, ids=str)
def test_training_on_several_ranks(pool: RankPool, tmp_path: Path, case: TrainerCase) -> None:
    check(pool.run(trainer_cases.run, case, str(tmp_path), timeout=200), case)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_more_variants_on_several_ranks(pool: RankPool, tmp_path: Path, case: TrainerCase) -> None:
    check(pool.run(trainer_cases.run, case, str(tmp_path), timeout=200), case)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("pool", [2], indirect=True, ids=["2ranks"])
def test_fsdp1_with_original_parameters(pool: RankPool, tmp_path: Path) -> None:
    """Trainer's two groups stay apart: MARS is built from the wrapped model."""
    for result in pool.run(trainer_cases.run_fsdp1, TrainerCase(fsdp1=True), str(tmp_path), timeout=60):
        assert result["class"] is mars_dist.MARS and result["engines"] == {"FSDP1"}
        assert result["model"] == "FullyShardedDataParallel"
        assert result["rule_counts"] == {"MARS-AdamW": MATRICES, "AdamW": VECTORS}
        assert result["groups"] == [(MATRICES, DECAY, DECAY), (VECTORS, 0.0, 0.0)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("pool", [2], indirect=True, ids=["2ranks"])
def test_fsdp1_with_flat_parameters_is_refused(pool: RankPool, tmp_path: Path) -> None:
    """Biases and norms lie in one flat parameter with matrices: Trainer cannot keep them from decay."""
    with pytest.raises(RankError) as error:
        pool.run(trainer_cases.run_fsdp1, TrainerCase(fsdp1=False), str(tmp_path), timeout=60)
    assert str(error.value).count('"use_orig_params": true') == pool.world_size, str(error.value)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("pool", [2], indirect=True, ids=["2ranks"])
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_more_trainings_on_two_ranks(pool: RankPool, tmp_path: Path, case: TrainerCase) -> None:
    check(pool.run(trainer_cases.run, case, str(tmp_path), timeout=200), case)


@pytest.mark.timeout(240)
def test_contradictions_on_several_ranks(pool: RankPool, tmp_path: Path) -> None:
    for early, late, launched in pool.run(trainer_cases.contradict, str(tmp_path), timeout=100):
        assert 'optim="mars_lion"' in early and "contradict each other" in early, "when the arguments are made"
        assert 'optim="sgd" asks for another optimizer' in late, "optim was changed afterwards: when training starts"
        assert 'optim="mars_lion"' in launched and "contradict each other" in launched, "when the Trainer is made"


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    """Random tokens cannot be learned: the loss on others grows, so that the first checkpoint is the best."""
    from safetensors.torch import load_file
    from transformers import Trainer

    trainer_cases.prepare()
    more = {"eval_strategy": "steps", "eval_steps": SAVED, "load_best_model_at_end": True, "learning_rate": 5e-2}
    args = trainer_cases.arguments(TrainerCase(), tmp_path, **more)
    data = trainer_cases.dataset()
    trainer = Trainer(model=trainer_cases.model(), args=args, train_dataset=data[:12], eval_dataset=data[12:36])
    trainer.train()
    assert type(trainer_cases.inside(trainer.optimizer)) is mars_dist.MARS
    best = tmp_path / f"checkpoint-{SAVED}"
    assert trainer.state.best_model_checkpoint == str(best)
    saved, last = load_file(best / "model.safetensors"), load_file(tmp_path / f"checkpoint-{STEPS}/model.safetensors")
    now = dict(trainer.model.named_parameters())
    assert all(torch.equal(now[name], saved[name]) for name in now)
    assert not any(torch.equal(now[name], last[name]) for name in now)
    # Evaluating has prepared the model again, which must not make MARS forget its tensors.
    assert sum(trainer_cases.inside(trainer.optimizer).rule_counts().values()) == len(now)


def test_the_optimizer_given_as_a_class_and_keywords(tmp_path: Path) -> None:
    from transformers import Trainer

    trainer_cases.prepare()
    keywords = {"lr": LR, "lr_1d": LR, "gamma": 0.05}
    ends = []
    for given in (None, (mars_dist.MARS, keywords)):
        args = trainer_cases.arguments(TrainerCase(optim=None if given else "mars_adamw"), tmp_path, save_strategy="no")
        net = trainer_cases.model()
        trainer = Trainer(model=net, args=args, train_dataset=trainer_cases.dataset(), optimizer_cls_and_kwargs=given)
        trainer.train()
        assert type(trainer_cases.inside(trainer.optimizer)) is mars_dist.MARS
        ends.append(trainer_cases.values(net, TrainerCase()))
    assert furthest(*ends) == 0.0
