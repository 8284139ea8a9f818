"""A checkpoint of a run as a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mars_dist.pretrain import checkpoint as checkpoints
from mars_dist.pretrain import model as models
from mars_dist.pretrain.engine import STATE_FILE
from mars_dist.pretrain.recipe import load  # noqa
from mars_dist.pretrain.tokenizer import END_OF_TEXT, END_OF_TEXT_ID, load_ranks


def export(source: Path, out: Path, trusted: bool = False) -> None:
    """Write the model of ``source`` in float32, and GPT-2's tokenizer, to the new folder ``out``.

    Args:
        source: folder of a run (its last checkpoint is taken) or of one checkpoint in it.
        trusted: unpickle a DeepSpeed checkpoint without a check of what its pickles do.

    Raises:
        ValueError: when there is no complete checkpoint, or its pickles do more than checkpoints need.
        FileExistsError: when ``out`` exists and is not empty.
    """
    folder, run = find(source)
    if not (run / "recipe.yaml").is_file():
        raise ValueError(f"{run} has no recipe.yaml: a checkpoint is exported from where its run has it")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not empty: choose another folder")
    recipe = load(str(run / "recipe.yaml"), ["model.compile=false"])
    model: Any = models.build(recipe.model)
    model.load_state_dict(weights(folder, trusted))
    out.mkdir(parents=True, exist_ok=True)
    model.config.use_cache = True
    model.save_pretrained(out)
    tokenizer().save_pretrained(out)


def find(source: Path) -> tuple[Path, Path]:
    """The checkpoint's folder and the run's."""
    if (source / checkpoints.RUN_FILE).is_file():
        return source, source.parent.parent
    folder = checkpoints.latest(source / "checkpoints")
    if folder is None:
        raise ValueError(f"{source} holds no complete checkpoint: give the folder of a run of `mars-dist train`")
    return folder, source


def weights(folder: Path, trusted: bool = False) -> dict[str, torch.Tensor]:
    """The model's parameters by name, in float32, whatever the engine sharded."""
    if (folder / STATE_FILE).exists():
        try:
            state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)["model"]
        except Exception as error:  # torch raises many kinds for a damaged file
            raise ValueError(
                f"{folder / STATE_FILE} is damaged ({type(error).__name__}): export another one"
            ) from error
    else:
        from mars_dist.integrations.deepspeed.launch import whole_weights

        state = whole_weights(folder, "deepspeed", trusted)
    state = {name.removeprefix("_orig_mod."): value.float() for name, value in state.items()}
    state.setdefault("lm_head.weight", state["transformer.wte.weight"])
    return state


def tokenizer() -> Any:
    """transformers' GPT-2 tokenizer made of the ranks that ship with the package; equal ids, offline."""
    from transformers import GPT2TokenizerFast

    vocabulary, merges = bpe(load_ranks())
    return GPT2TokenizerFast(vocab=vocabulary | {END_OF_TEXT: END_OF_TEXT_ID}, merges=merges)


def bpe(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges in GPT-2's printable alphabet, from tiktoken's ranks.

    A token of more than one byte is made by the merge of the two parts that the encoder ends with when only the
    tokens of lower rank may be used.
    """
    letters = alphabet()
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = [bytes([b]) for b in token]
            while len(parts) > 2:
                pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
                i = min(range(len(pairs)), key=pairs.__getitem__)
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            merges.append(parts)
    write = {token: "".join(letters[b] for b in token) for token in ranks}
    return {write[token]: rank for token, rank in ranks.items()}, [(write[a], write[b]) for a, b in merges]


def alphabet() -> dict[int, str]:
    """GPT-2 writes every byte as a printable character: itself where it is one, else one from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
