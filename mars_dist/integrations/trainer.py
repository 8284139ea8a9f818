"""``TrainingArguments(optim="mars_adamw", optim_args="gamma=0.05,...")`` in transformers' Trainer.

transformers has no public way to add an optimizer by name. ``optim`` is checked against the members of the enum
``OptimizerNames`` (the command line takes its choices from them when the parser is built), and names are looked up in
``transformers.trainer_optimizer._OPTIMIZER_HANDLERS``. Both are filled here when somebody imports them; this module
imports neither torch nor transformers. Where a release of transformers lacks one of the names that are used here, the
error comes when MARS is asked for, not when an unrelated script imports transformers.

An "optimizer" block in a DeepSpeed configuration silently beats ``optim``: such a pair is compared when the arguments
are made, and again when training starts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from mars_dist import versions
from mars_dist.integrations import trainer_checkpoints
from mars_dist.integrations.deepspeed import NAMES as DEEPSPEED_NAMES
from mars_dist.integrations.import_hook import forget, when_imported

logger = logging.getLogger("mars_dist")

ARGUMENTS = "transformers.training_args"
OPTIMIZERS = "transformers.trainer_optimizer"
DEEPSPEED = "transformers.integrations.deepspeed"
NAMES = {
    "MARS_ADAMW": "mars_adamw",
    "MARS_LION": "mars_lion",
    "MARS_SHAMPOO": "mars_shampoo",
    "MARS_M": "mars_m",
}

_active = False  # what somebody else has wrapped once more cannot be taken out, only turned off
_said: set[str] = set()
_driven = False


def register() -> None:
    """Make the names known to Trainer, now or as soon as transformers is imported. Idempotent."""
    global _active
    _active = True
    when_imported(ARGUMENTS, _extend_arguments)
    when_imported(OPTIMIZERS, _add_handlers)
    when_imported(DEEPSPEED, _watch_configuration)
    trainer_checkpoints.register()


def unregister() -> None:
    """Undo ``register()``: transformers is as before."""
    global _active
    _active = False
    trainer_checkpoints.unregister()
    for name in (ARGUMENTS, OPTIMIZERS, DEEPSPEED):
        forget(name)
    arguments = sys.modules.get(ARGUMENTS)
    names = getattr(arguments, "OptimizerNames", None)
    handlers = getattr(sys.modules.get(OPTIMIZERS), "_OPTIMIZER_HANDLERS", {})
    for name, value in NAMES.items():
        if _is_ours(handlers.get(value)):
            del handlers[value]
        if names is not None and getattr(getattr(names, "_member_map_", {}).get(name), "mars_dist", False):
            _remove_member(names, name, value)
    _unwrap(getattr(arguments, "TrainingArguments", None), "__post_init__")
    for name in WATCHED:
        _unwrap(getattr(sys.modules.get(DEEPSPEED), "HfTrainerDeepSpeedConfig", None), name)


# ------------------------------------------------------------------------------------------ names and handlers


def _extend_arguments(module: ModuleType) -> None:
    names = getattr(module, "OptimizerNames", None)
    if names is not None:
        for name, value in NAMES.items():
            _add_member(names, name, value)
    _wrap(getattr(module, "TrainingArguments", None), "__post_init__", _before_arguments)


def _add_member(enum: Any, name: str, value: str) -> None:
    """A real member: found by name, by value, by iteration and ``in``; ``enum`` has no public way to add one."""
    if not hasattr(enum, "_value2member_map_") or value in enum._value2member_map_:
        return
    member = str.__new__(enum, value)
    member._name_, member._value_, member._sort_order_ = name, value, len(enum._member_names_)
    member.__objclass__ = enum
    member.mars_dist = True
    enum._member_names_.append(name)
    enum._member_map_[name] = member
    enum._value2member_map_[value] = member
    if hasattr(enum, "_hashable_values_"):  # Python 3.13
        enum._hashable_values_.append(value)
    type.__setattr__(enum, name, member)


def _remove_member(enum: Any, name: str, value: str) -> None:
    enum._member_names_.remove(name)
    del enum._member_map_[name], enum._value2member_map_[value]
    if value in getattr(enum, "_hashable_values_", ()):
        enum._hashable_values_.remove(value)
    type.__delattr__(enum, name)


def _add_handlers(module: ModuleType) -> None:
    handlers = getattr(module, "_OPTIMIZER_HANDLERS", None)
    names = getattr(sys.modules.get(ARGUMENTS), "OptimizerNames", None)
    if isinstance(handlers, dict) and names is not None:
        for member in [m for m in names if m.value in NAMES.values()]:
            handlers.setdefault(member, _mars)


def _is_ours(handler: Any) -> bool:
    """Whether it is the handler below, of this load of the module or of an earlier one."""
    return getattr(handler, "__module__", None) == __name__ and getattr(handler, "__name__", None) == "_mars"


def _mars(context: Any) -> tuple[type, dict[str, Any]]:
    """What Trainer calls for ``optim="mars_..."``: the class and its keywords (the groups are Trainer's)."""
    from mars_dist.integrations.trainer_arguments import choose, optimizer_class
    from mars_dist.maths.rules import RULES
    from mars_dist.sharding.fsdp1 import is_flat

    flat = [p for p in context.model.parameters() if is_flat(p)] if context.model is not None else []
    if flat:
        raise RuntimeError(
            f'optim="{context.args.optim.value}" under FSDP1 needs the original parameters: the model has {len(flat)} '
            "flat ones, in which matrices lie beside the biases and norms that Trainer keeps from decay. Say "
            'fsdp_config={"use_orig_params": true, ...}, or take FSDP2 ("version": 2).'
        )
    keywords, sentence = choose(context.args)
    if keywords.get("is_approx") is False and not _driven:
        raise RuntimeError(
            "optim_args: is_approx=False (exact mode) needs a second gradient at each update, which Trainer does not "
            "take: use mars_dist.integrations.exact_trainer.ExactTrainer in its place, or leave it out."
        )
    _say(sentence)
    if RULES[keywords["mars_type"]].whole_matrix and context.model is not None:
        kinds = {kind.__name__ for m in context.model.modules() for kind in type(m).__mro__}
        if found := sorted(kinds & {"Embedding", "Conv1D"}):
            _say(
                f"the groups are Trainer's: {keywords['mars_type']} also orthogonalises embeddings and head, and takes "
                f"Conv1D weights for (out, in) (this model has {' and '.join(found)}). mars_dist.param_groups knows "
                "them: Trainer(optimizers=(mars_dist.MARS(groups, ...), None))"
            )
    return optimizer_class(keywords), keywords


@contextlib.contextmanager
def exact_mode_is_driven() -> Iterator[None]:
    """Around the creation of an optimizer for a Trainer that takes the second gradient of exact mode."""
    global _driven
    _driven = True
    try:
        yield
    finally:
        _driven = False


def _say(sentence: str) -> None:
    """Once, on rank 0."""
    if sentence not in _said and os.environ.get("RANK", "0") == "0":
        _said.add(sentence)
        logger.info("%s", sentence)


# ----------------------------------------------------------------------------------------- when MARS is asked for


def _asks_for_mars(optim: Any) -> bool:
    return str(getattr(optim, "value", optim)) in NAMES.values()


def _before_arguments(args: Any) -> None:
    """At the construction of TrainingArguments: before a model is loaded, and with a message of its own."""
    if _asks_for_mars(args.optim):
        _refuse_other_releases(str(getattr(args.optim, "value", args.optim)))
        from mars_dist.integrations.trainer_arguments import choose

        choose(args)


def _refuse_other_releases(value: str) -> None:
    """Raise where this release of transformers lacks, or has changed, a name that MARS is registered through."""
    missing = []
    names = getattr(sys.modules[ARGUMENTS], "OptimizerNames", ())
    if value not in [m.value for m in names]:
        missing.append(f"{ARGUMENTS}.OptimizerNames to which a member can be added")
    try:
        handlers = getattr(importlib.import_module(OPTIMIZERS), "_OPTIMIZER_HANDLERS", None)
    except ImportError:
        handlers = None
    if not isinstance(handlers, dict):
        missing.append(f"the dictionary {OPTIMIZERS}._OPTIMIZER_HANDLERS")
    try:
        config = getattr(importlib.import_module(DEEPSPEED), "HfTrainerDeepSpeedConfig", None)
    except ImportError:
        config = None
    missing += [f"{DEEPSPEED}.HfTrainerDeepSpeedConfig.{name}" for name in WATCHED if not hasattr(config, name)]
    instead = "give MARS to Trainer yourself: optimizer_cls_and_kwargs=(mars_dist.MARS, {...})"
    if missing:
        raise RuntimeError(versions.missing_hook("transformers", missing, f'optim="{value}" does not work', instead))
    assert handlers is not None
    if not _is_ours(handlers.get(value)):
        raise RuntimeError(
            f"transformers {versions.installed('transformers')} has an optimizer of its own, or of another package, "
            f'for optim="{value}": {handlers.get(value)!r}. mars_dist does not replace it; {instead}.'
        )


# ------------------------------------------------------------------------------------ the block of a ds_config.json

WATCHED = ("trainer_config_process", "trainer_config_finalize")


def _watch_configuration(module: ModuleType) -> None:
    config = getattr(module, "HfTrainerDeepSpeedConfig", None)
    _wrap(config, "trainer_config_process", _before_configuration, _after_configuration)
    _wrap(config, "trainer_config_finalize", _before_configuration, _say_configuration)


def _before_configuration(config: Any, args: Any, *others: Any, **more: Any) -> None:
    """Compare the configuration's optimizer block with ``optim``; fill in what only one of them says."""
    block = config.config.get("optimizer")
    kind, wanted = block.get("type") if isinstance(block, dict) else None, _asks_for_mars(args.optim)
    is_mars = kind in DEEPSPEED_NAMES
    optim = str(getattr(args.optim, "value", args.optim))
    if (wanted or is_mars) and os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "t", "on"):
        raise ValueError(
            "ACCELERATE_USE_CPU is set in the environment: Accelerate then leaves DeepSpeed out without a word, and "
            "with it the optimizer block of its configuration. Unset it; --use_cpu alone runs DeepSpeed on a CPU."
        )
    if not isinstance(block, dict):
        return
    if wanted and not is_mars:
        raise ValueError(
            f'optim="{optim}" asks for MARS, and the DeepSpeed configuration has an optimizer block of its own with '
            f'"type": "{kind}", which DeepSpeed would train with. Take the block out of the configuration, or give it '
            '"type": "MARS".'
        )
    if not is_mars:
        return
    from mars_dist.integrations.trainer_arguments import changed, explicit, parse

    params = block.setdefault("params", {})
    if wanted:
        _agree(params, args, explicit(args)[0], optim)
        return
    if changed(args, "optim"):
        raise ValueError(
            f'the DeepSpeed configuration has an optimizer block with "type": "{kind}", which DeepSpeed would train '
            f'with, and optim="{optim}" asks for another optimizer. Leave optim out, or take the block out of the '
            "configuration."
        )
    if args.optim_args:
        parse(args.optim_args)
        raise ValueError(
            f"optim_args={args.optim_args!r} would have no effect: the DeepSpeed configuration has an optimizer block "
            f'with "type": "{kind}" and optim was not given. Put the values into the block\'s "params", or give '
            f"optim (one of {', '.join(NAMES.values())}) as well."
        )
    if params.get("betas") == "auto":  # Trainer would put Adam's defaults there
        from mars_dist.config import GROUP_DEFAULTS

        names = ("adam_beta1", "adam_beta2")
        pairs = zip(names, GROUP_DEFAULTS["betas"], strict=True)
        params["betas"] = [getattr(args, name) if changed(args, name) else ours for name, ours in pairs]


