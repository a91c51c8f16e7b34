"""Every row of the list of faults has a test that is marked with its number."""

import ast
import re
from pathlib import Path

import pytest
from helpers import ROOT

FAULTS = ROOT.parent / "shared" / "FAULTS.md"


def marked():
    """Return the numbers in the `pytest.mark.fault(...)`s of all tests."""
    numbers = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                numbers.update(number.value for number in node.args)
    return numbers


@pytest.mark.skipif(not FAULTS.exists(), reason="needs ../shared/FAULTS.md")
def test_every_fault_has_a_test():
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", FAULTS.read_text(), re.M)}
    assert sorted(rows - marked()) == []
    assert sorted(marked() - rows) == []
