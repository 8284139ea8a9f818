"""What watches over a DeepSpeed engine that trains with MARS, so that it never trains with something else.

When the engine takes the optimizer, the configuration is held against ``features.py``: refused keys raise, others are
warned about. After every step that the engine says it has taken, MARS must have updated every tensor exactly once: a
feature that takes the update over raises at its first step, whatever its name.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from mars_dist.integrations.deepspeed import NAMES, loading, nvme, saved, universal_load
from mars_dist.integrations.deepspeed.features import OFFLOAD, as_given, lookup, refused, unknown, warned
from mars_dist.integrations.deepspeed.parallel import faults
from mars_dist.optimizer import MARS
from mars_dist.sharding.locate import trainable_only
from mars_dist.tables import shapes_and_rules
from mars_dist.versions import missing_hook

logger = logging.getLogger("mars_dist")

ORIGINAL = "_mars_dist_original_"
EXPECTED = "_mars_dist_tensors"


# What the guard reads of an engine that takes its optimizer.
READ = ("_config", "client_optimizer", "basic_optimizer", "_step_applied", "torch_autocast_z0_gradscaler")


def guard(module: ModuleType) -> None:
    """Watch over the engines of ``deepspeed.runtime.engine``. Idempotent.

    Raises:
        RuntimeError: when this release of DeepSpeed has no such methods.
    """
    _refuse_other_releases(getattr(module, "DeepSpeedEngine", None), WATCHED)
    for name, watch in WATCHED.items():
        if not hasattr(module.DeepSpeedEngine, ORIGINAL + name):
            original = getattr(module.DeepSpeedEngine, name)
            setattr(module.DeepSpeedEngine, ORIGINAL + name, original)
            setattr(module.DeepSpeedEngine, name, _watched(original, watch))


def _refuse_other_releases(engine: Any, names: Iterable[str]) -> None:
    missing = [f"DeepSpeedEngine.{name}" for name in names if not hasattr(engine, name)]
    if missing:
        consequence = "nothing would notice that DeepSpeed updates weights in place of MARS"
        remedy = "set MARS_DIST_REGISTER=0 in the environment to train unwatched"
        raise RuntimeError(f"MARS: {missing_hook('deepspeed', missing, consequence, remedy)}")


def unguard(module: ModuleType | None) -> None:
    """Undo ``guard``."""
    engine: Any = getattr(module, "DeepSpeedEngine", None)
    for name in WATCHED:
        if hasattr(engine, ORIGINAL + name):
            setattr(engine, name, getattr(engine, ORIGINAL + name))
            delattr(engine, ORIGINAL + name)


def _watched(original: Callable[..., Any], watch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return watch(original, self, *args, **kwargs)

    return method


def _when_it_takes_the_optimizer(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    """Stands before ``DeepSpeedEngine._do_optimizer_sanity_check``, which sees the optimizer before it is wrapped."""
    _say_which_of_two(engine, optimizer)
    if isinstance(optimizer, MARS):
        _refuse_other_releases(engine, READ)
        config = engine._config._param_dict
        for feature in refused(config):
            raise RuntimeError(f"MARS: {feature.key} {as_given(config, feature.key)}: {feature.reason}")
        fault = nvme.too_few_buffers(config, optimizer.most_states())
        if fault:
            given = lookup(config, f"{OFFLOAD}.buffer_count", 4)
            raise RuntimeError(f"MARS: {OFFLOAD}.buffer_count = {given}: {fault}")
        for fault in faults(engine, optimizer):
            raise RuntimeError(f"MARS: {fault}")
        if engine.global_rank == 0:
            for feature in warned(config):
                logger.warning("%s %s: %s", feature.key, as_given(config, feature.key), feature.reason)
            for key in unknown(config):
                logger.warning("%s = %r: mars_dist was not tested with this key", key, lookup(config, key))
            _say_what_is_orthogonalised(engine.module, optimizer)
        # DeepSpeed makes its flats of exactly these, right after this call.
        parameters = [("", p) for group in optimizer.param_groups for p in group["params"]]
        setattr(engine, EXPECTED, len(trainable_only(parameters)))
        if engine.zero_optimization_stage() == 0:  # every rank holds everything
            optimizer.attach(engine.module, engine.seq_data_parallel_group)
    return original(engine, optimizer)


def _say_what_is_orthogonalised(model: nn.Module, optimizer: MARS) -> None:
    """A file knows nothing of layers: under a matrix variant embeddings and Conv1D weights are matrices as well."""
    taking = {
        id(p): group["fan_in_fan_out"]
        for group in optimizer.param_groups
        for p, _, rule in shapes_and_rules(group, optimizer.settings)
        if rule.whole_matrix
    }
    unsuited = []
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        forms = [taking[id(p)] for p in module.parameters(recurse=False) if id(p) in taking]
        if forms and ("Embedding" in kinds or "Conv1D" in kinds and not all(forms)):
            unsuited.append(name)
    if unsuited:
        logger.warning(
            "%s orthogonalises %d embeddings or Conv1D weights (%s, ...) as if they were (out, in) matrices. "
            'mars_dist.param_groups(model, "%s", lr=...) knows them: give it to deepspeed.initialize as '
            "model_parameters.",
            optimizer.settings.mars_type,
            len(unsuited),
            ", ".join(unsuited[:2]),
            optimizer.settings.mars_type,
        )


def _say_which_of_two(engine: Any, optimizer: Any) -> None:
    """DeepSpeed prefers an optimizer that it is given to the one that the file names, without a word."""
    named = lookup(engine._config._param_dict, "optimizer.type")
    if named not in NAMES:
        return
    if not isinstance(optimizer, MARS):
        raise RuntimeError(
            f"MARS: optimizer.type = {named!r}, but DeepSpeed would train with {type(optimizer).__module__}."
            f"{type(optimizer).__name__}: an optimizer given to deepspeed.initialize wins over the file (or "
            f"torch.optim.{named} was replaced). Give none, or remove the block from the file."
        )
    if engine.client_optimizer is not None and engine.global_rank == 0:
        logger.warning(
            "optimizer.type = %r: deepspeed.initialize was given a MARS object as well, which DeepSpeed takes instead: "
            "the params of the file are not used. Give only one of them.",
            named,
        )


def _when_zero_is_made(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    """Stands around ``DeepSpeedEngine._configure_zero_optimizer``."""
    made = original(engine, optimizer)
    if isinstance(optimizer, MARS):
        fault = nvme.misplaced_gradient(made, engine._config._param_dict)
        if fault:
            raise RuntimeError(f"MARS: {fault}")
        if getattr(made, "torch_autocast_gradscaler", None) is not None:  # the key itself was refused before
            raise RuntimeError(
                "MARS: an earlier engine in this process turned on torch_autocast in float16, and DeepSpeed keeps it "
                "on for every later ZeRO engine: gradients would reach MARS 65536 times too small. Use a new process."
            )
    return made


def _when_it_loads(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands around ``DeepSpeedEngine.load_checkpoint``."""
    given = inspect.signature(original).bind(engine, *args, **kwargs).arguments
    folder, tag = given.get("load_dir"), given.get("tag")
    something = folder is not None and (tag is not None or (Path(folder) / "latest").is_file())
    if folder is None or not isinstance(engine.basic_optimizer, MARS):
        return original(engine, *args, **kwargs)
    is_universal = engine.load_universal_checkpoint()
    if (something or is_universal) and nvme.is_on(engine._config._param_dict):
        raise RuntimeError(f"MARS: {nvme.NO_LOADING}")
    saved.check_before_loading(engine, Path(folder), tag)
    if is_universal:
        return universal_load.load(original, engine, *args, **kwargs)
    if given.get("load_optimizer_states", True) and not given.get("load_module_only"):
        universal_load.refuse_another_cut(engine, folder, tag)
    loading.check_shards(engine, given)
    result = original(engine, *args, **kwargs)
    loading.check_that_states_arrived(engine, given, result[0])
    return result


