"""``load_checkpoint`` of a universal checkpoint into an engine that trains with MARS.

DeepSpeed's own loader runs, between a check before it (nothing is overwritten by what does not fit) and a repair after
it, which gives MARS its states by parameter name. The loader, left alone (read and measured in DeepSpeed 0.19):

- writes the values of the first parameter group over all groups (stage 3)
- makes one step counter the state of all sub-groups (stage 3): n of them count n steps in one
- takes further states in the master's precision and only where all parameters of a group have them (stages 1 and 2), or
  not at all (stage 3): those are in a folder that it does not look into
- puts weights and states to wrong places under ``round_robin_gradients``
- leaves frozen parameters and buffers as the new model has them
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mars_dist.checkpoint import manifest
from mars_dist.checkpoint.kinds import ranks_of, tag_folder
from mars_dist.checkpoint.together import together
from mars_dist.config import SETTINGS_KEY, Settings
from mars_dist.integrations.deepspeed.universal import COMMON, DEMANDED, KIND, OURS, PARAM, POINTER, REST, ZERO
from mars_dist.integrations.deepspeed.universal_source import MODEL, OPTIMIZER
from mars_dist.maths.absent import ABSENT
from mars_dist.optimizer import MARS
from mars_dist.states import STEP
from mars_dist.tables import GROUP_ID
from mars_dist.versions import missing_hook

logger = logging.getLogger("mars_dist")

THEIRS = ("fp32", STEP, *DEMANDED)  # what DeepSpeed's loader reads of a parameter
GRADIENTS = ("prev_grad", "next_prev_grad")
CONVERT = "`mars-dist checkpoint convert DIR OUT`"
# Where the wrappers keep the parameters of each flat tensor, and what else is used of them.
MEMBERS = {
    "DeepSpeedZeroOptimizer": ("bit16_groups", "update_lp_params", "_lazy_init_hp_params_optimizer_state"),
    "BF16_Optimizer": ("bf16_groups", "update_lp_params", "_lazy_init_hp_params_optimizer_state"),
    "DeepSpeedZeroOptimizer_Stage3": (
        "fp16_groups",
        "_set_fp32_optimizer_param_groups",
        "_clear_fp32_optimizer_param_groups",
    ),
}


def load(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """``DeepSpeedEngine.load_checkpoint`` with ``"checkpoint": {"load_universal": true}`` and MARS.

    Raises:
        CheckpointError (ValueError on one rank): the folder is damaged or does not fit the engine; nothing was changed.
    """
    given = inspect.signature(original).bind(engine, *args, **kwargs).arguments
    with together("load_checkpoint"):
        folder = _folder(Path(given["load_dir"]), given.get("tag"))
    with together(f"loading {folder} (nothing was changed)"):
        _refuse_what_cannot_be(engine, given)
        if engine.global_rank == 0:
            _check_files(folder)
        saved = Saved.read(folder)
        engine_names = {id(p): name for name, p in engine.module.named_parameters()}
        groups = _fitting(engine, saved, engine_names)
    mars: MARS = engine.basic_optimizer
    before = [dict(group) for group in mars.param_groups]
    result = original(engine, *args, **kwargs)
    for group, was in zip(mars.param_groups, before, strict=True):
        params = group["params"]
        group.clear()
        group.update(was, params=params)
    with together(f"loading the states of {folder}"), _flats(engine.optimizer):
        _repair(mars, engine.optimizer, saved, groups, engine_names)
    if hasattr(engine.optimizer, "update_lp_params"):
        engine.optimizer.update_lp_params()
    _restore_the_rest(engine, saved)
    return result


def refuse_another_cut(engine: Any, load_dir: Any, tag: Any) -> None:
    """Before an ordinary load: what converts a checkpoint of another number of ranks, and what reads a universal one.

    Raises:
        RuntimeError: on every rank.
    """
    try:
        folder = tag_folder(Path(load_dir), tag or (Path(load_dir) / "latest").read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return  # DeepSpeed says what it thinks of it
    if (folder / ZERO).is_dir() and not any(folder.glob(f"*{OPTIMIZER}")):
        raise RuntimeError(
            f'MARS: {folder} is a universal checkpoint: set "checkpoint": {{"load_universal": true}} in the '
            "configuration to load it."
        )
    ranks = ranks_of(folder)
    if ranks is not None and ranks != engine.seq_dp_world_size and engine.zero_optimization():
        raise RuntimeError(
            f"MARS: {folder} was saved by an engine of {ranks} ranks, and this one has {engine.seq_dp_world_size}. "
            f"{CONVERT} writes a checkpoint for any number of ranks; load it with "
            '"checkpoint": {"load_universal": true}.'
        )


# ------------------------------------------------------------------------------------------------ before the load


def _folder(load_dir: Path, tag: Any) -> Path:
    if tag is None:
        pointer = load_dir / POINTER
        if not pointer.is_file():
            raise FileNotFoundError(
                f"{pointer} does not exist: {CONVERT} makes the universal checkpoint OUT, and this file beside it. "
                "Then load_checkpoint(folder above OUT), or give the name of OUT as tag"
            )
        tag = pointer.read_text(encoding="utf-8").strip()
    folder = tag_folder(load_dir, tag)
    if not (folder / ZERO / COMMON).is_file():
        raise FileNotFoundError(f"{folder} is no universal checkpoint. {CONVERT} makes one")
    return folder


def _refuse_what_cannot_be(engine: Any, given: Mapping[str, Any]) -> None:
    if not engine.zero_optimization():
        raise ValueError(
            '"checkpoint": {"load_universal": true} without ZeRO: DeepSpeed would not load the weights. Remove it: at '
            "stage 0 an ordinary checkpoint loads on any number of ranks"
        )
    if given.get("load_module_only") or given.get("load_optimizer_states") is False:
        raise ValueError(
            "a universal checkpoint is loaded as a whole (weights, states of the optimizer, counters). For the weights "
            "alone load the ordinary checkpoint, or export them"
        )
    kind = type(engine.optimizer).__name__
    used = MEMBERS.get(kind, (f"known wrapper: {kind}",))
    missing = [f"{kind}.{name}" for name in used if not hasattr(engine.optimizer, name)]
    if missing:
        raise RuntimeError(missing_hook("deepspeed", missing, "MARS cannot be given its states"))


def _check_files(folder: Path) -> None:
    """Against the manifest; the guard has looked at the pickles before (``saved.py``)."""
    if (folder / manifest.NAME).is_file():
        faults = manifest.faults(folder)
        if faults:
            raise ValueError(f"it is not as it was written: {'; '.join(faults[:3])}")


@dataclass(frozen=True)
class Saved:
    """What is known of a universal checkpoint; ``parameters`` is None for one that stock tools have made."""

    folder: Path
    groups: list[dict[str, Any]]
    settings: Settings | None
    parameters: dict[str, dict[str, Any]] | None

    @classmethod
    def read(cls, folder: Path) -> Saved:
        if (folder / manifest.NAME).is_file():
            facts = manifest.read(folder)
            if facts.get("kind") == KIND:
                settings = Settings.from_text(facts[SETTINGS_KEY])
                groups = [{**group, SETTINGS_KEY: facts[SETTINGS_KEY]} for group in facts["groups"]]
                return cls(folder, groups, settings, facts["parameters"])
        common = torch.load(
            folder / ZERO / COMMON, map_location="cpu", mmap=True, weights_only=False
        )  # the guard has looked at it
        groups = [{k: v for k, v in group.items() if k != "params"} for group in common["param_groups"]]
        text = groups[0].get(SETTINGS_KEY) if groups else None
        return cls(folder, groups, None if text is None else Settings.from_text(text), None)

    def file(self, name: str, key: str) -> Path:
        folder = self.folder / ZERO / name
        return (folder if key in THEIRS else folder / OURS) / f"{key}.pt"

    def tensor(self, name: str, key: str) -> Tensor:
        content = torch.load(self.file(name, key), map_location="cpu", mmap=True, weights_only=True)
        tensor: Tensor = content if isinstance(content, Tensor) else content[PARAM]
        return tensor.flatten()

    def rest(self) -> dict[str, dict[str, Tensor]]:
        """Frozen parameters and buffers, whole, by name; none in what stock tools have made."""
        path = self.folder / REST
        if not path.is_file():
            return {"frozen": {}, "buffers": {}}
        rest: dict[str, dict[str, Tensor]] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return rest

    def keys(self, name: str) -> list[str]:
        """The states of a parameter, beside its step."""
        if self.parameters is not None:
            return list(self.parameters[name]["states"])
        return [key for key in DEMANDED if self.file(name, key).is_file()]

    def step(self, name: str) -> float:
        if self.parameters is not None:
            return float(self.parameters[name][STEP])
        if self.file(name, STEP).is_file():
            return float(torch.load(self.file(name, STEP), map_location="cpu", weights_only=True))
        common = torch.load(self.folder / ZERO / COMMON, map_location="cpu", mmap=True, weights_only=False)
        return float(common["optimizer_state_dict"]["state"][0][STEP])


def _members(wrapper: Any) -> list[list[Tensor]]:
    """The parameters of each flat tensor."""
    members: list[list[Tensor]] = getattr(wrapper, MEMBERS[type(wrapper).__name__][0])
    return members


def _fitting(engine: Any, saved: Saved, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The saved values for each parameter group of the engine.

    Raises:
        ValueError: with what differs between the checkpoint and the engine.
    """
    mars: MARS = engine.basic_optimizer
    if saved.settings is not None and saved.settings.mars_type != mars.settings.mars_type:
        raise ValueError(
            f"it was saved by mars_type={saved.settings.mars_type!r}, and the engine trains with "
            f"{mars.settings.mars_type!r}: their states mean different things"
        )
    flats = [[(names[id(p)], p) for p in members] for members in _members(engine.optimizer)]
    here = {name: tuple(getattr(p, "ds_shape", p.shape)) for flat in flats for name, p in flat}
    _refuse_other_parameters(saved, here)
    _refuse_other_rest(engine, saved, here)
    for flat in flats:
        steps = {saved.step(name): name for name, _ in flat}
        if len(steps) > 1:
            raise ValueError(
                f"{' and '.join(f'{name} ({step:g} steps)' for step, name in steps.items())} would lie in one flat "
                "tensor, which has one counter: give them parameter groups of their own, as they had"
            )
    if engine.zero_optimization_stage() < 3:
        for number, members in enumerate(_members(engine.optimizer)):
            if all(p._hp_mapping is None for p in members):  # type: ignore[attr-defined]
                raise ValueError(
                    f"this rank has nothing of parameter group {number}, whose {sum(p.numel() for p in members)} "
                    "elements are fewer than the ranks take, and DeepSpeed's loader fails there. Use ZeRO stage 3, "
                    "fewer ranks, or fewer groups"
                )
    if saved.parameters is None:
        _refuse_stock(engine, saved, here)
        return list(saved.groups)
    chosen = []
    for number, group in enumerate(mars.param_groups):
        ours = [names[id(p)] for p in mars._tables.constructed_with(group[GROUP_ID]) if id(p) in names]
        its = {saved.parameters[name]["group"] for name in ours if name in here}
        values = [saved.groups[i] for i in sorted(its)]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"parameter group {number} has tensors of groups {sorted(its)} of the checkpoint, whose values "
                "differ: make the groups as they were"
            )
        chosen.append(values[0] if values else {k: v for k, v in group.items() if k != "params"})
    return chosen


