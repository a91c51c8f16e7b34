"""benchmarks/accuracy.py: whole trainings with several seeds, and the table of what they cost."""

import json
import math
import shutil

import pytest

import accuracy
from helpers import MACHINE, ROOT, TINY, assert_one_line, benchmark, processes_of, run_forked

SCRIPT = ROOT / "benchmarks" / "accuracy.py"
SHORT = ["--", *TINY, "--steps", 1]
RUN = {"seed", "wall_seconds", "warmup_seconds", "training_seconds", "val_top1", "seconds_to_goal"}
RUN |= {"images_per_second", "peak_memory_bytes", "epochs", "parts"}


def outcome(folder, *words, stop_at=None):
    """Run accuracy.py; return (process, record, page, what it said before each run)."""
    done, record, page = benchmark(
        SCRIPT, folder, *words, "--result_dir", folder, *SHORT, stop_at=stop_at
    )
    begun = [line for line in done.stdout.splitlines() if line.startswith("seed ")]
    return done, record, page, begun


def test_rows_take_turns_add_runs_only_what_is_new_and_ctrl_c_keeps_what_ran(digits, tmp_path):
    done, record, text, begun = outcome(
        tmp_path, digits, "--set", "fused --lr 1e37", "--set", "fused", "--seeds", 0, "--goal", 0.01
    )
    # a failed run says why, others go on
    assert done.returncode == 1
    assert begun == ["seed 0: plain", "seed 0: fused --lr 1e37", "seed 0: fused"]
    plain, failed, fused = record
    assert "the loss is no longer finite" in failed["error"] and failed["runs"] == []
    assert "the loss is no longer finite" in open(failed["log"]).read()
    assert "| fused --lr 1e37 | 0 | FAIL: train_fused: error: the loss is" in text
    for row, name, techniques in (plain, "plain", []), (fused, "fused", ["fused"]):
        assert (row["name"], row["techniques"], row["compiled"]) == (name, techniques, "new")
        assert row["machine"]["packages"]["torch"] and row["date"] and "--goal" in row["command"]
        (run,) = row["runs"]
        seconds = [epoch["seconds"] for epoch in run["epochs"]]
        assert run.keys() == RUN and {*run["epochs"][0]} == {"loss", "val_top1", "seconds"}
        assert run["seed"] == 0 and run["training_seconds"] == sum(seconds[1:])
        assert run["seconds_to_goal"] == run["warmup_seconds"] < run["wall_seconds"]
        assert f"| {name} | 1 | " in text
    assert "conv11 4 wide, 16 px, digits, batch 40, 2 epochs of 1 steps, " in text
    assert text in done.stdout

    # a kept row finds the code of the run before it
    code = tmp_path / "accuracy" / "compiled" / "fused"
    (code / "kernel").write_text("compiled")
    words = digits, "--kept", "fused", "--seeds", 1, 0, "--goal", 0.01, "--add"
    done, added, text, begun = outcome(tmp_path, *words, stop_at="seed 0: fused, kept")
    assert done.returncode == 130, done.stderr
    assert begun == ["seed 1: plain", "seed 1: fused, kept", "seed 0: fused, kept"]
    more, *others, kept = added
    assert others == [failed, fused] and (code / "kernel").exists()
    assert [run["seed"] for run in more["runs"]] == [0, 1] and more["runs"][:1] == plain["runs"]
    losses = [run["epochs"][0]["loss"] for run in more["runs"]]
    assert losses[0] != losses[1]  # other seeds
    assert (kept["status"], kept["compiled"], len(kept["runs"])) == ("ok", "kept", 1)
    assert "| plain | 2 | " in text and "| fused, kept | 1 | " in text and "\n- kept: " in text
    assert "Stopped by SIGINT." in text and processes_of(tmp_path) == []


def test_a_kept_row_finds_the_images_that_a_run_before_it_has_decoded(tmp_path, monkeypatch):
    row, begun = accuracy.row_of("cache", "kept", ["--epochs", "9"], tmp_path), []

    def train(row, *rest):
        begun.append((row.compiled, row.command[-2:]))
        row.code.mkdir(parents=True, exist_ok=True)
        (tmp_path / "decoded").mkdir(exist_ok=True)
        return dict(images_per_second=1, val_top1=1, training_seconds=1, wall_seconds=1)

    monkeypatch.setattr(accuracy, "train", train)
    cache_dir = ["--cache_dir", tmp_path / "decoded"]
    for number in (1, 2):
        entry = dict(runs=[])
        accuracy.measure(entry, row, 0, 1, tmp_path, math.inf)
        assert entry["status"] == "ok" and len(entry["runs"]) == 1
        # one epoch of the first run, which compiles and decodes, does not count
        assert begun == [("new", ["--epochs", 1]), *[("kept", cache_dir)] * number]
    shutil.rmtree(tmp_path / "decoded")
    accuracy.measure(dict(runs=[]), row, 0, 1, tmp_path, math.inf)
    assert begun[-2:] == [("kept", ["--epochs", 1]), ("kept", cache_dir)]
    assert row.more == dict(decoded="kept")


