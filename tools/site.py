"""Write the data of the page, docs/data.js, and the list of scripts in docs/index.html.

    python tools/site.py

The data comes from src/, results/ and the titles in docs/*.md. The page joins techniques by
applying the changes of each to the baseline, as compose.sh does; a test compares all sets.
"""

import difflib
import html
import json
import re

import compose
import report

ROOT = report.ROOT
GUIDES = {"train": "techniques.md", "loader": "loading.md"}  # whose sections describe the scripts


def hunks(base, variant):
    """Return [[start, end, lines]]: `lines` take the place of base[start:end]."""
    matcher = difflib.SequenceMatcher(None, base, variant, autojunk=False)
    return [
        [start, end, variant[first:last]]
        for tag, start, end, first, last in matcher.get_opcodes()
        if tag != "equal"
    ]


def sections(family):
    """Return {script's name: its heading, title, section in the guide and launcher}."""
    guide = (ROOT / "docs" / GUIDES[family]).read_text()
    found, group = {}, ""
    for title, text in re.findall(r"^##+ ([^\n]*)\n(.*?)(?=^##+ |\Z)", guide, re.M | re.S):
        if not (parts := re.fullmatch(rf"({family}\w*)\.py: (.*)", title)):
            group = title
            continue
        launcher = re.search(rf"^(\S.*)src/{family}", text, re.M)
        section = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        found[parts[1]] = dict(
            group=group,
            title=parts[2],
            guide=f"{GUIDES[family]}#{section}",
            launcher=launcher[1] if launcher else "python ",
        )
    return found


def family_of(family):
    """Return what the page has to know about src/<family>*.py."""
    described = sections(family)
    base = compose.script(family).split("\n")
    variants = {}
    for path in sorted((ROOT / "src").glob(f"{family}_*.py")):
        changes = hunks(base, compose.script(path.stem).split("\n"))
        added = sum(bool(line.strip()) for *_, lines in changes for line in lines)
        variants[path.stem.removeprefix(f"{family}_")] = dict(
            described[path.stem], added=added, hunks=changes
        )
    order = [name.removeprefix(f"{family}_") for name in described if name != family]
    choices = compose.choices(order) if family == "train" else [order]
    return dict(base=base, variants=variants, choices=choices)


def measured(family, row, rows):
    """Return a row of a record as the page shows it; speeds are in images/s.

    The ratio of a training row is the table's, to the first of the record's `rows`.
    """
    trains = family == "train"
    about = dict(
        techniques=row.techniques if trains else row.loader.split("_", 1)[1:],
        note="" if trains else row.cache,
    )
    if row.status != "ok":
        return about | dict(problem=report.problem(row))
    speeds = report.speeds(row)
    value = f"top-1 {row.val_top1:.2%}" if trains else f"{row.megabytes_per_second:,.1f} MB/s"
    return about | dict(
        speed=row.images_per_second,
        value=value,
        least=min(speeds),
        most=max(speeds),
        epochs=len(speeds),
        runs=len(report.runs(row)),
        ratio=report.to_baseline(row, rows) if trains else None,
    )


def records():
    """Return the records in results/; those with a steady baseline come first."""
    found = []
    for folder, (kind, rows) in report.results().items():
        family = {"running": "train", "loading": "loader"}[kind]
        warning = report.warning(rows).replace("**", "") if family == "train" else ""
        limits = [
            f"{row.loader} is limited by {row.bottleneck}: {row.evidence}."
            for row in rows
            if family == "loader" and row.bottleneck
        ]
        limits += [row.stopped for row in rows if row.stopped is not None]
        found.append(
            dict(
                folder=folder,
                family=family,
                file=f"{kind}.json",
                warning=warning,
                limits=limits,
                title=f"{report.workload(rows[0])}; {report.place(rows[0])}",
                setting=report.setting(rows[0]),
                rows=[
                    measured(family, row, rows)
                    for row in rows  # without techniques that are gone
                    if kind == "loading" or {*row.techniques} <= {*compose.TECHNIQUES}
                ],
            )
        )
    return sorted(found, key=lambda record: bool(record["warning"]))


def listed():
    """Return the list of scripts for docs/index.html, which needs no JavaScript."""
    lines = []
    for family in GUIDES:
        described = {family: dict(title="the baseline", guide="techniques.md")} | sections(family)
        lines += [
            f'<li><a href="../src/{stem}.py">{stem}.py</a>: {html.escape(about["title"])} '
            f'(<a href="{about["guide"]}">about {stem}</a>)</li>'
            for stem, about in described.items()
        ]
    return "\n".join(["<ul>", *lines, "</ul>"])


def pages():
    """Return {path: text} of what this script writes."""
    families = {family: family_of(family) for family in GUIDES}
    data = json.dumps(dict(families=families, records=records()), indent=0)
    index = ROOT / "docs" / "index.html"
    text = re.sub(
        r"(<!-- scripts -->\n).*?(<!-- /scripts -->)",
        lambda found: f"{found[1]}{listed()}\n{found[2]}",
        index.read_text(),
        flags=re.S,
    )
    return {
        index: text,
        index.with_name(
            "data.js"
        ): f"// made by `python tools/site.py` from src/ and results/\nconst DATA = {data};\n",
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
