"""What runs on the ranks in the tests of a save that one rank cannot make, by the libraries' own saving."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mars_dist.checkpoint import latest_valid, manifest
from tests import cpu_fsdp
from tests.accelerate_cases import Case
from tests.save_accelerate_cases import Training
from tests.zero_cases import ZeroCase
from tests.zero_more_cases import Run


@contextlib.contextmanager
def full_disk(rank: int, folder: str) -> Iterator[list[str]]:
    """On one rank nothing can be written into ``folder``, by torch.save and by safetensors; the files it tried."""
    tried: list[str] = []

    def refusing(save: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(value: Any, into: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(into, str | os.PathLike) and str(into).startswith(folder):
                tried.append(Path(into).name)
                Path(into).touch()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(into))
            return save(value, into, *args, **kwargs)

        return refuse

    with contextlib.ExitStack() as patches:
        if dist.get_rank() == rank:
            import accelerate.utils.other
            import transformers.modeling_utils

            for where, name in (
                (torch, "save"),
                (accelerate.utils.other, "safe_save_file"),
                (transformers.modeling_utils, "safe_save_file"),
            ):
                patches.enter_context(mock.patch.object(where, name, refusing(getattr(where, name))))
        yield tried


def said_by(save: Callable[[], Any]) -> str:
    original = torch.save
    try:
        save()
    except Exception as error:  # the text is the result
        return f"{type(error).__name__}: {error}"
    finally:
        assert torch.save is original, "torch.save is as it was"
    return ""


def with_deepspeed(case: ZeroCase, folder: str, rank: int) -> dict[str, Any]:
    """One save that works, one that fails on ``rank``, and one after it."""
    run = Run(case)
    run.train(0, 1)
    run.engine.save_checkpoint(folder, tag="global_step1")
    run.train(1, 2)
    with full_disk(rank, folder) as tried:
        said = said_by(lambda: run.engine.save_checkpoint(folder, tag="global_step2"))
    dist.barrier()
    pointed, newest = (Path(folder) / "latest").read_text(), latest_valid(folder, say=lambda text: None)
    dist.barrier()
    run.train(2, 3)
    run.engine.save_checkpoint(folder)
    result = {
        "said": said,
        "tried": len(tried),
        "pointed": pointed,
        "newest": newest and newest.name,
        "then": (Path(folder) / "latest").read_text(),
        "faults": manifest.faults(Path(folder) / "global_step3"),
        "wrapper": run.wrapper,
        "rule_counts": run.mars.rule_counts(),
    }
    run.engine.destroy()
    return result


def with_accelerate(case: Case, folder: str, rank: int) -> dict[str, Any]:
    try:
        training = Training(case, True)
        training.train(0, 1)
        training.accelerator.save_state(f"{folder}/checkpoint_1")
        with full_disk(rank, folder) as tried:
            said = said_by(lambda: training.accelerator.save_state(f"{folder}/checkpoint_2"))
        dist.barrier()
        newest = latest_valid(folder, say=lambda text: None)
        dist.barrier()
        training.accelerator.save_state(f"{folder}/checkpoint_3")
        result = {
            "said": said,
            "tried": len(tried),
            "newest": newest and newest.name,
            "faults": manifest.faults(Path(folder) / "checkpoint_3"),
            "model": type(training.model).__name__,
            "rule_counts": training.mars.rule_counts(),
        }
        training.close()
        return result
    finally:
        cpu_fsdp.reset()


def with_trainer(folder: str, rank: int) -> dict[str, Any]:
    """The Trainer under DDP: the first checkpoint works, the second fails on ``rank``."""
    from transformers import Trainer, TrainerCallback

    from tests import trainer_cases
    from tests.trainer_cases import TrainerCase

    class Fill(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                disk.enter_context(full_disk(rank, folder))

    trainer_cases.prepare()
    with trainer_cases.clean_environment(), contextlib.ExitStack() as disk:
        args = trainer_cases.arguments(TrainerCase(), folder, max_steps=3, save_steps=1)
        trainer = Trainer(
            model=trainer_cases.model(), args=args, train_dataset=trainer_cases.dataset(), callbacks=[Fill()]
        )
        said = ""
        try:
            trainer.train()
        except Exception as error:  # the text is the result
            said = f"{type(error).__name__}: {error}"
    dist.barrier()
    newest = latest_valid(folder, say=lambda text: None)
    return {"said": said, "newest": newest and newest.name, "model": type(trainer.model_wrapped).__name__}
