#!/usr/bin/env bash
# Lint, types and tests. `bash launch/test.sh` runs the default tier, `--all` everything; other arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

tier=()
if [ "${1:-}" = --all ]; then
  tier=(-m "")
  shift
fi
make_environment deepspeed,hf,train,test

ruff check .
mypy mars_dist
python -m pytest "${tier[@]}" "$@"
