"""What runs on the ranks in the tests of DeepSpeed's checkpoints, beside ``zero_more_cases.save_and_continue``."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import nets
from tests.save_cases import END, SAVED, differences
from tests.zero_cases import ZeroCase
from tests.zero_more_cases import Run


def held(run: Run) -> dict[str, torch.Tensor]:
    """This rank's values and states."""
    out = {}
    for i, (p, state) in enumerate(run.mars.state.items()):
        out[f"{i}/param"] = p.detach().clone()
        out |= {f"{i}/{key}": t.clone() for key, t in state.items()}
    return out


def exactly(case: ZeroCase, folder: str) -> dict[str, Any]:
    """A training through ``ExactMode`` that is saved between two batches and goes on, and one that takes over."""
    from mars_dist.exact import ExactMode

    def loop(run: Run, begin: int, position: Any, save: bool) -> Any:
        def gradient(step: int) -> None:
            tokens, targets = nets.batch(step)
            mine = torch.arange(len(tokens)).view(dist.get_world_size(), -1)[dist.get_rank()]
            run.engine.backward(run.engine(tokens[mine], targets[mine]))
            run.engine.step()

        run.seen_lr, run.update = [[]], 0
        exact = ExactMode(run.engine, range(begin, END), gradient)
        if position is not None:
            exact.load_state_dict(position)
        for number, batch in enumerate(exact, begin):
            for step in batch:
                gradient(step)
            if save and number == SAVED - 1:
                run.engine.save_checkpoint(folder, tag="half")
                position = copy.deepcopy(exact.state_dict())
        return position

    first = Run(case)
    position = loop(first, 0, None, True)
    second = Run(replace(case, params={**case.params, "lr": 0.5, "gamma": 0.9}))
    second.engine.load_checkpoint(folder, tag="half")
    loop(second, SAVED, position, False)
    result = {
        "differences": differences(held(first), held(second)),
        "number": len(held(first)),
        "states": sorted({key.split("/")[1] for key in held(first)}),
        "rule_counts": second.mars.rule_counts(),
        "engines": second.mars.engines(),
        "wrapper": second.wrapper,
        "position": position["handed_out"],
    }
    for run in (first, second):
        run.engine.destroy()
    return result


def with_a_shard_gone(case: ZeroCase, folder: str, empty: bool = False) -> dict[str, Any]:
    """What each rank says when the last rank's optimizer states are missing; then with the weights alone."""
    run = Run(case)
    run.train(0, 2)
    run.engine.save_checkpoint(folder, tag="t")
    dist.barrier()
    if dist.get_rank() == 0:
        (gone,) = (Path(folder) / "t").glob(f"*zero_pp_rank_{dist.get_world_size() - 1}_*optim_states.pt")
        gone.write_bytes(b"") if empty else gone.unlink()
    dist.barrier()
    run.engine.destroy()
    run = Run(case)
    before = held(run)
    said = ""
    try:
        run.engine.load_checkpoint(folder)
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    untouched = differences(before, held(run)) == []
    run.engine.destroy()
    return {"said": said, "untouched": untouched, "wrapper": run.wrapper}
