"""Tables, charts and pages that tools/report.py makes from records."""

import dataclasses
import json

import pytest

import records
import report
from helpers import MACHINE, ROOT
from records import Training, Verdict

OPTIONS = dict(
    model="resnet50",
    width=16,
    image_size=224,
    batch_size=256,
    steps=None,
    epochs=3,
    dataset="/somewhere/imagenet",
)


def good(speed, **details):
    """A row of running.sh that ended well."""
    return Training.read(fields(speed, **details))


def fields(speed, **details):
    """The fields of a row that ended well: three epochs, of which the first warms up."""
    epochs = [
        dict(images_per_second=each, seconds=1000 / each, data_wait=0.05)
        for each in (speed / 2, speed, 1.1 * speed)
    ]
    return (
        dict(
            status="ok",
            machine=MACHINE,
            options=OPTIONS,
            date="2026-11-24",
            processes=1,
            command="./running.sh 3 /data/imagenet",
            left_out={},
            epochs=epochs,
            val_top1=0.75,
            images_per_second=speed,
            train_seconds=2000 / speed,
            warmup_seconds=9,
            peak_memory_bytes=2**30,
        )
        | details
    )


def staircase_rows():
    """A baseline of 100 images/s; fused left out, amp kept, fused kept when tried again."""
    rows = [good(100, row="single", column="plain", techniques=[])]
    for name, on, speed, kept in [
        ("fused", [], 90, False),
        ("amp", [], 200, True),
        ("fused", ["amp"], 230, True),
    ]:
        rows.append(
            good(
                speed,
                row="staircase",
                column=f"+{name}",
                on=on,
                kept=kept,
                techniques=sorted([*on, name]),
            )
        )
    rows += [
        Training(
            row="staircase",
            column="+DALI",
            techniques=["DALI", "amp", "fused"],
            on=["amp", "fused"],
            kept=False,
            status="skip",
            error="DALI is not installed",
        ),
        good(200, row="single", column="+amp", techniques=["amp"]),
        Training(
            row="DDP",
            column="plain",
            techniques=["DDP"],
            status="fail",
            error="no port",
            log="running/train_DDP.log",
        ),
    ]
    return rows


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A project with two folders of results, two scripts and pages with marked parts."""
    loading = [
        dict(
            fields(speed),
            loader=loader,
            cache=cache,
            samples=9,
            bytes=9e6,
            seconds=1,
            megabytes_per_second=5,
            cores_busy=2,
            gpu_busy=None,
            options=dict(data_source="/data/pairs", batch_size=8),
            storage=dict(
                kind="SSD",
                file_system="ext4",
                device="/dev/x",
                answer_seconds=0.001,
                cold_megabytes_per_second=100,
            ),
        )
        for loader, speed in (("loader", 10), ("loader_DALI", 90))
        for cache in ("cold", "warm")
    ]
    loading[3] |= dict(bottleneck="CPU", evidence="all cores busy")
    for name, kind, rows in (("one", "running", staircase_rows()), ("two", "loading", loading)):
        (tmp_path / "results" / name).mkdir(parents=True)
        records.write(rows, tmp_path / "results" / name / f"{kind}.json")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text('add("--epochs")\n\nstep()\n')
    (tmp_path / "src" / "train_amp.py").write_text(
        'add("--epochs")\n\n# new #\n# why\nadd("--amp_dtype")\nstep()\n'
    )
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("<!-- variants train -->\n<!-- /variants -->\n")
    (tmp_path / "docs" / "techniques.md").write_text(
        "".join(f"### train_{name}.py: what it is\n" for name in ("amp", "fused", "DALI"))
    )
    (tmp_path / "README.md").write_text(
        "".join(
            f"text\n<!-- {part} -->\nstale words\n<!-- /{part.split()[0]} -->\n"
            for part in ("pays one one", "diff train_amp", "table one", "table two")
        )
    )
    monkeypatch.setattr(report, "ROOT", tmp_path)
    return tmp_path


def test_pages_are_those_of_the_records_and_scripts():
    stale = [
        str(path.relative_to(ROOT))
        for path, text in report.pages().items()
        if not path.exists() or path.read_text() != text
    ]
    assert stale == [], "run `python tools/report.py`"
    for path in (ROOT / "results").glob("*/running.json"):
        assert path.with_suffix(".png").exists(), path


def test_the_tables_of_running_sh():
    lines = report.markdown(staircase_rows()).splitlines()
    assert lines[2:7] == [
        "| baseline | 100 | 1.00x |  | 1 |  | 75.00% |  |",
        "| +fused | 90 | 0.90x ±0.21 | 0.90x | 1 | never | 75.00% | left out |",
        "| +amp | 200 | 2.00x ±0.48 | 2.00x | 1 | the first epoch | 75.00% | kept |",
        "| +fused | 230 | 2.30x ±0.55 | 1.15x | 1 | the first epoch | 75.00% | kept |",
        "| +DALI | SKIP: DALI is not installed | | | | | | |",
    ]
    text = "\n".join(lines)
    assert "`./compose.sh amp fused > my_train.py`" in text
    assert "| single | 20.00 s (1.00x) | 10.00 s (2.00x ±0.48) |\n| DDP | FAIL |" in text
    assert "| train_amp_fused | 1 | 230 (230 to 253) | 75.00% | 1,024 MB | 5% | 9.0 s |" in text
    assert "- train_DDP: FAIL: no port (log: running/train_DDP.log)" in text
    assert "resnet50, 224 px, imagenet, batch 256, 3 epochs. Seconds and images/s are of" in text
    assert "1x NVIDIA X1, driver 580, CUDA 13.0, cuDNN 91000; 16 cores of A CPU; torch 2" in text


def test_a_set_is_named_with_the_options_that_it_ran_with():
    row = good(
        200,
        techniques=["DDP", "amp"],
        options=OPTIONS | {"amp_dtype": "bfloat16", "sync_bn": True},
        command="./running.sh 3 -- --lr 0.2 --amp_dtype=bfloat16 --sync_bn",
    )
    assert report.command(row, good(100)) == (
        "`./compose.sh DDP amp > my_train.py`\n  with `--amp_dtype bfloat16 --sync_bn`"
    )


def test_a_table_says_where_the_baseline_moved():
    rows = staircase_rows()
    assert report.warning(rows) == ""
    for speed in (80, 120):
        runs = [
            dict(number=number, images_per_second=each, rates=[each], warmup_seconds=9)
            for number, each in enumerate((100, speed))
        ]
        moved = [dataclasses.replace(rows[0], runs=runs), *rows[1:]]
        assert report.markdown(moved).startswith(
            f"**The baseline's speed changed:** it trained 100 images/s and then {speed}."
        )
    lost = [dataclasses.replace(rows[0], failed="SKIP: time"), *rows[1:]]
    assert report.markdown(lost).startswith("**A later run of the baseline did not end well**")
    failed = [Training(row="single", column="plain", status="fail", error="x", log="y"), *rows[1:]]
    assert report.markdown(failed).startswith("There are no ratios")


@pytest.mark.parametrize("top1, is_told", [(0.125, True), (0.75, False)])
def test_a_baseline_that_learned_nothing_is_told(top1, is_told):
    base, *rest = staircase_rows()
    rows = [dataclasses.replace(base, val_top1=top1, other={"classes": [*"0123456789"]}), *rest]
    assert ("hardly better than chance (10.0% with 10 classes)" in report.markdown(rows)) == is_told


def test_the_chart_has_title_panels_labels_and_spread(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    report.chart(staircase_rows(), tmp_path / "x.png")
    (figure,) = drawn
    assert figure.get_size_inches()[0] * 100 == 900
    assert figure.get_suptitle() == "1x NVIDIA X1: resnet50, 224 px, imagenet, batch 256"
    steps, cells = figure.axes
    assert [axis.get_title("left").split(",")[0] for axis in figure.axes] == [
        "Technique after technique",
        "Processes",
    ]
    assert not steps.get_legend()
    assert [text.get_text() for text in steps.texts] == [
        "1.00x  top-1 75.0%",
        "0.90x ±0.21  top-1 75.0%  left out",
        "2.00x ±0.48  top-1 75.0%  kept",
        "2.30x ±0.55  top-1 75.0%  kept",
    ]
    assert [text.get_text().split("top-1 75.0%")[1] for text in cells.texts] == ["", ""]
    assert [label.get_text() for label in cells.get_yticklabels()] == ["baseline", "single +amp"]
    ends = [sorted(x for x, _ in lines.get_segments()[0]) for lines in steps.collections]
    assert ends[0] == pytest.approx([100, 110]) and ends[3] == pytest.approx([230, 253])


def test_a_page_for_each_folder_and_an_index(root):
    pages = report.pages()
    index = pages[root / "results" / "README.md"]
    place, work = "1x NVIDIA X1", "resnet50, 224 px, imagenet, batch 256"
    assert index.splitlines()[6:] == [
        f"| [one](one/README.md) | {place} | {work} | amp fused: 2.30x ±0.55 | 2026-11-24 |",
        f"| [two](two/README.md) | {place} | pairs, batch 8 | loader_DALI: 9.00x loader cold, "
        "9.00x loader warm, limited by CPU | 2026-11-24 |",
    ]
    assert pages[root / "results" / "one" / "README.md"].startswith(
        f"# {place}: {work}\n\n![bars of images/s](running.png)\n\n| staircase |"
    )
    assert (
        "- loader_DALI is limited by **CPU**: all cores busy."
        in pages[root / "results" / "two" / "README.md"]
    )


def test_a_kind_of_record_is_a_file_in_benchmarks(root, monkeypatch):
    """Its page, its line of the index and its table come from the two functions of that file."""
    (root / "benchmarks").mkdir()
    (root / "benchmarks" / "toy.py").write_text(
        'def markdown(record):\n    return f"Of a toy.\\n\\n| {record} |\\n|---|\\n\\nMore.\\n"\n'
        'def shows(record):\n    return "here", "a toy", "nothing", "2026-11-24"\n'
    )
    monkeypatch.syspath_prepend(root / "benchmarks")
    for name in ("toy", "unknown"):
        (root / "results" / name).mkdir()
        (root / "results" / name / f"{name}.json").write_text("7")
    (root / "README.md").write_text("<!-- table toy -->\n<!-- /table toy -->\n")
    pages = report.pages()
    assert pages[root / "results" / "toy" / "README.md"] == (
        "# here: a toy\n\nOf a toy.\n\n| 7 |\n|---|\n\nMore.\n"
    )
    assert pages[root / "README.md"] == ("<!-- table toy -->\n| 7 |\n|---|\n<!-- /table toy -->\n")
    index = pages[root / "results" / "README.md"]
    assert "| [toy](toy/README.md) | here | a toy | nothing | 2026-11-24 |" in index
    assert "unknown" not in index and "toy" not in report.results()


def test_marked_parts_of_pages_are_made_anew(root):
    pages = report.pages()
    assert (
        "| [train_amp.py](../src/train_amp.py) | 1 | 3 | 4 | `--amp_dtype` |"
        in pages[root / "docs" / "a.md"]
    )
    text = pages[root / "README.md"]
    assert "stale words" not in text and text.count("text\n") == 4
    assert '```diff\n@@ line 3 @@\n+# new #\n+# why\n+add("--amp_dtype")\n```' in text
    title = "[resnet50, 224 px, imagenet, batch 256, 1x NVIDIA X1](results/one/README.md)"
    assert f"| technique | {title} | {title} |" in text
    assert (
        "| [fused](src/train_fused.py): what it is | **1.15x** | **1.15x** |\n"
        "| [amp](src/train_amp.py): what it is | **2.00x** | **2.00x** |\n"
        "| [DALI](src/train_DALI.py): what it is |  |  |\n"
    ) in text  # it did not end well
    assert "| +amp | 200 | 2.00x ±" in text
    assert "| loader_DALI | warm | 90 (90 to 99) | 9.00x |" in text
    (root / "README.md").write_text(text)
    assert report.pages()[root / "README.md"] == text
    # a technique of a record that is no longer there
    (root / "docs" / "techniques.md").write_text("### train_amp.py: what it is\n")
    assert "train_fused.py" not in report.pages()[root / "README.md"]


def test_each_folder_of_results_holds_one_record_without_paths_of_the_machine():
    paths = [path for path in (ROOT / "results").glob("*/*.json") if report.functions(path.stem)]
    assert sorted(path.parent.name for path in paths) == sorted(report.all_records())
    for path in paths:
        assert str(ROOT) not in path.read_text(), path


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "results").glob("*/*.json")) if path.stem in records.KINDS],
    ids=lambda path: path.parent.name,
)
def test_a_record_is_read_and_written_without_a_loss(path, tmp_path):
    records.write(records.read(path), tmp_path / path.name)
    assert json.loads((tmp_path / path.name).read_text()) == json.loads(path.read_text())
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_verdict_is_one_of_those_that_are_there():
    row = good(100, verdict="ran once", on=[], kept=True)
    assert row.verdict is Verdict.RAN_ONCE and row.written()["verdict"] == "ran once"
    assert report.verdict(row) == "kept, ran once"
    with pytest.raises(ValueError, match="'pays' is not a valid Verdict"):
        good(100, verdict="pays")


@pytest.mark.parametrize("name", report.results())
def test_rows_of_a_record_hold_together(name):
    kind, rows = report.results()[name]
    rows = [row for row in rows if row.status == "ok"]
    assert rows and all(row.machine["gpu"] and row.date and row.command for row in rows)
    if kind == "running":  # all runs had the same options, and so the same global batch
        options = [
            {key: value for key, value in row.options.items() if key in rows[0].options}
            for row in rows
        ]
        assert all(each == options[0] for each in options)
