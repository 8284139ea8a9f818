"""What a ds_config.json may ask for beside the optimizer, and MARS's answer to each key: one table.

Three answers: it works (tests/compatibility/ shows it by numbers, or the key has nothing to do with the update), it is
refused, or it works as far as is known and is warned about. The guard asks this table when ``deepspeed.initialize``
takes a MARS, the checker when it reads a file. A key that is in none of the lists is warned about as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Feature:
    """A key of the configuration with an answer that the user must hear.

    Attributes:
        key: dotted, as it is written in the file.
        reason: what happens with it, and what to do instead: sentences for people.
        is_on: whether the value that the file gives (None where it gives none) turns it on in that configuration.
    """

    key: str
    reason: str
    is_on: Callable[[Any, Config], bool] = lambda value, config: truth(value)


def as_given(config: Config, key: str) -> str:
    """The value of a dotted key as a message shows it."""
    value = lookup(config, key)
    return "is not given" if value is None else f"= {value!r}"


def lookup(config: Config, key: str, default: Any = None) -> Any:
    """The value of a dotted key; ``default`` where the file does not give it, gives null or leaves it to "auto"."""
    found: Any = config
    if key.startswith("bf16.") and "bf16" not in config:
        key = OLD_BF16 + key.removeprefix("bf16")
    for part in key.split("."):
        if not isinstance(found, Mapping):
            return default
        found = found.get(part)
    return default if found is None or found == "auto" else found


def truth(value: Any) -> bool:
    """A value as DeepSpeed reads it where it wants a boolean: strings too."""
    if isinstance(value, str):
        return value.lower() not in ("false", "f", "no", "n", "off", "0", "")
    return bool(value)


def number(value: Any, default: float) -> float:
    """A value as DeepSpeed reads it where it wants a number: strings too; ``default`` for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return default


def stage_of(config: Config) -> int:
    """The ZeRO stage that the configuration asks for; 0 without any, and where DeepSpeed refuses it."""
    if config.get("zero_optimization") is True:  # an old form that DeepSpeed still reads
        return 1
    stage = number(lookup(config, "zero_optimization.stage"), 0)
    return int(stage) if 0 <= stage <= 3 else 0


OLD_BF16 = "bfloat16"  # an old name of the section, which DeepSpeed still reads
ZERO = "zero_optimization"
OFFLOAD = f"{ZERO}.offload_optimizer"
PARAM = f"{ZERO}.offload_param"
NOT_MARS = "DeepSpeed would update weights with an optimizer of its own and not call MARS for them. "