def _refuse_other_parameters(saved: Saved, here: Mapping[str, tuple[int, ...]]) -> None:
    there = set(saved.parameters) if saved.parameters is not None else set()
    if saved.parameters is None:
        there = {name for name in here if saved.file(name, "fp32").is_file() and saved.file(name, "exp_avg").is_file()}
    parts = [
        f"{where}: {', '.join(sorted(found)[:3])}{' ...' if len(found) > 3 else ''}"
        for where, found in (("trained only there", there - here.keys()), ("trained only here", here.keys() - there))
        if found
    ]
    if parts:
        raise ValueError(f"it is of another model: {'; '.join(parts)}")
    for name, shape in here.items():
        its = shape
        if saved.parameters is not None:
            its = tuple(saved.parameters[name]["shape"])
        elif saved.tensor(name, "fp32").numel() != torch.Size(shape).numel():
            its = (saved.tensor(name, "fp32").numel(),)
        if its != shape:
            raise ValueError(f"it is of another model: {name} has shape {its} there and {shape} here")


def _refuse_other_rest(engine: Any, saved: Saved, here: Mapping[str, tuple[int, ...]]) -> None:
    """Frozen parameters and buffers of other shapes: later, only the first rank would see them."""
    model = {n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in engine.module.named_parameters() if n not in here}
    model |= {name: tuple(buffer.shape) for name, buffer in engine.module.named_buffers()}
    rest = saved.rest()
    for name, value in {**rest["frozen"], **rest["buffers"]}.items():
        if name in model and tuple(value.shape) != model[name]:
            raise ValueError(f"it is of another model: {name} has shape {tuple(value.shape)} there, {model[name]} here")


