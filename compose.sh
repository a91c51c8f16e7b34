#!/usr/bin/env bash
# Joins techniques into one training script; needs Python and git, no packages.
#   ./compose.sh DDP amp > my_train.py        prints one readable file with just these techniques
#   ./compose.sh --into my_train.py amp       adds techniques to your own edited copy
#   ./compose.sh --into my_train.py amp --verify -- --dataset DATA    adds them if the copy still does
#                                             the same: it runs before and after (needs PyTorch)
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/tools/compose.py" "$@"
