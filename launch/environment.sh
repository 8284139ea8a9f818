# Sourced by quickstart.sh and test.sh: `make_environment EXTRAS` leaves a virtual environment with mars_dist[EXTRAS]
# at $MARS_DIST_VENV (default .venv) at the front of PATH. A complete one is used again. Run from the repository's root.

die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# The Python to build with: $PYTHON if given, otherwise the first of these that is 3.11 or newer.
find_python() {
  local candidate seen=""
  for candidate in ${PYTHON:-python3 python python3.14 python3.13 python3.12 python3.11}; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
    seen="$seen $candidate ($("$candidate" -V 2>&1))"
  done
  die "needs Python 3.11 or newer, found:${seen:- none of ${PYTHON:-python3, python}}. Install one and run again, or name one: PYTHON=/path/to/python3.11 bash $0"
}

has_nvidia_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

make_environment() {
  local extras=$1 venv=${MARS_DIST_VENV:-.venv} python pip_options=() need_mb=4000 kind=cpu
  if has_nvidia_gpu; then
    kind=gpu need_mb=12000 # the CUDA build of torch with its libraries
  else
    pip_options=(-c launch/constraints-cpu.txt)
  fi

  # The stamp is written last: it says what a complete installation was made of.
  local stamp="$venv/mars_dist.stamp" made_of
  made_of="$kind $PWD $(cat setup.py pyproject.toml launch/constraints-cpu.txt | cksum)"
  if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c '' 2>/dev/null && grep -qxF "$made_of | $extras" "$stamp" 2>/dev/null; then
    echo "environment: $venv (complete, used again)"
  else
    python=$(find_python) || exit 1
    mkdir -p "$venv" || die "cannot write to $venv; name another place: MARS_DIST_VENV=/path bash $0"
    local free_mb
    free_mb=$(df -Pm "$venv" | awk 'NR == 2 {print $4}')
    [ "$free_mb" -ge "$need_mb" ] || die "$free_mb MB free at $venv, about $need_mb MB are needed; free some, or name another place: MARS_DIST_VENV=/path bash $0"
    if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
      [ -e "$venv/pyvenv.cfg" ] || [ -z "$(ls -A "$venv")" ] || die "$venv exists and is no virtual environment; move it away, or name another place: MARS_DIST_VENV=/path bash $0"
      echo "environment: making $venv with $("$python" -V)"
      "$python" -m venv --clear "$venv" || die "'$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"
    fi
    echo "environment: installing mars_dist[$extras] and what it needs (minutes; log: $venv/install.log)"
    [ -t 1 ] || pip_options+=(--progress-bar off)
    "$venv/bin/python" -m pip install --quiet --log "$venv/install.log" "${pip_options[@]}" -e ".[$extras]" ||
      die "pip could not install mars_dist[$extras]; see above and $venv/install.log, then run again"
    echo "$made_of | $extras" >>"$stamp"
  fi
  PATH="$(cd "$venv" && pwd)/bin:$PATH"
  export PATH
}
