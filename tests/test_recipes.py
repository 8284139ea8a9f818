"""Recipes: the files hold the published numbers, every mistake is refused in one line, what is written is read."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_dist.pretrain import recipe_files
from mars_dist.pretrain.recipe import MarsOptimizer, Recipe, RecipeError, accumulation, load, names
from mars_dist.pretrain.recipe_files import OPTIMIZERS, SIZES
from tests.processes import ROOT

# ------------------------------------------------------------------------------------------- the published numbers

# size: layers, heads, width, micro batch, accumulation on 8 GPUs, min_lr
SHAPES = {
    "gpt2-small": (12, 12, 768, 15, 4, 3e-5),
    "gpt2-medium": (24, 16, 1024, 15, 4, 6e-5),
    "gpt2-large": (36, 20, 1280, 5, 12, 1e-5),
    "gpt2-xl": (48, 25, 1600, 5, 12, 1e-5),
}
# (size, optimizer): lr, lr_1d. Without MARS-Lion, MARS-Shampoo and Muon at xl, for which none are published; MARS-M
# has one learning rate and AdamW has no second one.
RATES: dict[tuple[str, str], tuple[float, float | None]] = {
    ("gpt2-small", "mars-adamw"): (6e-3, 3e-3),
    ("gpt2-medium", "mars-adamw"): (3e-3, 1.5e-3),
    ("gpt2-large", "mars-adamw"): (2e-3, 1e-3),
    ("gpt2-xl", "mars-adamw"): (2e-3, 1e-3),
    ("gpt2-small", "adamw"): (6e-4, None),
    ("gpt2-medium", "adamw"): (3e-4, None),
    ("gpt2-large", "adamw"): (2e-4, None),
    ("gpt2-xl", "adamw"): (2e-4, None),
    ("gpt2-small", "muon"): (2e-2, 3e-3),
    ("gpt2-medium", "muon"): (1e-2, 1.5e-3),
    ("gpt2-large", "muon"): (6.67e-3, 1e-3),
    ("gpt2-small", "mars-m"): (6e-3, 6e-3),
    ("gpt2-medium", "mars-m"): (5e-3, 5e-3),
    ("gpt2-large", "mars-m"): (5e-3, 5e-3),
    ("gpt2-xl", "mars-m"): (3e-3, 3e-3),
}
MARS_NUMBERS = {
    "betas": (0.95, 0.99),
    "betas_1d": (0.9, 0.95),
    "gamma": 0.025,
    "weight_decay": 0.01,
    "weight_decay_1d": 0.1,
    "weight_decay_embeddings": 0.0,
    "clip": 1.0,
}
OTHER_NUMBERS = {
    "adamw": {"betas": (0.9, 0.95), "weight_decay": 0.1},
    "muon": {
        "betas_1d": (0.9, 0.95),
        "gamma": 0.0,
        "weight_decay": 0.0,
        "weight_decay_1d": 0.1,
        "weight_decay_embeddings": 0.1,
        "clip": None,
    },
}
PUBLISHED = [(size, optimizer) for size in SHAPES for optimizer in OPTIMIZERS]


@pytest.mark.parametrize(("size", "optimizer"), PUBLISHED)
def test_a_recipe_holds_the_published_numbers(size: str, optimizer: str) -> None:
    recipe = load(f"{size}-{optimizer}")
    layers, heads, width, micro, accumulated, min_lr = SHAPES[size]
    model, training = recipe.model, recipe.training
    assert (model.layers, model.heads, model.width) == (layers, heads, width)
    assert (model.sequence_length, model.vocabulary, model.bias) == (1024, 50304, False)
    assert (training.steps, training.batch, training.micro_batch) == (100_000, 480, micro)
    assert (training.clip, training.precision) == (1.0, "bf16")
    assert (recipe.schedule.warmup_steps, recipe.schedule.min_lr) == (2000, min_lr)
    assert accumulation(training.batch, training.micro_batch, 8) == accumulated

    numbers = recipe.optimizer.model_dump()
    assert numbers["name"] == optimizer
    expected = OTHER_NUMBERS.get(optimizer, MARS_NUMBERS)
    assert {key: numbers[key] for key in expected} == expected
    assert numbers["eps"] == 1e-8
    if (size, optimizer) in RATES:
        lr, lr_1d = RATES[size, optimizer]
        assert (numbers["lr"], numbers.get("lr_1d")) == (lr, lr_1d)


def test_what_is_not_published_says_so_in_the_file() -> None:
    for size, optimizer in set(PUBLISHED) - RATES.keys():
        section = (recipe_files.RECIPES / f"{size}.yaml").read_text().split(f"\n  {optimizer}:\n")[1].split("\n\n")[0]
        assert re.search("not published|No learning rates are published", section), (size, optimizer)


def test_every_size_has_a_file_and_every_optimizer_and_nothing_else() -> None:
    assert {path.name for path in recipe_files.RECIPES.iterdir()} == {f"{size}.yaml" for size in SIZES}
    assert len(names()) == len(set(names())) == len(SIZES) * (1 + len(OPTIMIZERS))
    for size in SIZES:
        content = recipe_files.parse((recipe_files.RECIPES / f"{size}.yaml").read_text(), size)
        assert tuple(content["optimizers"]) == OPTIMIZERS
        assert load(size) == load(f"{size}-mars-adamw")


def test_tiny_has_the_numbers_of_the_quickstart() -> None:
    tiny = load("tiny")
    assert (tiny.model.layers, tiny.model.heads, tiny.model.width, tiny.model.sequence_length) == (4, 2, 64, 64)
    assert (tiny.training.batch, tiny.training.steps, tiny.training.precision) == (16, 250, "fp32")
    assert tiny.data.path is None
    for optimizer in ("mars-adamw", "adamw"):
        recipe = load(f"tiny-{optimizer}")
        kind = "mars" if optimizer == "mars-adamw" else "adamw"
        quickstart = recipe_files.parse((ROOT / f"ds_configs/quickstart_{kind}.json").read_text(), kind)
        wanted = {
            k: v for k, v in quickstart["optimizer"]["params"].items() if k in type(recipe.optimizer).model_fields
        }
        assert len(wanted) >= 3
        if optimizer == "adamw":  # searched anew for the recipe's model (examples/results/README.md)
            wanted["lr"] = 2.5e-3
        found = recipe.optimizer.model_dump(mode="json")
        assert {key: found[key] for key in wanted} == wanted
        assert recipe.schedule.min_lr == pytest.approx(recipe.optimizer.lr / 10, rel=1e-12)
        assert (recipe.training.batch, recipe.training.clip) == (
            quickstart["train_batch_size"],
            quickstart["gradient_clipping"],
        )


def test_mars_takes_the_keywords_of_every_recipe() -> None:
    from mars_dist.config import GROUP_DEFAULTS, Settings

    for name in names():
        optimizer = load(name).optimizer
        if isinstance(optimizer, MarsOptimizer):
            assert Settings(mars_type=optimizer.mars_type)
            keywords = type(optimizer).model_fields.keys() - {"name", "weight_decay_embeddings", "exact"}
            assert keywords <= GROUP_DEFAULTS.keys()
    assert load("tiny-muon").optimizer.mars_type == "mars-shampoo"  # type: ignore[union-attr]


# -------------------------------------------------------------------------------------------------------- overrides


def test_overrides_are_read_as_yaml() -> None:
    recipe = load(
        "gpt2-large",
        [
            "training.micro_batch=3",
            "optimizer.lr=1e-3",
            "training.clip=null",
            "model.compile=true",
            "optimizer.betas=[0.9, 0.95]",
            "logging.wandb=on",
            "data.path=/data/a=b",
            "training.steps=50_000",
            "training.steps=60000",
        ],
    )
    assert (recipe.training.micro_batch, recipe.training.clip, recipe.training.steps) == (3, None, 60_000)
    assert (recipe.optimizer.lr, recipe.optimizer.betas, recipe.model.compile) == (1e-3, (0.9, 0.95), True)
    assert (recipe.logging.wandb, recipe.data.path) == ("on", "/data/a=b")
    assert recipe.model == load("gpt2-large").model.model_copy(update={"compile": True})


@pytest.mark.parametrize("lr_first", [True, False])
def test_another_optimizer_brings_its_own_numbers(lr_first: bool) -> None:
    changes = ["optimizer.lr=1e-2", "optimizer.name=muon"][:: 1 if lr_first else -1]
    muon = load("gpt2-large-muon").optimizer
    assert load("gpt2-large", changes).optimizer == muon.model_copy(update={"lr": 1e-2})


WRONG: list[tuple[str, str]] = [
    # Keys.
    ("training.microbatch=3", "unknown key training.microbatch; did you mean training.micro_batch?"),
    ("micro_batch=3", "unknown key micro_batch; did you mean training.micro_batch?"),
    ("trainin.steps=3", "unknown key trainin; did you mean training?"),
    ("training.lr=3", "unknown key training.lr; did you mean optimizer.lr?"),
    ("optimizer.gama=3", "unknown key optimizer.gama; did you mean optimizer.gamma?"),
    ("optimizer.seed=3", "unknown key optimizer.seed; did you mean data.seed?"),
    ("checkpoint.zzz=3", "unknown key checkpoint.zzz; there are checkpoint.every_steps, checkpoint.every_minutes, "),
    ("zzz=3", "unknown key zzz; there are name, description, model, data, training, "),
    ("optimizers.muon.lr=3", "unknown key optimizers; did you mean optimizer?"),
    ("base=tiny", "unknown key base; there are name, "),
    ("5=3", "unknown key 5; there are name, "),
    ("model.layers.x=3", "model.layers must be a whole number of at least 1, got {'x': 3}"),
    # Types.
    ("training.steps=1e5", "training.steps must be a whole number of at least 1, got 100000.0"),
    ("training.steps='5'", "training.steps must be a whole number of at least 1, got '5'"),
    ("training.steps=010", "training.steps must be a whole number of at least 1, got '010'"),
    ("training.steps=1:30", "training.steps must be a whole number of at least 1, got '1:30'"),
    ("training.steps=true", "training.steps must be a whole number of at least 1, got True"),
    ("training.steps=null", "training.steps must be a whole number of at least 1, got None"),
    ("model.bias=yes", "model.bias must be true or false, got 'yes'"),
    ("model.bias=off", "model.bias must be true or false, got 'off'"),
    ("model.bias=1", "model.bias must be true or false, got 1"),
    ("data.path=3", "data.path must be a folder of tokens, or null for the text that ships, got 3"),
    ("data.path=false", "data.path must be a folder of tokens, or null for the text that ships, got False"),
    ("training.clip=1.0x", "training.clip must be a number above 0, or null for no clip, got '1.0x'"),
    ("model=3", "model must be a section with the keys layers, heads, width, sequence_length, "),
    ("model=[1]", "model must be a section with the keys layers, "),
    ("data=null", "data must be a section with the keys path, seed, got None"),
    ("optimizer=3", "optimizer must be a section with the keys name, lr, betas, "),
    # Ranges.
    ("training.steps=0", "training.steps must be a whole number of at least 1, got 0"),
    ("training.batch=0", "training.batch must be a whole number from 1 to 1000000, got 0"),
    ("training.clip=0", "training.clip must be a number above 0, or null for no clip, got 0"),
    ("training.clip=.nan", "training.clip must be a number above 0, or null for no clip, got nan"),
    ("training.precision=bf61", "training.precision must be 'fp32' or 'bf16', got 'bf61' (did you mean bf16?)"),
    ("training.seed=-1", "training.seed must be a whole number from 0 to 4294967295, got -1"),
    ("model.sequence_length=1", "model.sequence_length must be a whole number of at least 2, got 1"),
    ("model.vocabulary=50256", "model.vocabulary must be a whole number of at least 50257, got 50256"),
    ("schedule.warmup_steps=-1", "schedule.warmup_steps must be a whole number of at least 0, got -1"),
    ("schedule.min_lr=-1e-9", "schedule.min_lr must be a number of at least 0, got -1e-09"),
    ("validation.every=-1", "validation.every must be a whole number of at least 0, got -1"),
    ("validation.batches=0", "validation.batches must be a whole number of at least 1, got 0"),
    ("checkpoint.every_steps=0", "checkpoint.every_steps must be a whole number of at least 1, or null, got 0"),
    ("checkpoint.every_minutes=0", "checkpoint.every_minutes must be a number above 0, or null, got 0"),
    ("checkpoint.keep_last=0", "checkpoint.keep_last must be a whole number of at least 1, got 0"),
    ("logging.every=0", "logging.every must be a whole number of at least 1, got 0"),
    ("logging.wandb=''", "logging.wandb must be the name of a Weights & Biases project, or null, got ''"),
    ("engine.name=dpp", "engine.name must be 'auto', 'ddp' or 'deepspeed', got 'dpp'"),
    ("name=a/b", "name must be letters, digits, _ . + - (it names a folder), got 'a/b'"),
    # The optimizer: MARS's own words where MARS has them.
    ("optimizer.name=mun", "optimizer.name must be one of mars-adamw, mars-lion, mars-shampoo, mars-m, adamw, muon, "
     "got 'mun' (did you mean muon?)"),
    ("optimizer.name=[muon]", "optimizer.name must be one of mars-adamw, mars-lion, "),
    ("optimizer.lr=-1", "optimizer.lr must be in [0, inf), got -1"),
    ("optimizer.lr=.inf", "optimizer.lr must be in [0, inf), got inf"),
    ("optimizer.lr=auto", "optimizer.lr must be a number, got 'auto' of type str"),
    ("optimizer.lr=" + "9" * 400, "optimizer.lr must be a number, got '999"),
    ("optimizer.lr=0", "optimizer.lr must be a number above 0, got 0"),
    ("optimizer.lr_1d=null", "optimizer.lr_1d must be a number, got None of type NoneType"),
    ("optimizer.betas=[0.9]", "optimizer.betas must be two numbers in [0, 1), got [0.9]"),
    ("optimizer.betas=[0.9, 1]", "optimizer.betas[1] must be in [0, 1), got 1"),
    ("optimizer.betas_1d=0.9", "optimizer.betas_1d must be two numbers in [0, 1), got 0.9"),
    ("optimizer.gamma=.nan", "optimizer.gamma must be finite, got nan"),
    ("optimizer.clip=0", "optimizer.clip must be in (0, inf) (None turns the clip off), got 0"),
    ("optimizer.weight_decay_1d=-1", "optimizer.weight_decay_1d must be in [0, inf), got -1"),
    ("optimizer.weight_decay_embeddings=-1", "optimizer.weight_decay_embeddings must be a number of at least 0, "),
    # How it is written.
    ("training.steps", "write key=value, for example training.steps=1000; null stands for no value"),
    ("training.steps=", "write key=value, "),
    ("=3", "write key=value, "),
    ("optimizer.betas=[0.9", "expected ',' or ']', but got '<stream end>'"),
    ("data.path=!!python/object:os.system x", "could not determine a constructor for the tag"),
    ("model={layers: 1, layers: 2}", "the key layers is given twice (line 1)"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG, ids=lambda text: re.sub(r"[^\w.=-]+", "_", text)[:40])
def test_a_wrong_override_is_refused_in_one_line(change: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        load("gpt2-large", ["training.seed=2", change])
    assert str(error.value).startswith(f"--set {change}: {message}")
    assert "\n" not in str(error.value)


DISAGREEING: list[tuple[list[str], str]] = [
    (["model.heads=7"], "model.heads = 7 does not divide model.width = 1280"),
    (["training.micro_batch=7"], "training.micro_batch = 7 does not divide training.batch = 480; nearest: 6 or 8"),
    (["training.micro_batch=500"], "training.micro_batch = 500 does not divide training.batch = 480; nearest: 240 "),
    (["training.steps=10"], "schedule.warmup_steps = 2000 must be below training.steps = 10: change both for a "),
    (["training.steps=2000"], "schedule.warmup_steps = 2000 must be below training.steps = 2000"),
    (["schedule.min_lr=0.1"], "schedule.min_lr = 0.1 is above optimizer.lr = 0.002"),
    (["engine={name: ddp, deepspeed: x}"], "engine.deepspeed = 'x' has no effect with engine.name = 'ddp'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), DISAGREEING)
def test_sections_that_disagree_are_refused_with_both_keys(changes: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=f"^{re.escape(f'gpt2-large: {message}')}"):
        load("gpt2-large", changes)


def test_muon_with_a_correction_is_refused() -> None:
    with pytest.raises(RecipeError, match="optimizer.gamma must be 0 and clip null for muon, got 0.1 and None"):
        load("tiny-muon", ["optimizer.gamma=0.1"])


def test_adamw_has_no_keys_of_mars() -> None:
    with pytest.raises(RecipeError, match="unknown key optimizer.gamma; there are optimizer.name, optimizer.lr, "):
        load("tiny-adamw", ["optimizer.gamma=0.1"])
    with pytest.raises(RecipeError, match="unknown key optimizer.lr1; did you mean optimizer.lr?"):
        load("tiny-adamw", ["optimizer.lr1=0.1"])


# ------------------------------------------------------------------------------------------------------- user's files


def write(folder: Path, text: str | bytes, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_file_says_its_base_and_what_differs(tmp_path: Path) -> None:
    path = write(tmp_path, "base: gpt2-large-muon\ntraining: {micro_batch: 3}\noptimizer: {lr: 1e-2}\n", "my run.yaml")
    mine, base = load(path, ["training.seed=7"]), load("gpt2-large-muon")
    assert mine.name == "my-run"
    assert (mine.training.micro_batch, mine.training.seed) == (3, 7)
    assert mine.optimizer == base.optimizer.model_copy(update={"lr": 1e-2})
    assert (mine.model, mine.schedule, mine.description) == (base.model, base.schedule, base.description)


def test_a_base_is_looked_for_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "base: gpt2-small\nname: theirs\ntraining: {seed: 3}\noptimizer: {lr: 1e-2}", "sub/base.yaml")
    path = write(tmp_path, "base: base.yaml\noptimizer: {name: muon, lr_1d: 1e-4}\n", "sub/mine.yaml")
    monkeypatch.chdir(tmp_path)
    mine = load(os.path.relpath(path))
    assert (mine.name, mine.training.seed) == ("mine", 3)
    # The base's lr was one for MARS-AdamW: Muon does not inherit it.
    assert mine.optimizer == load("gpt2-small-muon").optimizer.model_copy(update={"lr_1d": 1e-4})


def test_a_copy_of_a_shipped_file_is_a_recipe(tmp_path: Path) -> None:
    path = write(tmp_path, (recipe_files.RECIPES / "gpt2-xl.yaml").read_bytes())
    same = {"name": "mine"}
    assert load(path) == load("gpt2-xl").model_copy(update=same)
    assert load(path, ["optimizer.name=adamw"]) == load("gpt2-xl-adamw").model_copy(update=same)


def test_a_recipe_of_ones_own_needs_few_sections(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        model: {layers: 1, heads: 1, width: 8, sequence_length: 8, vocabulary: 50257, bias: true}
        training: {steps: 10, batch: 2, micro_batch: 1, clip: null, precision: fp32}
        schedule: {warmup_steps: 0, min_lr: null}
        optimizer: &o {name: adamw, lr: 1, betas: [0.9, 0.95], weight_decay: 0, weight_decay_1d: 0,
                       weight_decay_embeddings: 0}
        """,
    )
    mine = load(path)
    assert (mine.schedule.min_lr, mine.optimizer.lr, mine.engine.name) == (0.1, 1.0, "auto")
    path.write_text(path.read_text().replace("bias: true", "bias: true, layers: 2"))
    with pytest.raises(RecipeError, match=r"mine.yaml: the key layers is given twice \(line 2\)$"):
        load(path)


