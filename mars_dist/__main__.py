"""``python -m mars_dist script.py ...``: run a script that nobody edited, with MARS registered.

Also as ``deepspeed --module mars_dist script.py ...`` and ``torchrun -m mars_dist script.py ...``. The script sees
the command line and the module path that it would see if it were run directly.
"""

from __future__ import annotations

import os
import runpy
import sys

import mars_dist

USAGE = """usage: python -m mars_dist [-m] SCRIPT [ARGUMENTS ...]

Registers MARS, so that "type": "MARS" works in a DeepSpeed configuration, then runs SCRIPT (with -m: a module) with
its ARGUMENTS as if it had been started directly. Under a launcher:

  deepspeed --module mars_dist SCRIPT ...
  torchrun -m mars_dist SCRIPT ...
"""


def main(argv: list[str]) -> None:
    # The deepspeed launcher puts --local_rank before the arguments; it belongs to the script.
    leading = [a for a in argv[:1] if a.startswith(("--local_rank", "--local-rank"))]
    argv = argv[len(leading) :]
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        sys.exit(0 if argv else 2)
    as_module = argv[0] == "-m"
    argv = argv[as_module:]
    if not argv:
        sys.exit("mars_dist: -m needs the name of a module to run")
    target = argv[0]
    if not as_module and not os.path.exists(target):
        sys.exit(f"mars_dist: there is no script {target!r} (in {os.getcwd()}). Usage: python -m mars_dist SCRIPT ...")
    mars_dist.register()
    sys.argv = [target, *leading, *argv[1:]]
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        # As the interpreter does for a script: its own folder comes first, not the working directory.
        sys.path[0] = os.path.dirname(os.path.abspath(target))
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