REFUSED: tuple[Feature, ...] = (
    Feature(
        f"{OFFLOAD}.super_offload",
        NOT_MARS + 'Remove it; plain "offload_optimizer" works.',
        lambda value, config: truth(value) and stage_of(config) == 3,  # below, DeepSpeed does not look at it
    ),
    Feature(
        f"{ZERO}.zenflow",
        NOT_MARS + 'Remove it; plain "offload_optimizer" works.',
        lambda value, config: value is not None,
    ),
    Feature(
        f"{OFFLOAD}.ratio",
        "DeepSpeed takes it with its own CPU Adam only. Remove it or set it to 1.0: the whole optimizer is offloaded.",
        lambda value, config: number(value, 1.0) < 1.0,
    ),
    Feature(
        "fp16.enabled",
        "without ZeRO: DeepSpeed divides the gradients by a loss scale that it has not applied to the loss, so that "
        'they reach MARS thousands of times too small and are never clipped. Use "bf16", or ZeRO stage 1.',
        lambda value, config: truth(value) and stage_of(config) == 0,
    ),
    Feature(
        "fp16.fp16_master_weights_and_grads",
        "DeepSpeed takes it with its own CPU Adam only. Remove it: MARS steps float32 masters.",
    ),
    Feature(
        "bf16.bf16_master_weights_and_grads",
        "without bf16_optimizer_states, or with offload_optimizer, DeepSpeed takes it with its own CPU Adam only. "
        "Remove it: MARS steps float32 masters.",
        lambda value, config: (
            truth(value)
            and (
                not lookup(config, "bf16.bf16_optimizer_states")
                or lookup(config, f"{OFFLOAD}.device", "none") != "none"
            )
        ),
    ),
    Feature(
        "torch_autocast.dtype",
        "in float16 with ZeRO: DeepSpeed clips the gradients before it takes the loss scale away (they reach MARS "
        "65536 times too small), takes another scale from the second parameter group on a step where the scale grows, "
        'and does not lower the scale after an overflow. Use "bfloat16", or the "fp16" section with a "loss_scale".',
        lambda value, config: (
            truth(lookup(config, "torch_autocast.enabled"))
            and str(value).removeprefix("torch.") in ("float16", "fp16", "half")
            and stage_of(config) > 0
        ),
    ),
    Feature(
        f"{ZERO}.elastic_checkpoint",
        "at stages 1 and 2 DeepSpeed writes checkpoints that it cannot load again. Remove it.",
        lambda value, config: truth(value) and stage_of(config) in (1, 2),
    ),
    Feature(
        "checkpoint.load_universal",
        "without ZeRO: DeepSpeed would not load the weights. Remove it: at stage 0 an ordinary checkpoint loads on any "
        "number of ranks.",
        lambda value, config: truth(value) and stage_of(config) == 0,
    ),
    Feature(f"{ZERO}.legacy_stage1", "DeepSpeed has it no more. Remove it: stage 1 itself works."),
    Feature(
        "tensor_parallel.autotp_size",
        "it hands over slices of matrices as if they were whole, and MARS would clip by the norm of a slice. Remove "
        '"tensor_parallel" and shard with ZeRO stage 3.',
        lambda value, config: number(value, 0) > 1,
    ),
)

WARNED: tuple[Feature, ...] = (
    Feature(
        "fp16.enabled",
        "with a dynamic loss scale: on a step where the scale grows DeepSpeed divides the gradients by the new scale, "
        'which halves them; the correction of MARS sees that twice. Prefer "bf16", or set "fp16.loss_scale".',
        lambda value, config: truth(value) and not lookup(config, "fp16.loss_scale", 0) and stage_of(config) > 0,
    ),
    Feature(
        "torch_autocast.enabled",
        'without a "dtype": on a GPU torch then takes float16, without a loss scale. Say "dtype": "bfloat16".',
        lambda value, config: truth(value) and lookup(config, "torch_autocast.dtype") is None,
    ),
    Feature(
        "data_types.grad_accum_dtype",
        "MARS was tested with bf16 and fp32 here.",
        lambda value, config: value == "fp16",
    ),
    Feature(
        "bf16.check_grad_overflow",
        "at stages 1 and 2 one NaN or inf then reaches every weight. Remove it, or set "
        '"skip_nonfinite": true in the optimizer\'s "params".',
        lambda value, config: (
            value is not None
            and not truth(value)
            and stage_of(config) in (1, 2)
            and not lookup(config, "optimizer.params.skip_nonfinite")
            # DeepSpeed's BF16_Optimizer checks all the same.
            and (stage_of(config), lookup(config, "data_types.grad_accum_dtype")) != (1, "fp32")
        ),
    ),
    Feature(
        "bf16.bf16_optimizer_states",
        "MARS keeps exp_avg and exp_avg_sq in float32; masters and prev_grad are in bfloat16.",
    ),
    Feature(
        "scheduler.params.cycle_momentum",
        "this scheduler moves betas unless told otherwise (OneCycle: to (0.8 to 0.9, 0.99)), and with beta1 the "
        "strength of the gradient correction. Set it to false to keep the optimizer's betas.",
        lambda value, config: (
            lookup(config, "scheduler.type") in ("OneCycle", "OneCycleLR", "CyclicLR")
            and (value is None or truth(value))
        ),
    ),
    Feature(
        f"{ZERO}.load_from_fp32_weights",
        "loading a checkpoint then rounds the master weights to bfloat16.",
        lambda value, config: value is False and lookup(config, "bf16.enabled", False) and stage_of(config) in (1, 2),
    ),
    Feature(
        f"{OFFLOAD}.device",
        "below ZeRO stage 3 DeepSpeed keeps the optimizer in the host's memory, nothing goes to disk.",
        lambda value, config: value == "nvme" and stage_of(config) < 3,
    ),
    Feature(
        f"{OFFLOAD}.device",
        "DeepSpeed cannot restore the optimizer from a checkpoint then: a run that stops cannot be resumed.",
        lambda value, config: value == "nvme" and stage_of(config) == 3,
    ),
    Feature(f"{ZERO}.zero_quantized_weights", "its CUDA kernels were not run in the tests of mars_dist."),
    Feature(f"{ZERO}.zero_quantized_gradients", "its CUDA kernels were not run in the tests of mars_dist."),
    Feature("compile.deepcompile", "it needs a GPU and was not run in the tests of mars_dist."),
    Feature("hybrid_engine.enabled", "it was not run in the tests of mars_dist."),
    Feature(
        "expert_parallel",
        "the experts of a layer become one tensor with three dimensions, which takes plain AdamW by default.",
        lambda value, config: isinstance(value, Mapping) and lookup(config, "expert_parallel.autoep_size", 1) > 1,
    ),
)

