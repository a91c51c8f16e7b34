"""benchmarks/scaling.py: sets on 1 and more GPUs or processes, and the table of how they scale."""

from types import SimpleNamespace

import pytest

import accuracy
import scaling
from helpers import MACHINE, ROOT, TINY, assert_one_line, benchmark, processes_of, run_forked

SCRIPT = ROOT / "benchmarks" / "scaling.py"
SHORT = ["--", *TINY]


def outcome(folder, *words, stop_at=None):
    return benchmark(SCRIPT, folder, *words, "--result_dir", folder, *SHORT, stop_at=stop_at)


def test_a_set_trains_alone_and_with_ddp(digits, tmp_path):
    name = "fused --steps 2"
    done, record, text = outcome(tmp_path, digits, "--set", name, "--gpus", 2, 1, "--runs", 1)
    assert done.returncode == 0, done.stderr
    assert [(row["set"], row["gpus"], row["status"]) for row in record] == [
        (name, 1, "ok"),
        (name, 2, "ok"),
    ]
    assert [row["techniques"] for row in record] == [["fused"], ["DDP", "fused"]]
    for row in record:
        (run,) = row["runs"]
        assert run["seed"] == 0 and len(run["epochs"]) == 2
        # two steps an epoch, of 40 images for each process
        assert run["images_per_second"] == pytest.approx(
            80 * row["gpus"] / run["epochs"][1]["seconds"]
        )
    alone, together = (row["runs"][0]["images_per_second"] for row in record)
    for gpus, speed in (1, alone), (2, together):
        assert f"| {name} | {gpus} | 1 | {speed:,.0f} ({speed:,.0f} to {speed:,.0f}) | " in text
    assert "| 1.00x |  | " in text
    assert f"| {together / alone:.2f}x | {50 * together / alone:.0f}% (" in text
    assert "batch 40, 2 epochs of 3 steps, " in text and "weak scaling" in text
    assert "There is no GPU here: a GPU in this table is a process" in text
    assert text in done.stdout and processes_of(tmp_path) == []


@pytest.mark.slow
def test_a_row_that_fails_says_why_and_the_others_go_on(digits, tmp_path):
    """Of 240 images two processes cannot take 130 each."""
    sets = "fused --batch_size 130", "fused"
    done, record, text = outcome(
        tmp_path, digits, "--set", sets[0], "--set", sets[1], "--gpus", 1, 2, "--runs", 1
    )
    assert done.returncode == 1, done.stderr
    assert [(row["set"], row["gpus"], row["status"]) for row in record] == [
        (sets[0], 1, "ok"),
        (sets[0], 2, "fail"),
        (sets[1], 1, "ok"),
        (sets[1], 2, "ok"),
    ]
    error = "train_DDP_fused.py: error: --batch_size 260: there are only 240 training images"
    assert error in record[1]["error"] and f"| {sets[0]} | 2 | 0 | FAIL: {error}" in text


def test_ctrl_c_keeps_what_ran_and_add_goes_on(digits, tmp_path):
    words = digits, "--set", "fused", "--gpus", 1
    done, record, text = outcome(tmp_path, *words, "--runs", 2, stop_at="seed 1: ")
    assert done.returncode == 130 and "Stopped by SIGINT." in text, done.stderr
    assert [run["seed"] for run in record[0]["runs"]] == [0]
    done, added, text = outcome(tmp_path, *words, "--runs", 2, "--add")
    assert done.returncode == 0 and "Stopped" not in text, done.stderr
    assert [run["seed"] for run in added[0]["runs"]] == [0, 1]
    assert added[0]["runs"][:1] == record[0]["runs"] and "| fused | 1 | 2 | " in text


def test_wrong_options_end_before_any_run(digits, tmp_path):
    for words, part in [
        (("--set", "fused", *SHORT, "--bogus"), "arguments: --bogus"),
        (("--set", "fused --small 1", *SHORT), "arguments: --small 1"),
        (("--set", "nothing", *SHORT), "no technique 'nothing'"),
        (("--set", "amp DDP", *SHORT), "--set amp DDP: rows of several GPUs get"),
        (("--set", "amp", "--gpus", 0, *SHORT), "--gpus: from 1 to "),
    ]:
        done = run_forked(SCRIPT, digits, "--result_dir", tmp_path, *words)
        assert_one_line(done, 2, part)
        assert "seed 0" not in done.stdout


