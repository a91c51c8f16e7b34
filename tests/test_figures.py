"""Every measured figure in README.md and docs/ is in a record of results/.

A figure is a number with a thousands separator or a decimal point, in front of a unit of UNIT, or
alone in a cell of a table. Code, the targets of links and the parts that tools/report.py makes are
left out. A figure has to stand on the page of a folder of results/ that its section links to or
shows a part of, or in the table below.
"""

import json
import re

import pytest

from helpers import ROOT

PAGES = {path.name: path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
WHATIF = ROOT / "results" / "h100-whatif" / "byhand.json"
NUMBER = r"\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?"
UNIT = r"x\b|\s?(?:%|(?:times|images/s|samples/s|steps/s|MB/s|ms|s|seconds)\b)"
WRITTEN = {"x": "x", "times": "x", "%": "%", "ms": " ms", "s": " s", "seconds": " s"}
CODE = re.compile(r"^```.*?^```|`[^`]*`", re.MULTILINE | re.DOTALL)
LEFT_OUT = re.compile(
    r"<!-- (\w+)\b[^>]*-->.*?<!-- /\1\b[^>]*-->"  # made by tools/report.py
    r"|\]\([^)]*\)|\b(?:Python|torch) [\d.]+",
    re.DOTALL,
)

# figures that nobody measured: {page: {figure: why}}
SETTINGS = {
    "README.md": {"95%": "of Student's t"},
    "loading.md": {"20%": "a threshold", "10,000": "a setting of loading.sh"},
    "measuring.md": {
        "5 s": "a setting of running.sh",
        "30 s": "a setting of running.sh",
        "95%": "of Student's t",
        **dict.fromkeys(
            ("7,160", "7,950", "75.9%", "2,791", "94.01%", "2.59 s", "4.0"), "its source states it"
        ),
    },
    "reliability.md": {"2,000": "an example of FUZZ"},
    "techniques.md": {"20%": "a threshold"},
    "verdicts.md": {
        "95%": "COVERAGE in stats.py",
        "3%": "MARGIN_GPU there",
        "2%": "ADVISED there",
        "0.5%": "LOSS_STEADY there",
        "10%": "MARGIN_CPU, CLEAR and MOVED there",
        "20%": "ONE_RUN there, and WAITS",
        "1%": "twice STEADY there",
        "300 s": "a setting of running.sh",
    },
    "whatif.md": {
        "95%": "COVERAGE in stats.py",
        "10%": "APART in forecast.py",
        "0.2 s": "WINDOW in plans.py",
        "0.7 s": "WINDOW there",
        "20 s": "WATCH_SECONDS there",
        "90%": "BUSY there",
        "20%": "WAITS in report.py",
        "80%": "a threshold there",
        **dict.fromkeys(
            ("0", "1", "2", "3", "4", "5", "130"), "a status, or the version of torch or the record"
        ),
    },
}


def figures(text):
    """Return the figures of a text without code, such as "2,291", "1.83x", "18%" and "9.7 s"."""
    text = LEFT_OUT.sub("", text)
    found = re.findall(rf"(?<![\w.,/#-])({NUMBER})(?![.,]?\d)({UNIT})?", text)
    return {
        number + WRITTEN.get(unit.strip(), "")
        for number, unit in found
        if unit or not number.isdigit()
    } | {*re.findall(r"(?<=\| )\d+(?= \|)", text)}


def unmeasured(text):
    """Return the figures of a page that are on no page of results/ that their section names."""
    found = set()
    for section in re.split(r"^#+ ", CODE.sub("", text), flags=re.MULTILINE):
        parts = re.findall(r"<!-- (?:chart|table|pays) (.*?) -->|results/([\w-]+)/", section)
        results = "\n".join(
            (ROOT / "results" / name / "README.md").read_text()
            for name in {*" ".join(map(" ".join, parts)).split()}
        )
        found |= {
            figure
            for figure in figures(section)
            if not re.search(
                rf"(?<![\d.,]){re.escape(figure.split(' ')[0])}(?![.,]?\d|\s?%|x)", results
            )
        }
    return found


@pytest.mark.parametrize("name", PAGES)
def test_every_measured_figure_is_in_a_record(name):
    found, known = unmeasured(PAGES[name].read_text()), {*SETTINGS.get(name, {})}
    assert not found - known, "no record has these: link their section to the folder of results/"
    assert not known - found, "these are on the page no longer, or in a record: delete them here"


@pytest.mark.parametrize("name", ["README.md", "whatif.md"])
def test_what_whatif_printed_is_in_its_record(name):
    rows = re.findall(
        r"^(\S.*?) {2,}(\d\S+ ±\S+) +(\d+) +([\d.]+) +(faster|slower|not significant|open)",
        PAGES[name].read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 3
    for row in rows:
        assert f"| {' | '.join(row)} |" in WHATIF.with_name("README.md").read_text()


def test_the_shown_patch_is_in_its_record():
    diffs = [(one["found"]["patch"] or {}).get("diff") for one in json.loads(WHATIF.read_text())]
    shown = re.findall(r"```diff\n(.*?)```", PAGES["whatif_write.md"].read_text(), re.DOTALL)
    assert shown == [diff for diff in diffs if diff]


def test_a_figure_that_was_changed_is_found():
    text = PAGES["README.md"].read_text()
    known = unmeasured(text)
    measured = [figure for figure in figures(CODE.sub("", text)) - known if "," in figure]
    assert measured
    for figure in measured:
        other = figure[:-1] + str((int(figure[-1]) + 1) % 10)
        assert unmeasured(text.replace(figure, other)) - known == {other}
