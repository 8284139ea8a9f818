"""``mars-dist``: the command line. Only arguments, help and exit codes; a command's module is imported when it runs."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mars_dist import __version__, checkpoint_cli

DESCRIPTION = """\
Train GPT-2 with the MARS optimizers, from text to curve.

  mars-dist train tiny                      offline, on this machine, in minutes
  mars-dist prepare my_texts/ --out data    your text, tokenised into shards
  mars-dist train gpt2-small --set data.path=data --out runs/mine
  torchrun --nproc-per-node 8 -m mars_dist.cli train gpt2-small ...
  deepspeed --module mars_dist.cli train gpt2-large --set engine.deepspeed=ds_configs/gpt2_large_zero2.json ...
  mars-dist report runs/mine runs/other --png curves.png
"""
EXIT_CODES = """\
exit codes: 0 done, 1 an error (said in one line, with the remedy; --debug shows where), 2 wrong usage, 3 stopped by a
signal after a checkpoint was saved (run the same command again), 4 stopped because the loss was not finite, 130 Ctrl-C
before there was anything to save
"""


def parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quiet", action="store_true", help="no progress, only warnings and errors")
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")

    main = argparse.ArgumentParser(
        prog="mars-dist",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main.add_argument("--version", action="version", version=f"mars-dist {__version__}")
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str, epilog: str = "") -> Any:
        sub = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=epilog,
            parents=[common],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run)
        return sub

    train = command("train", _train, "train a recipe; goes on from the last checkpoint in --out", _recipes())
    train.add_argument("recipe", metavar="RECIPE", help="a name below, or a YAML file")
    train.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe; repeatable")
    train.add_argument("--exact", action="store_true", help="MARS in exact mode: two gradients for each step")
    train.add_argument("--out", type=Path, help="folder of the run (default runs/RECIPE)")
    train.add_argument("--fresh", action="store_true", help="start over, whatever --out holds")
    train.add_argument("--json", action="store_true", help="print the summary as JSON at the end; implies --quiet")
    train.add_argument("--show", action="store_true", help="print the resolved recipe and do nothing")

    prepare = command("prepare", _prepare, "tokenise text into shards that train reads; run it again to go on", "")
    prepare.add_argument(
        "sources", nargs="*", metavar="SOURCE", help="txt, jsonl or parquet files (also compressed), folders, patterns"
    )
    prepare.add_argument("--dataset", metavar="ID", help="a Hugging Face data set instead, streamed")
    prepare.add_argument("--dataset-config", metavar="NAME")
    prepare.add_argument("--dataset-split", default="train", metavar="NAME", help="(default train)")
    prepare.add_argument("--revision", metavar="COMMIT", help="of the data set; name one, so that it stays the same")
    prepare.add_argument("--shipped", action="store_true", help="the text that ships with the package instead")
    prepare.add_argument("--out", type=Path, required=True, help="folder of the shards")
    prepare.add_argument("--workers", type=int, help="processes that tokenise (default: one for each core)")
    prepare.add_argument("--val-fraction", type=float, help="documents held out (default 0.0005; --shipped: 0.1)")
    prepare.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N", help="(default 100,000,000)")
    prepare.add_argument("--text-field", default="text", help="field of jsonl and parquet rows (default text)")
    prepare.add_argument(
        "--separator", help=r"text that ends a document in txt files, \n and \t understood (default: a file is one)"
    )
    prepare.add_argument("--format", choices=("txt", "jsonl", "parquet"), help="of the files (default: by their names)")
    prepare.add_argument("--errors", choices=("strict", "replace"), default="strict", help="bytes that are no UTF-8")
    prepare.add_argument("--json", action="store_true", help="print the index as JSON; implies --quiet")

    report = command("report", _report, "compare runs: table, picture, speed-up at equal loss")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl")
    report.add_argument("--png", type=Path, help="write the curves as a picture")
    report.add_argument("--html", type=Path, help="write table and curves as one HTML page")
    report.add_argument(
        "--published", metavar="SIZE", help="draw the published points of gpt2-small, -medium or -large"
    )
    report.add_argument("--json", action="store_true", help="print the table as JSON")

    export = command("export", _export, "write a checkpoint as a folder that transformers loads")
    export.add_argument("checkpoint", type=Path, help="folder of a run (its last checkpoint), or of one checkpoint")
    export.add_argument("out", type=Path, help="the new folder: model and tokenizer")
    checkpoint_cli.trust_argument(export)

    check = command("check", _check, "check DeepSpeed configurations that name MARS, without starting anything")
    check.add_argument("configs", nargs="+", metavar="CONFIG.json", help="what deepspeed.initialize will be given")
    check.add_argument("--world-size", metavar="N", help="number of data-parallel ranks: batch sizes are checked too")
    check.add_argument("--json", action="store_true", help="print the findings as JSON")

    checkpoint_cli.add(commands, common)
    return main


def _recipes() -> str:
    folder = Path(__file__).parent / "pretrain/recipes"
    names = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    return f"""\
recipes: {names}
each with an optimizer behind it: -mars-adamw (the default), -mars-lion, -mars-shampoo, -mars-m, -adamw, -muon; for
example gpt2-small-adamw. `--show` prints what one says.

