"""Rows of DDP and FSDP1."""

from __future__ import annotations

from typing import Any

from tests.engine_cases import EngineCase
from tests.engine_more_cases import outcome
from tests.engines.row import EVERY, Row

DDP = "`DistributedDataParallel` (DDP)"
FSDP1 = "`FullyShardedDataParallel` (FSDP1): call `optimizer.attach(model)`"
WHOLE = ("whole tensors",)
SHARDED = ("FSDP1",)
LION = {"mars_type": "mars-lion"}
MATRIX = tuple({"mars_type": variant, "ns_dtype": "float32"} for variant in EVERY[2:])


def every(engine: str, *options: dict[str, Any], net: str = "net", **more: Any) -> tuple[EngineCase, ...]:
    """All variants with each of ``options``."""
    return tuple(EngineCase(engine, o, net, params=p, **more) for o in options for p in ({}, LION, *MATRIX))


def flat_and_original(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return options, {**options, "original": False}


def fsdp1(feature: str, cases: tuple[EngineCase, ...], *active: tuple[str, Any], **more: Any) -> Row:
    kind = ("type", "FullyShardedDataParallel")
    return Row(FSDP1, feature, cases=cases, engines=SHARDED, active=(kind, *active), **more)


DATA_PARALLEL: list[Row] = [
    Row(
        DDP,
        "also `gradient_as_bucket_view`, `static_graph`, `find_unused_parameters`, gradients zeroed in place",
        variants=EVERY,
        shown_by="tests/test_ddp.py::test_replay",
    ),
    Row(
        DDP,
        "matrix variants after `optimizer.attach(model)`: each matrix is orthogonalised by one rank",
        cases=(
            *every("ddp", {})[2:],
            *every("ddp", {"find_unused_parameters": True}, net="tied")[2:],
            *(EngineCase("ddp", {}, "kernels", params={"matrix_ndim": (2, 3), **p}) for p in MATRIX),
        ),
        collectives=0,
        engines=WHOLE,
        active=(("type", "DistributedDataParallel"),),
        variants=EVERY[2:],
        note="run with experts and tied embeddings; Accelerate and the Trainer call `attach`",
    ),
    Row(
        DDP,
        "matrix variants without it: every rank orthogonalises all",
        cases=every("ddp", {}, attach=False)[2:],
        collectives=0,
        engines=WHOLE,
        active=(("type", "DistributedDataParallel"),),
        variants=EVERY[2:],
    ),
    Row(
        DDP,
        "exact mode",
        shown_by="tests/test_exact_engines.py::test_replay",
        ranks=(2,),
        note="by `mars_dist.exact.ExactMode`",
    ),
    Row(
        DDP,
        "`torch.compile`d model",
        cases=every("ddp", {"compile": True}),
        collectives=0,
        engines=WHOLE,
        active=(("type", "DistributedDataParallel"), ("compiled", True)),
        note="run with the backend `aot_eager`",
    ),
    fsdp1(
        "`FULL_SHARD`, flat or original parameters",
        every("fsdp1", *flat_and_original()),
        ("strategies", {"FULL_SHARD"}),
        ("units", 1),
    ),
    fsdp1(
        "layers wrapped one by one",
        every("fsdp1", *flat_and_original(nested=True)),
        ("units", 5),
    ),
    fsdp1(
        "`SHARD_GRAD_OP`",
        every("fsdp1", *flat_and_original(strategy="SHARD_GRAD_OP")),
        ("strategies", {"SHARD_GRAD_OP"}),
    ),
    fsdp1(
        "`HYBRID_SHARD`",
        every("fsdp1", {"strategy": "HYBRID_SHARD", "nested": True})[2:]
        + every("fsdp1", *flat_and_original(strategy="HYBRID_SHARD")),
        ("strategies", {"HYBRID_SHARD"}),
        ranks=(4,),
    ),
    fsdp1(
        "`NO_SHARD`",
        every("fsdp1", *flat_and_original(strategy="NO_SHARD")),
        ("strategies", {"NO_SHARD"}),
        collectives=0,
    ),
    fsdp1(
        "matrix variants in rounds",
        tuple(
            EngineCase("fsdp1", o, params={**p, "matrix_buffer_mb": 1e-5})
            for o in flat_and_original(nested=True)
            for p in MATRIX
        ),
        in_rounds=True,
        variants=EVERY[2:],
        note="by `matrix_buffer_mb`",
    ),
    Row(
        FSDP1,
        "exact mode, also `HYBRID_SHARD`",
        shown_by="tests/test_exact_engines.py::test_replay",
        ranks=(2, 4),
        note="by `mars_dist.exact.ExactMode`",
    ),
    fsdp1(
        "`MixedPrecision` (bfloat16)",
        every("fsdp1", *flat_and_original(bf16=True)),
        same_as_one_process=False,
    ),
    fsdp1(
        "activation checkpointing",
        every("fsdp1", *flat_and_original(checkpoint=True, nested=True)),
        ("checkpointed", 3),
    ),
    fsdp1(
        "tied embeddings",
        every("fsdp1", *flat_and_original(), net="tied"),
        note="in one unit",
    ),
    fsdp1(
        "frozen parameters (LoRA)",
        every("fsdp1", {}, net="lora"),
        note="original parameters",
    ),
    fsdp1(
        "ranks without a piece",
        every("fsdp1", *flat_and_original(), net="single"),
    ),
    fsdp1(
        "convolutions, experts",
        tuple(
            EngineCase("fsdp1", o, "kernels", params={"matrix_ndim": (2, 3, 4), **p})
            for o in flat_and_original(nested=True)
            for p in ({}, LION, *MATRIX)
        ),
        note="by `matrix_ndim=(2, 3, 4)`; the clip is per tensor; matrix variants treat experts one by one",
    ),
    fsdp1(
        "optimizer built before wrapping, original parameters",
        every("fsdp1", {}, {"nested": True}, built="before"),
        note="`attach` after wrapping",
    ),
    fsdp1(
        "optimizer built before wrapping, flat parameters",
        every(
            "fsdp1",
            {"original": False},
            {"original": False, "nested": True},
            built="before",
        ),
        answer="refused",
        message="after wrapping, from the wrapped model's",
        function=outcome,
        note="build it after wrapping",
    ),
    fsdp1(
        "without `attach`",
        every("fsdp1", *flat_and_original(), attach=False)
        + every("fsdp1", *flat_and_original(), net="single", attach=False),
        answer="refused",
        message="optimizer.attach(model)",
        function=outcome,
    ),
    Row(
        FSDP1,
        "`CPUOffload`",
        variants=(),
        answer="untested",
        ranks=(),
        note="needs an accelerator: torch pins memory",
    ),
]