def _refuse_stock(engine: Any, saved: Saved, here: Mapping[str, tuple[int, ...]]) -> None:
    """What ``ds_to_universal`` by itself cannot give: an ending for each message is the converter that can."""
    mars, stage = engine.basic_optimizer, engine.zero_optimization_stage()
    reasons = []
    if len(saved.groups) != len(mars.param_groups):
        reasons.append(f"it has {len(saved.groups)} parameter groups, and the engine {len(mars.param_groups)}")
    name = f"{'zero_pp_rank_0_' if stage == 3 else ''}mp_rank_00_{MODEL}"
    content = torch.load(saved.file(next(iter(here)), "fp32"), map_location="cpu", mmap=True, weights_only=True)
    if not (saved.folder / name).is_file() or stage < 3 and isinstance(content, Tensor):
        reasons.append(f"it was made for another ZeRO stage than {stage}")
    if any(group.get("amsgrad") for group in saved.groups):
        reasons.append("max_exp_avg_sq (amsgrad) is not in it")
    rest = [n for n, p in engine.module.named_parameters() if n not in here and getattr(p, "ds_numel", p.numel())]
    rest += engine._get_buffer_names()
    if rest:
        reasons.append(f"{len(rest)} frozen parameters and buffers ({rest[0]}, ...) are not in it")
    if reasons:
        raise ValueError(f"made by DeepSpeed's own ds_to_universal: {'; '.join(reasons)}. Convert with {CONVERT}")