WRONG_FILES: list[tuple[str | bytes, str]] = [
    ("", "{path} is empty: a recipe says for example `base: gpt2-small` and what differs"),
    ("# nothing\n", "{path} is empty: "),
    ("- 1\n", "{path} holds a list, no keys: "),
    ("just words", "{path} holds a str, no keys: "),
    (b"\xff\xfe\x00", "{path} is no UTF-8 text: a recipe is a YAML file"),
    ("base: [1]", "{path}: base must be the name of a recipe or the path of a file, got [1]"),
    ("base:", "{path}: base must be the name of a recipe or the path of a file, got None"),
    ("base: gpt2-lrage", "gpt2-lrage is neither a recipe nor a file; did you mean gpt2-large? Recipes: tiny, "),
    ("base: tiny\ntraining:\n  steps: 5\n  steps: 6\n", "{path}: the key steps is given twice (line 4)"),
    ("base: tiny\nbase: tiny\n", "{path}: the key base is given twice (line 2)"),
    ("base: tiny\ntraining: {steps: 5", "{path}: expected ',' or '}}', but got '<stream end>' (line 2)"),
    ("base: tiny\n\ttraining: 5", "{path}: found character '\\t' that cannot start any token (line 2)"),
    ("base: tiny\n---\nbase: tiny", "{path}: but found another document (line 2)"),
    ("base: tiny\nx: \x07", "{path}: unacceptable character #x0007"),
    ("base: tiny\ntraning: {steps: 5}", "{path}: unknown key traning; did you mean training?"),
    ("base: tiny\ntraining: {step: 5}", "{path}: unknown key training.step; did you mean training.steps?"),
    ("base: tiny\ntrue: 5", "{path}: unknown key true; there are name, "),
    ("base: tiny\ntraining: {steps: x}", "{path}: training.steps must be a whole number of at least 1, got 'x'"),
    ("base: tiny\noptimizer: {lr: -1}", "{path}: optimizer.lr must be in [0, inf), got -1"),
    ("base: tiny\noptimizer: null", "{path}: optimizer must be a section with the keys name, lr, "),
    ("base: tiny\ntraining:\n", "{path}: training must be a section with the keys steps, batch, "),
    ("base: tiny\noptimizers: {sgd: {lr: 1}}", "{path}: optimizers.sgd must be a section for one of mars-adamw, "),
    ("base: tiny\noptimizers: {muon: 1}", "{path}: optimizers.muon must be a section for one of mars-adamw, "),
    ("base: tiny\noptimizers: 5", "{path}: optimizers must be a section for one of mars-adamw, "),
    ("base: tiny\noptimizers: {muon: {lr1d: 1}}", "{path}: unknown key optimizers.muon.lr1d; did you mean opti"),
    ("base: tiny\noptimizers: {muon: {lr: -1}}", "{path}: optimizers.muon.lr must be in [0, inf), got -1"),
    ("base: tiny\noptimizers: {adamw: {gamma: 1}}", "{path}: unknown key optimizers.adamw.gamma; there are opti"),
    ("model: {layers: 1}", "{path}: model.heads is missing: it must be a whole number of at least 1"),
    ("model: &m {layers: *m}", "{path}: nested without end"),
    ("name: x", "{path}: model is missing: it must be a section with the keys layers, "),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), WRONG_FILES, ids=lambda x: re.sub(r"\W+", "_", str(x))[:40])
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(RecipeError) as error:
        load(path)
    assert str(error.value).startswith(message.format(path=path))
    assert "\n" not in str(error.value)


