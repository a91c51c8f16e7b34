"""What README.md and docs/ name is there."""

import ast
import re

import pytest

from helpers import ROOT, SRC, TECHNIQUES

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_section_linked_is_there(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if ":" in target or target.startswith("../../actions/"):  # on GitHub only
            continue
        name, _, section = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        titles = re.findall(r"^#+ (.*)", path.read_text(), re.M) if section else []
        anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not section or section in anchors, target
    for name in re.findall(r"src/(\w+\.py)", page.read_text()):
        assert (SRC / name).exists() or name.startswith("my_"), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_named_is_one_of_the_scripts(page):
    files = [
        *SRC.glob("*.py"),
        *ROOT.glob("*.py"),
        *ROOT.glob("*.sh"),
        *(ROOT / "tools").glob("*"),
        *(ROOT / "benchmarks").glob("*.py"),
        *(ROOT / "whatif").glob("*.py"),
    ]
    text = "".join(path.read_text() for path in files if path.is_file())
    torchrun = {
        "--nnodes",
        "--nproc_per_node",
        "--max-restarts",
        "--rdzv_id",
        "--rdzv_backend",
        "--rdzv_endpoint",
        "--standalone",
    }
    others = {
        "--nodes",
        "--ntasks-per-node",
        "--gpus-per-node",
        "--cpus-per-task",  # Slurm
        "--shm-size",
        "--ipc",
        "--cpus",  # Docker
        "--depth",
        "--help",
        "--dist",
    }  # git, every script, pytest
    own = re.sub(r"^```text.*?^```", "", page.read_text(), flags=re.M | re.S)  # not of others
    for option in set(re.findall(r"(?<![\w-])(--[a-z]\w[\w-]*)", own)):
        assert option in text or option in torchrun | others, option


def test_every_script_has_its_section():
    techniques = (ROOT / "docs" / "techniques.md").read_text()
    loading = (ROOT / "docs" / "loading.md").read_text()
    for name in TECHNIQUES:
        assert re.search(rf"^##+ .*\btrain_{name}\b", techniques, re.M), name
    for path in SRC.glob("loader*.py"):
        assert path.name in loading, path


def test_the_front_page_has_its_claim_then_whatif_then_a_whole_diff():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    claim = "\n".join(lines[:15])
    assert "whole run" in claim and "top-1" in claim and "results/" in claim
    commands = re.findall(r"```bash\n(.*?)```", "\n".join(lines), re.DOTALL)
    assert commands[0].startswith("python whatif my_train.py")
    order = [
        "## Your own script",
        "<!-- diff train_amp -->",
        "## Your own data",
        "## Join",
        "## Load faster",
        "## Several GPUs",
        "## How it was measured",
    ]
    places = [
        next(number for number, line in enumerate(lines) if line.startswith(start))
        for start in order
    ]
    assert places == sorted(places)
    for page in PAGES[2:]:
        assert len(page.read_text().splitlines()) <= 250, page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_text_are_not_too_long(page):
    is_code = False
    for line in page.read_text().splitlines():
        is_code ^= line.startswith("```")
        if not is_code and not line.startswith(("|", "![", "<!--", "*Training ")):
            assert len(line) <= 120, line


def test_no_path_of_the_machine_that_made_it():
    for path in [
        *PAGES,
        *SRC.glob("*.py"),
        *ROOT.glob("*.py"),
        *ROOT.glob("*.sh"),
        *(ROOT / "tools").glob("*.*"),
        *(ROOT / "whatif").rglob("*.py"),
        *(ROOT / "results").glob("*/README.md"),
    ]:
        assert str(ROOT) not in path.read_text(), path


def test_every_fault_has_a_test():
    """The marks name the faults that docs/reliability.md lists, and no others."""
    page = (ROOT / "docs" / "reliability.md").read_text()
    listed = re.findall(r"^\| ([^|]+) \|", page[page.index("| fault |") :], re.M)[1:]
    tested = set()
    for path in (ROOT / "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                tested |= {name.value for name in node.args}
    assert listed and len(listed) == len({*listed}) and {*listed} == tested
