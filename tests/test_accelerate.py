"""MARS under Accelerate: what ``prepare`` does for it in DDP, FSDP1, FSDP2, HSDP and DeepSpeed, by numbers."""

from __future__ import annotations

import logging
import math
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mars_dist.integrations import accelerate as integration
from tests import accelerate_cases, nets
from tests.accelerate_cases import BATCH, Case, rate
from tests.processes import run_python
from tests.ranks import RankPool
from tests.reference import RULE_NAMES, ReferenceMARS
from tests.zero_cases import LR

ELEMENTWISE = ("mars-adamw", "mars-lion")
LION: dict[str, Any] = {"mars_type": "mars-lion", "weight_decay": 0.05}
SHAMPOO: dict[str, Any] = {"mars_type": "mars-shampoo", "ns_dtype": "float32", "weight_decay": 0.05}
MARS_M: dict[str, Any] = {"mars_type": "mars-m", "ns_dtype": "float32"}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module", params=[3, 4], ids=["3ranks", "4ranks"])
def larger_pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(request.param)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


# ----------------------------------------------------------------------------------------------------- by numbers


def reference(start: dict[str, torch.Tensor], case: Case) -> ReferenceMARS:
    return ReferenceMARS(start, **{k: v for k, v in {**LR, **case.params}.items() if k != "ns_dtype"})


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def norm(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(g.square().sum().item() for g in gradients.values()))


def end_to_end(case: Case) -> dict[str, torch.Tensor]:
    """The same training on one process, with the reference as the optimizer."""
    net = nets.build()
    model = reference({n: p.detach().double() for n, p in net.named_parameters()}, case)
    taken = 0
    for step in range(case.steps):
        net.zero_grad()
        net(*nets.batch(step, BATCH)).backward()
        if step == case.overflow:
            continue
        if case.clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        gradients = {n: p.grad.double() for n, p in net.named_parameters() if p.grad is not None}
        model.step(gradients, lr=LR["lr"] * rate(taken) if case.schedule else None)
        taken += 1
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_(model.params[name])
    return model.params


def check(results: list[dict[str, Any]], case: Case) -> None:
    """The engine was the one that was asked for, MARS's rules ran, and every number is right."""
    variant = case.params.get("mars_type", "mars-adamw")
    updates = case.steps - (case.overflow is not None)
    for result in results:
        check_engine(result, case, len(results))
        assert result["class"] == "mars_dist.optimizer.MARS"
        assert result["rule_counts"] == {RULE_NAMES[variant]: nets.MATRICES, "AdamW": nets.VECTORS}
        assert result["steps"] == [updates]
        assert furthest(result["end"], results[0]["end"]) == 0.0, "the ranks hold different parameters"
        rates = [rate(step) if case.schedule else 1.0 for step in range(updates)]
        assert [set(used) for used in result["rates"]] == [{LR["lr"] * factor} for factor in rates]
        skipped = [] if case.overflow is None else [case.overflow]
        assert result["skipped"] == skipped
        assert result["untouched"] == skipped, "a skipped step moves no parameter, no h, no state and no counter"

    if variant not in ELEMENTWISE:  # with replicas, each of them once
        times = 2 if case.engine == "hsdp" else 1
        assert sum(r["orthogonalised"] for r in results) == times * updates * nets.MATRICES, "not shared out"

    result = results[0]
    gradients = result["gradients"]
    assert len(gradients) == updates and all(g.keys() == result["start"].keys() for g in gradients)
    assert all(g.isfinite().all() for one in gradients for g in one.values())
    if case.clip:
        norms = [norm(one) for one in gradients]
        assert max(norms) < case.clip * (1 + 1e-5) and max(norms) > case.clip * (1 - 1e-3), "the clip was never active"
    model = reference(result["start"], case)
    for step, one in enumerate(gradients):
        model.step(one, lr=LR["lr"] * rate(step) if case.schedule else None)
    assert furthest(model.params, result["end"]) < (2e-6 if variant in ELEMENTWISE else 5e-6)
    if case.mixed == "no":
        assert furthest(end_to_end(case), result["end"]) < (5e-6 if case.accumulation == 1 else 2e-5)
    moved = min((result["end"][n] - result["start"][n]).abs().max().item() for n in result["start"])
    assert moved > 1e-3, "a tensor did not move: the comparison would prove nothing"


