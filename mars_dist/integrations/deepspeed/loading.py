"""``DeepSpeedEngine.load_checkpoint``: every rank's file is there before it begins, and states are there afterwards.

By itself a rank whose file of optimizer states is missing or cut short raises alone, and the others wait for it in
their next exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mars_dist.checkpoint.together import together

WITHOUT = "To load weights alone, say load_optimizer_states=False."


def wants_states(given: Mapping[str, Any]) -> bool:
    """Whether this call of ``load_checkpoint`` is to load the optimizer's states."""
    return bool(given.get("load_optimizer_states", True)) and not given.get("load_module_only", False)


def tag_folder(given: Mapping[str, Any]) -> Path | None:
    """The folder of the tag that will be loaded; None where DeepSpeed finds none and says so."""
    folder, tag = given.get("load_dir"), given.get("tag")
    if folder is None:
        return None
    latest = Path(folder) / "latest"
    if tag is None:
        if not latest.is_file():
            return None
        tag = latest.read_text(encoding="utf-8").strip()
    found = Path(folder) / str(tag)
    return found if found.is_dir() else None


def check_shards(engine: Any, given: Mapping[str, Any]) -> None:
    """Look for the optimizer states of all ranks.

    Raises:
        CheckpointError: the same on every rank (without other ranks ``FileNotFoundError``); nothing is loaded.
    """
    if not wants_states(given) or engine.load_universal_checkpoint() or engine.zero_optimization_stage() == 0:
        return
    with together(f"loading {given.get('tag') or 'the latest checkpoint'} from {given.get('load_dir')}"):
        folder = tag_folder(given)
        if folder is None:
            return
        ranks = {rank: 0 for rank in range(engine.dp_world_size)}
        for file in folder.glob("*zero_pp_rank_*optim_states.pt"):
            number = file.name.partition("zero_pp_rank_")[2].partition("_")[0]
            if number.isdigit() and file.stat().st_size:
                ranks[int(number)] = 1
        missing = [rank for rank, found in ranks.items() if not found]
        if missing:
            present = [rank for rank, found in ranks.items() if found]
            raise FileNotFoundError(
                f"{folder} has no optimizer states (zero_pp_rank_N_..._optim_states.pt, not empty) of rank "
                f"{', '.join(map(str, missing[:8]))}, only of {', '.join(map(str, present[:8])) or 'none'}: it is "
                f"incomplete, or was saved by another number of ranks (for those see `mars-dist checkpoint convert`). "
                f"{WITHOUT}"
            )


def check_that_states_arrived(engine: Any, given: Mapping[str, Any], loaded_from: Any) -> None:
    """After ``load_checkpoint``: a run that has taken steps has states.

    Raises:
        RuntimeError: when MARS has none.
    """
    if loaded_from is None or not wants_states(given) or engine.global_steps <= engine.skipped_steps:
        return
    if not any("exp_avg" in state for state in engine.basic_optimizer.state.values()):
        raise RuntimeError(
            f"MARS: {loaded_from} was saved after {engine.global_steps} steps, and DeepSpeed loaded no states of the "
            f"optimizer from it: training would begin anew. {WITHOUT}"
        )
