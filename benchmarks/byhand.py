"""Time scripts and their changed copies by turns, with nothing but a clock, after whatif --write.

    python benchmarks/byhand.py FOUND.json [--each] [--name "ResNet-50, batch 256"] [--runs 3]

FOUND.json is what `python whatif --write fast.patch --json FOUND.json my_train.py ARGS` has written;
call this from the same folder. The set that was proved is written into a copy of the folder, or the
command line gets its options. --each does so with each set of the table, on kept batches. Each side
starts anew for every run; --first steps are not timed, the next --steps are. whatif takes no part
in these runs. Writes RESULT_DIR/byhand.json and .md, with whatif's own table; --add keeps what is
there.
"""

import functools
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import peers
import records
import report
import runs
from whatif.report import speed, times
from whatif.write import patch

CLOCK = Path(__file__).resolve().with_name("clock.py")
KEPT = 8  # batches that are repeated, as whatif does
LEFT_OUT = "windows", "facts"  # of whatif's record: they are long, and no page shows them
SETS = "| set | speedup (95 %) | n | GPU GB | verdict |"
HANDS = (
    "| set | data | forecast | whatif's proof | by hand: median (least to most) | runs |"
    " steps/s before | after |"
)


# ------------------------------------------------------------------------------ one run
def rate_of(words, folder, kept, args):
    """Return the steps/s of a script. Raises RuntimeError with the end of what it printed."""
    inner = [sys.executable, CLOCK, args.first, args.steps, kept, *words]
    # some scripts ask for the width of the terminal
    command = ["script", "-qefc", shlex.join(map(str, inner)), "/dev/null"]
    limit = 60 * args.minutes
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no {args.first + args.steps} steps in {limit:.0f} s") from None
    found = re.search(r"by hand: (\S+) steps/s", done.stdout)
    if not found:
        raise RuntimeError(
            (done.stdout + done.stderr).strip()[-500:] or f"status {done.returncode}"
        )
    return float(found[1])


def changed(document, names, folder, copy):
    """Write a set of techniques into `copy`, a copy of the folder; return the words that run it.

    Raises RuntimeError if whatif cannot write all of the set.
    """
    proof = document["proof"] or {}
    extras = proof["extras"] if proof and {*names} == {*proof["techniques"]} else ()
    extra = {"workers": document["loader"]["best"]} if "workers" in names else {}
    made = patch.make(document["facts"], tuple(names), extra, str(folder), extras)
    if {*made.techniques()} != {*names}:
        reasons = (f"{name}: {why}" for name, why in made.reasons.items())
        raise RuntimeError("; ".join(reasons) or "nothing to write")
    shutil.copytree(folder, copy, symlinks=True)
    for path, text in made.files.items():
        (copy / Path(path).relative_to(folder)).write_bytes(text)
    command = [sys.executable, document["script"], *document["arguments"]]
    options = document["facts"].get("options") or ()
    return patch.new_command(command, "script", made, options)[1:]


def measure(document, names, kept, args):
    """Return the steps/s of the script and of its changed copy, by turns."""
    hand = {"data": "kept" if kept else "as loaded", "set": " + ".join(names)}
    hand |= {"before": [], "after": []}
    folder = Path.cwd()
    with tempfile.TemporaryDirectory(dir=folder.parent) as top:  # beside it: ../data is found
        copy = Path(top) / folder.name
        plain = [document["script"], *document["arguments"]]
        sides = [
            ("before", plain, folder),
            ("after", changed(document, names, folder, copy), copy),
        ]
        for turn in range(args.runs):
            for key, words, place in sides[:: -1 if turn % 2 else 1]:
                hand[key].append(rate_of(words, place, kept, args))
                runs.say(f"{hand['set']}, {key}: {hand[key][-1]:.4g} steps/s")
    return hand


def jobs_of(document, each):
    """Return [(techniques, kept batches)]: the proved set, and with `each` those of the table."""
    proof = document["proof"] or {}
    found = [(proof["techniques"], 0)] if proof.get("proved") else []
    sets = [row["techniques"] for row in document["rows"]] if each else []
    return found + [(names, KEPT) for names in sets if not names[0].startswith("batch")]


# ------------------------------------------------------------------------------ the page
def row_of(row):
    """Return the cells of a row of whatif's table."""
    memory = "" if row["memory"] is None else f"{row['memory'] / 1e9:.2f}"
    shown = times(row["speedup"], row["low"], row["high"])
    return [row["name"], shown, row["n"], memory, row["verdict"]]


def gained(hand):
    """Return the ratios of a set's pairs of runs."""
    return [after / before for before, after in zip(hand["before"], hand["after"])]


