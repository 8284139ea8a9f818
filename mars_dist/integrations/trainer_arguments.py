"""What a Trainer's arguments say about MARS: ``optim``, ``optim_args``, ``learning_rate`` and the Adam values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from mars_dist.config import GROUP_DEFAULTS, Settings, resolve_defaults

VARIANT_OF = {
    "mars_adamw": "mars-adamw",
    "mars_lion": "mars-lion",
    "mars_shampoo": "mars-shampoo",
    "mars_m": "mars-m",
}

OURS = "MARS's default"
TRUE, FALSE, NOTHING = ("true", "1", "yes", "on"), ("false", "0", "no", "off"), ("none", "null")
PAIR = "two numbers with a slash between them, for example 0.95/0.99"
# A pair by its key, and one of its two numbers by the key's name and its place.
PAIRS = {"betas": ("beta1", "beta2"), "betas_1d": ("beta1_1d", "beta2_1d")}
# What Trainer says with an argument of its own, group by group: a second place to say it would not be heard.
TRAINERS_OWN = {"lr": "learning_rate", "weight_decay": "weight_decay"}


def _number(text: str) -> float:
    return float(text)


def _whole(text: str) -> int:
    return int(text)


def _boolean(text: str) -> bool:
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise ValueError


def _pair(text: str) -> tuple[float, float]:
    first, second = text.split("/")
    return float(first), float(second)


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.split(r"[+/]", text))


def _word(text: str) -> str:
    return text


def _or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() in NOTHING else parse(text)


_Kind = tuple[Callable[[str], Any], str]
NUMBER: _Kind = (_number, "a number")
BOOLEAN: _Kind = (_boolean, "True or False")

KINDS: dict[str, _Kind] = {
    "eps": NUMBER,
    "gamma": NUMBER,
    "lr_1d": NUMBER,
    "weight_decay_1d": NUMBER,
    "clip": (_or_none(_number), "a number, or None for no clip"),
    "betas": (_pair, PAIR),
    "betas_1d": (_pair, PAIR),
    **{part: NUMBER for parts in PAIRS.values() for part in parts},
    "amsgrad": BOOLEAN,
    "optimize_1d": BOOLEAN,
    "maximize": BOOLEAN,
    "fan_in_fan_out": BOOLEAN,
    "matrix_parts": (_whole, "a whole number"),
    "is_approx": BOOLEAN,
    "skip_nonfinite": BOOLEAN,
    "one_state": (_or_none(_boolean), "True, False, or None for where it is the same"),
    "matrix_buffer_mb": NUMBER,
    "use_mars": (_or_none(_boolean), "True, False, or None for by shape"),
    "ns_steps": (_whole, "a whole number"),
    "matrix_ndim": (_ranks, "a whole number, or several with + between them, for example 2+3"),
    "mars_type": (lambda text: text.replace("_", "-"), "a variant"),
    "first_step": (_word, "a word"),
    "orthogonalizer": (_word, "a word"),
    "ns_dtype": (_or_none(_word), "a dtype, or None"),
}
"""How each key of ``optim_args`` is read."""


def parse(text: str | None) -> dict[str, Any]:
    """``"gamma=0.05,clip=none,beta1=0.9"`` as typed values by key; ``beta1`` and the like stay keys of their own.

    A zero is a zero and ``False`` is False: nothing is decided by the truth of a string.

    Raises:
        ValueError: a piece that is no ``key=value``, a key given twice, an unknown key (with the nearest known one),
            a value that cannot be read, a pair given whole and in parts, or what is an argument of Trainer.
    """
    found: dict[str, Any] = {}
    if text is not None and not isinstance(text, str):
        raise ValueError(f'optim_args is text, for example "gamma=0.05,lr_1d=1e-3", got {text!r}')
    text = (text or "").replace(" ", "")
    if re.search(r"[()\[\]]", text):
        raise ValueError(
            f"optim_args: {text!r} has brackets, and transformers cuts it at every comma. A tuple is given by its "
            "numbers: beta1=0.95,beta2=0.99 (or betas=0.95/0.99), matrix_ndim=2+3."
        )
    for piece in text.split(",") if text else ():
        key, equals, value = piece.partition("=")
        if not key or not equals or not value or "=" in value:
            raise ValueError(f"optim_args: {piece!r} in {text!r} is not of the form key=value")
        if key in found:
            raise ValueError(f"optim_args: {key} is given twice in {text!r}")
        found[key] = _value(key, value)
    for whole, parts in PAIRS.items():
        both = [part for part in parts if part in found]
        if whole in found and both:
            raise ValueError(f"optim_args gives {whole} and {both[0]}: give {whole}=a/b, or {' and '.join(parts)}")
    return found


def _value(key: str, text: str) -> Any:
    if key in TRAINERS_OWN:
        raise ValueError(
            f"optim_args: {key}={text} would not be heard, because Trainer sets it for each parameter group: give "
            f"--{TRAINERS_OWN[key]} {text} instead"
        )
    if key not in KINDS:
        near = difflib.get_close_matches(key.lower(), KINDS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"optim_args: MARS has no key {key!r}{hint} It knows: {', '.join(sorted(KINDS))}.")
    read, wanted = KINDS[key]
    try:
        return read(text)
    except ValueError:
        raise ValueError(f"optim_args: {key}={text} cannot be read; {key} is {wanted}") from None


def changed(args: Any, name: str) -> bool:
    """Whether an argument has another value than transformers gives it by default: a subclass may give it its own."""
    first: Any = next(c for c in reversed(type(args).__mro__) if name in getattr(c, "__dataclass_fields__", ()))
    return bool(getattr(args, name) != first.__dataclass_fields__[name].default)


def explicit(args: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The keywords of MARS that these arguments name, and where each of them comes from.

    Betas and eps: ``optim_args`` first, then ``adam_beta1``, ``adam_beta2`` and ``adam_epsilon`` where they differ
    from their defaults, each by itself.
    """
    found = parse(args.optim_args)
    variant = VARIANT_OF[str(getattr(args.optim, "value", args.optim))]
    if found.setdefault("mars_type", variant) != variant:
        raise ValueError(
            f"optim_args says mars_type={found['mars_type']} and optim says {variant}: leave mars_type out, or give "
            f"the optim of that name (one of {', '.join(VARIANT_OF)})"
        )
    if found.get("weight_decay_1d") and args.weight_decay == 0.0:
        raise ValueError(
            f"optim_args: weight_decay_1d={found['weight_decay_1d']:g} would have no effect, because with "
            "--weight_decay 0 both of Trainer's parameter groups are undecayed: give --weight_decay as well"
        )
    sources = dict.fromkeys(found, "optim_args")
    for whole, parts in PAIRS.items():
        adam = ("adam_beta1", "adam_beta2") if whole == "betas" else ()
        if whole in found:
            continue
        pair, origins = list(GROUP_DEFAULTS[whole]), []
        for i, part in enumerate(parts):
            if part in found:
                pair[i] = found.pop(part)
                origins.append("optim_args")
            elif adam and changed(args, adam[i]):
                pair[i] = getattr(args, adam[i])
                origins.append(adam[i])
            else:
                origins.append(OURS)
        if set(origins) != {OURS}:
            found[whole] = (pair[0], pair[1])
            sources[whole] = origins[0] if origins[0] == origins[1] else " and ".join(origins)
    if "eps" not in found and changed(args, "adam_epsilon"):
        found["eps"], sources["eps"] = args.adam_epsilon, "adam_epsilon"
    return found, sources