{EXIT_CODES}"""


def _train(args: argparse.Namespace) -> int:
    from mars_dist.pretrain.recipe import load

    recipe = load(args.recipe, args.set + ["optimizer.exact=true"] * args.exact)
    if args.show:
        print(recipe.to_yaml(), end="")
        return 0
    from mars_dist.pretrain.train import train

    out = args.out or Path("runs") / recipe.name
    code = train(recipe, out, resume=not args.fresh, bar=not (args.quiet or args.json))
    if args.json and code == 0 and os.environ.get("RANK", "0") == "0":
        print((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return code


def _prepare(args: argparse.Namespace) -> int:
    from mars_dist.pretrain.prepare import prepare
    from mars_dist.pretrain.sources import open_source

    given = [bool(args.sources), bool(args.dataset), args.shipped]
    if sum(given) != 1:
        raise ValueError("give files, or --dataset ID, or --shipped: one of the three")
    source = open_source(
        args.sources or (f"hf:{args.dataset}" if args.dataset else "shipped"),
        field=args.text_field,
        separator=args.separator,
        errors=args.errors,
        form=args.format,
        config=args.dataset_config,
        split=args.dataset_split,
        revision=args.revision,
    )
    fraction = args.val_fraction if args.val_fraction is not None else 0.1 if args.shipped else 0.0005
    quiet = args.quiet or args.json

    if source.left_out and not quiet:
        reasons = ", ".join(f"{why}: {count:,}" for why, count in sorted(source.left_out.items()))
        print(f"not read from the folders given: {reasons}", file=sys.stderr)

    def show(progress: Any) -> None:
        print(f"\r{progress.documents:,} documents, {progress.tokens:,} tokens", end="", file=sys.stderr, flush=True)

    try:
        index = prepare(
            source,
            args.out,
            workers=args.workers,
            val_fraction=fraction,
            shard_tokens=args.shard_tokens,
            report=None if quiet else show,
        )
    finally:
        if not quiet:
            print(file=sys.stderr)
    counts = {name: (f["documents"], f["tokens"]) for name, f in index["splits"].items()}
    if not counts["train"][0]:
        print("no document went to train: prepare again with a smaller --val-fraction", file=sys.stderr)
    elif not counts["val"][0] and counts["train"][0] == 1:
        print(
            "the text is one document, so nothing is held out: split it with --separator '\\n\\n' (txt), or train with "
            "--set validation.every=0",
            file=sys.stderr,
        )
    elif not counts["val"][0]:
        print(
            f"none of {counts['train'][0]:,} documents went to val: prepare again into another --out with a larger "
            f"--val-fraction than {fraction:g} (0.5 for a handful), or train with --set validation.every=0",
            file=sys.stderr,
        )
    if args.json:
        print(json.dumps(index))
    elif not quiet:
        parts = [f"{name}: {documents:,} documents, {tokens:,} tokens" for name, (documents, tokens) in counts.items()]
        from mars_dist.pretrain.tokenizer import RANKS_FILE

        print(f"tokenizer: GPT-2's, from {RANKS_FILE}")
        print(f"{args.out}: " + "; ".join(parts))
        if counts["train"][0]:
            blind = "" if counts["val"][0] else " --set validation.every=0"
            print(f"train on it: mars-dist train ... --set data.path={shlex.quote(str(args.out))}{blind}")
    return 0


def _report(args: argparse.Namespace) -> int:
    from mars_dist.pretrain.report import report

    return report(args.runs, png=args.png, html=args.html, published=args.published, as_json=args.json)


def _export(args: argparse.Namespace) -> int:
    from mars_dist.pretrain.export import export

    export(args.checkpoint, args.out, args.trust_checkpoint)
    if not args.quiet:
        print(f"wrote {args.out}: AutoModelForCausalLM.from_pretrained({str(args.out)!r}) loads it")
    return 0


def _check(args: argparse.Namespace) -> int:
    from mars_dist.integrations.deepspeed.__main__ import main as check

    world = ["--world-size", args.world_size] if args.world_size else []
    return check([*args.configs, *world, *(["--json"] if args.json else [])])


def main(argv: Sequence[str] | None = None) -> int:
    # The deepspeed launcher puts its --local_rank before the command; LOCAL_RANK in the environment says the same.
    words = [
        w for w in (sys.argv[1:] if argv is None else argv) if not w.startswith(("--local_rank=", "--local-rank="))
    ]
    args = parser().parse_args(words)
    if args.quiet or getattr(args, "json", False):
        logging.getLogger("mars_dist").setLevel(logging.WARNING)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("mars-dist: interrupted before there was anything to save", file=sys.stderr)
        return 130
    except Exception as error:
        if args.debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ImportError) and "pip install" not in text:
            text += ": pip install 'mars-dist[deepspeed,train]' brings what this command needs"
        elif not isinstance(error, (ValueError, OSError, RuntimeError, ImportError)):
            text = f"unexpected {type(error).__name__}: {text} (--debug shows where)"
        print(f"mars-dist: error: {text}", file=sys.stderr)
        return int(getattr(error, "exit_code", 1))


if __name__ == "__main__":
    sys.exit(main())
