"""What runs on the ranks in the tests of ``Accelerator.save_state`` and ``load_state``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests import accelerate_cases, cpu_fsdp, engine_nets, nets
from tests.accelerate_cases import Case
from tests.engine_cases import clean
from tests.save_cases import END, SAVED, WRONG, differences, different_values, without_fillers
from tests.save_cases import SaveCase as Filler

CLIP = {"clip": 0.1, "weight_decay": 0.05}


class Training:
    def __init__(self, case: Case, first: bool, net: str = "layers", bf16: bool = False) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        self.case = Case(**{**vars(case), "params": {**CLIP, **case.params, **({} if first else WRONG)}})
        module = engine_nets.build(net)
        if not first:
            with torch.no_grad():
                for p in module.parameters():
                    p.mul_(-0.5).add_(0.1)
        if bf16:
            module.to(torch.bfloat16)
        self.net = module
        self.accelerator = accelerate_cases.accelerator_of(self.case)
        self.model, self.optimizer = accelerate_cases.prepare(self.accelerator, module, self.case)
        from mars_dist.integrations.accelerate import mars_inside

        self.mars = mars_inside(self.optimizer)
        self.deepspeed = case.engine.startswith("zero")

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            tokens, targets = nets.batch(step, accelerate_cases.BATCH)
            rows = torch.arange(len(tokens)).view(dist.get_world_size(), -1)[dist.get_rank()]
            self.accelerator.backward(self.model(tokens[rows], targets[rows]))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def pieces(self) -> dict[str, Tensor]:
        """This rank's part of all values and states."""
        out: dict[str, Tensor] = {}
        if self.deepspeed:
            for i, (p, state) in enumerate(self.mars.state.items()):
                out[f"{i}/param"] = p.detach().clone()
                out |= {f"{i}/{key}": t.clone() for key, t in state.items()}
            if self.model.zero_optimization_stage() < 3:
                out |= {f"{name}/param": p.detach().clone() for name, p in self.net.named_parameters()}
            return out
        local = lambda t: (t.to_local() if hasattr(t, "to_local") else t).detach().clone()  # noqa: E731
        for name, p in self.model.named_parameters():
            out[f"{clean(name)}/param"] = local(p)
            out |= {f"{clean(name)}/{key}": local(t) for key, t in self.mars.state.get(p, {}).items()}
        return out

    def close(self) -> None:
        if self.deepspeed:
            self.model.destroy()
        self.accelerator.free_memory()


@contextlib.contextmanager
def copies_of_what_is_gathered() -> Iterator[None]:
    """What the transfer to the CPU does on a GPU, for FSDP1 with full states.

    torch gathers all states of original parameters in one buffer and the weights in another, which it frees, and relies
    on ``.cpu()`` to copy out of them. On a CPU that copies nothing: all states are views of what was gathered last, and
    the weights of freed memory (AdamW's as well).
    """
    import torch.distributed.fsdp._optim_utils as theirs
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    unflatten = theirs._unflatten_orig_param_states

    def copying(info: Any, states: dict[str, dict[str, Any]], name: str, *more: Any) -> None:
        unflatten(info, states, name, *more)
        for state in states.values():
            if isinstance(state.get(name), Tensor):
                state[name] = state[name].clone()

    with (
        mock.patch.object(theirs, "_unflatten_orig_param_states", copying),
        mock.patch.object(FlatParamHandle, "to_cpu", lambda _: contextlib.nullcontext()),
    ):
        yield


def save_and_continue(case: Case, folder: str, net: str = "layers", bf16: bool = False) -> dict[str, Any]:
    """Train, save, go on; then the rest again by another model and optimizer that load."""
    try:
        with copies_of_what_is_gathered() if case.engine.startswith("fsdp1") else contextlib.nullcontext():
            first = Training(case, True, net, bf16)
            first.train(0, SAVED)
            saved = first.pieces()
            first.accelerator.save_state(folder)
            dist.barrier()
            kept = first.pieces()
            first.train(SAVED, END)
            wanted = first.pieces()
            first.close()
            second = Training(case, False, net, bf16)
            before = second.pieces()
            other = different_values({k: saved[k] for k in before.keys() & saved.keys()}, before)
            second.accelerator.load_state(folder)
            loaded = second.pieces()
            second.train(SAVED, END)
            filler = Filler("fsdp1" if case.engine == "fsdp1-original" else case.engine, "")
            result = {
                "saving changed": differences(saved, kept),
                "loaded": differences(saved, without_fillers(filler, saved, loaded)),
                "continued": differences(wanted, without_fillers(filler, saved, second.pieces())),
                "was other": other,
                "went on": different_values(saved, second.pieces()),
                "steps": sorted({float(t) for key, t in saved.items() if key.endswith("/step")}),
                "dtypes": {(key.split("/")[1], t.dtype) for key, t in loaded.items()},
                "rule_counts": second.mars.rule_counts(),
                "engines": second.mars.engines(),
                "gamma": second.mars.param_groups[0]["gamma"],
                "files": sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*")),
                **accelerate_cases.what_ran(second.accelerator, second.model, second.optimizer),
            }
            second.close()
            dist.barrier()
            return result
    finally:
        cpu_fsdp.reset()


