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
    is_on: Callable[[Any, Config], bool] = lambda value, config: bool(value)


def lookup(config: Config, key: str, default: Any = None) -> Any:
    """The value of a dotted key; ``default`` where the file does not give it, gives null or leaves it to "auto"."""
    found: Any = config
    for part in key.split("."):
        if not isinstance(found, Mapping):
            return default
        found = found.get(part)
    return default if found is None or found == "auto" else found


def stage_of(config: Config) -> int:
    """The ZeRO stage that the configuration asks for; 0 without any."""
    if config.get("zero_optimization") is True:  # an old form that DeepSpeed still reads
        return 1
    stage = lookup(config, "zero_optimization.stage", 0)
    return stage if isinstance(stage, int) else 0


ZERO = "zero_optimization"
OFFLOAD = f"{ZERO}.offload_optimizer"
NOT_MARS = "DeepSpeed would update weights with an optimizer of its own and not call MARS for them. "

REFUSED: tuple[Feature, ...] = (
    Feature(f"{OFFLOAD}.super_offload", NOT_MARS + 'Remove it; plain "offload_optimizer" works.'),
    Feature(
        f"{ZERO}.zenflow",
        NOT_MARS + 'Remove it; plain "offload_optimizer" works.',
        lambda value, config: value is not None,
    ),
    Feature(
        f"{OFFLOAD}.ratio",
        NOT_MARS + "Remove it or set it to 1.0: all of the optimizer is then offloaded.",
        lambda value, config: isinstance(value, (int, float)) and value < 1.0,
    ),
    Feature(
        "fp16.enabled",
        "without ZeRO: DeepSpeed divides the gradients by a loss scale that it has not applied to the loss, so that "
        'they reach MARS thousands of times too small and are never clipped. Use "bf16", or ZeRO stage 1.',
        lambda value, config: bool(value) and stage_of(config) == 0,
    ),
    Feature(
        "tensor_parallel.autotp_size",
        "it hands over slices of matrices as if they were whole, and MARS would clip by the norm of a slice. Remove "
        '"tensor_parallel" and shard with ZeRO stage 3.',
        lambda value, config: isinstance(value, int) and value > 1,
    ),
)

WARNED: tuple[Feature, ...] = (
    Feature(
        "fp16.enabled",
        "with a dynamic loss scale: on a step where the scale grows DeepSpeed divides the gradients by the new scale, "
        'which halves them; the correction of MARS sees that twice. Prefer "bf16", or set "fp16.loss_scale".',
        lambda value, config: bool(value) and not lookup(config, "fp16.loss_scale", 0) and stage_of(config) > 0,
    ),
    Feature(f"{ZERO}.zero_quantized_weights", "its CUDA kernels were not run in the tests of mars_dist."),
    Feature(f"{ZERO}.zero_quantized_gradients", "its CUDA kernels were not run in the tests of mars_dist."),
    Feature(f"{ZERO}.zero_quantized_nontrainable_weights", "its CUDA kernels were not run in the tests of mars_dist."),
    Feature("compile.deepcompile", "it needs a GPU and was not run in the tests of mars_dist."),
    Feature("hybrid_engine.enabled", "it was not run in the tests of mars_dist."),
    Feature(
        "expert_parallel",
        "(AutoEP) it was not run in the tests of mars_dist.",
        lambda value, config: isinstance(value, Mapping) and bool(value.get("enabled", True)),
    ),
)

# Keys that rows of tests/compatibility turn on; a test holds the two equal.
TESTED: frozenset[str] = frozenset(
    {
        "bf16.enabled",
        "gradient_accumulation_steps",
        "gradient_clipping",
        f"{OFFLOAD}.buffer_count",
        f"{OFFLOAD}.device",
        f"{OFFLOAD}.nvme_path",
        f"{ZERO}.reduce_bucket_size",
        f"{ZERO}.round_robin_gradients",
        f"{ZERO}.stage",
    }
)

# Keys and whole sections that change neither what reaches the optimizer nor what becomes of its result: batch sizes,
# data, logging, files. The optimizer and scheduler blocks are the checker's.
NEUTRAL: frozenset[str] = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "autotuning",
        "checkpoint",
        "comms_logger",
        "csv_monitor",
        "comet",
        "data_efficiency",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_python_gc",
        "dump_state",
        "elasticity",
        "flops_profiler",
        "log_level",
        "memory_breakdown",
        "optimizer.params",
        "optimizer.type",
        "scheduler",
        "steps_per_print",
        "tensorboard",
        "timers",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "zero_allow_untested_optimizer",
        f"{ZERO}.enable_sanity_checks",
        f"{ZERO}.log_trace_cache_warnings",
        f"{ZERO}.pipeline_loading_checkpoint",
        f"{ZERO}.save_muon_momentum_buffer_in_memory",
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        f"{ZERO}.stage3_gather_fp16_weights_on_model_save",
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
            key = prefix + str(name)
            if key in known or value is None or value is False or value == "auto":
                continue
            if isinstance(value, Mapping):
                yield from visit(value, key + ".")
            else:
                yield key

    return visit(config, "")
