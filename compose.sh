#!/usr/bin/env bash
# Joins techniques into one training script, by three-way merge of src/train_<technique>.py over src/train.py.
#   ./compose.sh DDP amp > my_train.py        one readable file with just these techniques
#   ./compose.sh --into my_train.py amp       adds techniques to your own edited copy
# A copy that the merge cannot change cleanly is left as it was; exit 1 and the place. Wrong use: exit 2.
set -euo pipefail
shopt -s nullglob

root=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT

fail() { # STATUS MESSAGE
  printf 'compose.sh: %s\n' "$2" >&2
  exit "$1"
}

names() { # the techniques that there are
  local file
  for file in "$root"/src/train_*.py; do
    file=${file##*/train_}
    printf '%s ' "${file%.py}"
  done
}

merge() { # CURRENT BASELINE VARIANT RESULT: false on a conflict
  local status=0
  git merge-file -p -L "yours" -L "train.py" -L "${3##*/}" "$1" "$2" "$3" >"$4" 2>"$work/error" || status=$?
  ((status < 128)) || fail 1 "git merge-file: $(<"$work/error")"
  ((status == 0))
}

reasons() { # the second lines of a file's blocks, which say why
  awk '/^ *# new #$/ {getline; print}' "$1" | LC_ALL=C sort -u
}

holds() { # FILE VARIANT: whether all of the variant's blocks are in the file, edited since or not
  [[ -z $(LC_ALL=C comm -13 <(reasons "$1") <(reasons "$2")) ]]
}

first_reason() { # FROM TO: the first comment between two lines of a conflict, quoted
  awk -v from="$1" -v to="$2" 'index($0, to) == 1 {exit}
    on && /^[# ]*# [^ ]/ && !/# new #$/ {sub(/^[# ]*/, ""); print "\"" $0 "\""; exit}
    index($0, from) == 1 {on = 1}'
}

changed_lines() { # the lines of src/train.py that a technique's blocks stand at
  diff --unchanged-line-format= --old-line-format='%dn
' --new-line-format= "$root/src/train.py" "$1" || true
  diff -U0 "$root/src/train.py" "$1" | sed -n 's/^@@ -\([0-9]*\).*/\1/p' || true
}

# The version of src/train.py that a copy came from: of all in the history, the one it differs least from.
find_origin() { # FILE: prints the last commit that has it, or nothing for the version that lies in src/
  local best commit count last=HEAD
  best=$(diff "$root/src/train.py" "$1" | grep -c '^[<>]' || true)
  for commit in $(git -C "$root" log --format=%H -n 200 -- src/train.py 2>/dev/null || true); do
    if git -C "$root" show "$commit:./src/train.py" >"$work/old.py" 2>/dev/null; then
      count=$(diff "$work/old.py" "$1" | grep -c '^[<>]' || true)
      if ((count < best)); then
        best=$count
        # what has been mended over it since counts too, if the history is a line there
        [[ $(git -C "$root" rev-parse "$last:./src/train.py") == $(git -C "$root" rev-parse "$commit:./src/train.py") ]] ||
          last=$commit
        printf '%s\n' "$last"
      fi
    fi
    last=$commit^
  done | tail -n 1
}

whole_history() { # whether older versions can be looked for
  [[ $(git -C "$root" rev-parse --is-shallow-repository 2>/dev/null) == false ]] &&
    (($(git -C "$root" log --format=x -n 2 -- src/train.py | wc -l) > 1))
}

into=
if [[ ${1-} == --into ]]; then
  (($# >= 2)) || fail 2 "--into takes a file"
  into=$2
  shift 2
  [[ $into == /* ]] || into=./$into
  [[ -f $into && -r $into ]] || fail 2 "--into $into: no such file"
  ! grep -q $'\r$' -- "$into" || fail 1 "--into $into: it has Windows line ends: sed -i 's/\\r\$//' takes them away"
fi
if (($# == 0)) || [[ $1 == -* ]]; then
  fail 2 "usage: ./compose.sh [--into FILE] TECHNIQUE ...    techniques: $(names)"
fi
for name in "$@"; do
  [[ $name =~ ^[A-Za-z0-9_]+$ && -f $root/src/train_$name.py ]] ||
    fail 2 "no technique '$name'; there are: $(names)"
done
mapfile -t techniques < <(printf '%s\n' "$@" | LC_ALL=C sort -u)

# Techniques that write at the same place exclude each other.
for ((i = 0; i < ${#techniques[@]}; i++)); do
  for ((j = i + 1; j < ${#techniques[@]}; j++)); do
    one=$root/src/train_${techniques[i]}.py
    other=$root/src/train_${techniques[j]}.py
    merge "$one" "$root/src/train.py" "$other" "$work/pair" && continue
    line=$(changed_lines "$one" | grep -Fxf <(changed_lines "$other") | sort -n | head -n 1) || true
    fail 2 "${techniques[i]} and ${techniques[j]} exclude each other: both write at line ${line:-?} of src/train.py, $(
      first_reason '<<<<<<< ' '=======' <"$work/pair") or $(first_reason '=======' '>>>>>>> ' <"$work/pair")"
  done
done

base=$root/src/train.py
cp -- "${into:-$base}" "$work/current"
warnings=()
if [[ $into ]]; then
  origin=$(find_origin "$into")
  if [[ $origin ]]; then
    base=$work/train.py
    git -C "$root" show "$origin:./src/train.py" >"$base"
  fi
fi

for name in "${techniques[@]}"; do
  variant=$root/src/train_$name.py
  if [[ $base != "$root/src/train.py" ]]; then
    git -C "$root" show "$origin:./src/train_$name.py" >"$work/train_$name.py" 2>/dev/null ||
      fail 1 "$name is younger than the train.py that $into comes from; this makes it newer: $(
        printf 'git -C %q show %q > old.py && git merge-file %q old.py %q' "$root" "$origin:./src/train.py" "$into" \
          "$root/src/train.py")"
    variant=$work/train_$name.py
  fi
  if [[ $into ]] && holds "$work/current" "$variant"; then
    printf 'compose.sh: %s holds %s already\n' "$into" "$name" >&2
    continue
  fi
  if ! merge "$work/current" "$base" "$variant" "$work/next"; then
    same=$(diff --unchanged-line-format='x' --old-line-format= --new-line-format= "$base" "$work/current" | wc -c || true)
    ((3 * same > $(wc -l <"$base"))) ||
      fail 1 "$into has less than a third of train.py's lines: take over by hand what src/train_$name.py adds"
    awk '/^<<<<<<< /{on=1; next} /^=======$/{if (on) exit} on' "$work/next" >"$work/yours"
    line=$(awk 'NR == FNR {yours[NR] = $0; n = NR; next} {text[FNR] = $0}
      END {for (i = 1; n && i + n - 1 <= FNR; i++) {
        for (k = 1; k <= n && text[i + k - 1] == yours[k]; k++);
        if (k > n) {print i; exit}}}' "$work/yours" "${into:-$work/current}")
    awk '/^<<<<<<< /{on=1} on; /^>>>>>>> /{on=0}' "$work/next" >&2
    place=${line:+line $line}
    reason="$name does not join ${into:-the others}: both rewrite ${place:-the place} (shown above); nothing was changed"
    [[ -z $into ]] || whole_history ||
      reason+="; with the whole git history of $root, the train.py that $into comes from might be found, and it might join"
    fail 1 "$reason"
  fi
  if [[ $into ]]; then
    while read -r line; do
      warnings+=("$name may not do all that it should in $into: it $line")
    done < <("${PYTHON:-python3}" "$root/tools/compose_check.py" "$base" "$variant" "$into" "$work/next" 2>/dev/null || true)
  fi
  mv -- "$work/next" "$work/current"
done

if [[ ! $into ]]; then
  cat -- "$work/current"
elif ! cmp -s -- "$work/current" "$into"; then
  [[ ! $origin ]] || printf 'compose.sh: %s comes from the train.py of %s: the techniques are taken from there too\n' \
    "$into" "$(git -C "$root" show -s --format='%h (%cs)' "$origin")" >&2
  # beside it and moved into place, with the mode it had, through a link to the file itself
  target=$(readlink -f -- "$into")
  cp -p -- "$target" "$target.part"
  cat -- "$work/current" >"$target.part"
  mv -- "$target.part" "$target"
fi
((!${#warnings[@]})) || printf 'compose.sh: warning: %s\n' "${warnings[@]}" >&2
