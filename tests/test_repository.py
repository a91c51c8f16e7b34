"""What a visitor finds beside the code: one test command, an installable whatif, one version."""

import ast
import json
import re
import shutil
import sys

import pytest
import yaml

from helpers import ROOT, flags, run


def text_of(name):
    return (ROOT / name).read_text()


def version():
    return re.search(r'^version = "(.*)"', text_of("pyproject.toml"), re.M)[1]


def test_there_is_one_test_command():
    """README.md, CONTRIBUTING.md and .ci/run have the same two lines."""
    commands = [
        re.findall(r"^python3 -m venv .*\npytest .*$", text_of(name), re.M)
        for name in ("README.md", "CONTRIBUTING.md", ".ci/run")
    ]
    assert len(commands[0]) == 1 and commands == commands[:1] * 3
    install, test = commands[0][0].splitlines()
    assert "-r requirements-test.txt" in install and test.endswith(" tests")
    assert text_of("requirements-test.txt").startswith("-r requirements.txt\n")
    assert "run: .ci/run\n" in text_of(".github/workflows/test.yml")


def test_there_is_one_version():
    assert re.search(r"^## (\S+)", text_of("CHANGELOG.md"), re.M)[1] == version()
    assert yaml.safe_load(text_of("CITATION.cff"))["version"] == version()


@pytest.mark.parametrize("name", ["running", "loading", "compose"])
def test_help_needs_no_packages(name, tmp_path):
    """It has status 0 and a text for each option."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    done = run(ROOT / f"{name}.sh", "--help", env={"PYTHON": str(bare)}, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: ./{name}.sh" in done.stdout
    words = re.findall(r"^  (?:-h, )?(\S.*(?:\n {10,}\S.*)*)", done.stdout, re.M)
    assert words and all(re.search(r"\s{2,}\S", each) for each in words), words


def test_the_code_is_formatted_and_checked():
    """pre-commit runs the same ruff."""
    assert f"ruff=={re.search(r'rev: v(.*)', text_of('.pre-commit-config.yaml'))[1]}\n" in text_of(
        "requirements-test.txt"
    )
    for words in (["check"], ["format", "--check"]):
        done = run(sys.executable, "-m", "ruff", *words, ROOT)
        assert done.returncode == 0, done.stdout


def test_one_module_of_a_folder_changes_sys_path():
    for folder, only in (("tools", "paths.py"), ("benchmarks", "folders.py")):
        found = [
            path.name
            for path in (ROOT / folder).glob("*.py")
            if re.search(r"sys\.path(\.\w+\(| \+=|\[:)", path.read_text())
        ]
        assert found == [only]


@pytest.mark.parametrize("folder", ["tools", "whatif"])
def test_functions_and_classes_are_short(folder):
    most = {ast.FunctionDef: 60, ast.AsyncFunctionDef: 60, ast.ClassDef: 200}
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if type(node) in most:
                lines = node.end_lineno - node.lineno + 1
                assert lines <= most[type(node)], (path.name, node.name)


@pytest.mark.parametrize(
    "path", [*ROOT.glob(".github/*/*.yml"), ROOT / ".pre-commit-config.yaml"], ids=lambda p: p.name
)
def test_settings_are_valid_yaml(path):
    assert yaml.safe_load(path.read_text())


def test_pip_installs_the_command_whatif_and_nothing_but_torch(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(ROOT / "whatif", source / "whatif")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source)
    words = "--no-deps --no-index --no-build-isolation --disable-pip-version-check -q".split()
    done = run(sys.executable, "-m", "pip", "install", *words, "--target", target, source)
    assert done.returncode == 0, done.stderr
    (about,) = target.glob("*.dist-info/METADATA")
    assert f"\nVersion: {version()}\n" in about.read_text()
    needed = re.findall(r"^Requires-Dist: (\w+)", about.read_text(), re.M)
    assert needed == ["torch"] and {path.name for path in target.iterdir()} == {
        "bin",
        "whatif",
        about.parent.name,
    }
    ours, theirs = (
        {path.relative_to(folder) for path in folder.rglob("*.py")}
        for folder in (ROOT / "whatif", target / "whatif")
    )
    assert ours == theirs
    done = run(target / "bin" / "whatif", "--help", env={"PYTHONPATH": str(target)}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: whatif [OPTIONS] my_train.py")  # as it was called


def test_an_installed_whatif_is_no_library_of_the_script(tmp_path):
    """Its own code then lies in site-packages, as that of libraries which call a model."""
    shutil.copytree(ROOT / "whatif", tmp_path / "site-packages" / "whatif")
    script = tmp_path / "train.py"
    shutil.copy(ROOT / "tests" / "whatif_scripts" / "plain_loop.py", script)
    options = ["--only", "plain", *flags(minutes=0.1, json=tmp_path / "found.json")]
    words = [sys.executable, "-m", "whatif", *options, script, "--size", 8]
    done = run(*words, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site-packages")})
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((tmp_path / "found.json").read_text())["facts"]
    made = [*facts["models"], *facts["optimizers"], *facts["loaders"]]
    assert len(made) == 3 and not any(each["library"] for each in made)
