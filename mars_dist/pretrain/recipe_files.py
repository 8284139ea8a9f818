"""Recipe files: where they are, YAML read the way people mean it, `base`, overrides. What the keys mean: recipe.py."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

RECIPES = Path(__file__).parent / "recipes"
SIZES = ("tiny", "gpt2-small", "gpt2-medium", "gpt2-large", "gpt2-xl")
OPTIMIZERS = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "adamw", "muon")
DEFAULT_OPTIMIZER = OPTIMIZERS[0]

Content = dict[str, Any]


class RecipeError(ValueError):
    """A recipe, a file or an override that cannot be used: one line, with the key, the value and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def names() -> tuple[str, ...]:
    """The recipes that ship: every size, and every size with every optimizer."""
    return tuple(name for size in SIZES for name in (size, *(f"{size}-{optimizer}" for optimizer in OPTIMIZERS)))


def compose(name: str, overrides: Sequence[str]) -> tuple[Content, Content, dict[str, str]]:
    """A recipe with its base under it and `overrides` over it, unchecked.

    Returns: the content, with the numbers of the optimizer that it names; the table of optimizers it was taken from;
        for each dotted key the file or override that gave it.
    """
    content: Content = {}
    changes: Content = {}
    origin: dict[str, str] = {}
    for source, layer in layers(name):
        content = merge(content, layer)
        origin |= dict.fromkeys(paths(layer), source)
    for text in overrides:
        change = override(text)
        changes = merge(changes, change)
        origin |= dict.fromkeys(paths(change), f"--set {text}")
    table = content.pop("optimizers", {})
    content = merge(content, changes)
    if table:
        content = merge({"optimizer": {"name": DEFAULT_OPTIMIZER}}, content)
        chosen = content["optimizer"]
        numbers = table.get(str(chosen["name"])) if isinstance(table, dict) and isinstance(chosen, dict) else None
        content["optimizer"] = numbers | chosen if isinstance(numbers, dict) else chosen
    return content, table, origin


def layers(name: str, folder: Path = Path(), above: tuple[Path, ...] = ()) -> list[tuple[str, Content]]:
    """(where from, content) of the recipe and of what it is based on, the base first.

    Args:
        name: of a recipe that ships, or a path relative to `folder`.
        above: the files that led here by their `base`.
    """
    if name in names():
        size = next(s for s in SIZES if name == s or name.removeprefix(f"{s}-") in OPTIMIZERS)
        optimizer = name.removeprefix(size).removeprefix("-") or DEFAULT_OPTIMIZER
        content = parse((RECIPES / f"{size}.yaml").read_text(encoding="utf-8"), size)
        return [(name, content | {"name": f"{size}-{optimizer}", "optimizer": {"name": optimizer}})]
    path = folder / name
    if path.resolve() in above:
        raise RecipeError(f"{path}: base goes in a circle: {' -> '.join(p.name for p in (*above, path))}")
    content = parse(_read(path, name), str(path))
    if not isinstance(content, dict):
        what = "is empty" if content is None else f"holds a {type(content).__name__}, no keys"
        raise RecipeError(f"{path} {what}: a recipe says for example `base: gpt2-small` and what differs")
    content.setdefault("name", re.sub(r"[^A-Za-z0-9_.+-]+", "-", path.stem).strip("-.+") or "recipe")
    if "base" not in content:
        return [(str(path), content)]
    base = content.pop("base")
    if not isinstance(base, str):
        raise RecipeError(f"{path}: base must be the name of a recipe or the path of a file, got {base!r}")
    return [*layers(base, path.parent, (*above, path.resolve())), (str(path), content)]


def _read(path: Path, name: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RecipeError(f"{path} is no UTF-8 text: a recipe is a YAML file") from None
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name.removesuffix(".yaml"), names(), n=1, cutoff=0.4)
        raise RecipeError(
            f"{name} is neither a recipe nor a file{f'; did you mean {near[0]}?' if near else '.'} "
            f"Recipes: {', '.join(SIZES)}, each also with {', '.join('-' + o for o in OPTIMIZERS)}"
        ) from None
    except OSError as error:
        reason = "is a folder" if path.is_dir() else f"cannot be read ({error.strerror})"
        inside = path / "recipe.yaml"
        raise RecipeError(f"{path} {reason}: give {inside if inside.is_file() else 'a YAML file'}") from None


def override(text: str) -> Content:
    """``{"training": {"steps": 5}}`` for "training.steps=5"; the value is read as YAML."""
    key, _, value = text.partition("=")
    if not key.strip() or not value.strip():
        raise RecipeError(f"--set {text}: write key=value, for example training.steps=1000; null stands for no value")
    parsed = parse(value, f"--set {text}")
    for part in reversed(key.strip().split(".")):
        parsed = {part: parsed}
    return parsed


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Content:
    """`above` wins, key by key; an optimizer of another name does not inherit the numbers of the one below."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            names_given = {str(section["name"]) for section in (old, value) if "name" in section}
            merged[key] = value if key == "optimizer" and len(names_given) == 2 else merge(old, value)
        else:
            merged[key] = value
    return merged


def paths(content: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Every dotted key: "training", "training.steps", ..."""
    for key, value in content.items():
        yield f"{above}{key}"
        if isinstance(value, dict):
            yield from paths(value, f"{above}{key}.")


# -------------------------------------------------------------------------------------------------------------- YAML


class Loader(yaml.SafeLoader):
    """yes, no, on, off and dates are text, 1e-3 is a number, a key is text and comes once."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    message = f"the key {key.value} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
                seen.add(key.value)
                key.tag = "tag:yaml.org,2002:str"  # a key is text, whatever it looks like
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes what Loader would not read as text; lists in one line."""

    yaml_implicit_resolvers: dict[str, Any] = {}


Dumper.add_representer(list, lambda dumper, x: dumper.represent_sequence("tag:yaml.org,2002:seq", x, flow_style=True))
for _tag, _pattern, _first in [
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9_]{0,17})", "-+0123456789"),
    ("float", r"[-+]?(([0-9][0-9_]*\.[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
]:
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def parse(text: str, source: str) -> Any:
    """YAML; `source` is named in errors."""
    try:
        content = yaml.load(text, Loader)
        for _ in paths(content if isinstance(content, dict) else {}):  # an alias to what it stands in has no end
            pass
        return content
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise RecipeError(f"{source}: {error.problem}{line}") from None
    except RecursionError:
        raise RecipeError(f"{source}: nested without end") from None
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{source}: {error}") from None
