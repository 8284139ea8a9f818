r"""``mars-dist checkpoint convert``: a DeepSpeed checkpoint of MARS for another number of ranks, or another ZeRO stage.

DeepSpeed's own ``ds_to_universal`` puts the master weights, ``exp_avg`` and ``exp_avg_sq`` of each parameter into a
folder of its own. It drops every other state without a word, and where it goes wrong it is given what it needs:

| DeepSpeed | here |
|---|---|
| fails where a group has no ``exp_avg_sq`` (mars-lion, mars-shampoo, mars-m) | zeros, which MARS throws away again |
| has wrong places for ``round_robin_gradients`` | the order in which the flat tensors really are |
| loses ``prev_grad``, ``next_prev_grad``, ``max_exp_avg_sq`` | a file each, in the precision they were saved in, in a \
folder that DeepSpeed's loader does not read (it wants the same states for all parameters of a group) |
| writes what only the same kind of stage can load | files for stages 1, 2 and 3 |
| loses frozen parameters and buffers | ``mars_dist_rest.pt`` |

The states, groups and settings by parameter name are in the folder's manifest. ``universal_load.py`` reads it all.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mars_dist.checkpoint import manifest
from mars_dist.config import SETTINGS_KEY
from mars_dist.integrations.deepspeed.universal_source import INNER, MAPPINGS, MODEL, OUTER, Source, find
from mars_dist.states import STEP
from mars_dist.versions import installed, missing_hook

KIND = "deepspeed-universal"
POINTER = "latest_universal"  # DeepSpeed's, beside the folder
DEMANDED = ("exp_avg", "exp_avg_sq")  # by DeepSpeed, of every parameter
REST = "mars_dist_rest.pt"
OURS = "mars_dist"  # the folder of what only MARS reads, in that of a parameter
ZERO, COMMON = "zero", "optimizer_state.pt"
PARAM, CAT_DIM = "param", "cat_dim"  # of a parameter's file
CARRIED = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")  # of the wrapper


def convert(
    source: str | os.PathLike[str], out: str | os.PathLike[str], tag: str | None = None, trusted: bool = False
) -> dict[str, Any]:
    """Write the universal form of a checkpoint that DeepSpeed ZeRO 1, 2 or 3 has saved with MARS.

    The folder appears whole or not at all, with a manifest; ``latest_universal`` beside it then names it, so that
    ``engine.load_checkpoint(folder above)`` with ``"checkpoint": {"load_universal": true}`` finds it.

    Args:
        source: folder of the checkpoint, or the one above it (its ``latest`` file, or ``tag``, says which).
        out: the new folder.
        trusted: do not check the pickles of ``source``, which DeepSpeed executes.

    Returns: the facts of the manifest: variant, settings, groups, parameters, world size, stage, versions.

    Raises:
        ValueError, FileNotFoundError: a file of a rank is missing or damaged, MARS did not save it, ...; nothing is
            left behind.
        FileExistsError: ``out`` exists.
    """
    out = Path(out)
    if out.exists() or out.is_symlink():
        raise FileExistsError(f"{out} exists: give a folder that is not there yet")
    opened = Source(find(Path(source), tag), trusted)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".converting", dir=out.parent))
    try:
        made = work / out.name
        made.mkdir()
        _run_deepspeed(_prepared(opened, work / "source"), made)
        facts = _complete(opened, made)
        for path in sorted(made.rglob("*")):
            manifest.to_disk(path)
        manifest.write(made, {name: manifest.record(made / name) for name in manifest.files_in(made)}, facts)
        os.rename(made, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    manifest.to_disk(out.parent)
    manifest.put_text(out.parent / POINTER, out.name)
    return facts


# ------------------------------------------------------------------------------------------------ DeepSpeed's part


def _prepared(source: Source, folder: Path) -> Path:
    """A folder with the checkpoint as ``ds_to_universal`` can read it: links, and new files where it could not."""
    folder.mkdir()
    for path in source.model_files:
        (folder / path.name).symlink_to(path.resolve())
    for rank, path in enumerate(source.files):
        mappings = None if source.is_stage3 else _mappings(source, rank)
        states = [source.states(rank, flat) for flat in range(len(source.shapes))]
        right = mappings is None or all(
            {n: (f.start, f.numel) for n, f in theirs.items()} == {n: (f.start, f.numel) for n, f in ours.items()}
            for theirs, ours in zip(source.ranks[rank][MAPPINGS], mappings, strict=True)
        )
        if right and all(key in state for state in states for key in DEMANDED):
            (folder / path.name).symlink_to(path.resolve())
            continue
        content = source.read(path)
        inner, _ = INNER[source.is_stage3]
        content[OUTER][inner]["state"] = {flat: _demanded(state) for flat, state in enumerate(states)}
        if mappings is not None:
            content[OUTER][MAPPINGS] = mappings
        torch.save(content, folder / path.name)
    return folder


def _demanded(state: dict[str, Any]) -> dict[str, Any]:
    """The states that ``ds_to_universal`` reads; zeros for one that MARS does not have, a single number on disk."""
    zeros = torch.zeros(1, dtype=state["exp_avg"].dtype).expand(state["exp_avg"].numel())
    return {STEP: state[STEP], **{key: state.get(key, zeros) for key in DEMANDED}}


def _mappings(source: Source, rank: int) -> list[dict[str, Any]]:
    """Where each parameter's piece lies in the rank's flat tensors, as ``ds_to_universal`` wants it."""
    from deepspeed.utils.tensor_fragment import fragment_address

    out: list[dict[str, Any]] = [OrderedDict() for _ in source.shapes]
    for parameter in source.parameters.values():
        piece = source.piece(parameter, rank)
        if piece.start < piece.stop:
            address = fragment_address(numel=piece.stop - piece.start, start=piece.offset)
            out[parameter.flat][parameter.name] = address
    return out


def _run_deepspeed(source: Path, out: Path) -> None:
    """``ds_to_universal`` in this process: it starts none with one worker."""
    try:
        from deepspeed.checkpoint.ds_to_universal import main
    except ImportError as error:
        raise RuntimeError(missing_hook("deepspeed", str(error), "there is no converter to build on")) from error
    arguments = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(out),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main(arguments)
    except Exception as error:
        raise RuntimeError(
            f"DeepSpeed's ds_to_universal failed ({type(error).__name__}: {error}). It said last: "
            f"{said.getvalue().strip().splitlines()[-1:]}"
        ) from error


# ------------------------------------------------------------------------------------------------------ our part


def _complete(source: Source, made: Path) -> dict[str, Any]:
    """Add what DeepSpeed has left out. Returns the facts for the manifest."""
    parameters: dict[str, Any] = {}
    for name, parameter in source.parameters.items():
        folder = made / ZERO / name
        keys, step = source.keys(parameter), source.step(parameter)
        dtypes = {"fp32": _with_shape(folder / "fp32.pt", parameter.shape)}
        for key in DEMANDED:
            dtypes[key] = _with_shape(folder / f"{key}.pt", parameter.shape)
        for key in keys:
            if key not in DEMANDED:
                (folder / OURS).mkdir(exist_ok=True)
                dtypes[key] = _save(source.whole(parameter, key), folder / OURS / f"{key}.pt")
        torch.save(torch.tensor(step, dtype=torch.float32), folder / "step.pt")
        parameters[name] = {
            "shape": list(parameter.shape),
            "group": parameter.group,
            "step": step,
            "states": {key: dtypes[key] for key in keys},
        }
    for folder in (made / ZERO).iterdir():  # buffers and frozen parameters, as float32: nobody reads them there
        if folder.is_dir() and folder.name not in source.parameters:
            shutil.rmtree(folder)
    torch.save(source.rest(), made / REST)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in source.groups]
    torch.save(_common(source, groups), made / ZERO / COMMON)
    _model_files(source, made)
    return {
        "kind": KIND,
        "variant": source.settings.mars_type,
        SETTINGS_KEY: source.settings.to_text(),
        "groups": [{key: _plain(value) for key, value in group.items()} for group in groups],
        "parameters": parameters,
        "world_size": len(source.files),
        "zero_stage": source.stage,
        "versions": {name: installed(name) for name in ("mars_dist", "torch", "deepspeed")},
    }


def _with_shape(path: Path, shape: tuple[int, ...]) -> str:
    """Give a file that stage 3 has left flat the form that the loader of the other stages reads. Returns its dtype."""
    content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if isinstance(content, Tensor):
        return _save(content.clone().view(shape), path)
    if tuple(content[PARAM].shape) != shape:
        raise ValueError(f"ds_to_universal gave {path.parent.name} {path.stem} another shape than {shape}")
    return _name(content[PARAM].dtype)


def _save(value: Tensor, path: Path) -> str:
    torch.save({PARAM: value, CAT_DIM: 0}, path)
    return _name(value.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _common(source: Source, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What the loaders of all stages read of the optimizer as a whole (stage 3 looks one level deeper)."""
    first = source.ranks[0]
    step = max(source.step(parameter) for parameter in source.parameters.values())
    listed = [{**group, "params": [number]} for number, group in enumerate(groups)]
    return {
        **{key: first[key] for key in CARRIED if key in first},
        "ds_version": first.get("ds_version", installed("deepspeed")),
        "param_groups": listed,
        OUTER: {"state": {0: {STEP: torch.tensor(step, dtype=torch.float32)}}, "param_groups": listed},
    }


def _model_files(source: Source, made: Path) -> None:
    """The file with the engine's counters and the schedule, under the names by which the stages look for it.

    The weights in it are left out: DeepSpeed takes those of the parameters' folders.
    """
    content = source.read(source.model_files[0])
    content |= {"module": {}, "frozen_param_fragments": None, "dp_world_size": 1}  # no other rank's file belongs to it
    for path in made.glob(f"*{MODEL}"):
        path.unlink()
    for name in (f"mp_rank_00_{MODEL}", f"zero_pp_rank_0_mp_rank_00_{MODEL}"):
        torch.save(content, made / name)


def _plain(value: Any) -> Any:
    """A value of a group as JSON has it."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