def test_an_optimizer_that_is_not_complete_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, load("tiny").to_yaml())
    with pytest.raises(RecipeError, match="mine.yaml: optimizer.lr is missing: it must be a number above 0"):
        load(path, ["optimizer.name=muon"])  # a resolved recipe has the numbers of one optimizer only
    without = re.sub(r"(?s)\noptimizer:.*", "\noptimizer: {lr: 1}\n", path.read_text())
    with pytest.raises(RecipeError, match="mine.yaml: optimizer.name is missing: it must be one of mars-adamw, "):
        load(write(tmp_path, without))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_bases_in_a_circle_are_refused(tmp_path: Path, length: int) -> None:
    for i in range(length):
        write(tmp_path, f"base: ./{(i + 1) % length}.yaml\n", f"{i}.yaml")
    circle = " -> ".join(f"{i % length}.yaml" for i in range(length + 1))
    with pytest.raises(RecipeError, match=f"base goes in a circle: {circle}$"):
        load(tmp_path / "0.yaml")


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"^{tmp_path} is a folder: give a YAML file$"):
        load(tmp_path)
    write(tmp_path, load("tiny").to_yaml(), "recipe.yaml")
    with pytest.raises(RecipeError, match=f"^{tmp_path} is a folder: give {tmp_path}/recipe.yaml$"):
        load(tmp_path)
    with pytest.raises(
        RecipeError, match=r"^gpt2-large-moun is neither a recipe nor a file; did you mean gpt2-large-muon\?"
    ):
        load("gpt2-large-moun")
    with pytest.raises(
        RecipeError, match=r"is neither a recipe nor a file\. Recipes: tiny, .* each also with -mars-adamw, "
    ):
        load(tmp_path / "zzz.yaml")
    with pytest.raises(RecipeError, match=r"cannot be read \(.*\): give a YAML file$"):
        load(tmp_path / "recipe.yaml" / "x")


