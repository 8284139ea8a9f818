"""Optimizer states that Accelerate and the Trainer load under FSDP: that they are there, and that they arrive.

Both call ``load_fsdp_optimizer``. Two things are wrong with it for any optimizer:

- FSDP1 with SHARDED_STATE_DICT reads only those states that the optimizer has already. A new one has none: nothing is
  loaded, without an error. MARS is given its states first, by a step on zero gradients with a learning rate of 0.
- A file that is missing on one rank leaves the others waiting. Each rank looks for its files first.

Afterwards the states are counted: what the checkpoint has, and MARS has not, is an error.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mars_dist.integrations.import_hook import forget, when_imported

FUNCTION = "load_fsdp_optimizer"
# Where that function is called under its own name.
MODULES = ("accelerate.accelerator", "transformers.trainer")
ORIGINAL = "_mars_dist_original_load_fsdp_optimizer"
OPTIMIZER = "optimizer"  # Accelerate's name of its files
STATES = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "prev_grad", "next_prev_grad"}


def register() -> None:
    """Watch over the calls from the moment that somebody imports the modules that make them. Idempotent."""
    when_imported(MODULES[1], watch)  # accelerate.py has a hook of its own on the other module, and calls watch()


def unregister() -> None:
    """Undo ``register()``."""
    forget(MODULES[1])
    for module in filter(None, map(sys.modules.get, MODULES)):
        if hasattr(module, ORIGINAL):
            setattr(module, FUNCTION, getattr(module, ORIGINAL))
            delattr(module, ORIGINAL)


def watch(module: ModuleType) -> None:
    """Stand around the function where ``module`` calls it."""
    original = getattr(module, FUNCTION, None)
    if original is None or hasattr(module, ORIGINAL):
        return
    setattr(module, ORIGINAL, original)
    setattr(module, FUNCTION, functools.wraps(original)(functools.partial(load, original)))


def load(
    original: Callable[..., Any],
    plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: Any,
    optimizer_index: int = 0,
    **more: Any,
) -> Any:
    """Stands around ``accelerate.utils.load_fsdp_optimizer``.

    Raises:
        CheckpointError: when a rank does not find its files; on every rank.
        RuntimeError: when the checkpoint has states that MARS does not have afterwards; on every rank.
    """
    from mars_dist.checkpoint.together import together
    from mars_dist.integrations.accelerate import mars_inside

    mars = mars_inside(optimizer)
    arguments = (plugin, accelerator, optimizer, model, input_dir, optimizer_index)
    if mars is None:
        return original(*arguments, **more)
    sharded = plugin.state_dict_type.name == "SHARDED_STATE_DICT" and more.get("use_dcp", True)
    folder = Path(input_dir)
    if sharded and folder.name != f"{OPTIMIZER}_{optimizer_index}":
        folder = folder / f"{OPTIMIZER}_{optimizer_index}"
    with together(f"loading the optimizer's states from {input_dir}"):
        if sharded:
            look_for_shards(folder)
        elif plugin.state_dict_type.name == "FULL_STATE_DICT" and accelerator.process_index == 0:
            look_for(folder / (f"{OPTIMIZER}.bin" if optimizer_index == 0 else f"{OPTIMIZER}_{optimizer_index}.bin"))
    if sharded and plugin.fsdp_version == 1 and not any(mars.state.values()):
        create_states(mars)
    result = original(*arguments, **more)
    if sharded:
        check_that_all_arrived(mars, model, folder)
    return result


def look_for(path: Path) -> None:
    """Raise ``FileNotFoundError`` or ``ValueError`` unless ``path`` is a file with something in it that can be read."""
    with path.open("rb") as file:
        if not file.read(1):
            raise ValueError(f"{path} is empty")


def look_for_shards(folder: Path) -> None:
    """``look_for`` every file that a sharded checkpoint of torch names."""
    from torch.distributed.checkpoint import FileSystemReader

    look_for(folder / ".metadata")
    for name in {
        entry.relative_path for entry in (FileSystemReader(folder).read_metadata().storage_data or {}).values()
    }:
        look_for(folder / name)


def create_states(mars: Any) -> None:
    """The states of a new optimizer, as torch's checkpoint helpers make them: nothing moves, and gradients are kept."""
    import torch

    tensors = [p for group in mars.param_groups for p in group["params"] if p.requires_grad]
    gradients = [p.grad for p in tensors]
    rates = [group["lr"] for group in mars.param_groups]
    try:
        for p in tensors:
            p.grad = torch.zeros_like(p)
        for group in mars.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        type(mars).step(mars)
    finally:
        for group, rate in zip(mars.param_groups, rates, strict=True):
            group["lr"] = rate
        for p, gradient in zip(tensors, gradients, strict=True):
            p.grad = gradient


def check_that_all_arrived(mars: Any, model: Any, folder: Path) -> None:
    """Compare the states of a sharded checkpoint with those that MARS has now, over all ranks.

    FSDP1 with original parameters saves the same states for all tensors of a unit. One that a tensor's rule does not
    use, and that others have here, was such a filler and is not missed.

    Raises:
        RuntimeError: naming the parameters and states that are missing.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint import FileSystemReader

    saved: dict[str, set[str]] = defaultdict(set)
    begin = f"{OPTIMIZER}.state."
    for key in FileSystemReader(folder).read_metadata().state_dict_metadata:
        if key.startswith(begin):
            name, _, state = key.removeprefix(begin).rpartition(".")
            saved[name].add(state)
    used = _used(mars)
    mine: dict[str, list[str]] = {}
    fillers: dict[str, set[str]] = {}  # what may be missing
    for name, p in model.named_parameters():
        keys = [key for key, value in mars.state.get(p, {}).items() if key != "step" or value > 0]
        layout = mars._tables.attached(p)
        names = [name] if layout is None else [segment.name for segment in layout.segments]
        mine |= {_clean(name): keys for name in names}
        if layout is not None and layout.unit is not None and p in used:
            fillers |= {_clean(name): STATES - used[p] for name in names}
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    held: dict[str, set[str]] = defaultdict(set)
    for one in everyone:
        for name, keys in one.items():
            held[name] |= set(keys)
    anywhere = {key for keys in held.values() for key in keys}
    missing = []
    for name, states in saved.items():
        if lost := states - held[name] - (fillers.get(name, set()) & anywhere):
            missing.append(f"{name} ({', '.join(sorted(lost))})")
    if missing:
        raise RuntimeError(
            f"MARS: {len(missing)} of {len(saved)} parameters did not get the states that {folder} has for them: "
            f"{'; '.join(missing[:3])}. Construct MARS as it was when they were saved (mars_type, amsgrad, clip, "
            "one_state, is_approx), for the same model."
        )


def _used(mars: Any) -> dict[Any, set[str]]:
    """By tensor the states that its rule uses, where that is known."""
    from mars_dist.states import needed

    out = {}
    for group in mars.param_groups:
        for p in group["params"]:
            rules = mars._tables.rules(group, p, mars.settings)
            if rules is not None:
                out[p] = set(needed(rules, group["amsgrad"], bool(group["one_state"])))
    return out


def _clean(name: str) -> str:
    """The name of a parameter as FSDP saves it."""
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name
