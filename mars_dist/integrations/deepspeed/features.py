"""What a ds_config.json may ask for beside the optimizer, and MARS's answer to each key: one table.

Three answers: it works (a row of tests/compatibility.py shows it by numbers, or the key has nothing to do with the
update), it is refused, or it is untested and warned about. The guard asks this table when ``deepspeed.initialize``
takes a MARS, the checker when it reads a file; a key that is in none of the lists is warned about as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Feature:
    """A key of the configuration.

    Attributes:
        key: dotted, as it is written in the file.
        reason: what happens with it, and what to do instead; a sentence that begins after the key's name.
        is_on: whether the value that the file gives (None where it gives none) turns it on, in that configuration.
    """

    key: str
    reason: str
    is_on: Callable[[Any, Config], bool] = lambda value, config: bool(value)


def lookup(config: Config, key: str, default: Any = None) -> Any:
    """The value of a dotted key; ``default`` where the file does not give it, gives null or leaves it to "auto"."""
    found: Any = config
    for part in key.split("."):
        if not isinstance(found, Mapping):
            return default
        found = found.get(part)
    return default if found is None or found == "auto" else found


def stage_of(config: Config) -> int:
    """The ZeRO stage that the configuration asks for; 0 without any."""
    stage = lookup(config, "zero_optimization.stage", 0)
    return stage if isinstance(stage, int) else 0


OFFLOAD = "zero_optimization.offload_optimizer"

REFUSED: tuple[Feature, ...] = (
    Feature(
        f"{OFFLOAD}.super_offload",
        "DeepSpeed would update the weights with an Adam of its own and never call MARS. Remove it (plain "
        '"offload_optimizer" works with MARS).',
    ),
    Feature(
        "zero_optimization.zenflow",
        "DeepSpeed would update the weights with an Adam of its own and never call MARS. Remove it (plain "
        '"offload_optimizer" works with MARS).',
        lambda value, config: value is not None,
    ),
)

UNTESTED: tuple[Feature, ...] = ()

# Keys that rows of tests/compatibility.py turn on.
TESTED: frozenset[str] = frozenset()

# Keys and whole sections that do not touch what reaches the optimizer or what becomes of its result.
NEUTRAL: frozenset[str] = frozenset()


def refused(config: Config) -> Iterator[Feature]:
    """The keys of ``config`` that MARS does not train with."""
    return (feature for feature in REFUSED if feature.is_on(lookup(config, feature.key), config))


def untested(config: Config) -> Iterator[Feature]:
    """The keys of ``config`` with which nobody has shown by numbers that MARS trains rightly."""
    return (feature for feature in UNTESTED if feature.is_on(lookup(config, feature.key), config))
