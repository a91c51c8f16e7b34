"""docs/whatif.md: the keys of the record, the commands, options and techniques are whatif's own."""

import json
import re
import shlex
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from helpers import ROOT
from test_whatif_report import BASELINE, FACTS, LOADER
from whatif import advice, options, report, run, session, techniques
from whatif.inside import loading, plans
from whatif.write import patch

PAGE = (ROOT / "docs" / "whatif.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks/README.md"]
SEEN = FACTS | dict(loaders=[LOADER | dict(threaded=False)])
FREE = ("failed", "excluded", "not_tried", "advice", "options", "facts")  # keys are names, or facts


def rows_of(text):
    """Return the cells of each row of the tables in a text, without headings."""
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith("|--")
    ]


def documented():
    """Return {key: its keys} of the table of the record."""
    rows = rows_of(re.search(r"<!-- keys -->(.*?)<!-- /keys -->", PAGE, re.S)[1])[1:]
    return {
        key: {*filter(None, keys.split(", "))}
        for names, keys, _ in rows
        for key in names.split(", ")
    }


def window(names, rate):
    """Return a window as the process of the script makes it."""
    sent = []
    script = SimpleNamespace(
        ranks=lambda: (0, 1),
        last_loss=torch.ones(()),
        send=lambda **record: sent.append(record["window"]),
    )
    turns = SimpleNamespace(run=script, windows=[])
    plans.Turns.add(turns, names, dict(seconds=1.0, steps=4, samples=rate, memory=10**9))
    return json.loads(json.dumps(sent[0]))


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.ones(2)


def result_of_run(command, spec, *_):
    """Return what a run of a session gives: the turns, or a whole process with a set or without."""
    base = run.Results().merged() | dict(error="", facts=SEEN)
    watched = dict(
        seconds=2.0,
        steps=40,
        samples=400,
        wait=0.1,
        whole=2.2,
        batches=1.0,
        began=time.time() + 5,
        next=0.2,
        other=0.0,
        gaps=[0.05] * 43,
        set_up=3,
        compiled=False,
        cycle=1,
    )
    if spec["mode"] == "fixed":
        seconds = 1.0 if spec["techniques"] else 2.0 + spec["seed"] / 100
        return base | dict(
            windows=[watched | dict(seconds=seconds)], memory=10**9, losses=[1.0] * 60
        )
    loader = torch.utils.data.DataLoader(Data(), batch_size=4)
    names = [(), *[each for _ in range(6) for each in (("amp bfloat16",), ())]]
    return base | dict(
        windows=[
            window(each, 200 + number / 9 if each else 100) for number, each in enumerate(names)
        ],
        watched=watched,
        turns_began=time.time(),
        turns_over=time.time(),
        loading=loading.measure_loader(loader, 0.3, 1, lambda frame: False),
        lines=FACTS["lines"],
        busy=0.01,
        kernels={"products": 1.0},
    )


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """The record of a session whose processes are not started."""
    folder = tmp_path_factory.mktemp("record")
    (folder / "train.py").write_text("")
    args = options.parse(["--json", str(folder / "found.json"), str(folder / "train.py")])
    patch = pytest.MonkeyPatch()
    patch.setattr(session.run, "run_once", result_of_run)
    try:
        assert session.measure_all(session.Session(args, args.command, folder, folder)) == 0
    finally:
        patch.undo()
    return json.loads(args.json.read_text())


def test_the_documented_keys_are_those_of_the_record(record):
    assert record["version"] == report.VERSION and f"`version` is {report.VERSION}." in PAGE
    told = documented()
    assert {*told} == {*record}
    for key, keys in told.items():
        value = record[key]
        found = value[0] if isinstance(value, list) and value else value
        own = {*found} if isinstance(found, dict) and key not in FREE else set()
        assert own == keys, key


def test_the_record_has_all_parts(record):
    """Otherwise the keys of one would not have been compared."""
    assert all(
        record[key]
        for key in (
            "rows",
            "best",
            "loader",
            "forecast",
            "confirmation",
            "losses",
            "host_waits",
            "windows",
            "advice",
            "also_seen",
        )
    )
    assert record["confirmation"]["n"] >= 3 and {*BASELINE} <= {*record["baseline"]}


def test_options_and_techniques_are_documented():
    words = {word for row in rows_of(PAGE) for word in re.findall(r"`(--[a-z]+)", row[0])}
    own = {each for action in options.own_parser()._actions for each in action.option_strings}
    assert words == own - {"-h", "--help"}
    args = options.parse(["-m", "json"])
    for name in ("minutes", "seconds"):
        assert f"| `--{name} {getattr(args, name)}` |" in PAGE
    more = options.parse(["--write", "fast.patch", "-m", "json"]).minutes
    assert f"with `--write` {more} is the default" in PAGE
    table = PAGE.split("## What a technique does")[1].split("\n## ")[0]
    assert {name for row in rows_of(table)[1:] for name in row[0].split(", ")} >= {
        *techniques.NAMES
    }


def test_a_new_technique_is_one_file_with_names_and_what_to_write(monkeypatch):
    """The docstring of whatif/techniques/__init__.py says so: all other functions are optional."""
    new = ModuleType("whatif.techniques.faster")
    new.NAMES, new.write = ("faster",), lambda name, facts, extra: "torch.faster()"
    monkeypatch.setitem(sys.modules, new.__name__, new)
    monkeypatch.setattr(techniques, "MODULES", [*techniques.MODULES, new])
    assert techniques.reasons(SEEN, new.NAMES) == {}
    assert advice.write("faster", SEEN) == "torch.faster()"
    made = patch.make(SEEN, new.NAMES, {}, ".")
    assert made.is_empty() and made.reasons == {"faster": "no lines are known for it"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_can_be_copied(page, monkeypatch):
    """Each command that starts whatif has options, a command and a place that whatif takes."""
    monkeypatch.setattr(options.shutil, "which", lambda name: name)
    monkeypatch.setattr(options.Path, "is_file", lambda path: path.suffix == ".py")
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    found = []
    for line in lines:
        words = shlex.split(line.split("&&")[-1], comments=True)
        places = [
            number
            for number, word in enumerate(words)
            if word.endswith(("whatif", "whatif.pyz")) and number
        ]
        for number in places[:1]:
            args = options.parse(words[number + 1 :])
            found.append(args.compare if args.kind == "comparison" else args.command)
    assert all(found) and len(found) >= {"whatif.md": 6, "README.md": 1}.get(page.name, 0)
