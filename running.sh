#!/usr/bin/env bash
# Runs every training script on this machine, alone and one on top of another, and prints what each gains.
#   ./running.sh --help
set -euo pipefail
exec "${PYTHON:-python3}" -u "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/tools" running "$@"
