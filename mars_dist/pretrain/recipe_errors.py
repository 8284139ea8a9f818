"""What is wrong with a recipe, in one line: the key, what its value must be and what it was, or the nearest key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

UNKNOWN = "extra_forbidden"


class Problem(Exception):
    """A message and the dotted key that it is about ("" for several)."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def explain(errors: list[Any], wanted: Mapping[str, Mapping[str, str]], above: str = "") -> Problem:
    """What to say about `errors`, of which an unknown key goes first: it is often why another key is missing.

    Args:
        errors: pydantic's, of a whole recipe or of the optimizer section alone.
        wanted: optimizer name -> dotted key -> what its value must be.
        above: the key of the section that was checked, "" for a whole recipe.
    """
    error = min(errors, key=lambda e: e["type"] != UNKNOWN)
    place = [part for part in above.split(".") if part] + [str(part) for part in error["loc"]]
    depth = len(above.split(".")) if above else 1
    tag = place.pop(depth) if (above or place[:1] == ["optimizer"]) and len(place) > depth else ""  # pydantic's
    key = ".".join(place)
    kind, value = error["type"], error["input"]
    known = wanted.get(tag, next(iter(wanted.values())))
    if kind == "value_error":  # from a validator of ours; inside a section the text begins with the name of the field
        text = str(error["ctx"]["error"])
        return Problem(f"{key}.{re.split(r'[^a-z0-9_]', text)[0]}", f"{key}.{text}") if key else Problem("", text)
    if kind.startswith("union_tag"):
        key += ".name"
        kind, value = ("", value["name"]) if "name" in value else ("missing", None)
    standard = re.sub(r"^optimizers\.[^.]+", "optimizer", key)
    if kind == UNKNOWN:
        return Problem(key, f"unknown key {key}; {nearest(standard, list(known))}")
    if kind == "missing":
        return Problem(key, f"{key} is missing: it must be {known[standard]}")
    allowed = known[standard]
    near = difflib.get_close_matches(str(value), re.findall(r"[\w-]+", allowed), n=1, cutoff=0.7)
    hint = f" (did you mean {near[0]}?)" if near and isinstance(value, str) and near[0] != value else ""
    return Problem(key, f"{key} must be {allowed}, got {value!r}{hint}")


def nearest(key: str, known: list[str]) -> str:
    """The same name in another section, one spelt alike in this section or in another, or else all of this section."""
    section, _, name = key.rpartition(".")
    beside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    everywhere = {k.rpartition(".")[2]: k for k in reversed(known)}
    near = [name] if name in everywhere else difflib.get_close_matches(name, beside, n=1, cutoff=0.6)
    near = near or difflib.get_close_matches(name, everywhere, n=1, cutoff=0.8)
    if near:
        return f"did you mean {(beside | everywhere if name in everywhere else everywhere | beside)[near[0]]}?"
    return f"there are {', '.join(beside.values() or [k for k in known if '.' not in k])}"


def wanted_values(model: type[BaseModel], above: str = "") -> dict[str, str]:
    """Every dotted key of `model` with what its value must be: the description of the field."""
    found = {}
    for key, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            found[above + key] = f"a section with the keys {', '.join(section.model_fields)}"
            found |= wanted_values(section, f"{above}{key}.")
        else:
            found[above + key] = field.description or ""
    return found
