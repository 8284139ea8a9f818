"""``mars-dist checkpoint``: its arguments and exit codes; a command's module is imported when it runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Look into checkpoints without loading them: of `mars-dist train`, the Trainer, Accelerate, DeepSpeed and torch's DCP.

  mars-dist checkpoint verify runs/mine              is it complete, unchanged, free of foreign pickles?
  mars-dist checkpoint latest out                    the newest one that is valid, for a script
  mars-dist checkpoint seal out/checkpoint-500       note size and hash of every file, to compare with later
  mars-dist checkpoint convert out out/universal     DeepSpeed: for another number of ranks, or another ZeRO stage
"""
VERIFY = """\
Nothing is executed. A sealed folder (with mars_dist_manifest.json) is compared by size and SHA-256; of any other the
structure is checked: files that it must have by its own records, checksums inside of zip files, headers of safetensors.
Pickles are held against a list of names that checkpoints need (mars_dist/checkpoint/allowed.py).

exit codes: 0 valid (of several: the newest that is valid was found); 1 not, or nothing there
"""
CONVERT = """\
Built on DeepSpeed's ds_to_universal; the previous gradients and step counters of MARS are carried as well. Load OUT
with "checkpoint": {"load_universal": true} in the DeepSpeed configuration, and load_checkpoint(folder above OUT).
"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add ``checkpoint`` and what is below it to the commands of ``mars-dist``."""
    shape: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    text = "verify, seal and find checkpoints of any engine"
    group = commands.add_parser("checkpoint", help=text, description=DESCRIPTION, **shape)
    below = group.add_subparsers(dest="checkpoint_command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str, epilog: str = "") -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = below.add_parser(
            name, help=text, description=text, epilog=epilog, parents=[common], **shape
        )
        sub.set_defaults(run=run)
        sub.add_argument("folder", type=Path, metavar="DIR", help="folder of a checkpoint, or of several")
        return sub

    verify = command("verify", _verify, "is a checkpoint complete, unchanged, and free of foreign pickles?", VERIFY)
    trust_argument(verify)
    verify.add_argument("--json", action="store_true", help="print the report as JSON")
    command("seal", _seal, "write the manifest of a complete folder: size and SHA-256 of every file")
    latest = command("latest", _latest, "print the path of the newest valid checkpoint; exit code 1 if there is none")
    trust_argument(latest)
    text = "write a DeepSpeed checkpoint for another number of ranks, or another ZeRO stage"
    convert = command("convert", _convert, text, CONVERT)
    convert.add_argument("out", type=Path, metavar="OUT", help="the new folder, which must not exist")
    convert.add_argument("--tag", help="which of the checkpoints in DIR (default: the one that its `latest` names)")
    convert.add_argument("--json", action="store_true", help="print what is in OUT as JSON")
    trust_argument(convert)


def trust_argument(parser: argparse.ArgumentParser) -> None:
    """``--trust-checkpoint``, for every command that loads pickles of others."""
    parser.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="do not check pickles: they may run any program when they are loaded (also MARS_DIST_TRUST_CHECKPOINT=1)",
    )


def _verify(args: argparse.Namespace) -> int:
    from mars_dist.checkpoint import find

    report = find.verify(args.folder, trusted=args.trust_checkpoint)
    chosen: Path | None = None
    if report.several:
        chosen = find.latest_valid(args.folder, say=lambda text: None, trusted=args.trust_checkpoint)
    valid = chosen is not None if report.several else report.valid
    if args.json:
        content = {**report.as_json(), "valid": valid}
        print(json.dumps(content | ({"latest_valid": chosen and str(chosen)} if report.several else {}), indent=1))
        return 0 if valid else 1
    print(report)
    for one in report.several:
        print("\n" + str(one))
    if report.several:
        print(f"\nnewest valid checkpoint: {chosen if chosen else 'none'}")
    return 0 if valid else 1


def _seal(args: argparse.Namespace) -> int:
    from mars_dist.checkpoint import find
    from mars_dist.checkpoint.manifest import NAME

    report = find.verify(args.folder, trusted=True, sealed=False)
    if report.several:  # a manifest here would make it one checkpoint, which `latest` would then print
        raise ValueError(
            f"{args.folder} holds {len(report.several)} checkpoints: seal {report.several[0].folder}, or another"
        )
    if report.faults:
        raise ValueError(f"{args.folder} is not sealed, because it is not valid: {'; '.join(report.faults)}")
    if report.sealed:  # a new one would cover what was changed since, and lose what its writer has noted
        raise ValueError(
            f"{args.folder} is sealed already: `mars-dist checkpoint verify` compares with that. To seal it anew as it "
            f"is now, remove {args.folder / NAME} (mars-dist train does not resume from its own without it)"
        )
    files = find.seal(args.folder)
    if not args.quiet:
        print(f"sealed {args.folder} ({report.kind}, {files} files)")
    return 0


def _latest(args: argparse.Namespace) -> int:
    from mars_dist.checkpoint import find

    chosen = find.latest_valid(
        args.folder, say=lambda text: print(text, file=sys.stderr), trusted=args.trust_checkpoint
    )
    if chosen is None:
        print(f"mars-dist: {args.folder} holds no valid checkpoint", file=sys.stderr)
        return 1
    print(chosen)
    return 0


def _convert(args: argparse.Namespace) -> int:
    from mars_dist.integrations.deepspeed.universal import convert

    with contextlib.redirect_stdout(sys.stderr):  # what DeepSpeed says when it is imported
        facts = convert(args.folder, args.out, args.tag, trusted=args.trust_checkpoint)
    if args.json:
        print(json.dumps({"out": str(args.out), **facts}, indent=1))
    elif not args.quiet:
        print(
            f"wrote {args.out}: {facts['variant']}, {len(facts['parameters'])} parameters, saved by "
            f"{facts['world_size']} ranks at ZeRO stage {facts['zero_stage']}"
        )
    return 0
