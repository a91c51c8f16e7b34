"""The command line: whatif's own options, and the user's command behind them."""

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from whatif import run
from whatif.techniques import KINDS

ABOUT = """Run your PyTorch training script, unchanged, and measure how much faster each technique
makes it. The report says what holds it back and what to write."""
COMPARE = "{0} --compare OLD.json NEW.json [--fail-above PERCENT]"
USAGE = f"""{{0}} [OPTIONS] my_train.py ITS OWN ARGUMENTS
       {{0}} [OPTIONS] -m package.train ITS OWN ARGUMENTS
       {{0}} [OPTIONS] -- COMMAND ITS ARGUMENTS
       {COMPARE}"""
MORE = """--compare says whether the script as it is became slower between two records of --json, by more
than PERCENT (default: 0). Exit status: 0 a report, or a proved patch; 1 the script as it is fails or
ends too early; 2 a wrong option; 3 not all that gains could be written; 4 the patch was not proved;
5 --compare: slower. More: docs/whatif.md"""
LONG = 60  # characters of a command that are shown
WITH_VALUE = ("--seconds", "--minutes", "--only", "--json", "--write")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message):
        self.exit(2, f"whatif: error: {message}\n")


def started():
    """Return the words that started whatif: its folder, an archive, -m, or the installed command."""
    path = Path(sys.argv[0])
    if path.is_file() and path.name != "__main__.py":
        return f"python {path.name}" if path.suffix else path.name
    return "python whatif" if path.is_dir() else "python -m whatif"


def own_parser():
    """Return the parser of whatif's own options."""
    parser = Parser("whatif", allow_abbrev=False, description=ABOUT, epilog=MORE)
    parser.usage = USAGE.format(started())
    add = parser.add_argument
    add("--minutes", type=float, help="time limit for everything (default: 10, with --write 15)")
    add(
        "--seconds",
        type=float,
        default=20,
        help="measured time of each whole run that confirms the result, at most (default: 20)",
    )
    add(
        "--only",
        default=",".join(KINDS),
        metavar="NAMES",
        help=f"try only these, separated by commas: {', '.join(KINDS)}; plain: try nothing, only "
        "say what holds the script back",
    )
    add("--json", type=Path, metavar="FILE", help="also write the results to this file")
    add(
        "--write",
        type=Path,
        metavar="PATCH",
        help="write what gains as a patch of your own files to this file, once a changed copy has "
        "proved it",
    )
    add(
        "--copy",
        action="store_true",
        help="run in a copy of the current folder, and delete the copy at the end",
    )
    return parser


def split(words):
    """Return (whatif's own words, the words of the user's command)."""
    number = 0
    while words[number:] and words[number].startswith("-") and words[number] not in ("-m", "--"):
        number += 1 + (words[number] in WITH_VALUE)
    return words[:number], words[number:]


def read_command(args, words):
    """Add the command to `args`: kind, command, script, name and what is wrong with it, or ""."""
    args.kind, args.script, wrong = "script", None, ""
    first, rest = words[0] if words else "", words[1:]
    if first == "-m":
        args.kind, args.command = "module", [sys.executable, *words]
        args.name = rest[0] if rest else ""
        wrong = "" if rest else "-m: name a module"
    elif first == "--":
        args.kind, args.command = "command", rest
        args.name = shlex.join(rest)
        args.name = args.name if len(args.name) <= LONG else f"{args.name[: LONG - 3]}..."
        if not rest:
            wrong = "--: name a command"
        elif not shutil.which(rest[0]):
            wrong = f"{rest[0]}: there is no such command"
    else:
        args.script, args.command, args.name = Path(first), [sys.executable, *words], first
        if not words:
            wrong = "name a training script, -m MODULE or -- COMMAND"
        elif not (args.script.is_file() or (args.script / "__main__.py").is_file()):
            wrong = f"{first}: there is no such script"
    return wrong


def parse_comparison(words):
    """Return the options of --compare; end with one line and status 2 if one is wrong."""
    parser = Parser("whatif --compare", allow_abbrev=False, usage=COMPARE.format(started()))
    parser.set_defaults(kind="comparison")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("OLD", "NEW"),
        required=True,
        help="two records that --json has written",
    )
    parser.add_argument(
        "--fail-above",
        type=float,
        default=0,
        metavar="PERCENT",
        help="how much slower it may be, beyond the interval (default: 0)",
    )
    args = parser.parse_args(words)
    if not 0 <= args.fail_above < 100:
        parser.error("--fail-above has to be 0 or more, and below 100")
    return args


def parse(words):
    """Return the options and the command; end with one line and status 2 if one is wrong.

    kind is "script", "module", "command" or "comparison", which has options of its own; command is
    the command line that starts a run; name is what the report calls it; script is the script's
    path or None; only is a list of kinds.
    """
    if "--compare" in words[:1]:
        return parse_comparison(words)
    own, words = split(words)
    parser = own_parser()
    args = parser.parse_args(own)
    wrong_command = read_command(args, words)
    args.only = args.only.split(",")
    if args.minutes is None:
        args.minutes = 15 if args.write else 10
    odd = ", ".join(sorted({*args.only} - {*KINDS, "plain"}))
    outside = args.script and Path.cwd() not in args.script.resolve().parents
    for is_wrong, why in (
        (odd, f"--only {odd}: choose from {', '.join(KINDS)}, plain"),
        (min(args.seconds, args.minutes) <= 0, "--seconds and --minutes have to be above 0"),
        (
            args.json and (args.json.is_dir() or not args.json.resolve().parent.is_dir()),
            f"--json {args.json}: name a file, in a folder that is there",
        ),
        (
            args.write
            and (args.write.is_dir() or not os.access(args.write.resolve().parent, os.W_OK)),
            f"--write {args.write}: name a file, in a folder that can be written",
        ),
        (wrong_command, wrong_command),
        (
            args.copy and outside,
            f"--copy: {args.script and args.script.resolve()} is not below {Path.cwd()}, which "
            "is copied",
        ),
        (run.RANKS != run.LOCAL_RANKS, "it measures on one machine, but torchrun runs on several"),
    ):
        if is_wrong:
            parser.error(why)
    return args
