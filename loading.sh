#!/usr/bin/env bash
# Times a loader and the baseline, each cold (from the disk) and warm (from memory), and names the bottleneck.
#   ./loading.sh SCRIPT DATASET [--result_dir DIR] [OPTION ...]
# SCRIPT is a name in src/ (loader_DALI.py) or a path; OPTIONs go to the loaders. For the cold run it drops the files of
# DATASET, and no others, from the page cache; needs no root. Writes DIR/loading.md and .json (DIR: results).
set -euo pipefail
exec "${PYTHON:-python3}" -u "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/tools/loading.py" "$@"
