"""The training loop, from top to bottom: processes, data, engine, resume, steps, end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import mars_dist
from mars_dist.pretrain import checkpoint, data
from mars_dist.pretrain import model as models
from mars_dist.pretrain.engine import BY_NAME, Plain, ZeRO, choose, deepspeed_config, flat, state_form
from mars_dist.pretrain.folder import claimed, keep_recipe
from mars_dist.pretrain.metrics import Metrics
from mars_dist.pretrain.peers import Watch, compare
from mars_dist.pretrain.recipe import Recipe, accumulation
from mars_dist.pretrain.shards import open_split
from mars_dist.pretrain.tokenizer import RANKS_FILE, gpt2_tokenizer
from mars_dist.pretrain.world import World, join, limit_waiting, signals_noted
from mars_dist.versions import installed

logger = logging.getLogger("mars_dist")

DONE, INTERRUPTED = 0, 3
HELD_OUT_WORKS = 3  # of the shipped text, never trained on

Texts = tuple[data.Blocks, str, data.Blocks | None, str | None]  # training and held-out sequences, with fingerprints


class NonFiniteLoss(RuntimeError):
    """The loss is NaN or infinite: training on would poison every later checkpoint."""

    exit_code = 4


def train(recipe: Recipe, out: Path, resume: bool = True, bar: bool = True) -> int:
    """Train ``recipe`` in the folder ``out``, which all ranks share, from its last checkpoint if there is one.

    A resumed run must agree with its checkpoint in model, data, batch, seeds and kind of optimizer; everything else
    (learning rates, number of steps, ...) is what ``recipe`` says now. ``resume=False`` removes the checkpoints.

    Returns: 0 when all steps are done, 3 when a signal ended the run after a checkpoint was saved.

    Raises:
        NonFiniteLoss: on every rank, with step, rank and last checkpoint. Nothing is saved after it.
        ValueError: for a recipe that does not fit the data, the number of ranks or the checkpoint in ``out``.
    """
    engine_name = choose(recipe)
    world = join(out, engine_name, recipe.engine.timeout_minutes)  # a signal that comes before has nothing to save
    with signals_noted() as noted, claimed(out, world):
        texts, watch = start_alike(recipe, engine_name, resume)
        try:
            return _train(recipe, out, resume, bar, engine_name, world, noted, texts, watch)
        except Exception as error:
            if (lost := watch.explain(error)) is not None:
                raise lost from error
            raise
        finally:
            watch.stop()


def _train(
    recipe: Recipe,
    out: Path,
    resume: bool,
    bar: bool,
    engine_name: str,
    world: World,
    noted: list[int],
    texts: Texts,
    watch: Watch,
) -> int:
    sequences, digest, held_out, held_out_digest = texts
    if world.rank == 0:
        warn_of_short_text(recipe, sequences)

    kind = ZeRO if engine_name == "deepspeed" else Plain
    facts = what_must_agree(recipe, digest) | {"state": state_form(recipe, engine_name)}
    folder = out / "checkpoints"
    if world.rank == 0:
        checkpoint.tidy(folder, everything=False)
    world.gather([0.0])  # nobody looks before that
    saved = checkpoint.newest_valid(folder) if resume else None
    check_agreement(saved, facts)

    torch.manual_seed(recipe.training.seed)
    engine = kind(recipe, world.device)
    limit_waiting(recipe.engine.timeout_minutes)
    step = continue_from(saved, engine)

    about = about_run(recipe, engine, world, digest, held_out_digest)

    per_step = recipe.training.batch * recipe.model.sequence_length
    flops, peak = models.flops_per_token(engine.model, recipe.model), models.peak_flops(world.device)
    keeper = checkpoint.Checkpoints(folder, recipe.checkpoint, facts)
    with keeper, Metrics(recipe, out, step, about, active=world.rank == 0, bar=bar) as metrics, watch:
        metrics.say(describe(recipe, about, step, out))
        if step >= recipe.training.steps:
            metrics.say(f"finished at step {step}; for more: --set training.steps=..., to start over: --fresh")
        else:
            sequences.batch(step, recipe.training.batch, world.rank, world.size)  # before anything is removed
            if world.rank == 0:
                checkpoint.tidy(folder, everything=not resume)
                keep_recipe(out, recipe.to_yaml(), step)
        began = last_saved = time.perf_counter()
        while step < recipe.training.steps:
            step_began = time.perf_counter()
            mine = sequences.batch(step, recipe.training.batch, world.rank, world.size)
            if engine.is_exact:  # also before the last step: a run with more steps goes on as if it had not ended
                following = sequences.batch(step + 1, recipe.training.batch, world.rank, world.size)
                engine.look_ahead(split(following, recipe))
            loss, norm = engine.train_step(step, split(mine, recipe))
            step += 1

            minutes = recipe.checkpoint.every_minutes
            is_time = minutes is not None and time.perf_counter() - last_saved > 60 * minutes
            # The one exchange of a step: what it cost, whether a signal came, whether it is time to save, and whether
            # the checkpoint of an earlier step is on disk.
            said = [loss.item(), norm.item(), float(bool(noted)), float(is_time), float(keeper.is_written)]
            told = world.gather(said)
            stop_if_not_finite("loss", [losses for losses, *_ in told], step, folder)
            stop_if_not_finite("norm of the gradient", [norms for _, norms, *_ in told], step, folder)
            stopped, is_time = any(signals for _, _, signals, *_ in told), bool(told[0][3])
            if all(written for *_, written in told):
                keeper.finish()

            seconds = time.perf_counter() - step_began
            record: dict[str, Any] = {
                "step": step,
                "tokens": step * per_step,
                "loss": sum(losses for losses, *_ in told) / world.size,
                "lr": engine.lr,
                "tokens_per_s": round(per_step / seconds, 1),
            }
            if engine.is_exact:  # of a whole batch: the time of both of a step is in tokens_per_s
                record["gradient_evaluations"] = 2 * step
            if told[0][1] > 0:  # DeepSpeed can be told not to compute it
                record["grad_norm"] = told[0][1]
            if peak is not None:
                record["mfu"] = round((1 + engine.is_exact) * flops * per_step / seconds / (peak * world.size), 4)
            last = step == recipe.training.steps
            if held_out is not None and (last or step % recipe.validation.every == 0):
                val_losses = validate(engine, held_out, recipe, world)
                stop_if_not_finite("validation loss", val_losses, step, folder)
                record["val_loss"] = sum(val_losses) / world.size
            record["seconds"] = round(time.perf_counter() - began, 3)
            if last or "val_loss" in record or step % recipe.logging.every == 0:
                metrics.write(record)

            every = recipe.checkpoint.every_steps
            if last or stopped or is_time or (every and step % every == 0):
                keeper.save(step, engine)
                last_saved = time.perf_counter()
            if stopped and not last:
                keeper.finish()
                metrics.say(f"stopped by a signal at step {step}; saved: run the same command again to go on")
                break
        keeper.finish()
        done = step >= recipe.training.steps
        if done:
            metrics.summary({**about, "steps": step, **rules_of(engine)}, time.perf_counter() - began)
    engine.close()
    del engine  # it holds the process group
    world.leave(watch.stop)
    return DONE if done else INTERRUPTED


def start_alike(recipe: Recipe, engine_name: str, resume: bool) -> tuple[Texts, Watch]:
    """Open the data, and see to it that all ranks run the same: the one exchange before anything large is built.

    Raises:
        Disagreement: when they do not, or some of them cannot start.
        ValueError: when none can, such as for a batch that does not divide over the ranks.
    """
    texts, facts, fault = None, {}, None
    try:
        accumulation(
            recipe.training.batch, recipe.training.micro_batch, dist.get_world_size() if dist.is_initialized() else 1
        )
        if recipe.checkpoint.asynchronous and (form := state_form(recipe, engine_name)) != BY_NAME:
            raise ValueError(f"checkpoint.asynchronous = true cannot be had where the state is {form}: give false")
        train_text = open_sequences(recipe, "train")
        texts = *train_text, *(open_sequences(recipe, "val") if recipe.validation.every else (None, None))
        facts = what_ranks_share(recipe, engine_name, resume, texts[1], texts[3])
    except (ValueError, OSError, ImportError) as error:
        fault = error
    watch = Watch(compare(facts, fault))
    assert texts is not None
    return texts, watch


def what_ranks_share(
    recipe: Recipe, engine_name: str, resume: bool, digest: str, held_out_digest: str | None
) -> dict[str, Any]:
    """Everything that decides what a rank computes, and when it talks to the others."""
    libraries = ("torch", "transformers", *(["deepspeed"] if engine_name == "deepspeed" else []))
    sharding = flat(deepspeed_config(recipe), "engine.deepspeed: ") if engine_name == "deepspeed" else {}
    return {
        **flat(recipe.model_dump(mode="json")),
        **sharding,
        "the engine": engine_name,
        "--fresh": not resume,
        "the training data's fingerprint": digest,
        "the held-out data's fingerprint": held_out_digest,
        "mars_dist": mars_dist.__version__,
        **{library: installed(library) for library in libraries},
    }


def open_sequences(recipe: Recipe, split_name: str) -> tuple[data.Blocks, str]:
    """The sequences of "train" or "val", one token longer than the model reads, and what the data are known by."""
    length, seed = recipe.model.sequence_length, recipe.data.seed if split_name == "train" else 0
    if recipe.data.path is None:
        train_works, val_works = data.split(data.shakespeare(), HELD_OUT_WORKS)
        tokens: Any = data.encode(train_works if split_name == "train" else val_works, gpt2_tokenizer())
        digest = data.TEXT_SHA256
    else:
        tokens = open_split(recipe.data.path, split_name)
        digest = tokens.fingerprint()
    return data.Blocks(tokens, length, seed, recipe.model.vocabulary, overlap=1), digest


def warn_of_short_text(recipe: Recipe, sequences: data.Blocks) -> None:
    """The shipped text is there to try things with; a run that reads it over and over learns it by heart."""
    times = recipe.training.steps * recipe.training.batch / sequences.count
    if recipe.data.path is None and times > 1:
        logger.warning(
            "data.path is null: this run would read the short text that ships with the package %s times over. "
            "Prepare data (mars-dist prepare --help) and give --set data.path=FOLDER",
            f"{times:,.0f}" if times >= 10 else f"{times:.1f}",
        )


def what_must_agree(recipe: Recipe, digest: str) -> dict[str, Any]:
    """What makes it the same run, by the names that the recipe has for it."""
    section = recipe.model.model_dump(exclude={"gradient_checkpointing", "compile"})
    return {f"model.{key}": value for key, value in section.items()} | {
        "data.path": recipe.data.path and f"data with the fingerprint {digest[:16]}",
        "data.seed": recipe.data.seed,
        "training.batch": recipe.training.batch,
        "training.seed": recipe.training.seed,
        "optimizer.name": recipe.optimizer.name,
        **({"optimizer.exact": True} if getattr(recipe.optimizer, "exact", False) else {}),
    }


def check_agreement(saved: Path | None, facts: dict[str, Any]) -> None:
    """Refuse a checkpoint of another run before anything large is built.

    Raises:
        ValueError: with all that differs.
    """
    theirs = checkpoint.facts_of(saved) if saved else facts
    differing = [key for key in facts | theirs if theirs.get(key) != facts.get(key)]
    if differing:
        run = saved.parent.parent if saved else Path()
        remedy = "Choose another --out, or --fresh to start over."
        if differing == ["state"]:
            remedy = f"DeepSpeed's own files go on in the same stage and number of ranks only. Or c{remedy[1:]}"
        raise ValueError(
            f"{saved} belongs to another run: "
            + "; ".join(f"{key} is {theirs.get(key)!r} there and {facts.get(key)!r} here" for key in differing)
            + f". The recipe of that run is {run / 'recipe.yaml'}. {remedy}"
        )


def continue_from(saved: Path | None, engine: Plain | ZeRO) -> int:
    """Load ``saved`` and return its step; 0 without one."""
    if saved is None:
        return 0
    checkpoint.restore(saved, engine)
    return checkpoint.step_of(saved)


def split(sequences: np.ndarray[Any, Any], recipe: Recipe) -> Sequence[Tensor]:
    return torch.from_numpy(sequences).split(recipe.training.micro_batch)


def stop_if_not_finite(what: str, values: list[float], step: int, folder: Path) -> None:
    """``values``: by rank, the same list on every rank."""
    for rank, value in enumerate(values):
        if not math.isfinite(value):
            raise NonFiniteLoss(
                f"the {what} is {value} at step {step} on rank {rank}; last good checkpoint: "
                f"{checkpoint.latest(folder) or 'none'}. Lower the learning rate (--set optimizer.lr=...) or lengthen "
                "the warm-up (--set schedule.warmup_steps=...), and run again to go on from there."
            )


def validate(engine: Plain | ZeRO, held_out: data.Blocks, recipe: Recipe, world: World) -> list[float]:
    """Mean loss on each rank. Over all ranks these are the same sequences every time, however many ranks there are.

    They are the first ``validation.batches`` batches of the held-out text, or as many as read all of it once.
    """
    batch = recipe.training.batch
    losses = []
    for i in range(min(recipe.validation.batches, math.ceil(held_out.count / batch))):
        mine = held_out.batch(i, batch, world.rank, world.size)
        losses += [engine.evaluate(sequences) for sequences in split(mine, recipe)]
    return [value for (value,) in world.gather([torch.stack(losses).double().mean().item()])]


def about_run(
    recipe: Recipe, engine: Plain | ZeRO, world: World, digest: str, held_out_digest: str | None
) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "optimizer": recipe.optimizer.model_dump(mode="json", exclude_none=True),
        "parameters": models.count(engine.model),
        "batch": recipe.training.batch,
        "sequence_length": recipe.model.sequence_length,
        "engine": engine.name,
        "world_size": world.size,
        "device": world.device.type,
        "data": digest,
        "held_out_data": held_out_digest,
        "versions": {"mars_dist": mars_dist.__version__, "torch": torch.__version__},
    }


def describe(recipe: Recipe, about: dict[str, Any], step: int, out: Path) -> str:
    going_on = f", going on from step {step}" if step else ""
    return (
        f"{about['name']}: {about['parameters'] / 1e6:.1f} M parameters, {recipe.optimizer.name} at lr "
        f"{recipe.optimizer.lr:g}, {recipe.training.steps} steps of {about['batch']} x {about['sequence_length']} "
        f"tokens\n{about['engine']} on {about['world_size']} x {about['device']}{going_on}; writing {out}"
        + ("\nexact mode: two gradients for each step" if getattr(recipe.optimizer, "exact", False) else "")
        + ("" if recipe.data.path else f"\nthe text that ships; tokenizer: GPT-2's, from {RANKS_FILE}")
    )


def rules_of(engine: Plain | ZeRO) -> dict[str, Any]:
    """How many tensors MARS updated by which rule; nothing for another optimizer."""
    optimizer = engine.optimizer
    return {"rules": optimizer.rule_counts()} if isinstance(optimizer, mars_dist.MARS) else {}