# ---------------------------------------------------------------------------------------------- what is written is read

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
TRAPS = [
    "on",
    "yes",
    "No",
    "null",
    "~",
    "1e-3",
    "010",
    "0x1f",
    "1:30",
    "2024-01-01",
    "true",
    "<<",
    "=",
    " a ",
    "a: b",
    "#",
]
WORDS = st.one_of(st.sampled_from(TRAPS), TEXT)
POSITIVE = st.floats(1e-12, 1e6)
BETA = st.floats(0, 1, exclude_max=True)
BETAS = st.lists(BETA, min_size=2, max_size=2)


@st.composite
def contents(draw: st.DrawFn) -> dict[str, Any]:
    """A valid recipe as nested dictionaries."""
    decays = {key: draw(st.floats(0, 10)) for key in ("weight_decay", "weight_decay_1d", "weight_decay_embeddings")}
    name = draw(st.sampled_from(OPTIMIZERS))
    optimizer: dict[str, Any] = {"name": name, "lr": draw(POSITIVE), "betas": draw(BETAS), "eps": 0, **decays}
    if name != "adamw":
        optimizer |= {"lr_1d": draw(POSITIVE), "betas_1d": draw(BETAS)}
        free = name != "muon"
        optimizer["gamma"] = draw(st.floats(-1, 10)) if free else 0
        optimizer["clip"] = draw(st.none() | POSITIVE) if free else None
    heads, micro, steps = draw(st.integers(1, 30)), draw(st.integers(1, 64)), draw(st.integers(1, 10**7))
    seed = st.integers(0, 2**32 - 1)
    engine = draw(st.sampled_from(["auto", "ddp", "deepspeed"]))
    return {
        "name": draw(st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,10}", fullmatch=True)),
        "description": draw(st.just("") | WORDS),
        "model": {
            "layers": draw(st.integers(1, 100)),
            "heads": heads,
            "width": heads * draw(st.integers(1, 128)),
            "sequence_length": draw(st.integers(2, 10**6)),
            "vocabulary": draw(st.integers(50257, 10**6)),
            **{key: draw(st.booleans()) for key in ("bias", "gradient_checkpointing", "compile")},
        },
        "data": {"path": draw(st.none() | WORDS), "seed": draw(seed)},
        "training": {
            "steps": steps,
            "batch": micro * draw(st.integers(1, 1000)),
            "micro_batch": micro,
            "clip": draw(st.none() | POSITIVE),
            "precision": draw(st.sampled_from(["fp32", "bf16"])),
            "seed": draw(seed),
        },
        "schedule": {
            "warmup_steps": draw(st.integers(0, steps - 1)),
            "min_lr": draw(st.floats(0, optimizer["lr"])),
        },
        "checkpoint": {
            "every_steps": draw(st.none() | st.integers(1, 10**6)),
            "every_minutes": draw(st.none() | POSITIVE),
        },
        "logging": {"wandb": draw(st.none() | WORDS)},
        "engine": {"name": engine, "deepspeed": draw(st.none() | WORDS) if engine != "ddp" else None},
        "optimizer": optimizer,
    }