# Keys that rows of tests/compatibility turn on; a test holds the two equal.
TESTED: frozenset[str] = frozenset(
    {
        "activation_checkpointing.cpu_checkpointing",
        "activation_checkpointing.partition_activations",
        "aio.block_size",
        "aio.overlap_events",
        "aio.queue_depth",
        "aio.single_submit",
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
        "bf16.check_grad_overflow",
        "bf16.enabled",
        "bf16.immediate_grad_update",
        "checkpoint.load_universal",
        "communication_data_type",
        "data_parallel_size",
        "data_types.buffer_dtype",
        "data_types.grad_accum_dtype",
        "data_types.keep_in_fp32_modules",
        "data_types.param_dtype",
        "expert_parallel",
        "fp16.auto_cast",
        "fp16.consecutive_hysteresis",
        "fp16.enabled",
        "fp16.hysteresis",
        "fp16.initial_scale_power",
        "fp16.loss_scale",
        "fp16.loss_scale_window",
        "fp16.min_loss_scale",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "gradient_allreduce_op",
        "gradient_predivide_factor",
        "managed_gradient_accumulation",
        "optimizer.legacy_fusion",
        "prescale_gradients",
        "scheduler.params",
        "scheduler.type",
        "scheduler.params.cycle_momentum",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "torch_autocast.dtype",
        "torch_autocast.enabled",
        "torch_autocast.lower_precision_safe_modules",
        "use_data_before_expert_parallelism",
        "zero_force_ds_cpu_optimizer",
        f"{ZERO}.allgather_bucket_size",
        f"{ZERO}.compute_grad_norm",
        f"{ZERO}.contiguous_gradients",
        f"{ZERO}.cpu_offload",
        f"{ZERO}.cpu_offload_param",
        f"{ZERO}.cpu_offload_use_pin_memory",
        f"{ZERO}.ignore_unused_parameters",
        f"{ZERO}.leaf_module",
        f"{ZERO}.load_from_fp32_weights",
        f"{ZERO}.memory_efficient_linear",
        f"{OFFLOAD}.buffer_count",
        f"{OFFLOAD}.device",
        f"{OFFLOAD}.fast_init",
        f"{OFFLOAD}.nvme_path",
        f"{OFFLOAD}.pin_memory",
        f"{OFFLOAD}.pipeline_read",
        f"{OFFLOAD}.pipeline_write",
        f"{PARAM}.buffer_count",
        f"{PARAM}.buffer_size",
        f"{PARAM}.device",
        f"{PARAM}.max_in_cpu",
        f"{PARAM}.nvme_path",
        f"{PARAM}.pin_memory",
        f"{ZERO}.overlap_comm",
        f"{ZERO}.override_module_apply",
        f"{ZERO}.parameter_alignment",
        f"{ZERO}.reduce_bucket_size",
        f"{ZERO}.reduce_scatter",
        f"{ZERO}.round_robin_gradients",
        f"{ZERO}.stage3_allgather_sequential",
        f"{ZERO}.stage3_max_live_parameters",
        f"{ZERO}.stage3_max_reuse_distance",
        f"{ZERO}.stage3_model_persistence_threshold",
        f"{ZERO}.stage3_module_granularity_threshold",
        f"{ZERO}.stage3_param_persistence_threshold",
        f"{ZERO}.stage3_prefetch_bucket_size",
        f"{ZERO}.stage3_use_all_reduce_for_fetch_params",
        f"{ZERO}.stage",
        f"{ZERO}.sub_group_size",
        f"{ZERO}.use_multi_rank_bucket_allreduce",
        f"{ZERO}.zero_hpz_partition_size",
        f"{ZERO}.zero_quantized_gradients",
        f"{ZERO}.zero_quantized_weights",
    }
)