def with_a_file_gone(case: Case, folder: str, file: str) -> str:
    """What each rank says when ``file`` is gone."""
    try:
        first = Training(case, True)
        first.train(0, 2)
        first.accelerator.save_state(folder)
        dist.barrier()
        first.close()
        if dist.get_rank() == 0:
            (Path(folder) / file).unlink()
        dist.barrier()
        second = Training(case, False)
        before = second.pieces()
        said = ""
        try:
            second.accelerator.load_state(folder)
        except BaseException as error:  # the text is the result, also of torch's CheckpointException
            said = f"{type(error).__name__}: {error}"
        states = {key: t for key, t in second.pieces().items() if not key.endswith("/param")}
        assert not differences({k: t for k, t in before.items() if k in states}, states), "states were overwritten"
        second.close()
        return said
    finally:
        cpu_fsdp.reset()


def into_another_variant(case: Case, other: dict[str, Any], folder: str) -> str:
    """What is said when states of the checkpoint have no place in MARS."""
    try:
        first = Training(case, True)
        first.train(0, 2)
        first.accelerator.save_state(folder)
        dist.barrier()
        first.close()
        second = Training(Case(**{**vars(case), "params": other}), False)
        try:
            second.accelerator.load_state(folder)
        except Exception as error:  # the text is the result
            return f"{type(error).__name__}: {error}"
        return ""
    finally:
        cpu_fsdp.reset()


def without_us(case: Case, folder: str) -> int:
    """How many states are loaded where mars_dist does not watch."""
    from mars_dist.integrations import accelerate_loading

    try:
        first = Training(case, True)
        first.train(0, 2)
        first.accelerator.save_state(folder)
        dist.barrier()
        first.close()
        second = Training(case, False)
        accelerate_loading.unregister()
        try:
            second.accelerator.load_state(folder)
        finally:
            accelerate_loading.register()
            import accelerate.accelerator

            accelerate_loading.watch(accelerate.accelerator)
        return sum(bool(state) for state in second.mars.state.values())
    finally:
        cpu_fsdp.reset()


# ------------------------------------------------------------------------------------------------------ the Trainer


def trainer_with_fsdp1(folder: str) -> dict[str, Any]:
    """Four steps with a checkpoint in shards after two, and the last two again in another Trainer."""
    from transformers import Trainer

    from tests import trainer_cases
    from tests.trainer_cases import TrainerCase

    trainer_cases.prepare()
    cpu_fsdp.install()
    ends: list[dict[str, Tensor]] = []
    steps: list[float] = []
    rates: list[float] = []
    try:
        for resume in (False, True):
            with trainer_cases.clean_environment(), copies_of_what_is_gathered():
                layers = {"transformer_layer_cls_to_wrap": ["GPT2Block"], "sync_module_states": False}
                sharded = {"version": 1, "use_orig_params": True, "state_dict_type": "SHARDED_STATE_DICT", **layers}
                given = {"fsdp": True, "fsdp_config": sharded, "max_steps": 4, "save_steps": 2}
                args = trainer_cases.arguments(TrainerCase(), folder, **given)
                net = trainer_cases.model()
                trainer = Trainer(model=net, args=args, train_dataset=trainer_cases.dataset())
                trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2") if resume else None)
                mars = trainer_cases.inside(trainer.optimizer)
                model = trainer.model_wrapped
                end: dict[str, Tensor] = {}
                for name, p in model.named_parameters():
                    end[f"{clean(name)}/param"] = p.detach().clone()
                    end |= {f"{clean(name)}/{key}": t.clone() for key, t in mars.state.get(p, {}).items()}
                ends.append(end)
                steps += sorted({float(t) for key, t in end.items() if key.endswith("/step")})
                rates.append(max(group["lr"] for group in mars.param_groups))
        return {
            "differences": differences(ends[0], without_fillers(Filler("fsdp1", ""), ends[0], ends[1])),
            "number": len(ends[0]),
            "steps": steps,
            "rates": rates,
            "engines": mars.engines(),
            "rule_counts": mars.rule_counts(),
            "model": type(model).__name__,
            "files": [p.name for p in (Path(folder) / "checkpoint-2" / "optimizer_0").iterdir()],
        }
    finally:
        cpu_fsdp.remove()
        cpu_fsdp.reset()
