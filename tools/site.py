"""Make the page and the pages of docs/ as a site that opens from a folder or a web host.

    python tools/site.py          # needs markdown-it-py; then open site/index.html

The page's sources are in tools/page. Its data come from src/, results/ and docs/*.md. It joins
techniques by applying the changes of each to the baseline, as compose.sh does; a test compares all
sets. Markdown files become HTML at the same path.
"""

import argparse
import difflib
import html
import json
import posixpath
import re
import shutil
from pathlib import Path

import markdown_it

import compose
import report

ROOT = report.ROOT
SOURCES = ROOT / "tools" / "page"
GUIDES = {"train": "docs/techniques.md", "loader": "docs/loading.md"}  # they describe the scripts
PAGES = "*.md", "[a-z]*/README.md", "docs/*.md", "results/*/README.md"
WIDE = {  # what may be wider than the window scrolls, also by keyboard
    "<pre>": '<pre tabindex="0">',
    "<table>": '<div class="wide" tabindex="0"><table>',
    "</table>": "</table></div>",
}
PARTS = ".css", ".js", ".html", ".png"  # of the site, beside its pages


def hunks(base, variant):
    """Return [[start, end, lines]]: `lines` take the place of base[start:end]."""
    matcher = difflib.SequenceMatcher(None, base, variant, autojunk=False)
    return [
        [start, end, variant[first:last]]
        for tag, start, end, first, last in matcher.get_opcodes()
        if tag != "equal"
    ]


def slug(title):
    """Return the id that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def sentence(begin, text):
    """Return the first sentence that begins so, without the marks of Markdown; "" if none does."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", " ".join(text.split()))
    found = re.search(rf"(?:{begin})\b.*?\.(?= |$)", plain)
    return found[0] if found else ""


def sections(family):
    """Return {script's name: what the page has to know of its section in the guide}."""
    guide = (ROOT / GUIDES[family]).read_text()
    found, group = {}, ""
    for title, text in re.findall(r"^##+ ([^\n]*)\n(.*?)(?=^##+ |\Z)", guide, re.M | re.S):
        if not (parts := re.fullmatch(rf"({family}\w*)\.py: (.*)", title)):
            group = title
            continue
        launcher = re.search(rf"^(\S.*)src/{family}", text, re.M)
        found[parts[1]] = dict(
            group=group,
            title=parts[2],
            guide=f"{GUIDES[family]}#{slug(title)}",
            launcher=launcher[1] if launcher else "python ",
            pays=sentence("Pays|Can pay", text),
            pays_not=sentence("Does not pay|Does nothing", text),
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
        about = dict(described[path.stem], added=added, hunks=changes)
        about["guide"] = link(about["guide"], "", "")
        variants[path.stem.removeprefix(f"{family}_")] = about
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


def records(files):
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
                record=f"{files}/results/{folder}/{kind}.json",
                tables=f"results/{folder}/README.html",
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
    """Return the list of scripts, which needs no JavaScript."""
    lines = []
    for family in GUIDES:
        described = {family: dict(title="the baseline", guide=GUIDES[family])} | sections(family)
        lines += [
            f'<li><a href="src/{stem}.py">{stem}.py</a>: {html.escape(about["title"])} '
            f'(<a href="{about["guide"]}">about {stem}</a>)</li>'
            for stem, about in described.items()
        ]
    return "\n".join(["<ul>", *lines, "</ul>"])


# ------------------------------------------------------------------------------ pages and links
def link(target, folder, files):
    """Return where a link of a page in `folder` leads on the site.

    Markdown files are pages. What is not on the site is at the address `files`.
    """
    if re.match(r"\w+:|#", target):
        return target
    path, mark, section = target.partition("#")
    if path.endswith(".md"):
        return f"{path[:-3]}.html{mark}{section}"
    if path.endswith(PARTS):
        return target
    return f"{files}/{posixpath.normpath(posixpath.join(folder, path))}{mark}{section}"


def linked(text, page, files):
    """Return HTML of tools/page, whose links start at the root, with its links on a page."""
    up = "../" * page.count("/")

    def moved(found):
        target = found[2] if page == "index.html" else re.sub("^#", "index.html#", found[2])
        target = link(target, "", files)
        return f'{found[1]}="{target if re.match(r"[a-z]+:|#", target) else up + target}"'

    return re.sub(r'\b(href|src)="([^"]*)"', moved, text)


def article(page, files):
    """Return (title, HTML) of a Markdown file."""
    markdown = markdown_it.MarkdownIt("commonmark").enable("table")
    tokens = markdown.parse((ROOT / page).read_text())
    for token, following in zip(tokens, tokens[1:]):
        if token.type == "heading_open":
            token.attrSet("id", slug(following.content))
        for child in token.children or ():
            for name in {"href", "src"} & {*child.attrs}:
                child.attrSet(name, link(child.attrs[name], posixpath.dirname(page), files))
    text = markdown.renderer.render(tokens, markdown.options, {})
    for old, new in WIDE.items():
        text = text.replace(old, new)
    return tokens[1].content.split(" [")[0], text


def build(folder, files):
    """Write the site into a folder; `files` is the address of the repository's files."""
    index, frame = ((SOURCES / name).read_text() for name in ("index.html", "text.html"))
    families = {family: family_of(family) for family in GUIDES}
    data = json.dumps(dict(families=families, records=records(files)))
    texts = {"index.html": linked(index.replace("<!-- scripts -->", listed()), "index.html", files)}
    texts |= {name: (SOURCES / name).read_text() for name in ("page.css", "page.js")}
    texts["data.js"] = f"const DATA = {data};\n"
    nav = re.search(r"<nav.*?</nav>", index, re.S)[0]
    for path in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        page = path.relative_to(ROOT).as_posix()
        title, text = article(page, files)
        around = linked(frame.replace("<!-- nav -->", nav), page, files)
        texts[page.replace(".md", ".html")] = around.replace(
            "<!-- title -->", html.escape(title)
        ).replace("<!-- text -->", text)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for path in [*ROOT.glob("docs/*.png"), *ROOT.glob("results/*/*.png")]:
        shutil.copy(path, folder / path.relative_to(ROOT))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--into", type=Path, default=ROOT / "site", help="folder of the site")
    parser.add_argument("--files", default=ROOT.as_uri(), help="address of the repository's files")
    args = parser.parse_args()
    build(args.into, args.files)
    print(args.into / "index.html")
