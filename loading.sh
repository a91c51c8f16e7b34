#!/usr/bin/env bash
# Times a loader and the baseline, each from a cold and a warm page cache, and names what holds them back.
#   ./loading.sh SCRIPT DATASET [--result_dir DIR] [OPTION ...]
# SCRIPT is a name in src/ (loader_DALI.py) or a path; OPTIONs go to the loaders. Drops the cache of the data set's
# own files alone; needs no root. Writes DIR/loading.md and .json (DIR: results); records and logs lie in DIR/loading/.
set -euo pipefail
exec "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/tools/driver.sh" loading "$@"
