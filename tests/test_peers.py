"""benchmarks/: the peers do the same training as train.py, and the table is of what was run."""

import json
import re
from pathlib import Path

import pytest

import accuracy
import airbench
import loading
import peers
import running
import runs
import scaling
from helpers import ROOT, SRC, TINY, assert_one_line, flags, run, run_forked, tiny

PEERS = ROOT / "benchmarks"

# the lines of pytorch/examples' imagenet/main.py for two epochs of three steps
EXAMPLE = r"""
import os, sys
assert {*os.listdir(sys.argv[-1])} == {"train", "val"}
for epoch in range(2):
    for step in range(3):
        print(f"Epoch: [{epoch}][{step + 1}/3]\tTime  {0.1 * epoch + 0.1:.3f} ( 0.100)\tData 0.0")
        print(f"Test: [1/1]\tTime  9.000 ( 9.000)")
    print(f" *   Acc@1 12.500 Acc@5 {60 + epoch}.000")
"""


def record_of(script, data, folder, *options):
    """Run a training script, which must succeed, with one step an epoch; return its record."""
    done = run_forked(script, *tiny(data, folder, batch_size=240), *options)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / f"{script.stem}.json").read_text())


@pytest.mark.parametrize(
    "name, package", [("lightning_train", "lightning"), ("accelerate_train", "accelerate")]
)
def test_a_peer_trains_as_train_py_does(digits, tmp_path, name, package):
    """With all images in one batch their order does not matter, so the losses are equal."""
    pytest.importorskip(package)
    ours = record_of(SRC / "train.py", digits, tmp_path)
    peer = record_of(PEERS / f"{name}.py", digits, tmp_path)
    assert len(peer["epochs"]) == 2
    for one, other in zip(ours["epochs"], peer["epochs"]):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["val_top1"] == pytest.approx(one["val_top1"], abs=0.03)


def test_dali_reads_every_picture(photos, tmp_path):
    pytest.importorskip("nvidia.dali")
    done = run_forked(
        PEERS / "dali_plain.py",
        *flags(
            dataset=photos, resize=32, image_size=24, batch_size=8, epochs=2, result_dir=tmp_path
        ),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "dali_plain.json").read_text())
    epoch = record["epochs"][1]
    assert epoch["seconds"] * epoch["images_per_second"] == pytest.approx(26)


def test_a_library_that_leaves_out_pictures_is_an_error(photos, tmp_path):
    """Some drop what they cannot read, which would look like speed."""
    script = tmp_path / "lossy.py"
    script.write_text(
        f"import sys\nsys.path.append({str(PEERS)!r})\n"
        """
import common, loader, torch
args = loader.build_parser().parse_args()
common.time_reading(args, lambda: [(torch.zeros(25, 3, 8, 8), torch.zeros(25))], 26)
"""
    )
    done = run_forked(script, "--result_dir", tmp_path)
    assert_one_line(done, 1, "lossy.py: error: 25 of 26 pictures were read")


def compare(folder, *options, example=EXAMPLE):
    """Run peers.py on digits with this imagenet/main.py; return (process, rows, table)."""
    (folder / "imagenet").mkdir(exist_ok=True)
    (folder / "imagenet" / "main.py").write_text(example)
    words = ["train", *options[:1], *flags(examples=folder, result_dir=folder), *options[1:]]
    done = run_forked(PEERS / "peers.py", *words)
    files = [folder / f"peers.{kind}" for kind in ("json", "md")]
    assert all(file.exists() for file in files), done.stderr
    return done, json.loads(files[0].read_text()), files[1].read_text()


def test_the_table_has_what_ran_and_why_the_rest_did_not(digits, tmp_path):
    done, rows, text = compare(
        tmp_path, digits, "--runs", 1, "--only", "train.py", "imagenet*", "--", *TINY
    )
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in rows] == ["ok", "skip"]
    assert rows[0]["images_per_second"] == rows[0]["epochs"][1]["images_per_second"]
    assert rows[0]["options"]["width"] == 4 and rows[0]["wall_seconds"] > 0
    speed = f"{rows[0]['images_per_second']:,.0f}"
    assert f"| train.py | float32 | {speed} ({speed} to {speed}) | 1.00x | " in text
    assert "| imagenet/main.py | float32 | SKIP: it trains models of torchvision only |" in text
    assert "conv11 4 wide, 16 px, digits, batch 40, 2 epochs of 3 steps." in text


IMAGENET = ["--", *flags(model="resnet18", image_size=224, augment="resized", batch_size=30)]


def test_the_examples_speed_is_read_from_its_lines(digits, tmp_path):
    """Seconds of validation and of the last step do not count, and the first epoch does not."""
    done, rows, text = compare(tmp_path, digits, "--runs", 2, "--only", "imagenet*", *IMAGENET)
    assert done.returncode == 0, done.stderr
    assert len(rows) == 2 and rows[0]["images_per_second"] == pytest.approx(30 / 0.2)
    assert rows[0]["val_top1"] == 0.125
    assert "| imagenet/main.py | float32 | 150 (150 to 150) | 1.00x | 12.50% (12.50% to" in text