def _agree(params: dict[str, Any], args: Any, given: dict[str, Any], optim: str) -> None:
    """Make the block say what ``optim`` and ``optim_args`` say; what both say has to be the same.

    DeepSpeed makes one group of all parameters from a block, without Trainer's no-decay group: the tensors under plain
    AdamW (biases, norms) stand for it.
    """
    different, undecayed = [], "weight_decay_1d" not in params
    for name, value in given.items():
        value = list(value) if isinstance(value, tuple) else value
        present = params.get(name, "auto")
        if name == "matrix_ndim" and isinstance(present, int):
            present = [present]
        if present == "auto":
            params[name] = value
        elif (list(present) if isinstance(present, tuple) else present) != value:
            different.append(f"{name} is {present!r} in the block and {value!r} by the arguments")
    if different:
        raise ValueError(
            f'optim="{optim}" and the optimizer block of the DeepSpeed configuration contradict each other: '
            f"{'; '.join(different)}. Say each value in one place only."
        )
    if undecayed and given.get("weight_decay_1d"):
        raise ValueError(
            f"optim_args: weight_decay_1d={given['weight_decay_1d']:g} would decay biases and norms as well, because "
            "DeepSpeed makes one parameter group for an optimizer block, without Trainer's no-decay group. Say it in "
            "the block if that is meant, or take the block out."
        )
    params.setdefault("lr", "auto")
    params.setdefault("weight_decay", "auto")
    params.setdefault("lr_1d", args.learning_rate)
    params.setdefault("weight_decay_1d", 0.0)
    if params.get("betas") == "auto":
        from mars_dist.config import GROUP_DEFAULTS

        params["betas"] = list(GROUP_DEFAULTS["betas"])


