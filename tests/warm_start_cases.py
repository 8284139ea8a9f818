"""What runs on the ranks in test_warm_start_engines.py: states that have lost h on the way, under sharded engines."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.engine_again_cases import built_with, optimizer_of, pieces, train
from tests.engine_cases import EngineCase, local
from tests.zero_cases import ZeroCase
from tests.zero_more_cases import Run

AT, END = 3, 6


def put_by_hand(optimizer: Any, first_step: str) -> None:
    """Before the next step write into the states the h that a first step takes: 0, or the gradient itself."""
    done: set[int] = set()  # DeepSpeed steps a group, or a part of one, in a call

    def hook(*_: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None and id(p) not in done:
                done.add(id(p))
                h = optimizer.state[p].get("prev_grad")
                if h is not None:
                    local(h).copy_(local(p.grad) if first_step == "paper" else torch.zeros_like(local(p.grad)))

    optimizer.register_step_pre_hook(hook)


def without_h(saved: Any) -> int:
    """Take ``prev_grad`` out of a state dict in place, and count it."""
    return sum(state.pop("prev_grad", None) is not None for state in saved["state"].values())


def numbers(optimizer: Any) -> list[torch.Tensor]:
    states = [optimizer.state[p] for g in optimizer.param_groups for p in g["params"] if p in optimizer.state]
    return [local(state[key]).detach().clone() for state in states for key in sorted(state)]


def under_torch(case: EngineCase) -> dict[str, Any]:
    """Through torch's helper without h, and saved by it once more before the next step; ends both ways."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    ends, lost, facts = [], [], {}
    for how in ("kept", "lost", "by hand"):
        built, optimizer = built_with(case)
        train(built, optimizer, 0, AT)
        facts = built.facts
        if how == "lost":
            for _ in range(2):
                saved = copy.deepcopy(get_optimizer_state_dict(built.wrapped, optimizer))
                if not lost:
                    lost.append(without_h(saved))
                optimizer = optimizer_of(case, built)
                set_optimizer_state_dict(built.wrapped, optimizer, saved)
        if how == "by hand":
            put_by_hand(optimizer, case.params["first_step"])
        train(built, optimizer, AT, END)
        ends.append((pieces(built.wrapped), numbers(optimizer), optimizer.rule_counts(), optimizer.engines()))
        counts = sorted({float(s["step"]) for s in optimizer.state.values()})
        assert counts == [float(END)], counts
    return {"ends": ends, "lost": lost, "facts": facts}


def under_zero(case: ZeroCase, folder: str) -> dict[str, Any]:
    """DeepSpeed saves and loads twice, the first time without h; ends both ways."""
    ends, lost = [], []
    for how in ("kept", "lost", "by hand"):
        run = Run(case)
        run.train(0, AT)
        if how == "lost":
            for tag in ("first", "second"):
                run.engine.save_checkpoint(folder, tag=tag)
                run.close()
                run = Run(case)
                if tag == "first":
                    run.mars.register_load_state_dict_pre_hook(lambda _, saved: lost.append(without_h(saved)))
                with torch.no_grad():
                    run.engine.load_checkpoint(folder, tag=tag)
        if how == "by hand":
            put_by_hand(run.mars, case.params["first_step"])
        run.train(AT, END)
        states = [t.detach().clone() for state in run.states() for t in (state[k] for k in sorted(state))]
        counts = {float(state["step"]) for state in run.states()}
        assert counts == {float(END)}, counts
        result = run.close()
        ends.append((list(result["end"].values()), states, result["rule_counts"], result["engines"]))
    return {"ends": ends, "lost": lost}
