#!/usr/bin/env bash
# What running.sh and loading.sh share: driver.sh NAME ARGUMENT ... starts tools/NAME.py with a Python that has the packages:
# $PYTHON, or the active virtual environment's, or .venv in the project, or python3.
set -euo pipefail
root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
name=$1
shift
python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  [[ -n ${VIRTUAL_ENV:-} || ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
fi
"$python" -c 'import sys, importlib.util as i; sys.exit(not all(map(i.find_spec, ("torch", "torchvision", "psutil"))))' || {
  echo "$name.sh: $python lacks packages: python3 -m venv .venv && .venv/bin/pip install -r requirements.txt" >&2
  exit 1
}
exec "$python" -u "$root/tools/$name.py" "$@"
