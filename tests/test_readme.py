"""What the README shows is what the files and records say."""

import json
import re

import pytest
from conftest import ROOT, SRC, TECHNIQUES

import report

README = (ROOT / "README.md").read_text()
FAULTS = ROOT.parent / "shared" / "FAULTS.md"
RESULTS = sorted((ROOT / "results").glob("*/running.json"))
LOADING = sorted((ROOT / "results").glob("*/loading.json"))


def test_tables_are_those_of_the_files_and_records():
    assert report.readme(README) == README, "stale: run `python report.py`"


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
    assert len(rows) >= 12 and path.with_suffix(".png").exists()
    assert path.with_suffix(".md").read_text() == report.markdown(rows)
    for row in rows:
        assert row["environment"]["gpu"] and row["environment"]["driver"] and row["date"]
        assert row["command"].startswith("./running.sh")
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
        assert row["command"].startswith("./loading.sh") and row["samples"] >= 2000
    assert len({row["samples"] for row in rows}) == len({row["bytes"] for row in rows}) == 1


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