def test_what_does_not_fit_in_time_is_left_out(digits, tmp_path):
    words = digits, "--set", "fused", "--gpus", 1, 2, "--minutes", 1e-9
    done = run_forked(SCRIPT, *words, "--result_dir", tmp_path, *SHORT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left out: it does not fit in --minutes") == 6


def test_rows_take_turns_in_an_order_that_alternates():
    assert scaling.turns("abc", 3) == [
        *zip([0] * 3, "abc"),
        *zip([1] * 3, "cba"),
        *zip([2] * 3, "abc"),
    ]


def test_k_gpus_get_k_times_the_batch_and_workers_and_the_same_steps(tmp_path):
    parser = accuracy.runs.module_of(accuracy.TRAIN).build_parser()
    parser.set_defaults(workers=5)
    machine, options = dict(gpus=4, cores=16), ["--batch_size", "30"]
    rows = {
        k: scaling.row_of("fused --lr 0.2", k, 4, options, parser, 1000, machine, tmp_path)
        for k in (1, 2, 4)
    }
    for k, row in rows.items():
        script, *words = row.command
        args = parser.parse_args([*map(str, words)])
        assert (args.batch_size, args.workers, args.steps, args.lr) == (30 * k, 5 * k, 8, 0.2)
        assert ("init_process_group" in script.read_text()) == (k > 1)
        assert row.more == dict(set="fused --lr 0.2", gpus=k)
        assert row.variables["OMP_NUM_THREADS"] == "4"
    assert rows[1].code == rows[4].code and rows[1].code.is_dir()
    assert scaling.steps_of(SimpleNamespace(steps=7, batch_size=30), 1000, 4) == 7
    assert scaling.steps_of(SimpleNamespace(steps=None, batch_size=30), 100, 4) == 1


def test_a_row_sees_the_first_gpus_of_those_that_are_visible(monkeypatch):
    seen = [("", {1: "0", 2: "0,1"}), ("7,5,3,1", {1: "7", 2: "7,5", 4: "7,5,3,1"})]
    for visible, expected in seen:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        for gpus, ids in expected.items():
            found = scaling.variables_of(gpus, 4, dict(gpus=4, cores=6))
            assert found == dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=ids)
    assert scaling.variables_of(2, 2, dict(gpus=0, cores=6)) == dict(OMP_NUM_THREADS="3")


def test_numbers_of_gpus_are_those_there_are(capsys):
    for wanted, gpus, cores, found in [
        (None, 2, 8, [1, 2]),
        (None, 8, 8, [1, 2, 4]),
        ([4, 1, 1], 4, 8, [1, 4]),
        (None, 0, 2, [1, 2]),
        ([3], 0, 1, [3]),
        (None, 0, 1, [1]),
    ]:
        assert scaling.counts(wanted, dict(gpus=gpus, cores=cores)) == found
    with pytest.raises(SystemExit):
        scaling.counts([1, 4], dict(gpus=2, cores=8))
    assert capsys.readouterr().err == "scaling.py: error: --gpus: from 1 to 2, not 4\n"


@pytest.fixture
def record():
    """A record of two sets with three turns; one GPU was slower in the second turn."""
    machine = MACHINE | dict(gpus=4, gpu="H100")
    options = dict(
        model="resnet50",
        image_size=224,
        dataset="/x/imagenet",
        batch_size=256,
        epochs=4,
        steps=40,
        augment="resized",
        lr=0.1,
        workers=16,
    )
    speeds = {
        ("cache amp", 1): (1000, 500, 1010),
        ("cache amp", 2): (1900, 950, 1980),
        ("DALI amp", 1): (400, 410, 420),
        ("DALI amp", 4): (1600, 1476, 1260),
    }
    return [
        dict(
            set=name,
            gpus=gpus,
            name=f"{name}, GPUs: {gpus}",
            techniques=name.split(),
            options=options,
            machine=machine,
            date="2026-11-27",
            command="c",
            status="ok",
            runs=[
                dict(
                    seed=seed,
                    images_per_second=speed,
                    val_top1=0.5 + seed / 100,
                    peak_memory_bytes=(10 + seed) * 10**9,
                )
                for seed, speed in enumerate(each)
            ],
        )
        for (name, gpus), each in speeds.items()
    ]


def test_efficiency_is_the_median_of_the_ratios_of_each_turn(record):
    text, tail = scaling.markdown(record), " | 51.00% (50.00% to 52.00%) | 12.0 |"
    assert scaling.ratios(record[1], record) == [1.9, 1.9, pytest.approx(1980 / 1010)]
    for line in (
        "| cache amp | 1 | 3 | 1,000 (500 to 1,010) | 1.00x | ",
        "| cache amp | 2 | 3 | 1,900 (950 to 1,980) | 1.90x | 95% (95% to 98%)",
        "| DALI amp | 4 | 3 | 1,476 (1,260 to 1,600) | 3.60x | 90% (75% to 100%)",
    ):
        assert line + tail in text
    assert "resnet50, 224 px, imagenet, batch 256, 4 epochs of 40 steps, " in text
    assert "\n\n4x H100, driver 580" in text and "no GPU" not in text

    # rows of a set stand together; a turn without one GPU has no ratio
    del record[0]["runs"][1]
    text = scaling.markdown(record[::-1])
    assert [line.split(" | ")[:2] for line in text.splitlines()[2:6]] == [
        ["| DALI amp", "1"],
        ["| DALI amp", "4"],
        ["| cache amp", "1"],
        ["| cache amp", "2"],
    ]
    assert "| 1.93x | 97% (95% to 98%), 2 of 3 runs | " in text

    # nor does a set whose run on one GPU failed
    record[0] |= dict(status="fail", error="it broke", log="x.log")
    text = scaling.markdown(record)
    assert "| cache amp | 1 | 2 | FAIL: it broke (log: x.log) | | | | |" in text
    assert "| cache amp | 2 | 3 | 1,900 (950 to 1,980) |  |  | 51.00% " in text


def test_shows_the_fastest_set_on_the_most_gpus(record):
    place, work, told, date = scaling.shows(record)
    assert (place, date) == ("4x H100", "2026-11-27")
    assert work == "resnet50, 224 px, imagenet, batch 256, 4 epochs of 40 steps, weak scaling"
    assert told == "DALI amp: 1,476 images/s on 4 GPUs, 3.60x one, efficiency 90%"
    record[3]["status"] = "fail"
    assert scaling.shows(record)[2].startswith("cache amp: 1,900 images/s on 2 GPUs, 1.90x one, ")
    record[0]["status"] = "fail"
    assert scaling.shows(record)[2] == "no set ended well on several GPUs and on one"
