#!/usr/bin/env bash
# Runs every training variant on this machine, and then technique after technique, and prints what each buys.
#   ./running.sh EPOCHS [DATASET] [--part cells|staircase|all] [--result_dir DIR] [-- OPTION ...]
# Without DATASET it draws the digits first. OPTIONs go to every script: ./running.sh 5 -- --batch_size 512
# Writes DIR/running.md, .json and .png (DIR: results); the scripts, their records and logs lie in DIR/running/.
set -euo pipefail
exec "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/tools/driver.sh" running "$@"
