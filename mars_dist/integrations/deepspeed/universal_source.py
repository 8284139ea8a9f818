"""A checkpoint that DeepSpeed ZeRO has saved, read by parameter name: which piece of which parameter lies where.

Every rank has written one flat tensor for each parameter group (stages 1 and 2, BF16_Optimizer) or sub-group (stage 3),
and for each state of it. What is said here of their layout is what ``sharding/zero.py`` reads off a live engine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mars_dist.checkpoint import manifest, trust
from mars_dist.checkpoint.kinds import tag_folder
from mars_dist.config import SETTINGS_KEY, Settings
from mars_dist.sharding.layout import Segment
from mars_dist.states import STEP, needed
from mars_dist.step import rule_of
from mars_dist.versions import missing_hook

MODEL, OPTIMIZER = "model_states.pt", "optim_states.pt"
RANK = re.compile(rf"(?P<form>(?:bf16_|fp16_)?zero)_pp_rank_(?P<rank>\d+)_mp_rank_(?P<slice>\d+)_{OPTIMIZER}")
OUTER = "optimizer_state_dict"  # the wrapper's state in a rank's file
# The states of MARS in it, and the master weights: at stage 3, and below.
INNER = {True: (OUTER, "fp32_flat_groups"), False: ("base_optimizer_state", "single_partition_of_fp32_groups")}
MAPPINGS, ALIGNMENT = "param_slice_mappings", "param_alignment_paddings"
NEXT = "next_prev_grad"


@dataclass(frozen=True)
class Parameter:
    """A trained parameter: its global shape, the flat tensor and the group that it lies in."""

    name: str
    shape: tuple[int, ...]
    flat: int
    group: int
    offset: int  # in the flat tensor: of all ranks together (stages 1, 2), of each rank (stage 3)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a parameter, which begin at ``offset`` of a rank's flat tensor."""

    start: int
    stop: int
    offset: int


def find(folder: Path, tag: str | None) -> Path:
    """The folder of one checkpoint: ``folder`` itself, or what ``tag``, or its ``latest`` file, names in it.

    Raises:
        FileNotFoundError: when there is none; ValueError: for a tag that leads out of the folder.
    """
    if tag is None and not any(folder.glob(f"*{OPTIMIZER}")) and (folder / "latest").is_file():
        tag = (folder / "latest").read_text(encoding="utf-8").strip()
    chosen = folder if tag is None else tag_folder(folder, tag)
    if not any(chosen.glob(f"*{OPTIMIZER}")):
        raise FileNotFoundError(
            f"{chosen} has no *_{OPTIMIZER}: give the folder of a checkpoint that DeepSpeed ZeRO has saved, or the one "
            "above it and --tag"
        )
    return chosen


