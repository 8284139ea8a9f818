"""Whose checkpoint a folder is, and which files it must have by what its own files say. Nothing is executed.

Where no file says how many ranks there were (Accelerate and the Trainer under DDP), the missing file of the last rank
cannot be told from a smaller world; a sealed folder (``find.seal``) shows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mars_dist.checkpoint import manifest, tensors, trust
from mars_dist.checkpoint.allowed import Global
from mars_dist.checkpoint.pickles import Made

MARS, TRAINER, ACCELERATE = "mars-dist train", "Trainer", "Accelerate"
DEEPSPEED, UNIVERSAL, DCP = "DeepSpeed", "DeepSpeed universal", "torch DCP"
OTHER = "sealed by mars_dist"
MOST_RANKS = 1 << 16  # a number in a file does not keep us busy for ever
POINTERS = ("latest", "latest_universal")
STEP = re.compile(r"(?:[A-Za-z_.-]*[A-Za-z])?[-_.]?(\d+)(?:[-_.]universal)?")  # step-00000020, checkpoint-20, epoch_3
MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIM_STATES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
WEIGHTS: tuple[str, ...] = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
WEIGHTS += ("pytorch_model_fsdp.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json")


def kind_of(folder: Path) -> str | None:
    """One of the names above; None when it is not the folder of one checkpoint."""
    has = {path.name for path in folder.iterdir()}
    sealed = manifest.NAME in has
    if "trainer_state.json" in has or {"training_args.bin", "optimizer.pt"} & has:
        return TRAINER
    if any(tensors.PART.fullmatch(name) for name in has) or (sealed and re.fullmatch(r"step-\d{8,}", folder.name)):
        return MARS
    if any(re.fullmatch(r"random_states_\d+\.pkl", name) for name in has) or "optimizer.bin" in has:
        return ACCELERATE
    if (folder / "zero").is_dir():
        return UNIVERSAL
    if any(MODEL_STATES.fullmatch(name) or OPTIM_STATES.fullmatch(name) for name in has):
        return DEEPSPEED
    if any(name.endswith((trust.METADATA, trust.PIECES)) for name in has):
        return DCP
    return OTHER if sealed else None


def checkpoints_in(folder: Path) -> list[Path]:
    """Folders in ``folder`` that are, or should be, checkpoints: the newest first by the number in the name.

    Those without a number come after them, the newest first by the time of their last change. Hidden folders are what
    somebody has not finished.
    """
    numbered, others = [], []
    for path in folder.iterdir():
        if path.name.startswith(".") or not path.is_dir():
            continue
        step = step_of(path)
        if step is not None:
            numbered.append((step, path))
        elif kind_of(path) is not None:
            others.append((path.stat().st_mtime, path))
    newest = sorted(numbered, key=lambda pair: (pair[0], pair[1].name), reverse=True)
    return [path for _, path in newest + sorted(others, reverse=True)]


def step_of(path: Path) -> int | None:
    """The number of the step in the name of a checkpoint's folder."""
    found = STEP.fullmatch(path.name)
    return int(found.group(1)) if found else None


def tag_folder(folder: Path, tag: Any) -> Path:
    """The folder of a DeepSpeed tag.

    Raises:
        ValueError: when the tag leads out of ``folder``.
    """
    parts = Path(str(tag)).parts
    outside = Path(str(tag)).is_absolute() or ".." in parts or not parts or "\0" in str(tag)
    try:
        outside = outside or not (folder / str(tag)).resolve().is_relative_to(folder.resolve())
    except RuntimeError as error:  # what Python says of links in a circle
        raise ValueError(f"{folder}: the tag {str(tag)!r} leads nowhere ({error})") from error
    if outside:
        raise ValueError(f"{folder}: the tag {str(tag)!r} leads out of it. Tags cannot leave the folder")
    return folder / str(tag)


def pointer_faults(folder: Path) -> list[str]:
    """What is wrong with the files that name the latest of the folder's checkpoints."""
    found = []
    for name in POINTERS:
        if not (folder / name).is_file():
            continue
        try:
            target = tag_folder(folder, (folder / name).read_text(encoding="utf-8").strip())
            if not target.is_dir():
                found.append(f"{folder / name} names {target.name!r}, which is not there")
        except (ValueError, OSError) as error:
            found.append(f"{folder / name} cannot be used: {error}")
    return found


def faults(kind: str, folder: Path) -> list[str]:
    """What is missing in a checkpoint of that kind; its files were found to be whole before."""
    return _CHECKS[kind](folder)


# ------------------------------------------------------------------------------------------------------- each kind


def _mars(folder: Path) -> list[str]:
    """Its manifest is written last, so that there is none without it."""
    return [] if (folder / manifest.NAME).is_file() else [f"{folder} has no {manifest.NAME}: it is half written"]


