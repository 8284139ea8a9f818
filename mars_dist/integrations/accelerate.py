"""MARS under Hugging Face Accelerate: ``accelerator.prepare(model, optimizer)`` needs no further line.

Accelerate has no registry for optimizers: DDP, FSDP2 and FSDP1 take any ``torch.optim.Optimizer``. What is added here
to ``Accelerator.prepare``, ``prepare_model`` and ``prepare_optimizer`` is what they leave undone for MARS:

- with DeepSpeed and optimizer offload they would put DeepSpeedCPUAdam in the place of MARS without a word;
- with FSDP1 they do not say where the pieces of each parameter went (``MARS.attach``), and with
  ``use_orig_params=False`` they leave the optimizer with parameters that are never trained;
- on CPUs they may run every process on its own, or DDP in the place of FSDP, without an error;
- ``load_state`` unpickles what it is given: the folder is checked before; ``save_state`` is sealed.

The private names of Accelerate that this needs are in this file only. Nothing is imported before somebody else does.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import logging
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from mars_dist.integrations import accelerate_loading
from mars_dist.integrations.deepspeed import NAMES
from mars_dist.integrations.import_hook import forget, when_imported
from mars_dist.versions import missing_hook, tested

logger = logging.getLogger("mars_dist")

MODULE = "accelerate.accelerator"
ORIGINAL = "_mars_dist_original_"
FORCE = "zero_force_ds_cpu_optimizer"


def register() -> None:
    """Watch over ``Accelerator.prepare`` from the moment that somebody imports Accelerate. Idempotent."""
    when_imported(MODULE, _watch)
    accelerate_loading.register()


def unregister() -> None:
    """Undo ``register()``: the methods of ``Accelerator`` are the original function objects again."""
    forget(MODULE)
    accelerate_loading.unregister()
    accelerator = getattr(sys.modules.get(MODULE), "Accelerator", None)
    for name in WATCHED:
        if hasattr(accelerator, ORIGINAL + name):
            setattr(accelerator, name, getattr(accelerator, ORIGINAL + name))
            delattr(accelerator, ORIGINAL + name)


def _watch(module: ModuleType) -> None:
    missing = [name for name in WATCHED if not hasattr(getattr(module, "Accelerator", None), name)]
    if missing:  # no reason to fail at the import of a script that may not use MARS
        consequence = (
            "nothing keeps DeepSpeedCPUAdam from taking the place of MARS under offload, and FSDP1 needs "
            "optimizer.attach(model)"
        )
        logger.warning("%s", missing_hook("accelerate", [f"Accelerator.{name}" for name in missing], consequence))
        return
    for name, watch in WATCHED.items():
        if not hasattr(module.Accelerator, ORIGINAL + name):
            original = getattr(module.Accelerator, name)
            setattr(module.Accelerator, ORIGINAL + name, original)
            setattr(module.Accelerator, name, _watched(original, watch))
    accelerate_loading.watch(module)


def _watched(original: Callable[..., Any], watch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return watch(original, self, *args, **kwargs)

    return method


# ------------------------------------------------------------------------------------------------ the watched methods


def _prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands around ``Accelerator.prepare``."""
    given = [mars for arg in args if (mars := mars_inside(arg)) is not None]
    if given:
        _refuse_lonely_processes(accelerator)
        if _engine(accelerator) == "DEEPSPEED":
            _keep_from_cpu_adam(accelerator)
        _say_what_is_not_obvious(accelerator)
    result = original(accelerator, *args, **kwargs)
    if _engine(accelerator) == "DEEPSPEED":
        results = result if isinstance(result, tuple) else (result,)
        _check_the_class_inside(accelerator, given, args, results)
    else:
        _attach(accelerator)
    return result


