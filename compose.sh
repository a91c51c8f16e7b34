#!/usr/bin/env bash
# Joins techniques into one training script; needs Python and git, no packages.
#   ./compose.sh --help
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/tools" compose "$@"
