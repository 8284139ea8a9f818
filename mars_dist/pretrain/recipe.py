"""What a training run is: recipes in YAML, checked when they are read, every mistake said in one line.

``load("gpt2-large")`` is the published run with MARS-AdamW, ``load("gpt2-large-muon")`` the same with Muon,
``load("mine.yaml")`` a file of the user's, which may say ``base: gpt2-large`` and only what differs. Nothing is
guessed: an unknown key or a value of the wrong type is an error that names the nearest key or what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from mars_dist.pretrain.recipe_errors import Problem, explain, wanted_values
from mars_dist.pretrain.recipe_files import OPTIMIZERS, Dumper, RecipeError, compose, names

__all__ = ["Recipe", "RecipeError", "accumulation", "load", "names"]

# ------------------------------------------------------------------------------------------------- what a recipe holds
# The description of a field is the middle of the message about a wrong value: "KEY must be DESCRIPTION, got VALUE".


def _whole(default: Any = ..., low: int = 1, high: int | None = None, null: str = "") -> Any:
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    return Field(default, ge=low, le=high, description=wanted + null)


def _number(default: Any = ..., above: float | None = None, low: float | None = None, null: str = "") -> Any:
    wanted = f"a number above {above:g}" if above is not None else f"a number of at least {low:g}"
    return Field(default, gt=above, ge=low, description=wanted + null)


def _flag(default: Any = ...) -> Any:
    return Field(default, description="true or false")


def _text(default: Any = ..., pattern: str | None = None, wanted: str = "text") -> Any:
    return Field(default, min_length=1, pattern=pattern, description=wanted)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Model(Section):
    """GPT-2: dropout 0, head tied to the embedding, initialised and attention scaled as published."""

    layers: int = _whole()
    heads: int = _whole()  # divides width
    width: int = _whole()
    sequence_length: int = _whole(low=2)  # tokens
    vocabulary: int = _whole(low=50257)  # rows of the embedding: GPT-2's 50,257 tokens and what pads them
    bias: bool = _flag()  # false: linear layers and norms without biases
    gradient_checkpointing: bool = _flag(False)  # less memory, about a third more time
    compile: bool = _flag(False)  # torch.compile


class Data(Section):
    path: str | None = _text(None, wanted="a folder of tokens, or null for the text that ships")
    seed: int = _whole(1, low=0, high=2**32 - 1)  # of the order of the sequences


class Training(Section):
    steps: int = _whole()  # updates
    batch: int = _whole(high=10**6)  # sequences of one update, over all GPUs
    micro_batch: int = _whole(high=10**6)  # sequences of one forward pass on one GPU; accumulation follows from it
    clip: float | None = _number(above=0, null=", or null for no clip")  # norm of the whole gradient
    precision: Literal["fp32", "bf16"] = Field(description="'fp32' or 'bf16'")  # bf16: autocast, fp32 weights
    seed: int = _whole(1, low=0, high=2**32 - 1)  # of the initial weights


class Schedule(Section):
    """Linear warm-up to optimizer.lr, then a cosine that reaches min_lr at the last step; lr_1d in proportion."""

    warmup_steps: int = _whole(low=0)
    min_lr: float = _number(low=0)  # a file may say null: a tenth of optimizer.lr


class Validation(Section):
    every: int = _whole(1000, low=0)  # steps; 0: never
    batches: int = _whole(20)  # each of training.batch sequences


class Checkpoint(Section):
    every_steps: int | None = _whole(5000, null=", or null")
    every_minutes: float | None = _number(None, above=0, null=", or null")
    keep_last: int = _whole(2)  # older ones are removed,
    keep_every: int | None = _whole(None, null=", or null")  # but those of steps divisible by this stay
    asynchronous: bool = _flag(
        False
    )  # written while training goes on; each rank keeps a copy of its part in CPU memory


class Logging(Section):
    every: int = _whole(1)  # steps
    tensorboard: bool = _flag(True)
    wandb: str | None = _text(None, wanted="the name of a Weights & Biases project, or null")


class Engine(Section):
    name: Literal["auto", "ddp", "deepspeed"] = Field(default="auto", description="'auto', 'ddp' or 'deepspeed'")
    deepspeed: str | None = _text(None, wanted="the path of a DeepSpeed configuration, or null for ZeRO-2")
    timeout_minutes: float = _number(30.0, above=0)  # after which a rank gives up waiting for the others


class _Optimizer(Section):
    name: str
    lr: float = _number(above=0)  # the peak
    betas: tuple[float, float] = Field(strict=False, description="two numbers in [0, 1)")  # YAML has no tuples
    eps: float = _number(1e-8, low=0)
    weight_decay: float = _number(low=0)  # of matrices
    weight_decay_1d: float = _number(low=0)  # of biases and norms
    weight_decay_embeddings: float = _number(low=0)

    @model_validator(mode="before")
    @classmethod
    def _as_mars_says(cls, given: Any) -> Any:
        """Values that MARS does not take are refused in the words that MARS has for them."""
        from mars_dist.config import GROUP_DEFAULTS, resolve_defaults  # here, because it imports torch

        if isinstance(given, dict) and given.get("lr") != 0:  # MARS allows 0, a run does not
            known = {key: given[key] for key in cls.model_fields if key in given and key in GROUP_DEFAULTS}
            try:
                resolve_defaults(GROUP_DEFAULTS | {"lr_1d": 0.0} | known)
            except TypeError as error:
                raise ValueError(str(error)) from None
        return given


class AdamWOptimizer(_Optimizer):
    """torch's AdamW."""

    name: Literal["adamw"]