@pytest.mark.parametrize("text", ["\x85", "\u2028", "é", "a: b # c", " ' \" ", "\ttab"])
def test_any_text_of_a_description_survives(text: str, tmp_path: Path) -> None:
    """NEL and LINE SEPARATOR are line breaks to YAML unless they are escaped."""
    recipe = load("tiny").model_copy(update={"description": text})
    assert load(write(tmp_path, recipe.to_yaml())).description == text


@settings(max_examples=60, deadline=None)
@given(contents())
def test_a_written_recipe_loads_as_an_equal_one(content: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(content)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), recipe.to_yaml())
        again = load(path)
    assert again == recipe
    assert again.to_yaml() == recipe.to_yaml()


@pytest.mark.parametrize("name", names())
def test_a_shipped_recipe_loads_again_as_written(tmp_path: Path, name: str) -> None:
    assert load(write(tmp_path, load(name).to_yaml(), "recipe.yaml")) == load(name)


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load("tiny").training.steps = 5


# ------------------------------------------------------------------------------------------------------------- batches


def test_the_published_batch_on_32_gpus() -> None:
    assert [accumulation(480, micro, 32) for micro in (15, 5, 3, 1)] == [1, 3, 5, 15]
    with pytest.raises(
        RecipeError, match="480 on 32 GPUs: micro batch 15, 5 or 3; 480 with micro batch 10: 1, 2, 3, 4, "
    ):
        accumulation(480, 10, 32)
    with pytest.raises(RecipeError, match="480 on 7 GPUs: none; 480 with micro batch 15: 1, 2, 4, 8, 16 or 32 GPUs$"):
        accumulation(480, 15, 7)
    with pytest.raises(RecipeError, match="480 on 480 GPUs: micro batch 1; 480 with micro batch 7: none$"):
        accumulation(480, 7, 480)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 600), st.integers(1, 40), st.integers(1, 40))