def _prepare_model(original: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands around ``Accelerator.prepare_model``, which ``prepare`` calls as well."""
    before = list(model.parameters())
    prepared = original(accelerator, model, *args, **kwargs)
    if _is_fsdp1(accelerator):
        kept = {id(p) for p in prepared.parameters()}
        replaced = _replaced.setdefault(accelerator, {})
        replaced |= {id(p): weakref.ref(p) for p in before if id(p) not in kept}
    _wrapped.setdefault(accelerator, []).append(weakref.ref(prepared))
    _attach(accelerator)
    return prepared


def _prepare_optimizer(
    original: Callable[..., Any], accelerator: Any, optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stands around ``Accelerator.prepare_optimizer``, which ``prepare`` calls as well."""
    if mars_inside(optimizer) is not None:
        _refuse_lonely_processes(accelerator)
    prepared = original(accelerator, optimizer, *args, **kwargs)
    _attach(accelerator)
    return prepared


def _save_state(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands around ``Accelerator.save_state``: the folder is sealed when every rank has written."""
    if not _has_mars(accelerator):
        return original(accelerator, *args, **kwargs)
    from mars_dist.checkpoint import around

    with around.sealed_as_a_whole(), around.saving_together("Accelerator.save_state"):
        saved = original(accelerator, *args, **kwargs)
    if not accelerator.project_configuration.save_on_each_node:
        around.seal_after_saving(Path(saved), "Accelerate")
    return saved


def _load_state(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands before ``Accelerator.load_state``: its pickles are checked before one is opened."""
    if _has_mars(accelerator):
        _check_before_loading(accelerator, inspect.signature(original).bind(accelerator, *args, **kwargs).arguments)
    return original(accelerator, *args, **kwargs)


def _check_before_loading(accelerator: Any, given: dict[str, Any]) -> None:
    from mars_dist.checkpoint import around

    settings = accelerator.project_configuration

    def where() -> Path | None:
        if given.get("input_dir") is not None:
            return Path(given["input_dir"]).expanduser()
        if not settings.automatic_checkpoint_naming:
            return None  # Accelerate raises
        inside = Path(accelerator.project_dir, "checkpoints").iterdir()
        return max(inside, key=lambda path: int(re.findall(r"[0-9]+", path.name)[0]), default=None)

    around.check_before_loading(where, shared=not settings.save_on_each_node)


def _has_mars(accelerator: Any) -> bool:
    return any(mars_inside(optimizer) is not None for optimizer in _lists(accelerator)[1])


WATCHED: dict[str, Callable[..., Any]] = {
    "prepare": _prepare,
    "prepare_model": _prepare_model,
    "prepare_optimizer": _prepare_optimizer,
    "save_state": _save_state,
    "load_state": _load_state,
}

# By accelerator: the parameters that FSDP1 has replaced by flat ones. They never see a gradient again.
_replaced: weakref.WeakKeyDictionary[Any, dict[int, weakref.ref[Any]]] = weakref.WeakKeyDictionary()
# By accelerator: what prepare_model() returned. Its own list holds models without the DDP around them.
_wrapped: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()


# ------------------------------------------------------------------------------------------------------- questions


def mars_inside(prepared: Any) -> Any:
    """The MARS that an optimizer is, or that the wrappers of Accelerate and DeepSpeed hold; None if there is none."""
    from mars_dist.optimizer import MARS

    seen: set[int] = set()
    while prepared is not None and id(prepared) not in seen:
        if isinstance(prepared, MARS):
            return prepared
        if not hasattr(prepared, "param_groups"):  # not an optimizer: a scheduler has an .optimizer as well
            return None
        seen.add(id(prepared))
        prepared = getattr(prepared, "optimizer", None)
    return None


def _engine(accelerator: Any) -> str:
    """The name of what really runs, as Accelerate calls it: "DEEPSPEED", "FSDP", "MULTI_GPU", "MULTI_CPU", "NO"..."""
    kind = accelerator.distributed_type
    return str(getattr(kind, "value", kind))


def _is_fsdp1(accelerator: Any) -> bool:
    return _engine(accelerator) == "FSDP" and not accelerator.is_fsdp2


def _on(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1")


def _lists(accelerator: Any) -> tuple[list[Any], list[Any]]:
    """What the accelerator has prepared so far: its models and its optimizers."""
    try:
        return accelerator._models, accelerator._optimizers
    except AttributeError as error:
        instead = "set MARS_DIST_REGISTER=0 and call optimizer.attach(model) yourself after prepare()"
        raise RuntimeError(
            "MARS: " + missing_hook("accelerate", error, "its models cannot be shown to MARS", instead)
        ) from error


# --------------------------------------------------------------------------------------------- FSDP1, FSDP2 and DDP


def _attach(accelerator: Any) -> None:
    """Show every prepared model to every prepared MARS: needed for FSDP1; under DDP the matrices are shared out."""
    models, optimizers = _lists(accelerator)
    models = [*models, *(model for ref in _wrapped.get(accelerator, []) if (model := ref()) is not None)]
    for mars in filter(None, map(mars_inside, optimizers)):
        _refuse_replaced(accelerator, mars)
        held = {id(p) for group in mars.param_groups for p in group["params"]}
        for model in models:
            if any(id(p) in held for p in model.parameters()):  # not the model of another optimizer
                mars.attach(model)


def _refuse_replaced(accelerator: Any, mars: Any) -> None:
    """Raise when MARS holds parameters that FSDP1 took out of the model, which Accelerate does not notice."""
    replaced = _replaced.get(accelerator, {})
    held = [p for group in mars.param_groups for p in group["params"]]
    dead = [p for p in held if id(p) in replaced and replaced[id(p)]() is p]
    if dead:
        raise RuntimeError(
            f"MARS was constructed with {len(dead)} parameters (of {len(held)}) that FSDP1 has replaced by flat ones, "
            "as use_orig_params=False asks for: they would never see a gradient and the model would not be trained. "
            "Set fsdp_use_orig_params: true in the file of `accelerate launch` (or "
            "FullyShardedDataParallelPlugin(use_orig_params=True)), or prepare the model first and construct MARS "
            "with model.named_parameters() of what prepare() returns."
        )


def _refuse_lonely_processes(accelerator: Any) -> None:
    """Raise when a launcher started several processes and Accelerate runs each as if it were alone."""
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if started > 1 and accelerator.num_processes == 1:
        remedy = (
            'Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])'
            if _engine(accelerator) == "DEEPSPEED"
            else "ACCELERATE_USE_CPU=true in the environment (or Accelerator(cpu=True); Trainer: --use_cpu)"
        )
        raise RuntimeError(
            f"MARS: the launcher started {started} processes (WORLD_SIZE), but Accelerate runs this one as the only "
            f"one: each would train a model of its own. On CPUs say so: {remedy}."
        )


def _say_what_is_not_obvious(accelerator: Any) -> None:
    """Log on the main process what Accelerate decides without a word and what is not wrong, but may surprise."""
    if not accelerator.is_main_process:
        return
    if _engine(accelerator) == "DEEPSPEED":
        clip = accelerator.deepspeed_plugin.deepspeed_config.get("gradient_clipping", "auto")
        if clip == "auto":  # Accelerate fills in 1.0 for "auto", DeepSpeed for a missing key (which 0.0 becomes)
            logger.warning(
                "gradient_clipping is no number in the DeepSpeed configuration: the gradient will be clipped to norm "
                "1.0. Set it in the file of `accelerate launch` or in DeepSpeedPlugin (for none: in the dict of "
                "hf_ds_config, as the plug-in's own argument ignores 0)"
            )
    if _engine(accelerator) == "MULTI_CPU" and _on("ACCELERATE_USE_FSDP"):
        logger.warning("FSDP was asked for, but Accelerate runs DDP on CPUs: nothing is sharded")
    if _engine(accelerator) == "MULTI_CPU" and _on("ACCELERATE_USE_DEEPSPEED"):
        logger.warning(
            "DeepSpeed was asked for, but Accelerate runs DDP on CPUs where it is told to use them (cpu=True, "
            'ACCELERATE_USE_CPU): nothing is sharded. Say InitProcessGroupKwargs(backend="gloo") instead.'
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None) if _engine(accelerator) == "FSDP" else None
    reduced_in = getattr(getattr(plugin, "mixed_precision_policy", None), "reduce_dtype", None)
    if reduced_in is not None and reduced_in.itemsize < 4:
        logger.warning(
            "FSDP sums gradients over the ranks in %s; MARS uses the difference of two gradients, in which that "
            "rounding weighs more. %s sums in float32.",
            str(reduced_in).removeprefix("torch."),
            "Accelerator(fsdp_plugin=mars_dist.integrations.accelerate.fsdp2_plugin())"
            if accelerator.is_fsdp2
            else "mixed_precision_policy=MixedPrecision(param_dtype=..., reduce_dtype=torch.float32)",
        )


# ------------------------------------------------------------------------------------------------------- DeepSpeed


def _keep_from_cpu_adam(accelerator: Any) -> None:
    """Accelerate swaps an optimizer object for DeepSpeedCPUAdam under offload, unless this key says false."""
    config = accelerator.deepspeed_plugin.deepspeed_config
    offload = (config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    if offload.get("device") in (None, "none"):
        return
    if FORCE not in config:
        config[FORCE] = False
        if accelerator.is_main_process:
            logger.info("%s = False: DeepSpeed keeps MARS under offload instead of DeepSpeedCPUAdam", FORCE)
    elif config[FORCE]:
        raise RuntimeError(
            f"MARS: {FORCE} = {config[FORCE]!r} in the DeepSpeed configuration would replace MARS by DeepSpeedCPUAdam. "
            "Remove the key (mars_dist sets it to false), or let the configuration name the optimizer: "
            '"optimizer": {"type": "MARS", ...} with accelerate.utils.DummyOptim in the script.'
        )


def _check_the_class_inside(accelerator: Any, given: list[Any], args: Iterable[Any], results: Iterable[Any]) -> None:
    """Raise unless the engine that was just made trains with MARS, if MARS was given or named."""
    engines = [r for r in results if hasattr(r, "basic_optimizer")]
    if not engines:  # a data loader alone, say
        return
    named = (accelerator.deepspeed_plugin.deepspeed_config.get("optimizer") or {}).get("type")
    by_name = named in NAMES and any(type(arg).__name__ == "DummyOptim" for arg in args)
    if not given and not by_name:
        return
    inside = [mars_inside(r) for r in results if hasattr(r, "param_groups")]
    inside += [mars_inside(engine.basic_optimizer) for engine in engines]
    if not inside or any(mars is None or (given and mars not in given) for mars in inside):
        found = ", ".join(sorted({type(engine.basic_optimizer).__qualname__ for engine in engines}))
        asked = "the MARS that was given to prepare()" if given else f'"type": "{named}"'
        raise RuntimeError(
            f"MARS: Accelerate and DeepSpeed made an engine that trains with {found} in place of {asked}. mars_dist "
            f"was {tested('accelerate', 'deepspeed')}; check the DeepSpeed configuration with `python -m "
            "mars_dist.integrations.deepspeed CONFIG.json`."
        )


# --------------------------------------------------------------------------------------------- a plug-in for FSDP2

# Option of the plug-in: the default for MARS, and the variable by which `accelerate launch` hands over its YAML's.
FSDP2_DEFAULTS: dict[str, tuple[Any, str]] = {
    "reshard_after_forward": (True, "FSDP_RESHARD_AFTER_FORWARD"),
    "auto_wrap_policy": ("transformer_based_wrap", "FSDP_AUTO_WRAP_POLICY"),
    "state_dict_type": ("SHARDED_STATE_DICT", "FSDP_STATE_DICT_TYPE"),
}


def fsdp2_plugin(**overrides: Any) -> Any:
    """A ``FullyShardedDataParallelPlugin`` for FSDP2 with defaults that suit MARS.

    What the call names wins over the YAML of ``accelerate launch``, and that wins over the defaults:

    - ``fsdp_version=2``: parameters stay themselves as DTensors, so that MARS sees their shapes without being told.
    - ``mixed_precision_policy``: parameters are gathered and multiplied in what ``Accelerator(mixed_precision=...)``
      or the YAML says ("bf16", say), gradients are summed over the ranks in float32. Accelerate by itself sums in the
      lower precision as well, which no YAML can change: MARS uses g - h, the difference of two gradients, in which
      the rounding of both weighs more than in g alone. The optimizer's own parameters and states are float32 in any
      case (a model in 16 bits is made so when mixed precision is on). Outputs keep the precision they come in.
    - ``reshard_after_forward=True``: the gathered parameters are freed after the forward pass (ZeRO-3's memory);
      False keeps them for the backward pass (ZeRO-2's memory, less traffic).
    - ``auto_wrap_policy="transformer_based_wrap"``: one unit per layer as the model names them
      (``_no_split_modules``); Accelerate's default makes the whole model one unit, gathered at once. A model that
      names none is one unit here as well: give ``transformer_cls_names_to_wrap=["Block"]``.
    - ``state_dict_type="SHARDED_STATE_DICT"``: every rank saves its own pieces; "FULL_STATE_DICT" gathers all on one.

    Args:
        overrides: any option of ``accelerate.utils.FullyShardedDataParallelPlugin``.

    Raises:
        ValueError: for an unknown option (naming the nearest known one), or another version of FSDP.
    """
    plugin_class = _fsdp2_plugin_class()
    known = [field.name for field in dataclasses.fields(plugin_class)]
    for name in overrides:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"fsdp2_plugin: FullyShardedDataParallelPlugin has no option {name!r}{hint} "
                f"(mars_dist was {tested('accelerate')})"
            )
    if overrides.get("fsdp_version", 2) != 2:
        raise ValueError(
            f"fsdp2_plugin: fsdp_version={overrides['fsdp_version']!r}: this is for FSDP2; for FSDP1 use "
            "FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True)"
        )
    options = {"fsdp_version": 2, **overrides}
    for name, (default, variable) in FSDP2_DEFAULTS.items():
        if name not in options and not (_on("ACCELERATE_USE_FSDP") and variable in os.environ):
            options[name] = default
    plugin = plugin_class(**options)
    if plugin.mixed_precision_policy is None:
        plugin.sum_in_float32()
    return plugin


@functools.cache
def _fsdp2_plugin_class() -> Any:
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    class Fsdp2Plugin(FullyShardedDataParallelPlugin):
        """Accelerate tells a plug-in the precision by ``set_mixed_precision`` once it knows it."""

        mixed_precision_policy: Any
        sums_in_float32 = False

        def sum_in_float32(self) -> None:
            self.sums_in_float32 = True
            self.mixed_precision_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)

        def set_mixed_precision(self, mixed_precision: Any, *args: Any, **kwargs: Any) -> None:
            if not self.sums_in_float32:
                super().set_mixed_precision(mixed_precision, *args, **kwargs)
                return
            self.mixed_precision_policy = None
            super().set_mixed_precision(mixed_precision, *args, **kwargs)
            self.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=self.mixed_precision_policy.param_dtype, reduce_dtype=torch.float32
            )

    return Fsdp2Plugin
