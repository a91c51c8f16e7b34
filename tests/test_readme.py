"""What the README shows is what the files and records say."""

import json
import re

import pytest
from helpers import ROOT, SRC, TECHNIQUES

import report

README = (ROOT / "README.md").read_text()
FAULTS = ROOT.parent / "shared" / "FAULTS.md"
RESULTS = sorted((ROOT / "results").glob("*/running.json"))
LOADING = sorted((ROOT / "results").glob("*/loading.json"))


def test_tables_are_those_of_the_files_and_records():
    assert report.readme(README) == README, "stale: run `python tools/report.py`"


@pytest.mark.skipif(not FAULTS.exists(), reason="needs the list of ../shared/FAULTS.md")
def test_every_fault_has_a_test():
    listed = {int(number) for number in re.findall(r"^\| (\d+) \|", FAULTS.read_text(), re.M)}
    tested = {number for path in (ROOT / "tests").glob("test_*.py")
              for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
              for number in report.fault_numbers(name)}
    assert listed and sorted(listed - tested) == []


def test_a_test_of_a_fault_says_what_it_tries_and_what_happens(tmp_path):
    path = tmp_path / "test_loader.py"
    path.write_text('def test_f07_f61_x():\n    """This or | that ->\n    an error."""\n')
    assert report.faults_table(tmp_path).splitlines()[2:] == [
        r"| 7, 61 | [loaders](tests/test_loader.py) | This or \| that | an error |"]
    path.write_text('def test_f07_x():\n    """It works."""\n')
    with pytest.raises(ValueError, match="test_loader.py: test_f07_x wants a docstring"):
        report.faults_table(tmp_path)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_results_hold_together(path):
    rows = json.loads(path.read_text())
    assert len(rows) >= 5 and path.with_suffix(".png").exists()
    assert path.with_suffix(".md").read_text() == report.markdown(rows)
    for row in rows:
        assert row["command"].startswith("./running.sh") and row["date"]
    rows = [row for row in rows if row["status"] == "ok"]
    assert all(row["environment"]["gpu"] and row["environment"]["driver"] for row in rows)
    # one run's options hold for all, and the global batch with them
    options = [{key: value for key, value in row["options"].items()
                if key in rows[0]["options"]} for row in rows]
    assert all(each == options[0] for each in options)


@pytest.mark.parametrize("path", LOADING, ids=lambda path: path.parent.name)
def test_results_of_loading_hold_together(path):
    rows = json.loads(path.read_text())
    assert [row["cache"] for row in rows] == ["cold", "warm"] * 2
    assert path.with_suffix(".md").read_text() == report.loading_markdown(rows)
    for row in rows:
        assert row["environment"]["gpu"] and row["date"] and len(row["epochs"]) >= 4
        assert "./loading.sh" in row["command"] and row["samples"] >= 2000
    assert len({row["samples"] for row in rows}) == len({row["bytes"] for row in rows}) == 1


def staircase_rows():
    """A baseline of 100 images/s, fused tried on it, amp kept, fused tried again and kept, and a
    technique that is not to be had."""
    common = dict(status="ok", environment=dict(gpu="NVIDIA X1", gpus=2), options=dict(
        model="conv11", width=64, image_size=32, batch_size=512, dataset="/data/x"))
    steps = [("fused", [], 90, False), ("amp", [], 200, True), ("fused", ["amp"], 230, True)]
    rows = [dict(row="single", column="plain", techniques=[], images_per_second=100,
                 train_seconds=100, **common)]
    for name, on, speed, kept in steps:
        rows.append(dict(row="staircase", column=f"+{name}", techniques=sorted([*on, name]), on=on,
                         kept=kept, images_per_second=speed, **common))
    return [*rows, *(dict(row="staircase", column=f"+{name}", techniques=[name], on=[], kept=False,
                          status="skip", error="none") for name in ("DALI", "DP"))]


def pays(folder, **tables):
    """The cells of the table of these {folder of results: rows}, without the last column."""
    for name, rows in tables.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "running.json").write_text(json.dumps(rows))
    lines = report.pays_table(README, folder).splitlines()
    return [[cell.strip("| ") for cell in line.split(" | ")[:-1]] for line in lines[:1] + lines[2:]]