def test_wrong_options_end_before_any_run(digits, tmp_path):
    for words, part in [
        ((*SHORT, "--bogus"), "arguments: --bogus"),
        (("--set", "fused --small 1", *SHORT), "arguments: --small 1"),
        (("--only", "none", *SHORT), "--only: the rows are: plain"),
    ]:
        done = run_forked(SCRIPT, digits, "--result_dir", tmp_path, *words)
        assert_one_line(done, 2, part)
        assert "seed 0" not in done.stdout


@pytest.fixture
def record():
    """A record of two rows with three runs each: the second row is twice as fast."""

    def run(seed, factor, goal):
        epochs = [dict(loss=1.0, val_top1=top1, seconds=10 / factor) for top1 in (0.5, 0.94)]
        return dict(
            seed=seed,
            wall_seconds=(30 + seed) / factor,
            warmup_seconds=12 / factor,
            training_seconds=10 / factor,
            val_top1=0.94 + seed / 1000,
            seconds_to_goal=accuracy.seconds_to(goal, 12 / factor, epochs),
            epochs=epochs,
            images_per_second=5000 * factor,
            peak_memory_bytes=2_000_000_000,
        )

    machine = MACHINE | dict(gpu="H200")
    options = dict(
        model="resnet18",
        image_size=64,
        dataset="/x/cifar10",
        batch_size=512,
        epochs=2,
        steps=None,
        augment="crop",
        lr=0.4,
    )
    return [
        dict(
            name=name,
            techniques=name.split()[name == "plain" :],
            compiled="new",
            goal=0.93,
            options=options,
            machine=machine,
            date="2026-11-23",
            command="c",
            status="ok",
            runs=[run(seed, factor, 0.93) for seed in range(3)],
        )
        for name, factor in (("plain", 1), ("cache amp", 2))
    ]


def test_the_table_has_medians_their_spread_and_ratios(record):
    line = "| {} | 3 | 94.10% (94.00% to 94.20%) | {:.1f} | {:.1f} ({:.1f} to {:.1f}) | {} | "
    text = accuracy.markdown(record)
    assert (
        line.format("plain", 12, 10, 10, 10, "1.00x")
        + ("22.0 (22.0 to 22.0) | 1.00x | 31.0 (30.0 to 32.0) | 1.00x | 5,000 | 2.0 |")
        in text
    )
    assert (
        line.format("cache amp", 6, 5, 5, 5, "2.00x")
        + ("11.0 (11.0 to 11.0) | 2.00x | 15.5 (15.0 to 16.0) | 2.00x | 10,000 | 2.0 |")
        in text
    )
    assert "resnet18, 64 px, cifar10, batch 512, 2 epochs, --augment crop, --lr 0.4." in text
    assert "s until 93% " in text and "kept" not in text

    # an accuracy that some runs do not reach has no ratio
    record[1]["runs"][0]["seconds_to_goal"] = None
    assert "| 11.0 (11.0 to 11.0), 2 of 3 runs |  | 15.5 " in accuracy.markdown(record)
    for run in record[0]["runs"]:
        run["seconds_to_goal"] = None
    assert "| never |  | 31.0 " in accuracy.markdown(record)


def test_shows_the_row_that_is_fastest_until_the_goal(record):
    places = "1x H200", "resnet18, 64 px, cifar10, batch 512, 2 epochs"
    assert accuracy.shows(record) == (
        *places,
        ("cache amp: 2.00x until 93%, 2.00x in training, top-1 94.10% against 94.10%"),
        "2026-11-23",
    )
    for run in record[0]["runs"]:  # never there: the whole run counts, with the same accuracy
        run["seconds_to_goal"] = None
    assert accuracy.shows(record)[2].startswith("cache amp: 2.00x over the whole run, ")
    for run in record[1]["runs"]:
        run["val_top1"] -= 0.01
    assert accuracy.shows(record)[2].startswith("plain: 1.00x")
    record[0]["status"] = "fail"
    assert accuracy.shows(record)[2] == "the first training did not end well"


def test_nothing_is_started_that_cannot_end_in_time(digits, tmp_path, record):
    (tmp_path / "accuracy.json").write_text(json.dumps(record))
    done = run_forked(SCRIPT, digits, "--add", "--result_dir", tmp_path, *SHORT)
    assert_one_line(done, 1, "--add: ", "has another machine and options")
    done = run_forked(SCRIPT, digits, "--minutes", 1e-9, "--result_dir", tmp_path, *SHORT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left out: it does not fit in --minutes") == 3
