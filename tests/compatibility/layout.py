"""How the parameters are laid out in the flats, and when they are fetched and reduced."""

from collections.abc import Callable
from typing import Any

from tests.compatibility.offload_training import (
    continue_from_checkpoint,
    train,
    train_born_partitioned,
    train_with_torchs_linear,
)
from tests.compatibility.row import BASE, Row
from tests.zero_cases import ZeroCase

ZERO = "zero_optimization"


def row(
    feature: str,
    keys: str | tuple[str, ...],
    stages: tuple[int, ...],
    zero: dict[str, Any],
    active: str,
    function: Callable[..., dict[str, Any]] = train,
    **fields: Any,
) -> Row:
    """A row whose cases, one for each stage, have two groups that mix matrices and vectors."""
    names = (keys,) if isinstance(keys, str) else keys
    extra = fields.pop("extra", {})
    case = {"params": BASE, "zero": zero, "construct": "groups", "extra": extra, **fields.pop("case", {})}
    cases = tuple(ZeroCase(stage, **case) for stage in stages)
    dotted = tuple(f"{ZERO}.{name}" if name in zero else name for name in names)
    return Row("Layout", feature, dotted, cases, active, function, **fields)


FETCH = {"stage3_max_live_parameters": 80, "stage3_max_reuse_distance": 10, "stage3_prefetch_bucket_size": 20}

LAYOUT = [
    Row(
        "Layout",
        "ZeRO stages, `gradient_clipping`",
        (f"{ZERO}.stage", "gradient_clipping"),
        tuple(ZeroCase(s, d, params={**BASE, "clip": 0.01}, clip=0.1) for s in (0, 1, 2, 3) for d in ("fp32", "bf16")),
    ),
    row("`round_robin_gradients`", "round_robin_gradients", (1, 2), {"round_robin_gradients": True}, "round_robin"),
    row("several groups, one of them empty", (), (1, 2, 3), {}, "two groups"),
    row("small `sub_group_size`", "sub_group_size", (3,), {"sub_group_size": 30}, "sub-groups"),
    row("`deepspeed.zero.Init`", (), (3,), {"sub_group_size": 30}, "sub-groups", train_born_partitioned),
    row(
        "`stage3_param_persistence_threshold: 0`",
        "stage3_param_persistence_threshold",
        (3,),
        {"stage3_param_persistence_threshold": 0},
        "nothing persists",
    ),
    row(
        "`stage3_param_persistence_threshold`, large",
        "stage3_param_persistence_threshold",
        (3,),
        {"stage3_param_persistence_threshold": 10**9},
        "all persist",
    ),
    row(
        "`stage3_model_persistence_threshold`",
        "stage3_model_persistence_threshold",
        (3,),
        {"stage3_model_persistence_threshold": 60},
        "some persist",
    ),
    row(
        "`stage3_max_live_parameters`, `stage3_max_reuse_distance`, `stage3_prefetch_bucket_size`",
        tuple(FETCH),
        (3,),
        {**FETCH, "stage3_param_persistence_threshold": 0},
        "fetched late",
    ),
    row(
        "`stage3_module_granularity_threshold`",
        "stage3_module_granularity_threshold",
        (3,),
        {"stage3_module_granularity_threshold": 40, "stage3_param_persistence_threshold": 0},
        "leaf",
        case={"net": "nested", "construct": "json"},
    ),
    row(
        "`leaf_module`",
        "leaf_module",
        (3,),
        {"leaf_module": {"classes": ["torch.nn.modules.normalization.LayerNorm"]}},
        "leaf",
    ),
    row(
        "`memory_efficient_linear`",
        "memory_efficient_linear",
        (3,),
        {"memory_efficient_linear": True},
        "memory-efficient linear",
    ),
    row(
        "`memory_efficient_linear: false`",
        "memory_efficient_linear",
        (3,),
        {"memory_efficient_linear": False},
        "torch's linear",
        train_with_torchs_linear,
    ),
    row(
        "`override_module_apply: false`",
        "override_module_apply",
        (3,),
        {"override_module_apply": False},
        "apply as it was",
        train_born_partitioned,
    ),
    row(
        "`contiguous_gradients: false`",
        "contiguous_gradients",
        (1, 2, 3),
        {"contiguous_gradients": False},
        "gradients apart",
    ),
    row(
        "`ignore_unused_parameters: false`",
        "ignore_unused_parameters",
        (2,),
        {"ignore_unused_parameters": False},
        "unused are errors",
    ),
    row("`parameter_alignment`", "parameter_alignment", (1, 2), {"parameter_alignment": True}, "aligned"),
    row("`compute_grad_norm: false`", "compute_grad_norm", (1, 2), {"compute_grad_norm": False}, "no gradient norm"),
    row(
        "`gradient_accumulation_steps`",
        "gradient_accumulation_steps",
        (1, 2, 3),
        {},
        "accumulates",
        case={"accumulation": 2, "steps": 20},
    ),
    row(
        "`managed_gradient_accumulation: false`",
        "managed_gradient_accumulation",
        (1, 2, 3),
        {},
        "unmanaged",
        extra={"managed_gradient_accumulation": False},
        case={"accumulation": 2},
        note="Every `engine.step()` is then a step.",
    ),
    row(
        "`elastic_checkpoint`",
        "elastic_checkpoint",
        (1, 2),
        {"elastic_checkpoint": True},
        "",
        answer="refused",
        message=r"zero_optimization\.elastic_checkpoint",
        note="DeepSpeed could not load what it saves then.",
    ),
    row(
        "`load_from_fp32_weights: false`",
        "load_from_fp32_weights",
        (1, 2, 3),
        {"load_from_fp32_weights": False},
        "16-bit weights",
        continue_from_checkpoint,
        note="With bf16 at stages 1 and 2 loading rounds the master weights to 16 bits.",
    ),
    row(
        "`load_from_fp32_weights: false` in bf16",
        "load_from_fp32_weights",
        (1, 2),
        {"load_from_fp32_weights": False},
        "16-bit weights",
        case={"dtype": "bf16"},
        answer="warns",
        message="rounds the master weights",
        note="Loading a checkpoint rounds the master weights to 16 bits.",
    ),
    row(
        "`legacy_stage1`",
        "legacy_stage1",
        (1,),
        {"legacy_stage1": True},
        "",
        answer="refused",
        message=r"Error: MARS: zero_optimization\.legacy_stage1 = True",
        note="DeepSpeed itself no longer has it.",
    ),
]
