"""Time scripts and their changed copies by turns, with nothing but a clock, after whatif --write.

    python benchmarks/byhand.py FOUND.json ... [--name "ResNet-50, batch 256"] [--runs 3]

FOUND.json is what `python whatif --write fast.patch --json FOUND.json my_train.py ARGS` has written;
call this from the same folder. The patch is applied to a copy of the folder, or the new command line
is taken. Each side starts anew for every run; --first steps are not timed, the next --steps are.
whatif takes no part in these runs. Writes RESULT_DIR/byhand.json and .md, with whatif's own tables.
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
import report
import runs
from whatif.report import speed, times

CLOCK = Path(__file__).resolve().with_name("clock.py")
LEFT_OUT = "windows", "facts"  # of whatif's record: they are long, and no page shows them
SETS = "| set | speedup (95 %) | n | GPU GB | verdict |"
HANDS = (
    "| set | data | forecast | whatif's proof | by hand: median (least to most) | runs |"
    " steps/s before | after |"
)


# ------------------------------------------------------------------------------ one run
def rate_of(words, folder, first, steps, limit):
    """Return the steps/s of a script. Raises RuntimeError with the end of what it printed."""
    inner = [sys.executable, str(CLOCK), str(first), str(steps), *words]
    # some scripts ask for the width of the terminal
    command = ["script", "-qefc", shlex.join(inner), "/dev/null"]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no {first + steps} steps in {limit:.0f} s") from None
    found = re.search(r"by hand: (\S+) steps/s", done.stdout)
    if not found:
        raise RuntimeError(
            (done.stdout + done.stderr).strip()[-500:] or f"status {done.returncode}"
        )
    return float(found[1])


def sides(document, folder, copy):
    """Return [(words, folder) of the script as it is and of its changed copy].

    Raises RuntimeError if whatif has proved nothing, or if the patch does not apply.
    """
    patch, plain = document["patch"] or {}, [document["script"], *document["arguments"]]
    if not (document["proof"] or {}).get("proved"):
        raise RuntimeError("whatif has proved no change")
    changed = plain
    if patch["command"]:
        words = shlex.split(patch["command"])
        changed = words[words.index(document["script"]) :]
    shutil.copytree(folder, copy, symlinks=True)
    if patch["diff"]:
        done = subprocess.run(
            ["patch", "-p1", "--fuzz=0"], cwd=copy, input=patch["diff"], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"the patch does not apply: {done.stdout.strip()}")
    return [(plain, folder), (changed, copy)]


def measure(document, folder, args):
    """Return the steps/s of both sides, by turns: {"data", "set", "before", "after"}."""
    found = {"data": "as loaded", "set": name_of(document), "before": [], "after": []}
    with tempfile.TemporaryDirectory(dir=folder.parent) as top:
        both = sides(document, folder, Path(top) / folder.name)
        for turn in range(args.runs):
            for side, key in list(zip(both, ("before", "after")))[:: -1 if turn % 2 else 1]:
                found[key].append(rate_of(*side, args.first, args.steps, 60 * args.minutes))
                runs.say(f"{found['set']}, {key}: {found[key][-1]:.4g} steps/s")
    return found


# ------------------------------------------------------------------------------ the page
def name_of(document):
    """Return the name of the set that was proved, or is advised."""
    return " + ".join((document["proof"] or {}).get("techniques") or document["best"])


def row_of(row):
    """Return the cells of a row of whatif's table."""
    memory = "" if row["memory"] is None else f"{row['memory'] / 1e9:.2f}"
    shown = times(row["speedup"], row["low"], row["high"])
    return [row["name"], shown, row["n"], memory, row["verdict"]]


def gained(hand):
    """Return the ratios of a set's pairs of runs."""
    return [after / before for before, after in zip(hand["before"], hand["after"])]


def hand_row(hand, document):
    """Return the cells of what was timed by hand."""
    proof, same = document["proof"] or {}, hand["set"] == name_of(document)
    forecast = next(
        (
            f"{times(one['low'])} to {times(one['high'])}"
            for one in document["forecast"]
            if {*one["techniques"]} == {*hand["set"].split(" + ")}
        ),
        "",
    )
    if hand["data"] != "as loaded":  # then the table's row is what whatif says of it
        names = {*hand["set"].split(" + ")}
        rows = [row for row in document["rows"] if {*row["techniques"]} == names]
        forecast = times(rows[0]["speedup"]) if rows else ""
    proved = same and hand["data"] == "as loaded" and proof.get("speedup")
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
        if hand["after"] and hand["data"] == "as loaded"
    ]
    place = f"1x {found['machine']['gpu']}" if found["machine"]["gpu"] else "CPU"
    return place, "scripts by others", "; ".join(told) or "nothing by hand", found["date"]


write = functools.partial(report.save, markdown)


# ------------------------------------------------------------------------------ the driver
def parse(arguments):
    """Return the options of this script."""
    parser = peers.parser_of("byhand.py", __doc__)
    add = parser.add_argument
    add("FOUND", type=Path, nargs="+", help="records of whatif --write --json")
    add("--name", nargs="*", default=[], help="a name for each (default: the script's)")
    add("--runs", type=int, default=3, help="of each side (default: 3)")
    add("--first", type=int, default=30, help="steps that are not timed (default: 30)")
    add("--steps", type=int, default=100, help="steps that are timed (default: 100)")
    add("--minutes", type=float, default=5, help="limit of one run (default: 5)")
    add(
        "--result_dir", type=Path, default=Path("runs"), help="folder of the record (default: runs)"
    )
    return parser.parse_args(arguments)


def main():
    args, record, failed = parse(sys.argv[1:]), [], False
    args.result_dir.mkdir(parents=True, exist_ok=True)
    for k, path in enumerate(args.FOUND):
        document = json.loads(path.read_text())
        one = {
            "name": args.name[k] if k < len(args.name) else document["script"],
            "found": {key: value for key, value in document.items() if key not in LEFT_OUT},
            "hands": [],
        }
        try:
            one["hands"] = [measure(document, Path.cwd(), args)]
        except RuntimeError as error:
            runs.say(f"{one['name']}: {error}")
            failed = True
        record.append(one)
        write(record, args.result_dir / "byhand")
    print(markdown(record))
    sys.exit(failed)


if __name__ == "__main__":
    runs.guarded(main, "byhand.py")