# -------------------------------------------------------------------------------------------------- after the load


@contextlib.contextmanager
def _flats(wrapper: Any) -> Iterator[None]:
    """The flat tensors stand in MARS's groups, as in a step (stage 3 takes them out in between)."""
    is_stage3 = hasattr(wrapper, "_set_fp32_optimizer_param_groups")
    if is_stage3:
        wrapper._set_fp32_optimizer_param_groups()
    try:
        yield
    finally:
        if is_stage3:
            wrapper._clear_fp32_optimizer_param_groups()


def _repair(mars: MARS, wrapper: Any, saved: Saved, groups: list[dict[str, Any]], names: Mapping[int, str]) -> None:
    states: dict[int, dict[str, Any]] = {}
    listed = []
    for group, values in zip(mars.param_groups, groups, strict=True):
        first = len(states)
        originals = mars._tables.originals[group[GROUP_ID]]
        by_original = {name: names[id(p)] for name, ref in originals if (p := ref()) is not None and id(p) in names}
        for position, flat in enumerate(group["params"]):
            layout = mars._tables.expect(group, position)
            if layout.fault:
                raise RuntimeError(layout.fault)
            pieces = [(by_original[s.name], s.start, s.stop, s.offset) for s in layout.segments]
            states[len(states)] = _state(saved, flat, pieces)
            if hasattr(wrapper, "update_lp_params"):
                for name, start, stop, offset in pieces:
                    if start < stop:
                        flat.data[offset : offset + stop - start].copy_(saved.tensor(name, "fp32")[start:stop])
        listed.append({**values, "params": list(range(first, len(states)))})
    mars.load_state_dict({"state": states, "param_groups": listed})
    if hasattr(wrapper, "update_lp_params"):
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()


def _state(saved: Saved, flat: Tensor, pieces: list[tuple[str, int, int, int]]) -> dict[str, Any]:
    """The states of one flat tensor, as the parameters in it have them. Every rank gives it the same ones."""
    present = {name: saved.keys(name) for name, *_ in pieces}
    state: dict[str, Any] = {STEP: torch.tensor(saved.step(pieces[0][0]), dtype=torch.float32)}
    for key in dict.fromkeys(key for keys in present.values() for key in keys):
        out: Tensor | None = None
        for name, start, stop, offset in pieces:
            if key in present[name]:
                value = saved.tensor(name, key)
                if out is None:
                    fill = ABSENT if key in GRADIENTS else 0.0
                    out = torch.full_like(flat, fill, dtype=value.dtype, requires_grad=False)
                if start < stop:
                    out[offset : offset + stop - start].copy_(value[start:stop])
        assert out is not None
        state[key] = out
    return state


def _restore_the_rest(engine: Any, saved: Saved) -> None:
    """Frozen parameters and buffers, which DeepSpeed's loader leaves as they are."""
    import deepspeed

    if saved.parameters is None:  # one that was made by stock tools is refused where there is something to restore
        return
    rest = saved.rest()
    buffers = dict(engine.module.named_buffers())
    trained = {id(p) for members in _members(engine.optimizer) for p in members}
    absent = []
    with torch.no_grad():
        for name, value in rest["buffers"].items():
            if name in buffers:
                buffers[name].copy_(value)
        for name, p in engine.module.named_parameters():
            if id(p) in trained:
                continue
            if name not in rest["frozen"]:
                absent.append(name)
            elif hasattr(p, "ds_numel"):
                with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
                    if engine.global_rank == 0:
                        p.copy_(rest["frozen"][name])
            else:
                p.copy_(rest["frozen"][name])
    if absent and engine.global_rank == 0:
        logger.warning(
            "%s has no values for %d frozen parameters (%s, ...): they stay as the model was built.",
            saved.folder,
            len(absent),
            absent[0],
        )
