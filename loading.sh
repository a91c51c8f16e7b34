#!/usr/bin/env bash
# Times a loader and the baseline, each from a cold and a warm page cache, and names what holds them back.
#   ./loading.sh SCRIPT DATASET [--result_dir DIR] [OPTION ...]
# SCRIPT is a name in src/ (loader_DALI.py) or a path; OPTIONs go to the loaders. Drops the cache of the data set's
# own files alone; needs no root. Writes DIR/loading.md and .json (DIR: results); records and logs lie in DIR/loading/.
set -euo pipefail
root=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  [[ -n ${VIRTUAL_ENV:-} || ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
fi
"$python" -c 'import sys, importlib.util as i; sys.exit(not all(map(i.find_spec, ("torch", "torchvision", "psutil"))))' || {
  echo "loading.sh: $python lacks packages: python3 -m venv .venv && .venv/bin/pip install -r requirements.txt" >&2
  exit 1
}
exec "$python" -u "$root/loading.py" "$@"
