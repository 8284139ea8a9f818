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


def both(engine: str, *options: dict[str, Any], net: str = "net", **more: Any) -> tuple[EngineCase, ...]:
    """MARS-AdamW and MARS-Lion with each of ``options``."""
    return tuple(EngineCase(engine, o, net, params=p, **more) for o in options for p in ({}, LION))


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
        "exact mode",
        shown_by="tests/test_exact_engines.py::test_replay",
        ranks=(2,),
        note="by `mars_dist.exact.ExactMode`",
    ),
    Row(
        DDP,
        "`torch.compile`d model",
        cases=both("ddp", {"compile": True}),
        collectives=0,
        engines=WHOLE,
        active=(("type", "DistributedDataParallel"), ("compiled", True)),
        note="run with the backend `aot_eager`",
    ),
    fsdp1(
        "`FULL_SHARD`, flat or original parameters",
        both("fsdp1", *flat_and_original()),
        ("strategies", {"FULL_SHARD"}),
        ("units", 1),
    ),
    fsdp1(
        "layers wrapped one by one",
        both("fsdp1", *flat_and_original(nested=True)),
        ("units", 5),
    ),
    fsdp1(
        "`SHARD_GRAD_OP`",
        both("fsdp1", *flat_and_original(strategy="SHARD_GRAD_OP")),
        ("strategies", {"SHARD_GRAD_OP"}),
    ),
    fsdp1(
        "`HYBRID_SHARD`",
        both("fsdp1", *flat_and_original(strategy="HYBRID_SHARD")),
        ("strategies", {"HYBRID_SHARD"}),
        ranks=(4,),
    ),
    fsdp1(
        "`NO_SHARD`",
        both("fsdp1", *flat_and_original(strategy="NO_SHARD")),
        ("strategies", {"NO_SHARD"}),
        collectives=0,
    ),
    fsdp1(
        "`NO_SHARD`, matrix variants",
        tuple(EngineCase("fsdp1", o, params=p) for o in flat_and_original(strategy="NO_SHARD") for p in MATRIX),
        ("strategies", {"NO_SHARD"}),
        collectives=0,
        variants=EVERY[2:],
    ),
    fsdp1(
        "matrix variants on sharded parameters",
        (
            *(EngineCase("fsdp1", o, params=p) for o in flat_and_original() for p in MATRIX),
            *(EngineCase("fsdp1", {"strategy": "HYBRID_SHARD"}, params=p) for p in MATRIX),
        ),
        ranks=(4,),
        variants=EVERY[2:],
        answer="refused",
        message="needs whole matrices, and FSDP1 spreads",
        function=outcome,
    ),
    Row(
        FSDP1,
        "exact mode",
        shown_by="tests/test_exact_engines.py::test_replay",
        ranks=(2,),
        note="by `mars_dist.exact.ExactMode`",
    ),
    fsdp1(
        "`MixedPrecision` (bfloat16)",
        both("fsdp1", *flat_and_original(bf16=True)),
        same_as_one_process=False,
    ),
    fsdp1(
        "activation checkpointing",
        both("fsdp1", *flat_and_original(checkpoint=True, nested=True)),
        ("checkpointed", 3),
    ),
    fsdp1(
        "tied embeddings",
        both("fsdp1", *flat_and_original(), net="tied"),
        note="in one unit",
    ),
    fsdp1(
        "frozen parameters (LoRA)",
        both("fsdp1", {}, net="lora"),
        note="original parameters",
    ),
    fsdp1(
        "ranks without a piece",
        both("fsdp1", *flat_and_original(), net="single"),
    ),
    fsdp1(
        "convolutions, experts",
        tuple(
            EngineCase("fsdp1", o, "kernels", params={"matrix_ndim": (2, 3, 4), **p})
            for o in flat_and_original(nested=True)
            for p in ({}, LION)
        ),
        note="by `matrix_ndim=(2, 3, 4)`; the clip is per tensor",
    ),
    fsdp1(
        "optimizer built before wrapping, original parameters",
        both("fsdp1", {}, {"nested": True}, built="before"),
        note="`attach` after wrapping",
    ),
    fsdp1(
        "optimizer built before wrapping, flat parameters",
        both(
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
        both("fsdp1", *flat_and_original(), attach=False)
        + both("fsdp1", *flat_and_original(), net="single", attach=False),
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