def _when_it_saves(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands around ``DeepSpeedEngine.save_checkpoint``."""
    if not isinstance(engine.basic_optimizer, MARS):
        return original(engine, *args, **kwargs)
    return saved.save(original, engine, inspect.signature(original).bind(engine, *args, **kwargs))


def _when_it_steps(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands around ``DeepSpeedEngine._take_model_step``: one step, or one that is skipped for an overflow."""
    expected = getattr(engine, EXPECTED, None)
    if expected is None:
        return original(engine, *args, **kwargs)
    before = engine.basic_optimizer.tensor_updates
    fewest, most = _allowed(engine)
    result = original(engine, *args, **kwargs)
    updated = engine.basic_optimizer.tensor_updates - before
    if not engine._step_applied:
        fewest = most = 0
    if not fewest <= updated <= most:
        skipped = "" if engine._step_applied else " and skipped that step"
        raise RuntimeError(
            f"MARS updated {updated} tensors in step {engine.global_steps} of the DeepSpeed engine, which has "
            f"{most or expected} to train{skipped}: something else updates the weights in place of MARS, or "
            "steps it twice. Check the configuration with `python -m "
            "mars_dist.integrations.deepspeed CONFIG.json`; ds_configs/README.md lists what works with MARS."
        )
    return result


def _allowed(engine: Any) -> tuple[int, int]:
    """The fewest and the most tensors that MARS may update in the step that comes; asked before it."""
    mars, expected = engine.basic_optimizer, getattr(engine, EXPECTED)
    if engine.optimizer is mars:  # whole tensors: those with a gradient, also if they were unfrozen or added since
        fewest = most = sum(p.grad is not None for group in mars.param_groups for p in group["params"])
    elif engine.zero_optimization():
        fewest = most = expected
    else:
        fewest, most = min(max(1, mars.tensors_with_gradient()), expected), expected
    if engine.torch_autocast_z0_gradscaler is not None:  # it leaves out a step without telling the engine
        fewest = 0
    return fewest, most


WATCHED: dict[str, Callable[..., Any]] = {
    "_do_optimizer_sanity_check": _when_it_takes_the_optimizer,
    "_configure_zero_optimizer": _when_zero_is_made,
    "_take_model_step": _when_it_steps,
    "load_checkpoint": _when_it_loads,
    "save_checkpoint": _when_it_saves,
}
