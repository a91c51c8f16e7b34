"""Time scripts and their changed copies by turns, with nothing but a clock, after whatif --write.

    python benchmarks/byhand.py FOUND.json [--each] [--name "ResNet-50, batch 256"] [--runs 3]

FOUND.json is what `python whatif --write fast.patch --json FOUND.json my_train.py ARGS` has written;
call this from the same folder. Each side runs in a copy of the folder, which is deleted at the end.
The set that was proved is written into one of them, or the command line gets its options. --each
does so with each set of the table, on kept batches. Each side starts anew for every run; --first
steps are not timed, the next --steps are. whatif takes no part in these runs. Writes
RESULT_DIR/byhand.json and .md, with whatif's own table; --add keeps what is there.
"""

import functools
import json
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import peers
import records
import report
import runs
from whatif import copies
from whatif.report import speed, spent, times
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
    """Return the steps/s of a script. Raises RuntimeError with the last line that it printed."""
    inner = [sys.executable, CLOCK, args.first, args.steps, kept, *words]
    # some scripts ask for the width of the terminal
    command = ["script", "-qefc", shlex.join(map(str, inner)), "/dev/null"]
    limit, steps = 60 * args.minutes, args.first + args.steps
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no {steps} steps in {limit:.0f} s: see --minutes") from None
    found = re.search(r"by hand: (\S+) steps/s", done.stdout)
    if found:
        return float(found[1])
    if not done.returncode:
        raise RuntimeError(f"it ended before {steps} steps of its own process: see --steps")
    lines = (done.stdout + done.stderr).strip().splitlines() or [f"status {done.returncode}"]
    raise RuntimeError(lines[-1][-500:])


def changed(document, names, folder):
    """Return (the words that run a set of techniques, {path below the folder: new text}).

    Raises RuntimeError if whatif cannot write all of the set.
    """
    proof = document["proof"] or {}
    extras = proof["extras"] if proof and {*names} == {*proof["techniques"]} else ()
    extra = {"workers": document["loader"]["enough"]["workers"]} if "workers" in names else {}
    made = patch.make(document["facts"], tuple(names), extra, str(folder), extras)
    if {*made.techniques()} != {*names}:
        reasons = (f"{name}: {why}" for name, why in made.reasons.items())
        raise RuntimeError("; ".join(reasons) or "nothing to write")
    if made.root not in ("", str(folder)):
        raise RuntimeError(f"it would change files outside of {folder}")
    command = [sys.executable, document["script"], *document["arguments"]]
    options = document["facts"].get("options") or ()
    words = patch.new_command(command, "script", made, options)[1:]
    return words, dict(zip(made.changed, made.files.values()))


def measure(document, names, kept, args):
    """Return the steps/s of the script and of its changed copy, by turns."""
    hand = {"data": "kept" if kept else "as loaded", "set": " + ".join(names)}
    hand |= {"before": [], "after": []}
    folder = Path.cwd()
    words, files = changed(document, names, folder)
    with copies.copied(folder) as before, copies.copied(folder) as after:
        for path, text in files.items():
            (after / path).write_bytes(text)
        sides = [
            ("before", [document["script"], *document["arguments"]], before),
            ("after", words, after),
        ]
        for turn in range(args.runs):
            for key, side, copy in sides[:: -1 if turn % 2 else 1]:
                try:
                    rate = rate_of(copies.moved(side, folder, copy), copy, kept, args)
                except RuntimeError as error:
                    raise RuntimeError(f"{key}: {error}") from None
                hand[key].append(rate)
                runs.say(f"{hand['set']}, {key}: {rate:.4g} steps/s")
    return hand


def jobs_of(document, each):
    """Return [(techniques, kept batches)]: the proved set, and with `each` those of the table."""
    proof = document["proof"] or {}
    found = [(proof["techniques"], 0)] if proof.get("proved") else []
    sets = [row["techniques"] for row in document["rows"]] if each else []
    return found + [(names, KEPT) for names in sets if not names[0].startswith("batch")]


# ------------------------------------------------------------------------------ the page
def row_of(row, shown, verdict):
    """Return the cells of a row of whatif's table."""
    memory = f"{row['memory'] / 1e9:.2f}" if row["memory"] else ""
    return [row.get("name", "baseline"), shown, str(row["n"]), memory, verdict]


def rows_of(found):
    """Return the rows of whatif's table, the baseline's first."""
    base = found["baseline"]
    rate = f"{speed(base['rate'])} {found['unit']}/s" if base["rate"] else ""
    return [row_of(base, "1", rate)] + [
        row_of(row, times(row["speedup"], row["low"], row["high"]), row["verdict"])
        for row in found["rows"]
    ]


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
        peers.spread(gained(hand), "{:.2f}x"),
        len(hand["after"]),
        *(speed(statistics.median(hand[key])) for key in ("before", "after")),
    ]


def markdown(record):
    """Return the page of a record: for each script whatif's table, and what was timed by hand."""
    parts = []
    for one in record:
        found = one["found"]
        took = spent(found["seconds"])
        told = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in took.items())
        proof = found["proof"]
        parts += [
            f"## {one['name']}",
            report.table(SETS, rows_of(found)),
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
            f"{told}; `{found['command']}`"
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
def positive(text):
    """Return an option's whole number. Raises ValueError if it is below 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def opened(path):
    """Return the record of whatif in a file; exit with status 2 if no script can be timed by it."""
    try:
        document = json.loads(path.read_text())
        script, _ = document["script"], document["facts"]
    except (ValueError, KeyError, TypeError):
        runs.refuse(f"byhand.py: error: {path} is no record of whatif --json")
    if not Path(script).is_file():
        runs.refuse(
            f"byhand.py: error: no script {script} here: call this from the folder in which whatif "
            "ran; only `whatif my_train.py ARGS` can be timed, no module or other command"
        )
    return document


def parse(arguments):
    """Return the options of this script."""
    parser = peers.parser_of("byhand.py", __doc__)
    add = parser.add_argument
    add("FOUND", type=Path, help="a record of whatif --write --json")
    add("--name", help="what the page calls the script (default: its file)")
    add("--each", action="store_true", help="also each set of the table, on kept batches")
    add("--add", action="store_true", help="keep the scripts that the record has already")
    add("--runs", type=positive, default=3, help="of each side (default: 3)")
    add("--first", type=positive, default=30, help="steps that are not timed (default: 30)")
    add("--steps", type=positive, default=100, help="steps that are timed (default: 100)")
    add("--minutes", type=float, default=5, help="limit of one run (default: 5)")
    return parser.parse_args(arguments)


def main():
    args = parse(sys.argv[1:])
    stem, document, failed = args.result_dir / "byhand", opened(args.FOUND), False
    args.result_dir.mkdir(parents=True, exist_ok=True)
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