def test_what_pays_is_the_last_step_of_each_technique(tmp_path):
    title = "[conv11 64 wide, 32 px, batch 512, 2x X1](results/{}/running.md)"
    names = {name: f"[{name}](src/train_{name}.py)" for name in ("amp", "fused", "DALI", "DP")}
    assert pays(tmp_path, b=staircase_rows()) == [
        ["technique", title.format("b")], [names["amp"], "**2.00x**"],
        [names["fused"], "**1.15x**"], [names["DALI"], "SKIP"], [names["DP"], "SKIP"]]
    # a grid of the same options tells what the staircase does not, in the same column
    base = staircase_rows()[0]
    grid = [base, base | dict(column="+amp", techniques=["amp"], images_per_second=600),
            base | dict(row="DP", techniques=["DP"], images_per_second=50)]
    for name in "ac":  # before and behind the staircase
        assert pays(tmp_path, **{name: grid}) == [
            ["technique", title.format("b")], [names["amp"], "**2.00x**"],
            [names["fused"], "**1.15x**"], [names["DP"], "0.50x alone"], [names["DALI"], "SKIP"]]
    # a second staircase has a column of its own, as has one of other options
    for rows in staircase_rows(), [row | dict(options=base["options"] | dict(batch_size=64))
                                   for row in staircase_rows()]:
        assert [len(line) for line in pays(tmp_path, d=rows)] == [3] * 5
    # DP on one GPU tells nothing of DP
    for row in grid:
        row["environment"] = dict(gpu="NVIDIA X1", gpus=1)
    assert pays(tmp_path, d=grid)[3][1:] == ["0.50x alone", ""]


def test_a_technique_on_a_baseline_that_failed_is_faster_if_it_was_kept():
    rows = [row | dict(status="fail") if not row["techniques"] else row for row in staircase_rows()]
    stairs, alone = report.gains(rows)
    assert (stairs["amp"][1], stairs["fused"][1], alone) == ("**faster**", "**1.15x**", {})
    assert report.gains([rows[0], rows[1]])[0]["fused"][1] == ""


def test_seconds_of_training_leave_the_warm_up_out():
    environment = dict(gpu=None, cores=2, cpu="x", torch="2", python="3")
    record = dict(script="train_amp", options=dict(seed=7, width=8), val_top1=0.991,
                  epochs=[dict(seconds=seconds, images_per_second=100 / seconds, data_wait=0.05)
                          for seconds in (9, 0.5, 0.25, 0.4)], images_per_second=240,
                  warmup_seconds=20, environment=environment, date="2026-01-01", command="./x",
                  packages={"lmdb": "3"})
    assert report.training_seconds(record) == 4 * 0.4
    other = record | dict(script="train", options=dict(seed=8, width=8), command="./y")
    lines = report.runs_markdown([record, other]).splitlines()
    assert lines[2:4] == [f"| {name}, 4 epochs | 99.10% | 1.60 s | 240 (200 to 400) | 5% | 20.0 s |"
                          for name in ("train_amp, `--seed 7`", "train, `--seed 8`")]
    assert lines[-3].endswith("torch 2, lmdb 3, Python 3; 2026-01-01; `./x`")
    assert lines[-1] == "`./y`"
    lines = report.runs_markdown([  # options that not every script has
        record | dict(script="a", options=dict(seed=7)),
        *[record | dict(script="b", options=dict(seed=7, at=at)) for at in (None, 9)]]).splitlines()
    assert [line.split(" |")[0] for line in lines[2:5]] == [
        "| a, 4 epochs", "| b, 4 epochs", "| b, `--at 9`, 4 epochs"]
    assert report.runs_markdown([record]).splitlines()[2].startswith("| 4 epochs | 99.10% | ")
    lines = report.runs_markdown([record, record]).splitlines()
    assert [line[:17] for line in lines[2:4]] == ["| run 1, 4 epochs", "| run 2, 4 epochs"]
    more = report.runs_markdown([record, other, other]).splitlines()[2:5]
    assert "| run 1, " in more[1] and "| run 2, " in more[2] and "| run " not in more[0]


def test_every_technique_says_when_it_does_not_pay():
    for name in set(TECHNIQUES) - {"profile"}:
        assert len(report.does_not_pay(name, README)) > 20, name


def test_every_script_has_its_section_and_every_file_named_is_there():
    for name in TECHNIQUES:
        assert f"### train_{name}.py: " in README
    for path in SRC.glob("loader*.py"):
        assert f"### {path.name}: " in README
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
    for name in re.findall(r"src/(\w+\.py)", README):
        assert (SRC / name).exists(), name


def test_every_option_named_is_one_of_the_scripts():
    text = "".join(path.read_text() for path in [*SRC.glob("*.py"), *ROOT.glob("*.py"),
                                                 *ROOT.glob("*.sh")])
    torchrun = {"--nnodes", "--nproc_per_node", "--max-restarts", "--rdzv_id", "--rdzv_backend",
                "--rdzv_endpoint"}
    every_parser = {"--help"}
    slurm = {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task"}
    for option in set(re.findall(r"(--[a-z]\w[\w-]*)", README)) - torchrun - slurm - every_parser:
        assert option in text, option


def test_no_path_of_the_machine_that_made_it():
    for path in [ROOT / "README.md", *SRC.glob("*.py"), *ROOT.glob("*.py"), *ROOT.glob("*.sh"),
                 *RESULTS, *LOADING]:
        assert str(ROOT) not in path.read_text(), path