WHOLE = 333  # elements of the net
LINEAR = 3  # nn.Linear modules: one FSDP unit each


def check_engine(result: dict[str, Any], case: Case, ranks: int) -> None:
    kind = case.engine
    ran = (result["type"], result["is_fsdp2"], result["model"])
    if kind == "ddp":
        assert ran == ("MULTI_CPU", False, "DistributedDataParallel")
        assert (result["wrapper"], result["engines"]) == ("MARS", {"whole tensors"})
    elif kind.startswith("fsdp1"):
        assert ran == ("FSDP", False, "FullyShardedDataParallel")
        assert (result["wrapper"], result["engines"]) == ("MARS", {"FSDP1"})
        assert result["units"] == LINEAR + 1 and result["local_numel"] < WHOLE
    elif kind in ("fsdp2", "hsdp"):
        assert ran == ("FSDP", True, "FSDPNet")
        assert result["wrapper"] == "MARS" and all("Shard(dim=0)" in e for e in result["engines"]), result["engines"]
        assert result["units"] >= LINEAR + 1 and result["local_numel"] < WHOLE
        ids = list(range(ranks))
        assert result["meshes"] == [str(ids) if kind == "fsdp2" else str([ids[: ranks // 2], ids[ranks // 2 :]])]
        computed_in = {"no": None, "bf16": torch.bfloat16}[case.mixed]
        assert result["policies"] == [f"{computed_in} torch.float32 None"]
        freed = [r for r in result["reshards"] if r != "NoneType"]  # after the forward pass
        each = "FSDPMeshInfo" if kind == "fsdp2" else "HSDPMeshInfo"
        # Accelerate 1.13 frees the root unit too; later releases leave the root to torch, which keeps it.
        units = (LINEAR, LINEAR + 1) if case.plugin.get("reshard_after_forward", True) else (0,)
        assert freed in [[each] * n for n in units]
    else:
        stage = int(kind[-1])
        assert ran == ("DEEPSPEED", False, "DeepSpeedEngine") and result["stage"] == stage
        assert result["wrapper"] == {2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}[stage]
        assert result["engines"] == {{2: "ZeRO-1/2", 3: "ZeRO-3"}[stage]}
        assert result["force"] is (False if case.offload and not case.dummy else None)


CASES = [
    Case("ddp", accumulation=2, clip=0.5, schedule=True),
    Case("ddp", order="direct", params=LION),
    Case("ddp", order="apart", params=MARS_M),
    Case("fsdp2", clip=0.5, params=MARS_M),
    Case("fsdp1-original", params=SHAMPOO),
    Case("zero2", offload=True, params=SHAMPOO),
    Case("zero3", accumulation=2, params=MARS_M),
    Case("ddp", clip=0.5, schedule=True, overflow=4),
    Case("zero2", accumulation=2, clip=0.5, schedule=True),
    Case("zero2", offload=True, params=LION),
    Case("zero3", offload=True, accumulation=2),
    Case("zero3", dummy=True),
    Case("fsdp2", accumulation=2, clip=0.5, schedule=True),
    Case("fsdp2", clip=0.5, schedule=True, overflow=4),
    Case("fsdp2", mixed="bf16"),
    Case("fsdp1-original", accumulation=2, clip=0.5, schedule=True),
    Case("fsdp1-flat", order="model-first", clip=0.5, params=LION),
]
ENGINES = ("ddp", "zero2", "zero3", "fsdp2", "fsdp1-original")
VARIANTS = [
    *(Case(e, params=LION, accumulation=2) for e in ENGINES),
    *(Case(e, params=SHAMPOO) for e in ("ddp", "zero3", "fsdp2")),
    *(Case(e, params=MARS_M, schedule=True) for e in ("zero2", "fsdp1-original")),
]
SLOW = [
    Case("fsdp1-original", clip=0.5, schedule=True, overflow=4),
    *(Case("ddp", order=o) for o in ("together", "optimizer-first", "model-first")),
    *(Case("fsdp1-original", order=o, schedule=True) for o in ("apart", "direct", "optimizer-first", "model-first")),
    *(Case(f"zero{stage}", offload=True, dummy=True, clip=0.5) for stage in (2, 3)),
    Case("fsdp1-flat", order="model-first", accumulation=2, schedule=True),
    Case("fsdp1-original", plugin={"sharding_strategy": "SHARD_GRAD_OP"}),
    Case("fsdp2", plugin={"reshard_after_forward": False}, params={"weight_decay": 0.05}),
    Case("zero3", clip=0.5, schedule=True),
    Case("zero2", clip=0.5, params={"weight_decay": 0.1}),
]
HSDP = [Case("hsdp", accumulation=2, clip=0.5, schedule=True), Case("hsdp", params=LION)]
HSDP += [Case("hsdp", params=SHAMPOO), Case("hsdp", params=MARS_M, accumulation=2)]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replay_and_end_to_end(pool: RankPool, case: Case) -> None:
    check(pool.run(accelerate_cases.run, case, timeout=120), case)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("case", [*VARIANTS, *SLOW], ids=str)
def test_replay_and_end_to_end_more(pool: RankPool, case: Case) -> None:
    check(pool.run(accelerate_cases.run, case, timeout=120), case)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("case", [*CASES, *VARIANTS], ids=str)
def test_replay_and_end_to_end_on_more_ranks(larger_pool: RankPool, case: Case) -> None:
    check(larger_pool.run(accelerate_cases.run, case, timeout=120), case)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("case", HSDP, ids=str)
def test_replay_and_end_to_end_under_hsdp(four: RankPool, case: Case) -> None:
    check(four.run(accelerate_cases.run, case, timeout=120), case)


# -------------------------------------------------------------------------------- what would go wrong without a word


@pytest.mark.timeout(120)
@pytest.mark.parametrize("order", ["together", "apart", "direct", "optimizer-first"])
def test_parameters_that_fsdp1_has_replaced_are_refused(pool: RankPool, order: str) -> None:
    for said in pool.run(accelerate_cases.refused, Case("fsdp1-flat", order=order), timeout=60):
        assert "RuntimeError: MARS was constructed with 9 parameters (of 9) that FSDP1 has replaced" in said
        assert "fsdp_use_orig_params: true" in said and "prepare the model first" in said


@pytest.mark.timeout(120)
def test_without_mars_dist_accelerate_would_have_gone_on(pool: RankPool) -> None:
    """The reasons for the hook: none of the optimizer's parameters gets a gradient; DeepSpeedCPUAdam is asked for."""
    for result in pool.run(accelerate_cases.trained_without_us, Case("fsdp1-flat"), timeout=60):
        assert result == {"asked": [], "gradients": 0}
    for result in pool.run(accelerate_cases.trained_without_us, Case("zero2", offload=True), timeout=60):
        assert result["asked"] == ["MARS"]


@pytest.mark.timeout(120)
def test_a_configuration_that_insists_on_cpu_adam_is_refused(pool: RankPool) -> None:
    case = Case("zero2", offload=True, plugin={"zero_force_ds_cpu_optimizer": True})
    for said in pool.run(accelerate_cases.refused, case, timeout=60):
        assert "zero_force_ds_cpu_optimizer = True" in said and "Remove the key" in said and "DummyOptim" in said


@pytest.mark.timeout(120)
def test_an_engine_without_mars_inside_is_refused(pool: RankPool) -> None:
    for said in pool.run(accelerate_cases.swapped_by_the_engine, Case("zero2"), timeout=60):
        assert "trains with AdamW in place of the MARS that was given to prepare()" in said


@pytest.mark.timeout(120)
def test_a_missing_clip_is_named(pool: RankPool) -> None:
    case = Case("zero2", plugin={"gradient_clipping": "auto"}, steps=1)
    first, second = pool.run(accelerate_cases.run, case, timeout=60)
    assert any("gradient_clipping is no number" in m and "norm 1.0" in m for m in first["messages"])
    assert not any("gradient_clipping" in m for m in second["messages"]), "said once"


@pytest.mark.timeout(120)
def test_processes_that_would_train_alone_are_refused_and_ddp_in_place_of_fsdp_is_said(pool: RankPool) -> None:
    for kind, remedy in (("alone", "ACCELERATE_USE_CPU=true"), ("deepspeed", 'InitProcessGroupKwargs(backend="gloo")')):
        for result in pool.run(accelerate_cases.on_its_own, kind, timeout=60):
            assert result["ran"] == "" and "started 2 processes" in result["said"] and remedy in result["said"]
    first, second = pool.run(accelerate_cases.on_its_own, "fsdp", timeout=60)
    assert first["ran"] == second["ran"] == "DistributedDataParallel"
    assert any("Accelerate runs DDP on CPUs" in m for m in first["messages"])


@pytest.mark.timeout(120)
def test_a_prepared_scheduler_would_step_once_per_process(pool: RankPool) -> None:
    """Why the example and the cases above do not prepare theirs."""
    assert pool.run(accelerate_cases.lr_after_one_step, True, timeout=60) == [LR["lr"] * rate(2)] * 2
    assert pool.run(accelerate_cases.lr_after_one_step, False, timeout=60) == [LR["lr"] * rate(1)] * 2


# ------------------------------------------------------------------------------------------------------ registration

REGISTRATION = """
import sys
import mars_dist
from mars_dist.integrations import accelerate as ours

assert "accelerate" not in sys.modules and "torch" not in sys.modules, "nothing is imported by us"
from accelerate.accelerator import Accelerator
names = ("prepare", "prepare_model", "prepare_optimizer")
wrapped = [getattr(Accelerator, name) for name in names]
assert all(f.__wrapped__.__module__ == "accelerate.accelerator" for f in wrapped), wrapped
originals = [f.__wrapped__ for f in wrapped]
before = dict(vars(Accelerator))
ours.register()
ours.register()
assert [getattr(Accelerator, name) for name in names] == wrapped, "idempotent"
ours.unregister()
assert [getattr(Accelerator, name) for name in names] == originals, "the original function objects"
assert not [name for name in vars(Accelerator) if "mars" in name]
ours.unregister()
ours.register()
assert [getattr(Accelerator, name).__wrapped__ for name in names] == originals
print("registration is right")
"""


def test_registered_by_the_import_lazily_once_and_reversibly(tmp_path: Path) -> None:
    done = run_python("-c", REGISTRATION, folder=tmp_path)
    assert done.returncode == 0 and "registration is right" in done.stdout, done.stdout


def test_another_accelerate_is_named_with_the_tested_releases(caplog: pytest.LogCaptureFixture) -> None:
    other = types.SimpleNamespace(Accelerator=type("Accelerator", (), {"prepare": lambda self: None}))
    methods = dict(vars(other.Accelerator))
    with caplog.at_level(logging.WARNING, "mars_dist"):
        integration._watch(other)  # type: ignore[arg-type]
    assert dict(vars(other.Accelerator)) == methods
    (said,) = caplog.messages
    assert "has no Accelerator.prepare_model and no Accelerator.prepare_optimizer" in said and "1.15.0" in said
    assert "optimizer.attach(model)" in said
    with pytest.raises(RuntimeError, match=r"_models.*tested with Accelerate.*1\.15\.0"):
        integration._lists(types.SimpleNamespace())