def test_accumulation_against_brute_force(batch: int, micro: int, world: int) -> None:
    fitting = [n for n in range(1, batch + 1) if n * micro * world == batch]
    if fitting:
        assert [accumulation(batch, micro, world)] == fitting
        return
    with pytest.raises(RecipeError) as error:
        accumulation(batch, micro, world)
    here, there = str(error.value).split(". ")[1].split(";")
    micros = {m for m in range(1, batch + 1) for n in range(1, batch // m + 1) if m * n * world == batch}
    worlds = {w for w in range(1, batch + 1) for n in range(1, batch // w + 1) if w * n * micro == batch}
    assert listed(here.split(":")[1]) == (micros - {1} or micros)
    assert listed(there.split(":")[1]) == worlds


def listed(text: str) -> set[int]:
    return set(map(int, re.findall(r"\d+", text)))


# --------------------------------------------------------------------------------------------------------------- light


def test_the_names_are_known_without_torch() -> None:
    code = (
        "import sys; from mars_dist.pretrain import recipe; assert 'tiny-muon' in recipe.names(); "
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"]


def test_a_tenth_of_lr_is_resolved_after_the_overrides() -> None:
    assert load("tiny", ["optimizer.lr=1e-2"]).schedule.min_lr == pytest.approx(1e-3, rel=1e-12)
    assert load("gpt2-small", ["schedule.min_lr=null"]).schedule.min_lr == pytest.approx(6e-4, rel=1e-12)
    assert math.isclose(load("gpt2-small").schedule.min_lr, 3e-5)