class Source:
    """A ZeRO checkpoint with MARS in it, checked and opened (its tensors stay on disk until they are read)."""

    def __init__(self, folder: Path, trusted: bool = False) -> None:
        """Raises ``ValueError`` and ``FileNotFoundError`` with the file and what is wrong with it."""
        self.folder = folder
        if (folder / manifest.NAME).is_file():
            faults = manifest.faults(folder)
            if faults:
                raise ValueError(f"{folder} is not as it was saved: {'; '.join(faults[:3])}")
        trust.check(folder, trusted)  # DeepSpeed's converter unpickles all of it, and so does this class
        self.files = self._optimizer_files()
        self.model_files = self._model_files()
        model = self.read(self.model_files[0])
        self._refuse_missing(int(model["dp_world_size"]))
        try:
            self.ranks = [self.read(path)[OUTER] for path in self.files]
            self._look(model)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error} in {folder}"
            raise ValueError(missing_hook("deepspeed", what, "this checkpoint cannot be converted")) from error

    def read(self, path: Path) -> dict[str, Any]:
        """The content of a file that ``trust.check`` has seen: its records are classes of DeepSpeed."""
        try:
            content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        except (RuntimeError, EOFError, OSError) as error:
            raise ValueError(f"{path} cannot be read: it is truncated, or no file of torch.save ({error})") from error
        return content

    # ---------------------------------------------------------------------------------------------- the files

    def _optimizer_files(self) -> list[Path]:
        found: dict[int, Path] = {}
        for path in sorted(self.folder.glob(f"*{OPTIMIZER}")):
            match = RANK.fullmatch(path.name)
            if match is None or int(match["slice"]) > 0 or any(self.folder.glob("layer_*_expert_*")):
                raise ValueError(
                    f"{path} is one of tensor, pipeline or expert parallelism: only ZeRO over data-parallel ranks is "
                    "converted"
                )
            found[int(match["rank"])] = path
            self.form = match["form"]
        self.found = found
        return [found[rank] for rank in sorted(found)]

    def _model_files(self) -> list[Path]:
        whole = self.folder / f"mp_rank_00_{MODEL}"
        pieces = self.folder.glob(f"zero_pp_rank_*_mp_rank_00_{MODEL}")
        by_rank = sorted(pieces, key=lambda path: int(path.name.split("_")[3]))
        if not by_rank and not whole.is_file():
            raise FileNotFoundError(f"{whole} is missing: it has the counters of the engine and the schedule")
        return by_rank or [whole]

    def _refuse_missing(self, world_size: int) -> None:
        names = [self.folder / f"{self.form}_pp_rank_{rank}_mp_rank_00_{OPTIMIZER}" for rank in range(world_size)]
        if len(self.model_files) > 1 or self.model_files[0].name.startswith("zero"):
            names += [self.folder / f"zero_pp_rank_{rank}_mp_rank_00_{MODEL}" for rank in range(world_size)]
        missing = [str(path) for path in names if not path.is_file()]
        if missing or len(self.found) > world_size:
            raise FileNotFoundError(
                f"{', '.join(missing[:3]) or self.files[-1]} "
                + (
                    f"{'is' if len(missing) == 1 else 'are'} missing: the checkpoint was saved by {world_size} ranks"
                    if missing
                    else f"is not of this checkpoint, which {world_size} ranks have saved"
                )
                + ". Save it again, or take another one."
            )

    # --------------------------------------------------------------------------------------------- the content

    def _look(self, model: Mapping[str, Any]) -> None:
        first = self.ranks[0]
        self.is_stage3 = "fp32_flat_groups" in first
        self.stage = 3 if self.is_stage3 else int(first.get("zero_stage", 1))
        self.shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
        inner, masters = INNER[self.is_stage3]
        self.groups: list[dict[str, Any]] = first[inner]["param_groups"]
        self.settings = self._settings()
        for path, rank in zip(self.files, self.ranks, strict=True):
            states = rank[inner]["state"] if isinstance(rank[inner], Mapping) else {}
            lacking = [flat for flat in range(len(self.shapes)) if not states.get(flat)]
            if lacking or len(rank[masters]) != len(self.shapes):
                raise ValueError(
                    f"{path} has no state for {len(lacking)} of {len(self.shapes)} parameter groups: it was saved "
                    "before the first step, and there is nothing to convert. Train at least one step before saving"
                )
        self.parameters = {p.name: p for p in self._parameters()}

    def _settings(self) -> Settings:
        texts = {group.get(SETTINGS_KEY) for group in self.groups}
        if None in texts or len(texts) != 1:
            raise ValueError(
                f"{self.folder} was not saved by MARS (its parameter groups have no {SETTINGS_KEY!r}): DeepSpeed's own "
                "ds_to_universal converts it, and MARS loads the result as a first step with the moments kept"
            )
        return Settings.from_text(texts.pop())

    def _parameters(self) -> Iterator[Parameter]:
        """In the order in which they lie in the flat tensors (permuted under round_robin_gradients)."""
        group_of = {flat: number for number, group in enumerate(self.groups) for flat in group["params"]}
        paddings = self.ranks[0].get(ALIGNMENT)
        for flat, shapes in enumerate(self.shapes):
            offset = 0
            gaps = paddings[flat] if paddings else [0] * len(shapes)
            for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
                yield Parameter(name, shape, flat, group_of[flat], offset)
                offset += -(-math.prod(shape) // len(self.files)) if self.is_stage3 else math.prod(shape) + int(gap)

    def states(self, rank: int, flat: int) -> dict[str, Any]:
        """A rank's states of a flat tensor: views into its file."""
        states: dict[str, Any] = self.ranks[rank][INNER[self.is_stage3][0]]["state"][flat]
        return states

    def piece(self, parameter: Parameter, rank: int) -> Piece:
        """What ``rank`` has of ``parameter``; empty where ``start`` is ``stop``."""
        if self.is_stage3:
            size = -(-parameter.numel // len(self.files))
            start = min(rank * size, parameter.numel)
            return Piece(start, min(start + size, parameter.numel), parameter.offset)
        size = self.states(rank, parameter.flat)["exp_avg"].numel()
        first, last = rank * size, (rank + 1) * size
        low, high = max(first, parameter.offset), min(last, parameter.offset + parameter.numel)
        if low >= high:
            return Piece(0, 0, 0)
        return Piece(low - parameter.offset, high - parameter.offset, low - first)

    def whole(self, parameter: Parameter, key: str) -> Tensor:
        """The state ``key`` of a parameter from the pieces of all ranks, in the precision it was saved in."""
        out, filled = None, 0
        for rank in range(len(self.files)):
            flat, piece = self.states(rank, parameter.flat)[key], self.piece(parameter, rank)
            if out is None:
                out = torch.empty(parameter.numel, dtype=flat.dtype)
            length = piece.stop - piece.start
            out[piece.start : piece.stop] = flat[piece.offset : piece.offset + length]
            filled += length
        assert out is not None
        if filled != parameter.numel:
            raise ValueError(
                f"{self.folder}: the ranks have {filled} of the {parameter.numel} elements of {parameter.name} {key}"
            )
        return out.view(parameter.shape)

    def keys(self, parameter: Parameter) -> list[str]:
        """The states that the parameter's own rule uses; its flat tensor may have those of others as well."""
        group = self.groups[parameter.group]
        rule = rule_of(Segment(parameter.name, parameter.shape, 0, 0, 0), group, self.settings)
        keys = needed([rule], group["amsgrad"], bool(group["one_state"]))
        there = self.states(0, parameter.flat)
        return [key for key in (*keys, *([NEXT] if "prev_grad" in keys else [])) if key in there]

    def step(self, parameter: Parameter) -> float:
        """How many steps it has taken: the same on every rank."""
        steps = {float(self.states(rank, parameter.flat)[STEP]) for rank in range(len(self.files))}
        if len(steps) > 1:
            raise ValueError(f"{self.folder}: the ranks have taken {sorted(steps)} steps with {parameter.name}")
        return steps.pop()

    def rest(self) -> dict[str, dict[str, Tensor]]:
        """What is in the model and not trained: "frozen" parameters and "buffers", whole, by name."""
        models = [self.read(path) for path in self.model_files]
        first = models[0]
        module, buffers = first["module"], list(first.get("buffer_names") or [])
        aliases = set(dict(first.get("shared_params") or {}))
        frozen: dict[str, Tensor] = {}
        if self.is_stage3:
            for name, shape in (first.get("frozen_param_shapes") or {}).items():
                parts = [model["frozen_param_fragments"][name].flatten() for model in models]
                frozen[name] = torch.cat(parts)[: math.prod(shape)].view(tuple(shape))
        else:
            others = module.keys() - self.parameters.keys() - aliases - set(buffers)
            frozen = {name: module[name] for name in module if name in others}
        return {
            "frozen": {name: value.detach().clone() for name, value in frozen.items() if isinstance(value, Tensor)},
            "buffers": {name: module[name].detach().clone() for name in buffers if name in module},
        }