def _after_configuration(config: Any, args: Any, *others: Any, **more: Any) -> None:
    """Betas and eps of a MARS block are not compared with Adam's defaults, which nobody asked for."""
    block = config.config.get("optimizer")
    if not isinstance(block, dict) or block.get("type") not in DEEPSPEED_NAMES:
        return
    from mars_dist.integrations.trainer_arguments import changed

    compared = {"betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_epsilon",)}
    for key, names in compared.items():
        value = block.get("params", {}).get(key)
        values = value if isinstance(value, (list, tuple)) else [value]
        pairs = zip(names, values, strict=False)
        contradicted = any(changed(args, name) and getattr(args, name) != present for name, present in pairs)
        if _asks_for_mars(args.optim) or not contradicted:
            start = f"- ds optimizer.params.{key}="
            config.mismatches[:] = [text for text in config.mismatches if not text.startswith(start)]


def _say_configuration(config: Any, args: Any, *others: Any, **more: Any) -> None:
    """When training starts: every "auto" has its value by now."""
    block = config.config.get("optimizer")
    if isinstance(block, dict) and block.get("type") in DEEPSPEED_NAMES:
        values = ", ".join(f"{name} {value}" for name, value in block.get("params", {}).items())
        _say(f"Trainer's optimizer is the MARS block of the DeepSpeed configuration: {values or 'no values given'}")


# ------------------------------------------------------------------------------------------------------- wrapping


def _wrap(owner: Any, name: str, before: Callable[..., None], after: Callable[..., None] | None = None) -> None:
    original = getattr(owner, name, None)
    if original is None or getattr(original, "mars_dist", False):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _active:
            before(self, *args, **kwargs)
        result = original(self, *args, **kwargs)
        if _active and after is not None:
            after(self, *args, **kwargs)
        return result

    wrapped.mars_dist = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _unwrap(owner: Any, name: str) -> None:
    present: Any = getattr(owner, "__dict__", {}).get(name)
    if getattr(present, "mars_dist", False):
        setattr(owner, name, present.__wrapped__)