def _trainer(folder: Path) -> list[str]:
    found = []
    state = _json(folder / "trainer_state.json") if (folder / "trainer_state.json").is_file() else None
    if state is None:
        found.append(f"{folder / 'trainer_state.json'} is missing")
    elif not isinstance(state, dict) or type(state.get("global_step")) is not int:
        found.append(f"{folder / 'trainer_state.json'} names no global_step")
    elif folder.name.startswith("checkpoint-") and step_of(folder) not in (None, state["global_step"]):
        found.append(f"{folder / 'trainer_state.json'} is of step {state['global_step']}")
    tags, wrong = _tag_of_latest(folder)
    found += wrong + _weights(folder, tags)
    if _only_the_model(folder):
        return found
    if not tags and not _any(folder, "optimizer.pt", "optimizer.bin", "optimizer_*/"):
        found.append(f"{folder} has no states of an optimizer (optimizer.pt, or the folder of an engine)")
    if not (folder / "scheduler.pt").is_file() and not tags:
        found.append(f"{folder / 'scheduler.pt'} is missing")
    ranks = _ranks(folder, tags)
    if not (folder / "rng_state.pth").is_file():
        found += _in_a_row(folder, "rng_state_{}.pth", ranks)
    return found + _inner(folder)


def _only_the_model(folder: Path) -> bool:
    """Whether the Trainer was told to save no optimizer."""
    try:
        arguments = trust.values(folder / "training_args.bin")[0]
    except (OSError, ValueError):
        return False
    return isinstance(arguments, Made) and arguments.attributes().get("save_only_model") is True


def _accelerate(folder: Path) -> list[str]:
    tags, found = _tag_of_latest(folder)
    tags = tags or [path.parent for path in folder.glob("*/*model_states.pt")][:1]
    found += _weights(folder, tags)
    if not tags and not _any(folder, "optimizer.bin", "optimizer_*/"):
        found.append(f"{folder} has no states of an optimizer (optimizer.bin, or the folder of an engine)")
    if tags and tags[0].is_dir() and not found:
        found += _deepspeed(tags[0])
    return found + _in_a_row(folder, "random_states_{}.pkl", _ranks(folder, tags)) + _inner(folder)


def _deepspeed(folder: Path) -> list[str]:
    """All ranks' files of a tag, for the world size and the stage that the tag's own files say."""
    models = {path.name: MODEL_STATES.fullmatch(path.name) for path in folder.iterdir()}
    present = [name for name, match in models.items() if match]
    if not present:
        return [f"{folder} has no file of the model (mp_rank_00_model_states.pt or zero_pp_rank_0_...)"]
    content = _value(folder / min(present))
    ranks = content.get("dp_world_size")
    if type(ranks) is not int or ranks < 1:
        return [f"{folder / min(present)} names no dp_world_size"]
    parallel = content.get("mp_world_size")
    parallel = parallel if type(parallel) is int else 1
    stage = _stage(content)
    optim = {match.groups() for path in folder.iterdir() if (match := OPTIM_STATES.fullmatch(path.name))}
    stage = max(stage, 1) if optim else stage
    found = []
    for part in range(min(parallel, MOST_RANKS)):
        wanted = [f"zero_pp_rank_{r}_mp_rank_{part:02d}_model_states.pt" for r in range(min(ranks, MOST_RANKS))]
        wanted = wanted if stage == 3 else [f"mp_rank_{part:02d}_model_states.pt"]
        found += [f"{folder / name} is missing" for name in wanted if name not in present]
        states = {int(r) for r, m in optim if int(m) == part}
        missing = [r for r in range(min(ranks, MOST_RANKS)) if r not in states] if stage else []
        found += [f"{folder}/zero_pp_rank_{r}_mp_rank_{part:02d}_optim_states.pt is missing" for r in missing]
        if len(found) > MOST_RANKS:
            break
    return _short(found)


def _stage(content: dict[str, Any]) -> int:
    config = content.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else 0
    return stage if type(stage) is int else 0


def _universal(folder: Path) -> list[str]:
    parameters = [path for path in (folder / "zero").iterdir() if path.is_dir()]
    found = [] if parameters else [f"{folder / 'zero'} has no parameters"]
    needed = {"fp32.pt"}
    needed |= {name for name in ("exp_avg.pt", "exp_avg_sq.pt") if any((p / name).is_file() for p in parameters)}
    wanted = [p / name for p in sorted(parameters) for name in sorted(needed)]
    found += [f"{path} is missing" for path in wanted if not path.is_file()]
    models = sorted(path for path in folder.iterdir() if MODEL_STATES.fullmatch(path.name))
    if not models:
        return [*found, f"{folder} has no file of the model (mp_rank_00_model_states.pt)"]
    shapes = _value(models[0]).get("param_shapes")
    names = {str(key) for group in shapes or [] for key, _ in _items(group)} if isinstance(shapes, list) else set()
    found += [f"{folder / 'zero' / name} is missing" for name in sorted(names) if not (folder / "zero" / name).is_dir()]
    if any(path.name.startswith("zero_pp_rank_") for path in models):  # from ZeRO-3: a file for each rank
        ranks = _value(models[0]).get("dp_world_size")
        have = {match.group(1) for path in models if (match := MODEL_STATES.fullmatch(path.name))}
        counted = range(min(ranks, MOST_RANKS)) if type(ranks) is int else ()
        found += [f"{folder}/zero_pp_rank_{r}_..._model_states.pt is missing" for r in counted if str(r) not in have]
    return _short(found)