def hand_row(hand, document):
    """Return the cells of what was timed by hand; on kept batches the table's row foretells it."""
    proof, names = document["proof"] or {}, {*hand["set"].split(" + ")}
    is_loaded = hand["data"] == "as loaded"
    said = [
        f"{times(one['low'])} to {times(one['high'])}" if is_loaded else times(one["speedup"])
        for one in document["forecast" if is_loaded else "rows"]
        if {*one["techniques"]} == names
    ]
    forecast = said[0] if said else ""
    proved = is_loaded and proof.get("speedup") and {*proof["techniques"]} == names
    return [
        hand["set"],
        hand["data"],
        forecast,
        times(proof["speedup"], proof["low"], proof["high"]) if proved else "",
        peers.spread(gained(hand), "{:.2f}x") if hand["after"] else hand.get("error", ""),
        len(hand["after"]),
        *(speed(statistics.median(hand[key])) if hand[key] else "" for key in ("before", "after")),
    ]


def markdown(record):
    """Return the page of a record: for each script whatif's table, and what was timed by hand."""
    parts = []
    for one in record:
        found = one["found"]
        base = found["baseline"]
        line = ["baseline", "1", base["n"], f"{base['memory'] / 1e9:.2f}" if base["memory"] else ""]
        line.append(f"{speed(base['rate'])} {found['unit']}/s")
        spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in found["seconds"].items())
        proof = found["proof"]
        parts += [
            f"## {one['name']}",
            report.table(
                SETS, [list(map(str, line)), *([*map(str, row_of(row))] for row in found["rows"])]
            ),
        ]
        if one["hands"]:
            parts.append(
                report.table(HANDS, [[*map(str, hand_row(hand, found))] for hand in one["hands"]])
            )
        if proof and not proof["proved"]:
            parts.append(f"Not proved: {proof['why']}.")
        gpu, torch = found["machine"]["gpu"] or "CPU", found["machine"]["torch"]
        parts.append(
            f"{gpu}, {found['machine']['cores']} cores, torch {torch}, {found['date']}; seconds: "
            f"{spent}; `{found['command']}`"
        )
    parts.append(
        "By hand: steps/s of the script and of its changed copy, each started anew for every run, "
        "by turns, with nothing but a clock. Data `kept`: the script's first batches, again and "
        "again, as in the windows of the table."
    )
    return report.text_of(parts)


def shows(record):
    """Return (machine, workload, what the record shows, date), each in a few words."""
    found = record[0]["found"]
    told = [
        f"{one['name'].split(',')[0]}: {statistics.median(gained(hand)):.2f}x"
        for one in record
        for hand in one["hands"]
        if hand["data"] == "as loaded"
    ]
    place = f"1x {found['machine']['gpu']}" if found["machine"]["gpu"] else "CPU"
    return place, "scripts by others", "; ".join(told) or "nothing by hand", found["date"]


write = functools.partial(report.save, markdown)


# ------------------------------------------------------------------------------ the driver
def parse(arguments):
    """Return the options of this script."""
    parser = peers.parser_of("byhand.py", __doc__)
    add = parser.add_argument
    add("FOUND", type=Path, help="a record of whatif --write --json")
    add("--name", help="what the page calls the script (default: its file)")
    add("--each", action="store_true", help="also each set of the table, on kept batches")
    add("--add", action="store_true", help="keep the scripts that the record has already")
    add("--runs", type=int, default=3, help="of each side (default: 3)")
    add("--first", type=int, default=30, help="steps that are not timed (default: 30)")
    add("--steps", type=int, default=100, help="steps that are timed (default: 100)")
    add("--minutes", type=float, default=5, help="limit of one run (default: 5)")
    add(
        "--result_dir", type=Path, default=Path("runs"), help="folder of the record (default: runs)"
    )
    return parser.parse_args(arguments)


def main():
    args = parse(sys.argv[1:])
    args.result_dir.mkdir(parents=True, exist_ok=True)
    stem, document, failed = args.result_dir / "byhand", json.loads(args.FOUND.read_text()), False
    one = {
        "name": args.name or document["script"],
        "found": {key: value for key, value in document.items() if key not in LEFT_OUT},
        "hands": [],
    }
    record = records.read(stem.with_suffix(".json")) if args.add else []
    record = [*(other for other in record if other["name"] != one["name"]), one]
    for names, kept in jobs_of(document, args.each):
        try:
            one["hands"].append(measure(document, names, kept, args))
        except RuntimeError as error:
            runs.say(f"{' + '.join(names)}: {error}")
            failed = True
        write(record, stem)
    if not one["hands"] and not failed:
        runs.say("whatif has proved nothing")
    write(record, stem)
    print(markdown(record))
    sys.exit(failed or not one["hands"])


if __name__ == "__main__":
    runs.guarded(main, "byhand.py")
