#!/usr/bin/env bash
# Runs every training script on this machine, alone and one on top of another, and prints what each gains.
#   ./running.sh EPOCHS [DATASET] [--minutes N] [--runs N] [--part cells|staircase|all] [--with TECHNIQUE] ...
#                [--without TECHNIQUE] ... [--result_dir DIR] [-- OPTION ...]
# Without DATASET it draws digits and takes at most 5 minutes. With one it is only limited by --minutes.
# What cannot gain on this machine is left out; --with tries it. OPTIONs go to every script: ./running.sh 5 -- --lr 0.2
# Writes DIR/running.md, .json and .png (DIR: results); the scripts, their records and logs are in DIR/running/.
set -euo pipefail
exec "${PYTHON:-python3}" -u "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/tools/running.py" "$@"