# These act with compile.deepcompile alone, which is warned about (autoep_non_moe: torch.compile).
COMPILE = (
    "autoep_non_moe debug_log double_buffer free_activation free_activation_threshold keep_all_input_tensors "
    "keep_int_input_tensors offload_activation offload_activation_pin_memory offload_opt_states offload_parameters "
    "passes symmetric_memory sync_after_allgather sync_after_reduce sync_before_allgather sync_before_reduce"
).split()

ACTIVATIONS = ("contiguous_memory_optimization number_checkpoints profile synchronize_checkpoint_boundary").split()

# Keys and whole sections that change neither what reaches the optimizer nor what becomes of its result: batch sizes,
# data, logging, files. The optimizer and scheduler blocks are the checker's.
NEUTRAL: frozenset[str] = frozenset(
    {
        *(f"activation_checkpointing.{key}" for key in ACTIVATIONS),
        "aio.intra_op_parallelism",
        "aio.thread_count",
        "aio.use_gds",
        "autotuning",
        "checkpoint.checkpoint_serialization",
        "checkpoint.parallel_write",
        "checkpoint.tag_validation",
        "checkpoint.use_node_local_storage",
        "checkpoint.writer",
        *(f"compile.{key}" for key in COMPILE),
        "comms_logger",
        "csv_monitor",
        "comet",
        "data_efficiency",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "elasticity",
        "flops_profiler",
        "log_level",
        "memory_breakdown",
        "optimizer.params",
        "optimizer.type",
        "steps_per_print",
        "tensorboard",
        "timers",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "zero_allow_untested_optimizer",
        f"{OFFLOAD}.cpuadam_cores_perc",
        f"{ZERO}.allgather_partitions",
        f"{ZERO}.enable_sanity_checks",
        f"{ZERO}.log_trace_cache_warnings",
        f"{ZERO}.pipeline_loading_checkpoint",
        f"{ZERO}.save_muon_momentum_buffer_in_memory",
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        f"{ZERO}.stage3_gather_fp16_weights_on_model_save",
        f"{ZERO}.zero_quantized_nontrainable_weights",  # parallel.py refuses it where weights are frozen
    }
)


def refused(config: Config) -> Iterator[Feature]:
    """The keys of ``config`` that MARS does not train with."""
    return (feature for feature in REFUSED if feature.is_on(lookup(config, feature.key), config))


def warned(config: Config) -> Iterator[Feature]:
    """The keys of ``config`` with which MARS trains, but not without a word."""
    return (feature for feature in WARNED if feature.is_on(lookup(config, feature.key), config))


def unknown(config: Config) -> Iterator[str]:
    """The dotted keys of ``config`` that are in none of the lists above and are not turned off."""
    known = TESTED | NEUTRAL | {feature.key for feature in REFUSED + WARNED}

    def visit(section: Config, prefix: str) -> Iterator[str]:
        for name, value in section.items():
            key = prefix + ("bf16" if (prefix, name) == ("", OLD_BF16) else str(name))
            if key in known or value is None or value is False or value == "auto":
                continue
            if isinstance(value, Mapping):
                yield from visit(value, key + ".")
            else:
                yield key

    return visit(config, "")
