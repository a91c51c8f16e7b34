#!/usr/bin/env bash
# Times a loader and the baseline, each cold (from the disk) and warm (from memory), and names the bottleneck.
#   ./loading.sh --help
set -euo pipefail
exec "${PYTHON:-python3}" -u "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/tools" loading "$@"