@pytest.mark.parametrize(
    "example, error",
    [
        ("raise ValueError('no such luck')", "ValueError: no such luck"),
        ("import time; time.sleep(1e6)", "cut off after 1 s (--seconds)"),
    ],
)
def test_a_row_that_fails_says_why_and_runs_once(digits, tmp_path, example, error):
    done, rows, text = compare(
        tmp_path, digits, "--seconds", 1, "--only", "imagenet*", *IMAGENET, example=example
    )
    assert done.returncode == 1 and len(rows) == 1
    assert f"FAIL: {error} (log: " in text


def test_a_row_that_was_mended_runs_with_add(digits, tmp_path):
    compare(tmp_path, digits, "--only", "imagenet*", *IMAGENET, example="raise OSError")
    done, rows, text = compare(
        tmp_path, digits, "--runs", 1, "--add", "--only", "imagenet*", *IMAGENET
    )
    assert done.returncode == 0 and [row["status"] for row in rows] == ["ok"], done.stderr
    assert "FAIL" not in text


def test_ratios_are_to_the_median_of_the_reference(digits, tmp_path):
    _, rows, _ = compare(tmp_path, digits, "--runs", 1, "--only", "imagenet*", *IMAGENET)
    made = [
        rows[0] | {"name": name, "images_per_second": speed}
        for speeds in [(100, 300), (90, 330), (110, 310)]
        for name, speed in zip((peers.SWITCHES, "train.py"), speeds)
    ]
    text = peers.markdown(made)
    assert "| train.py | float32 | 310 (300 to 330) | 3.10x |" in text
    assert f"| {peers.SWITCHES} | float32 | 100 (90 to 110) | 1.00x |" in text
    place, work, told, _ = peers.shows(made)
    first = peers.records.Row.read(rows[0])
    assert place == peers.report.place(first) and work == peers.report.workload(first)
    assert told == f"train.py: 3.10x {peers.SWITCHES}"


def test_a_row_for_each_set_that_staircases_ended_in(tmp_path):
    for number, kept in enumerate((["amp", "compile"], ["amp"], ["amp", "compile"])):
        more = {"compile_mode": "reduce-overhead"} if "compile" in kept else {}
        ran = dict(command="./running.sh 5 -- --compile_mode reduce-overhead", kept=True)
        rows = [dict(techniques=[], options={}, **ran)]
        rows += [dict(techniques=kept, on=[], options={"lr": 0.1} | more, **ran)]
        rows += [dict(techniques=[*kept, "fused"], on=kept, ratio=1.01, **ran)]  # no gain
        (tmp_path / f"{number}.json").write_text(json.dumps(rows))
    args, _ = peers.parse(["train", "data", "--ends", *map(str, sorted(tmp_path.glob("*.json")))])
    names = [row.name for row in peers.training_rows(args, {}, tmp_path, 1)]
    graphs = "--compile_mode reduce-overhead"
    assert names[:4] == [
        "train.py",
        "train.py + amp channels_last",
        f"train.py + amp compile {graphs}, the end of 2 of 3 staircases",
        "train.py + amp, the end of 1 of 3 staircases",
    ]
    assert "autocast" in (tmp_path / "train_amp_compile.py").read_text()


def test_each_command_that_makes_a_table_has_options_that_exist(photos, tmp_path):
    """A stand-in for Python writes down what it is to run."""
    python, told = tmp_path / "python", tmp_path / "told"
    python.write_text(f"#!/bin/sh\n[ \"$1\" = -c ] || printf '%s\\n' \"$@\" '' >> '{told}'\n")
    python.chmod(0o755)
    script = ROOT / "benchmarks" / "tables.sh"
    text = script.read_text()
    tables = re.findall(r"^    ([a-z][\w-]+)\)$", text, re.MULTILINE)
    assert "|".join(tables) in text and len(tables) == 14
    done = run(script, "here", *tables, env={"PYTHON": str(python), "IMAGENET": str(photos)})
    assert done.returncode == 0, done.stderr
    commands = [words.split("\n") for words in told.read_text().strip().split("\n\n")]
    assert len(commands) == len(tables) + 10  # staircases
    for command in commands:
        path, *words = [word for word in command if word != "-u"]
        name = words.pop(0) if Path(path).name == "tools" else Path(path).stem
        if name == "loading":
            assert loading.parse(words)[0].name == "loader_DALI.py"
            continue
        if name == "airbench":
            assert airbench.parse(words).SCRIPT.name == "airbench94.py"
            continue
        module = {"running": running, "peers": peers, "accuracy": accuracy, "scaling": scaling}[
            name
        ]
        args, options = module.parse(words)
        assert (args.minutes, args.result_dir.parts[0]) in ((25, "results"), (3, "runs"))
        for own in running.options_of([], options), running.options_of(["compile"], options):
            runs.check_options(SRC / "train_compile.py", own, name)
    assert_one_line(run(script, "here", "nothing"), 2, "tables.sh: error: no table nothing")
