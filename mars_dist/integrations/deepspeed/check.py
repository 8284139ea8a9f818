"""What is wrong with a DeepSpeed configuration that names MARS, found without starting anything."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.optim.lr_scheduler

from mars_dist.config import LR_1D, Settings
from mars_dist.integrations.deepspeed import NAMES
from mars_dist.integrations.deepspeed.features import (
    OFFLOAD,
    TESTED,
    Config,
    as_given,
    lookup,
    refused,
    stage_of,
    unknown,
    warned,
)
from mars_dist.integrations.deepspeed.nvme import is_on, too_few_buffers
from mars_dist.maths.rules import rule_for
from mars_dist.optimizer import KEYWORDS, MARS
from mars_dist.states import needed

# transformers and Accelerate fill in these and no others.
MAY_BE_AUTO = ("lr", "betas", "eps", "weight_decay")
SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
MOST_RANKS = 4096  # to try when saying which numbers work
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Finding:
    """One thing to say about one key.

    Attributes:
        level: "error" (it will not start, or would not train as it says) or "warning".
        key: dotted, as in the file.
        message: what is wrong, with the value, and what to do.
    """

    level: str
    key: str
    message: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def read(path: Path) -> Config:
    """The configuration in ``path``, read as DeepSpeed reads it: JSON in which comments are allowed.

    Raises:
        ValueError: when it is not JSON, gives a key twice, or is no object; with line and column where known.
    """
    try:
        from hjson import loads  # as DeepSpeed, which brings it
    except ImportError:
        from json import loads

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"{', '.join(map(repr, twice))} is given twice in the same section: keep one")
        return dict(pairs)

    text = path.read_text(encoding="utf-8-sig")
    if not text.strip():
        raise ValueError("the file is empty")
    config = loads(text, object_pairs_hook=no_duplicates)
    if not isinstance(config, Mapping):
        raise ValueError(f"a configuration is a JSON object {{...}}, this is a {type(config).__name__}")
    return config


def check(config: Config, world_size: int | None = None) -> list[Finding]:
    """All findings, errors first.

    Args:
        config: the configuration, as read from the file or as passed to ``deepspeed.initialize``.
        world_size: the number of data-parallel ranks, where it is known: batch sizes are checked against it.
    """
    if "optimizer" in config and not _means_mars(config):
        return [*_optimizer(config), *_what_deepspeed_says(config)]
    found = [
        *_optimizer(config),
        *_schedule(config),
        *_clipping(config),
        *_batch(config, world_size),
        *_offload(config),
        *_sequence(config),
        *(Finding("error", f.key, f"{as_given(config, f.key)}: {f.reason}") for f in refused(config)),
        *(Finding("warning", f.key, f"{as_given(config, f.key)}: {f.reason}") for f in warned(config)),
        *_unknown_keys(config),
        *_what_deepspeed_says(config),
    ]
    return sorted(found, key=lambda finding: finding.level)


def _params(config: Config) -> Config:
    params = lookup(config, "optimizer.params", {})
    return params if isinstance(params, Mapping) else {}


def names_mars(config: Config) -> bool:
    return lookup(config, "optimizer.type") in NAMES


def _means_mars(config: Config) -> bool:
    return "mars" in str(lookup(config, "optimizer.type")).lower()


def _optimizer(config: Config) -> Iterator[Finding]:
    if "optimizer" not in config:
        yield Finding(
            "warning",
            "optimizer",
            "is not in the file, so it does not say MARS: the optimizer comes from the training script (or the "
            'Trainer\'s --optim). To name it here: "optimizer": {"type": "MARS", "params": {...}}.',
        )
        return
    kind = lookup(config, "optimizer.type")
    if not names_mars(config):
        meant = _means_mars(config)
        yield Finding(
            "error" if meant else "warning",
            "optimizer.type",
            f'= {kind!r}: DeepSpeed knows it as "MARS"; the variant goes into "params": {{"mars_type": "mars-adamw"}}.'
            if meant
            else f'= {kind!r}: this configuration does not train with MARS. Set it to "MARS".',
        )
        if not meant:
            return
    if not isinstance(lookup(config, "optimizer.params", {}), Mapping):
        yield Finding(
            "error", "optimizer.params", f"= {config['optimizer']['params']!r}: it must be an object {{...}}."
        )
        return
    yield from _keywords(_params(config))
    yield from _exact_mode(config)


def _keywords(params: Config) -> Iterator[Finding]:
    good: dict[str, Any] = {}
    for name, value in params.items():
        key = f"optimizer.params.{name}"
        if name == "max_grad_norm":
            yield Finding(
                "error", key, f'= {value!r}: DeepSpeed refuses it here. Write "gradient_clipping": {value!r}.'
            )
        elif name not in KEYWORDS:
            near = difflib.get_close_matches(name, KEYWORDS, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else f" It knows: {', '.join(KEYWORDS)}."
            yield Finding("error", key, f"MARS has no such parameter.{hint}")
        elif value == "auto":
            if name not in MAY_BE_AUTO:
                yield Finding(
                    "error",
                    key,
                    f'= "auto": only {", ".join(MAY_BE_AUTO)} are filled in by transformers. Give a value.',
                )
        elif message := _refusal({name: value}):
            yield Finding("error", key, f"= {value!r}: {message}")
        else:
            good[name] = value
    beta1, beta2 = good.get("betas", (0.0, 1.0))
    if beta1 > beta2:
        yield Finding(
            "warning",
            "optimizer.params.betas",
            f"= [{beta1:g}, {beta2:g}]: the first is larger than the second, and MARS corrects gradients by gamma * "
            f"beta1 / (1 - beta1) = {good.get('gamma', 0.025) * beta1 / (1 - beta1):g}. Were they swapped?",
        )
    lr = good.get("lr", 3e-3)
    if "lr_1d" not in params and 0 < 4 * lr < LR_1D:
        yield Finding(
            "warning",
            "optimizer.params.lr_1d",
            f"is not given: biases and norms take the published {LR_1D:g}, {LR_1D / lr:.3g} times lr = {lr:g}. Give "
            f'"lr_1d": {lr:g}, say.',
        )


def _refusal(keywords: Mapping[str, Any]) -> str:
    """What the constructor of MARS says against ``keywords``, or ""."""
    logger = logging.getLogger("mars_dist")
    was, logger.disabled = logger.disabled, True  # its warnings are findings of their own
    try:
        MARS([torch.zeros(1, 1, requires_grad=True)], **keywords)
    except (TypeError, ValueError) as error:
        return f"{error}."
    finally:
        logger.disabled = was
    return ""


def _exact_mode(config: Config) -> Iterator[Finding]:
    params = _params(config)
    if params.get("is_approx") is False:
        on_disk = is_on(config)
        yield Finding(
            "error" if on_disk else "warning",
            "optimizer.params.is_approx",
            "= false (exact mode) keeps a state between two passes, which does not work with optimizer states on NVMe: "
            "use offload_optimizer.device = cpu."
            if on_disk
            else "= false (exact mode) needs a second gradient for each step: iterate over mars_dist.exact.ExactMode "
            "in the training loop, or the second step raises.",
        )


def _schedule(config: Config) -> Iterator[Finding]:
    kind, params = lookup(config, "scheduler.type"), lookup(config, "scheduler.params", {})
    if kind is not None and kind not in SCHEDULES and not hasattr(torch.optim.lr_scheduler, str(kind)):
        near = difflib.get_close_matches(str(kind), SCHEDULES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        yield Finding("error", "scheduler.type", f"= {kind!r}: DeepSpeed has {', '.join(SCHEDULES)}.{hint}")
    elif kind is not None and not params:
        yield Finding("error", "scheduler.params", f"is not given, and {kind} cannot start without it.")
    lr = lookup(config, "optimizer.params.lr")
    peak = {
        "WarmupLR": ("warmup_max_lr", 0.001),
        "WarmupDecayLR": ("warmup_max_lr", 0.001),
        "OneCycle": ("cycle_max_lr", None),
        "LRRangeTest": ("lr_range_test_min_lr", 0.001),
    }.get(str(kind))
    if peak is not None and isinstance(params, Mapping) and params.get(peak[0]) != "auto":
        top = lookup(params, peak[0], peak[1])
        if lr is not None and top is not None and top != lr:
            yield Finding(
                "warning",
                f"scheduler.params.{peak[0]}",
                f"= {top!r} is where {kind} takes the learning rate, whatever optimizer.params.lr = {lr!r} says; lr_1d "
                f'keeps its ratio to the latter. Write the same number in both (or use "WarmupCosineLR", which '
                "multiplies lr).",
            )


def _clipping(config: Config) -> Iterator[Finding]:
    if "gradient_clipping" not in config:
        yield Finding(
            "warning",
            "gradient_clipping",
            "is not written out, and DeepSpeed's default differs between releases (0 before June 2026, 1.0 since). "
            'The published runs have "gradient_clipping": 1.0.',
        )
    elif "max_grad_norm" in _params(config):
        yield Finding(
            "error",
            "gradient_clipping",
            f"clipping is given twice: {config['gradient_clipping']!r} here and "
            f"{_params(config)['max_grad_norm']!r} as optimizer.params.max_grad_norm. Keep this one.",
        )


def _batch(config: Config, world_size: int | None) -> Iterator[Finding]:
    total, micro, steps = (lookup(config, key) for key in BATCH)
    if isinstance(total, int) and isinstance(steps, int) and world_size and micro is None and steps > 0:
        micro = 1  # whatever it is, DeepSpeed has to find a whole number
    if not isinstance(total, int) or not isinstance(micro, int) or total < 1 or micro < 1:
        return
    per_step = micro * (steps if isinstance(steps, int) and steps > 0 else 1)
    if total % per_step or (world_size and total % (per_step * world_size)):
        ranks = [n for n in range(1, min(total // micro, MOST_RANKS) + 1) if total % (micro * n) == 0]
        yield Finding(
            "error",
            "train_batch_size",
            f"= {total} is no multiple of {micro} sequences per rank"
            + (f" x {steps} accumulation steps" if isinstance(steps, int) else "")
            + (f" x {world_size} ranks" if world_size else "")
            + f". With {micro} per rank it works on {', '.join(map(str, ranks)) or 'no number of'} ranks.",
        )
    elif isinstance(steps, int) and world_size and per_step * world_size != total:
        yield Finding(
            "error",
            "train_batch_size",
            f"= {total} is not {micro} x {steps} x {world_size} ranks = {per_step * world_size}. Leave "
            '"gradient_accumulation_steps" out: DeepSpeed works it out.',
        )


def _offload(config: Config) -> Iterator[Finding]:
    device = lookup(config, f"{OFFLOAD}.device", "none")
    if device == "nvme" and not lookup(config, f"{OFFLOAD}.nvme_path"):
        yield Finding("error", f"{OFFLOAD}.nvme_path", "is not given: name a folder on a local disk of every node.")
    if (
        device in ("cpu", "nvme")
        and "optimizer" not in config
        and config.get("zero_force_ds_cpu_optimizer") is not False
    ):
        yield Finding(
            "warning",
            "zero_force_ds_cpu_optimizer",
            "with offload, a MARS that the script constructs is refused by DeepSpeed, and replaced by DeepSpeedCPUAdam "
            'in Accelerate and the Trainer. Set it to false, or name "MARS" in the "optimizer" block.',
        )
    if names_mars(config):
        params = _params(config)
        try:
            settings = Settings.from_dict(params)
        except (TypeError, ValueError):
            return  # said elsewhere
        states = max(
            len(needed([rule], params.get("amsgrad") is True))
            for shape in ((1, 1), (1,))
            for rule in [rule_for(shape, settings.mars_type, (2,), None, params.get("optimize_1d") is True)]
        )
        if fault := too_few_buffers(config, states):
            key = f"{OFFLOAD}.buffer_count"
            yield Finding("error", key, f"= {lookup(config, key, 4)!r}: {fault}")


def _sequence(config: Config) -> Iterator[Finding]:
    size = lookup(config, "sequence_parallel_size", 1)
    if isinstance(size, int) and size > 1 and stage_of(config) < 3:
        yield Finding(
            "error",
            "sequence_parallel_size",
            f"= {size}: at ZeRO stage {stage_of(config)} DeepSpeed does not add the gradients up over the ranks that "
            "share a sequence, unless deepspeed.initialize is given the mpu of Ulysses: MARS refuses to start without "
            "it. Use stage 3, or leave the key out and give that mpu.",
        )


def _unknown_keys(config: Config) -> Iterator[Finding]:
    for key in unknown(config):
        near = difflib.get_close_matches(key, TESTED, n=1, cutoff=0.85)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        yield Finding("warning", key, f"= {lookup(config, key)!r}: mars_dist was not tested with this key.{hint}")


def _without_auto(section: Any) -> Any:
    if isinstance(section, Mapping):
        return {key: _without_auto(value) for key, value in section.items() if value != "auto"}
    return section


def _what_deepspeed_says(config: Config) -> Iterator[Finding]:
    """DeepSpeed's own reading of the file; the number of ranks is not known here, so batch sizes are left out."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.runtime.config import DeepSpeedConfig
        from deepspeed.utils import logger
    except ImportError as error:
        yield Finding("warning", "", f"DeepSpeed could not be imported, so its own checks were left out: {error}.")
        return
    logger.setLevel(logging.ERROR)
    rest = {key: value for key, value in _without_auto(config).items() if key not in BATCH}
    try:
        DeepSpeedConfig({**rest, "train_micro_batch_size_per_gpu": 1})
    except Exception as error:  # pydantic's, DeepSpeed's, assertions: whatever it is, it would not start
        yield Finding("error", "", f"DeepSpeed does not accept the file: {error}")