class MarsOptimizer(_Optimizer):
    """MARS. Muon is the rule of MARS-Shampoo without the correction: gamma 0 and no bound on the corrected gradient."""

    name: Literal["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "muon"]
    lr_1d: float = _number(low=0)  # of what takes plain AdamW: biases, norms; under the matrix rules also embeddings
    betas_1d: tuple[float, float] = Field(strict=False, description="two numbers in [0, 1)")
    gamma: float = Field(description="a number")
    clip: float | None = _number(above=0, null=", or null for no clip")  # norm of a tensor's corrected gradient
    exact: bool = Field(default=False, description="true or false")  # a second gradient for each step (mars_dist.exact)

    @property
    def mars_type(self) -> str:
        """The rule, as ``MARS(mars_type=...)`` calls it."""
        return "mars-shampoo" if self.name == "muon" else self.name

    @model_validator(mode="after")
    def _muon_is_muon(self) -> MarsOptimizer:
        if self.name == "muon" and (self.gamma != 0 or self.clip is not None):
            raise ValueError(f"gamma must be 0 and clip null for muon, got {self.gamma} and {self.clip}")
        if self.name == "muon" and self.exact:
            raise ValueError("exact must be false for muon, which makes no use of a second gradient")
        return self


Optimizer = Annotated[MarsOptimizer | AdamWOptimizer, Field(discriminator="name")]


class Recipe(Section):
    """One run, complete: what `load` returns and what is written beside the run."""

    name: str = _text(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$", wanted="letters, digits, _ . + - (it names a folder)")
    description: str = Field(default="", description="text")
    model: Model
    data: Data = Data()
    training: Training
    schedule: Schedule
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    engine: Engine = Engine()
    optimizer: Optimizer

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        model, training, schedule, engine = self.model, self.training, self.schedule, self.engine
        if model.width % model.heads:
            raise ValueError(f"model.heads = {model.heads} does not divide model.width = {model.width}")
        if training.batch % training.micro_batch:
            near = sorted(_divisors(training.batch), key=lambda n: abs(n - training.micro_batch))[:2]
            raise ValueError(
                f"training.micro_batch = {training.micro_batch} does not divide training.batch = {training.batch}; "
                f"nearest: {_either(sorted(near))}"
            )
        if schedule.warmup_steps >= training.steps:
            raise ValueError(
                f"schedule.warmup_steps = {schedule.warmup_steps} must be below training.steps = {training.steps}: "
                "change both for a short run"
            )
        if schedule.min_lr > self.optimizer.lr:
            raise ValueError(f"schedule.min_lr = {schedule.min_lr:g} is above optimizer.lr = {self.optimizer.lr:g}")
        if engine.deepspeed and engine.name == "ddp":
            raise ValueError(f"engine.deepspeed = {engine.deepspeed!r} has no effect with engine.name = 'ddp'")
        return self

    def to_yaml(self) -> str:
        """The whole recipe as YAML; `load` of a file with this text gives an equal one."""
        content = self.model_dump(mode="json")
        return yaml.dump(content, Dumper=Dumper, sort_keys=False, allow_unicode=False, width=float("inf"))


# ----------------------------------------------------------------------------------------------------------- batches


def accumulation(batch: int, micro_batch: int, world_size: int) -> int:
    """Forward passes that each of `world_size` GPUs makes for one update of `batch` sequences, `micro_batch` at a time.

    Raises:
        RecipeError: it does not divide; lists the micro batches that do on this number of GPUs, and the numbers of
            GPUs that do with this micro batch. (Micro batch 1, always possible where any is, is listed if no other is.)
    """
    if batch % (micro_batch * world_size) == 0:
        return batch // (micro_batch * world_size)
    micros = _divisors(batch // world_size)[::-1] if batch % world_size == 0 else []
    worlds = _divisors(batch // micro_batch) if batch % micro_batch == 0 else []
    raise RecipeError(
        f"a batch of {batch} sequences does not divide into micro batches of {micro_batch} on {world_size} GPUs. "
        f"{batch} on {world_size} GPUs: {f'micro batch {_either(micros[:-1] or micros)}' if micros else 'none'}; "
        f"{batch} with micro batch {micro_batch}: {f'{_either(worlds)} GPUs' if worlds else 'none'}"
    )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _either(items: Sequence[object]) -> str:
    """``1, 2 or 3``."""
    words = [str(item) for item in items]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# ----------------------------------------------------------------------------------------------------------- loading


def load(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of this name or in this file, with `overrides` such as "training.micro_batch=3" on top.

    Values of overrides are read as YAML. Another optimizer.name takes that optimizer's numbers from the recipe.

    Raises:
        RecipeError: no such recipe or file; a file that is no recipe; an unknown key; a wrong type or value.
    """
    data, table, origin = compose(str(name_or_path), overrides)
    try:
        _check_table(table)
        schedule, optimizer = data.get("schedule"), data.get("optimizer")
        if isinstance(schedule, dict) and schedule.get("min_lr", 0) is None:
            lr = optimizer.get("lr") if isinstance(optimizer, dict) else None
            # Where lr is no learning rate, that is the error to report, not what follows from it.
            data["schedule"] = schedule | {"min_lr": lr / 10 if isinstance(lr, int | float) and lr > 0 else 0.0}
        return _check(RECIPE, data)
    except Problem as problem:
        raise RecipeError(f"{origin.get(problem.key, name_or_path)}: {problem}") from None


def _check_table(table: Any) -> None:
    """The optimizers that were not chosen are checked as well: a mistake should not wait for the run that needs it."""
    for name in table if isinstance(table, dict) else [""]:
        if name not in OPTIMIZERS or not isinstance(table[name], dict):
            key = f"optimizers.{name}".rstrip(".")
            raise Problem(key, f"{key} must be a section for one of {', '.join(OPTIMIZERS)}")
        _check(OPTIMIZER, table[name] | {"name": name}, f"optimizers.{name}")


def _check(model: TypeAdapter[Any], data: Any, above: str = "") -> Any:
    try:
        return model.validate_python(data)
    except ValidationError as error:
        raise explain(error.errors(), WANTED, above) from None


RECIPE: TypeAdapter[Any] = TypeAdapter(Recipe)
OPTIMIZER: TypeAdapter[Any] = TypeAdapter(Optimizer)
WANTED: dict[str, dict[str, str]] = {}  # optimizer -> key -> what its value must be
for _name in OPTIMIZERS:
    _class = AdamWOptimizer if _name == "adamw" else MarsOptimizer
    WANTED[_name] = wanted_values(Recipe) | wanted_values(_class, "optimizer.")
    WANTED[_name]["optimizer"] = f"a section with the keys {', '.join(_class.model_fields)}"
    WANTED[_name]["optimizer.name"] = f"one of {', '.join(OPTIMIZERS)}"
