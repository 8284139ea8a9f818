"""``python -m mars_dist.integrations.deepspeed CONFIG.json``: check a configuration before it costs a start."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mars_dist.integrations.deepspeed.check import check, names_mars, read


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when no file has an error, 1 when one has, 2 when one cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m mars_dist.integrations.deepspeed",
        description="Check DeepSpeed configurations that name MARS: unknown or wrong parameters, contradictions, keys "
        "that MARS refuses or was not tested with, and what DeepSpeed itself says. Nothing is started.",
        epilog="exit code: 0 no errors (there may be warnings), 1 errors, 2 a file cannot be read",
    )
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG.json")
    parser.add_argument("--world-size", type=int, metavar="N", help="check batch sizes for N data-parallel ranks")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parser.parse_args(argv)
    if args.world_size is not None and args.world_size < 1:
        parser.error(f"--world-size must be at least 1, got {args.world_size}")

    code, report = 0, {}
    for path in args.configs:
        try:
            config = read(path)
        except (OSError, ValueError, RecursionError) as error:
            print(f"{path}: cannot be read: {error}", file=sys.stderr)
            code = 2
            continue
        found = check(config, args.world_size)
        errors = sum(finding.level == "error" for finding in found)
        code = max(code, int(errors > 0))
        report[str(path)] = [finding.to_dict() for finding in found]
        if not args.json:
            for finding in found:
                print(f"{path}: {finding.level}: {finding.key} {finding.message}".replace("  ", " "))
            about = "MARS" if names_mars(config) else "not MARS"
            print(f"{path}: {about}, {_count(errors, 'error')}, {_count(len(found) - errors, 'warning')}")
    if args.json:
        print(json.dumps(report, indent=2))
    return code


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


if __name__ == "__main__":
    sys.exit(main())
