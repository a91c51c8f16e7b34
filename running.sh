#!/usr/bin/env bash
# Runs every training variant on this machine and prints what each technique buys.
#   ./running.sh EPOCHS [DATASET] [--result_dir DIR] [-- OPTION ...]
# Without DATASET it draws the digits first. OPTIONs go to every script: ./running.sh 5 -- --batch_size 512
# Writes DIR/running.md, .json and .png (DIR: results); the scripts, their records and logs lie in DIR/running/.
set -euo pipefail
root=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  [[ -n ${VIRTUAL_ENV:-} || ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
fi
"$python" -c 'import sys, importlib.util as i; sys.exit(not all(map(i.find_spec, ("torch", "psutil"))))' || {
  echo "running.sh: $python lacks packages: python3 -m venv .venv && .venv/bin/pip install -r requirements.txt" >&2
  exit 1
}
exec "$python" -u "$root/running.py" "$@"
