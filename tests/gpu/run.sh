#!/usr/bin/env bash
# What only a GPU shows: NCCL's device rules, CUDA kernels, offload moves, no host synchronisation. A few minutes.
# Works with one GPU (collectives are kept on one rank). Without a GPU it says so and leaves with code 77.
#
#   bash tests/gpu/run.sh             the Python of .venv, or of PYTHON=...
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || {
    echo "tests/gpu/run.sh: $python cannot import torch. Run bash launch/test.sh once, or set PYTHON=..." >&2
    exit 1
}
if [ "$gpus" -eq 0 ]; then
    echo "tests/gpu/run.sh: torch sees no GPU here: nothing was run."
    exit 77
fi
"$python" -c 'import torch; print(torch.__version__, [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])'
"$python" -m pytest -q -p no:cacheprovider --override-ini "testpaths=tests/gpu" tests/gpu/gpu_checks.py
"$python" -m mars_dist.bench --device cuda --size small