def choose(args: Any) -> tuple[dict[str, Any], str]:
    """The keywords to construct MARS with, all checked, and one sentence that says where they come from.

    ``lr`` is ``learning_rate``; ``lr_1d`` is the same unless given, so that one schedule drives both.
    """
    keywords, sources = explicit(args)
    _check(keywords, args.learning_rate)
    given = "learning_rate" if changed(args, "learning_rate") else "Trainer's default"
    words = [f"lr {args.learning_rate:g} ({given})"]
    if "lr_1d" in keywords:
        words.append(f"lr_1d {keywords['lr_1d']:g} (optim_args)")
    else:
        words.append("lr_1d = lr")
    for name in ("betas", "eps", "gamma"):
        value = keywords.setdefault(name, GROUP_DEFAULTS[name])
        shown = "({:g}, {:g})".format(*value) if name == "betas" else f"{value:g}"
        words.append(f"{name} {shown} ({sources.get(name, OURS)})")
    rest = [f"{k}={v}" for k, v in keywords.items() if k not in ("betas", "eps", "gamma", "lr_1d", "mars_type")]
    words += [f"{', '.join(rest)} (optim_args)"] if rest else []
    words.append(f"weight_decay {args.weight_decay:g}, and 0 in Trainer's no-decay group")
    keywords = {"lr": args.learning_rate, "lr_1d": args.learning_rate, **keywords}
    return keywords, f"Trainer's optimizer is {keywords['mars_type']}: {', '.join(words)}"


def _check(keywords: Mapping[str, Any], lr: Any) -> None:
    """Ranges, before a model is loaded rather than after it."""
    Settings(**{name: value for name, value in keywords.items() if name in Settings.__dataclass_fields__})
    group = {name: value for name, value in keywords.items() if name in GROUP_DEFAULTS}
    resolve_defaults({**GROUP_DEFAULTS, "lr_1d": 0.0, **group, "lr": lr or 1.0})  # MARS speaks up about an lr of 0


def optimizer_class(keywords: Mapping[str, Any]) -> type:
    """MARS; where ``weight_decay_1d`` is given, a class that makes a MARS which leaves the no-decay group undecayed."""
    from mars_dist.optimizer import MARS

    return _undecayed_class() if keywords.get("weight_decay_1d") else MARS


@cache
def _undecayed_class() -> type:
    from mars_dist.optimizer import MARS

    class MARSWithNoDecayGroup(MARS):
        """Constructing it gives a MARS: ``weight_decay_1d`` is one for the optimizer, and would decay the group that
        Trainer made because nothing in it shall be."""

        def __new__(cls, params: Any, **keywords: Any) -> Any:
            groups = []
            for group in params:
                if isinstance(group, dict) and group.get("weight_decay") == 0.0:
                    group = {"weight_decay_1d": 0.0, **group}
                groups.append(group)
            return MARS(groups, **keywords)

    return MARSWithNoDecayGroup