def _dcp(folder: Path) -> list[str]:
    if not any(folder.glob(f"*{trust.METADATA}")):
        return [f"{folder / trust.METADATA} is missing: the save did not end"]
    return []  # that its files are there, and long enough, is seen when they are read


_CHECKS: dict[str, Callable[[Path], list[str]]] = {
    MARS: _mars,
    TRAINER: _trainer,
    ACCELERATE: _accelerate,
    DEEPSPEED: _deepspeed,
    UNIVERSAL: _universal,
    DCP: _dcp,
    OTHER: lambda folder: [],
}

# --------------------------------------------------------------------------------------------------------- helpers


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError):
        return None  # said of the file itself


def _value(path: Path) -> dict[str, Any]:
    """What a file of torch.save holds, where that is a dictionary."""
    try:
        value = trust.values(path)[0]
    except (ValueError, OSError):  # said of the file itself
        return {}
    return value if isinstance(value, dict) else {}


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    items = value.items if isinstance(value, Made) and value.of == Global("collections", "OrderedDict") else []
    return [item for item in items if isinstance(item, tuple) and len(item) == 2]


def _any(folder: Path, *patterns: str) -> bool:
    return any(
        path.is_dir() if p.endswith("/") else path.is_file() for p in patterns for path in folder.glob(p.strip("/"))
    )


def _tag_of_latest(folder: Path) -> tuple[list[Path], list[str]]:
    """The folder of DeepSpeed's tag in the checkpoint of another library, and what is wrong with it."""
    if not (folder / "latest").is_file():
        inner = [path for path in folder.glob("global_step*") if path.is_dir()]
        return inner[:1], [f"{folder / 'latest'} is missing"] if inner else []
    found = pointer_faults(folder)
    if found:
        return [folder], found
    tag = folder / (folder / "latest").read_text(encoding="utf-8").strip()
    return [tag], _deepspeed(tag)


def _weights(folder: Path, tags: list[Path]) -> list[str]:
    found = []
    for index in sorted(folder.glob("*.index.json")):
        table = _json(index)
        shards = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(shards, dict) or not shards:
            found.append(f"{index} names no weights")
            continue
        for name in sorted({str(name) for name in shards.values()}):
            if "/" in name or not (folder / name).is_file():
                found.append(f"{folder / name} is missing, and {index.name} names it")
    if not tags and not _any(folder, *WEIGHTS, "pytorch_model_fsdp_*/", "model_*.safetensors"):
        found.append(f"{folder} has no weights of a model ({', '.join(WEIGHTS[:2])}, or the folder of an engine)")
    return _short(found)


def ranks_of(tag: Path) -> int | None:
    """The number of data-parallel ranks that saved the folder of a DeepSpeed tag; None where no file says it."""
    models = [path for path in tag.iterdir() if MODEL_STATES.fullmatch(path.name)] if tag.is_dir() else []
    size = _value(min(models)).get("dp_world_size") if models else None
    return size if type(size) is int else None


def _ranks(folder: Path, tags: list[Path]) -> int:
    """The number of ranks as far as the files of an engine say it, at least 1."""
    for tag in tags:
        if (size := ranks_of(tag)) is not None:
            return min(size, MOST_RANKS)
    pieces = [re.fullmatch(r"__(\d+)_\d+\.distcp", path.name) for path in folder.glob("*/*.distcp")]
    return 1 + max((int(match.group(1)) for match in pieces if match), default=0)


def _in_a_row(folder: Path, pattern: str, ranks: int) -> list[str]:
    """Those of ranks 0, 1, ... that have no file, up to the last rank that is known."""
    matcher = re.compile(re.escape(pattern).replace(r"\{\}", r"(\d+)"))
    have = {int(match.group(1)) for path in folder.iterdir() if (match := matcher.fullmatch(path.name))}
    last = max([min(ranks, MOST_RANKS) - 1, *(rank for rank in have if rank < MOST_RANKS)])
    return _short([f"{folder / pattern.format(rank)} is missing" for rank in range(last + 1) if rank not in have])


def _inner(folder: Path) -> list[str]:
    """Folders of DCP in the checkpoint of another library."""
    inner = [path for name in ("optimizer_*", "pytorch_model_fsdp_*") for path in folder.glob(name) if path.is_dir()]
    return [fault for path in sorted(inner) for fault in _dcp(path)]


def _short(found: list[str], most: int = 8) -> list[str]:
    return found[:most] + ([f"and {len(found) - most} more files are missing"] if len(found) > most else [])
