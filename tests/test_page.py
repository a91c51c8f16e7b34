"""The site that tools/site.py builds: its pages and links, and the page in a headless browser."""

import functools
import html.parser
import http.server
import itertools
import os
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import compose
from helpers import MACHINE, ROOT, SRC, TECHNIQUES, run_forked, shared
from records import Loading
from runs import module_of
from test_compose import hash_of, sets_joined
from test_whatif_report import FACTS
from whatif.search import kind
from whatif.techniques import NAMES, reasons

FILES = "https://host/owner/name/blob/main"
SITE = module_of(ROOT / "tools" / "site.py")
AXE = Path(os.environ.get("AXE", ROOT / "node_modules" / "axe-core" / "axe.min.js"))
HASHES = """async ([family, sets]) => Promise.all(sets.map(async (set) => {
  const bytes = new TextEncoder().encode(textOf(join(family, set)));
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return [...hash].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}))"""

SHIFTS = """() => new Promise((resolve) => {
  let sum = 0;
  new PerformanceObserver((list) => list.getEntries().forEach((entry) => { sum += entry.value; }))
    .observe({ type: "layout-shift", buffered: true });
  requestAnimationFrame(() => setTimeout(() => resolve(sum), 50));
})"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the site, which takes seconds to build."""
    return shared(tmp_path_factory, "site", build)


def build(folder):
    """Build the site with the command of the workflow."""
    workflow = (ROOT / ".github" / "workflows" / "page.yml").read_text()
    words = re.search(r"python (tools/site.py --files .*)", workflow)[1].split()
    done = run_forked(*words[:-1], FILES, "--into", folder, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"{folder / 'index.html'}\n"), done.stderr


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    with playwright.sync_playwright() as started:
        paths = [
            *map(shutil.which, ("chromium", "chromium-browser", "google-chrome")),
            started.chromium.executable_path,
        ]
        path = next((path for path in paths if path and Path(path).exists()), None)
        if not path:
            pytest.skip("needs a browser: apt-get install chromium")
        browser = started.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


class Tab:
    """A page of the browser that notes errors, and what it loads from elsewhere than `url`."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(viewport=dict(width=1280, height=900), **options)
        self.page, self.url, self.problems = self.context.new_page(), "about:blank", []
        note = self.problems.append
        self.page.on("console", lambda message: note(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: note(str(error)))
        self.page.on("requestfailed", lambda request: note(request.url))
        self.page.on("request", self.check)

    def check(self, request):
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.problems.append(request.url)


@pytest.fixture(scope="module")
def tab(browser):
    """The page that most tests open one after the other: a new one takes twice as long."""
    return Tab(browser)


@pytest.fixture
def visit(browser, tab, site):
    """Return a function that opens the page; no page may report an error or load from elsewhere."""
    others = []

    def visit(address="", at=site, size=(1280, 900), **options):
        if options:
            others.append(Tab(browser, **options))
        used = others[-1] if options else tab
        used.page.goto("about:blank")  # so that the page is new even if its address was the same
        used.page.set_viewport_size(dict(width=size[0], height=size[1]))
        used.url = at if isinstance(at, str) else at.as_uri()
        path = address if ".html" in address else f"index.html{address}"
        used.page.goto(f"{used.url}/{path}")
        return used.page

    yield visit
    tab.page.goto("about:blank")
    problems = [each for used in (tab, *others) for each in used.problems]
    tab.problems.clear()
    for used in others:
        used.context.close()
    assert problems == []


def script(page):
    """Return the text of the script that the page shows and gives."""
    return page.evaluate("textOf(join(state.family, state.chosen))")


def chosen(page):
    """Return the switches that are on, as the page shows them."""
    return page.eval_on_selector_all("#switches input:checked", "all => all.map(i => i.value)")


def address(page):
    return page.evaluate("location.hash")


def tick(page, name):
    page.locator(f"#switches input[value='{name}']").click()


# ------------------------------------------------------------------------ without a browser
class Parts(html.parser.HTMLParser):
    """The ids, links and tags of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.tags = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("href", "src"):
                self.links.append(value)


def test_every_link_of_the_site_leads_somewhere(site):
    """Within the site to a page and section, else to a file of the repository."""
    pages = {path: Parts(path.read_text()) for path in site.rglob("*.html")}
    for path, parts in pages.items():
        assert len(parts.ids) == len({*parts.ids}), path
        for target in parts.links:
            if target.startswith(FILES + "/"):
                name = target.removeprefix(FILES + "/").partition("#")[0]
                assert (ROOT / name).exists() or name.startswith("../../actions/"), target
            elif not re.match(r"\w+:", target):
                name, _, section = target.partition("#")
                file = (path.parent / name).resolve() if name else path
                assert file.is_relative_to(site) and file.is_file(), (path, target)
                assert not section or section in pages[file].ids, (path, target)


def test_each_markdown_file_is_a_page(site):
    for name in ("README", "docs/whatif", "docs/techniques", "results/h100-first-run/README"):
        text, source = (site / f"{name}.html").read_text(), (ROOT / f"{name}.md").read_text()
        assert {"h1", "table", "p", "nav"} <= Parts(text).tags, name
        assert text.count("<table>") == len(re.findall(r"^\|[-|: ]+\|$", source, re.M)), name
        assert text.count("<pre ") == source.count("\n```") / 2, name
        assert f"<title>{source.splitlines()[0][2:].split(' [')[0]}</title>" in text
    assert {path.stem for path in site.glob("docs/*.html")} == {
        path.stem for path in ROOT.glob("docs/*.md")
    }


def test_the_site_is_built_with_the_command_of_the_workflow(site, tmp_path):
    """The command has built `site`; a second time all is the same."""
    SITE.build(tmp_path, FILES)
    built = {path.relative_to(site) for path in site.rglob("*.*")}
    assert built == {path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")}
    for path in built:
        assert (tmp_path / path).read_bytes() == (site / path).read_bytes(), path


def test_the_page_is_small_and_loads_nothing_from_elsewhere(site):
    files = [site / name for name in ("index.html", "page.js", "page.css", "data.js")]
    assert sum(path.stat().st_size for path in files) < 400_000
    for path in files[:3]:
        loaded = re.sub(r'<a href="[^"]*"', "", path.read_text())
        assert not re.search(r"https?://|@import|fetch\(|import\(", loaded), path
    for path in SRC.glob("*.py"):
        assert f'<a href="{FILES}/src/{path.name}">' in files[0].read_text()


# ------------------------------------------------------------------------ advice
def answers():
    """Return {answer: (techniques to take, techniques to leave)} of the page's questions."""
    text = (SITE.SOURCES / "index.html").read_text()
    found = re.findall(r"<option([^>]*)>([^<]*)</option>", text)
    return {
        " ".join(answer.split()): tuple(
            (re.findall(rf'data-{key}="(.*?)"', words) or [""])[0].split()
            for key in ("take", "leave")
        )
        for words, answer in found
    }


def test_each_technique_that_an_answer_names_has_its_reason_in_the_guide():
    told = SITE.sections("train")
    assert len(answers()) > 9
    for take, leave in answers().values():
        assert all(told[f"train_{name}"]["pays"] for name in take)
        assert all(told[f"train_{name}"]["pays_not"] for name in leave)


def test_the_answers_take_all_that_the_table_of_the_guide_names():
    guide = (ROOT / SITE.GUIDES["train"]).read_text()
    table = re.search(r"^\| training is held back by .*?\n\n", guide, re.M | re.S)[0]
    named = {name for name in TECHNIQUES if re.search(rf"\b{name}\b", table)}
    taken = {name for take, _ in answers().values() for name in take}
    assert len(named) > 5 and named <= taken


@pytest.mark.parametrize(
    "answer, facts",
    [
        ("mostly convolutions (ResNet)", dict(seen=["image", "convolution"])),
        ("mostly matrix products", dict(seen=[])),
        ("none", dict(device="cpu")),
    ],
    ids=["convolutions", "products", "no GPU"],
)
def test_the_answers_agree_with_whatif(answer, facts):
    """What an answer takes is what whatif would try; what it leaves has a form that whatif refuses.

    whatif tries amp bfloat16 on a CPU, and not float16.
    """
    take, leave = answers()[answer]
    facts = FACTS | dict(seen=[], optimizers=[dict(can_fuse=True, fused=False)]) | facts
    refused = {kind(name) for name in NAMES if reasons(facts, [name])}
    assert not {*take} & refused and {*leave} <= refused


# ------------------------------------------------------------------------ joining
@functools.cache
def merged(techniques):
    """Return the text that compose.sh makes: join() without merging what it has merged before."""
    if not techniques:
        return compose.script("train")
    text, conflicts = compose.merge(
        merged(techniques[:-1]),
        compose.script("train"),
        compose.script(f"train_{techniques[-1]}"),
        techniques[-1],
    )
    assert not conflicts
    return text


def test_every_set_is_the_script_of_compose_sh(visit, tmp_path_factory):
    choices = [[[], *([name] for name in choice)] for choice in compose.choices(TECHNIQUES)]
    sets = [tuple(sorted(sum(picked, []))) for picked in itertools.product(*choices)]
    assert len(set(sets)) == 3 * 4 * 3 * 2 ** (len(TECHNIQUES) - 7)
    known = sets_joined(tmp_path_factory) | {"": dict(hash=hash_of(compose.script("train")))}
    assert known[" ".join(sets[-1])]["hash"] == hash_of(compose.join(sets[-1]))
    hashes = visit().evaluate(HASHES, ["train", sets])
    assert hashes == [known[" ".join(each)]["hash"] for each in sets]


def test_the_loaders_are_those_of_src(visit):
    names = [[], *([path.stem.split("_")[1]] for path in SRC.glob("loader_*.py"))]
    texts = [(SRC / f"{'_'.join(['loader', *name])}.py").read_text() for name in names]
    assert visit().evaluate(HASHES, ["loader", names]) == [hash_of(text) for text in texts]


def test_the_shown_script_has_all_lines_and_the_diff_leads_from_one_to_the_other(visit):
    page = visit("#train=DDP,amp,cache")
    page.uncheck("#fold")
    lines = "(root) => [...root.querySelectorAll('.row code')].map((code) => code.textContent)"
    shown = page.eval_on_selector("#code", lines)
    assert [line.rstrip() for line in shown] == merged(("DDP", "amp", "cache")).splitlines()
    for old, new in ([(), ("DDP", "amp")], [("DALI", "DP"), ("DDP", "LMDB", "amp")]):
        rows = page.evaluate(
            "([old, now]) => diff(join('train', old), join('train', now))", [old, new]
        )
        for sign, techniques in (("+", old), ("-", new)):
            text = "\n".join(row["text"] for row in rows if row["sign"] != sign)
            assert text == merged(techniques)


# ------------------------------------------------------------------------ choose, see
def test_switches_exclude_each_other_and_change_script_command_and_address(visit):
    page = visit("#train=")
    assert chosen(page) == ["", "", ""] and script(page) == merged(())
    for name in ("amp", "DALI", "cache", "DDP", "DP", "compile"):
        tick(page, name)
    assert chosen(page) == ["amp", "compile", "cache", "DP"]
    assert script(page) == merged(("DP", "amp", "cache", "compile"))
    assert "./compose.sh DP amp cache compile > my_train.py" in page.inner_text("#commands")
    assert address(page).startswith("#train=DP,amp,cache,compile&at=")
    tick(page, "DDP")
    assert "torchrun --standalone --nproc_per_node=gpu my_train.py" in page.inner_text("#commands")
    tick(page, "LMDB")
    assert re.search(r"^pip install .* lmdb$", page.inner_text("#commands"), re.M)
    page.click("#clear")
    assert chosen(page) == ["", "", ""]
    assert "cp src/train.py my_train.py" in page.inner_text("#commands")


def test_the_questions_set_the_switches_and_say_why(visit):
    page = visit()
    page.click("#advice summary")
    for question, answer in (
        ("GPUs", "several"),
        ("images", "a slow disk"),
        ("model", "mostly convolutions (ResNet)"),
    ):
        page.locator("#questions label", has_text=question).locator("select").select_option(answer)
    assert chosen(page) == ["amp", "channels_last", "compile", "fused", "LMDB", "DDP"]
    told = page.locator("#reasons li").all_inner_texts()
    assert len(told) == 6
    assert told[0] == f"DDP: {SITE.sections('train')['train_DDP']['pays']}"
    page.locator("#questions select").first.select_option("none")
    assert "DDP" not in chosen(page) and "amp" not in chosen(page)
    assert "not amp: Does not pay where" in page.inner_text("#reasons")


def test_blocks_are_coloured_listed_and_reached_and_the_rest_folds(visit):
    page = visit("#train=DDP,amp")
    texts = [(SRC / f"train_{name}.py").read_text() for name in ("DDP", "amp")]
    blocks = page.locator("#blocks button")
    assert blocks.count() == sum(text.count("# new #") for text in texts)
    told = re.findall(r"# new #\n *# (.*)", merged(("DDP", "amp")))
    assert [text.split("\n")[-1] for text in blocks.all_inner_texts()] == told
    assert page.locator(".row.new .tag").all_inner_texts() == [
        text.split(" ")[0] for text in blocks.all_inner_texts()
    ]
    colours = page.eval_on_selector_all(".row.new", "rows => rows.map(row => row.style.cssText)")
    assert len(set(colours)) == 2
    blocks.last.click()
    assert page.locator(".row.new", has_text=told[-1]).is_visible()
    assert page.evaluate("document.querySelector('#code').scrollTop") > 0
    page.wait_for_selector("#blocks li:last-child [aria-current=true]")
    row = page.locator(".row", has_text="import argparse")
    assert not row.is_visible()
    page.locator(".fold").first.click()
    assert row.is_visible()
    page.uncheck("#fold")
    assert page.locator(".fold").count() == 0
    assert page.locator("#code .row").count() == len(merged(("DDP", "amp")).splitlines())


def test_two_choices_are_compared(visit):
    page = visit("#train=DALI")
    page.click("#pin")
    assert page.locator("#code ins, #code del").count() == 0
    tick(page, "cache")
    tick(page, "amp")
    assert address(page).startswith("#train=amp,cache&from=DALI&view=diff&at=")
    assert page.inner_text("#summary").startswith("DALI to amp + cache: ")
    names = page.locator("#blocks b").all_inner_texts()
    assert set(names) == {"without DALI", "cache", "amp"}
    page.select_option("#from", "")
    assert page.inner_text("#summary").startswith("baseline to amp + cache: ")
    assert set(page.locator("#blocks b").all_inner_texts()) == {"cache", "amp"}


# ------------------------------------------------------------------------ gain
def shown_bars(page):
    return [" ".join(text.split()) for text in page.locator(".bar").all_inner_texts()]


@pytest.fixture
def site_of(tmp_path, monkeypatch):
    """Return a function that builds a site that shows these results."""

    def site_of(results):
        monkeypatch.setattr(SITE.report, "results", lambda: results)
        SITE.build(tmp_path, FILES)
        return tmp_path

    return site_of


def measured():
    """Return (folder, rows that the page shows) of a record of training with a steady baseline."""
    return next(
        (folder, [row for row in rows if {*row.techniques} <= {*TECHNIQUES}])
        for folder, (kind, rows) in SITE.report.results().items()
        if kind == "running" and not SITE.report.warning(rows)
    )


def test_the_figures_are_those_of_the_record(visit):
    folder, record = measured()
    row = next(row for row in record[::-1] if row.status == "ok" and row.techniques)
    page = visit(f"#train={','.join(row.techniques)}&at={folder}")
    assert page.inner_text("#found") == "Your choice was measured with this workload."
    (mine,) = [bar for bar in shown_bars(page) if "your choice" in bar]
    speeds, runs = SITE.report.speeds(row), len(row.runs)
    for figure in (
        f"{row.images_per_second:,.0f} images/s",
        f"top-1 {row.val_top1:.2%}",
        SITE.report.ratio(row, record[0]),
        f"{min(speeds):,.0f} to {max(speeds):,.0f}; {runs} run"
        f"{'s' * (runs > 1)}, {len(speeds)} epochs",
    ):
        assert figure in mine
    assert page.locator("#gain a").first.get_attribute("href").endswith(f"{folder}/running.json")
    assert row.command in page.locator("#gain details").text_content()


def test_a_set_that_was_not_measured_has_no_figure(visit):
    folder, record = measured()
    row = next(row for row in record[::-1] if row.status == "ok" and row.techniques)
    page = visit(f"#train={','.join(row.techniques)},profile&at={folder}")
    assert "was not measured with this workload" in page.inner_text("#found")
    (nearest,) = [bar for bar in shown_bars(page) if "nearest" in bar]
    assert nearest.startswith(f"{' + '.join(row.techniques)} nearest: without profile")
    assert "your choice" not in page.inner_text(".bars")


def loading_rows():
    """Rows of loading.sh: a baseline of 100 images/s, DALI with 900; LMDB failed."""
    rows = [
        Loading(
            loader=loader,
            cache=cache,
            machine=MACHINE,
            date="2026-11-24",
            command="./loading.sh",
            options=dict(dataset="/data/photos", batch_size=64),
            images_per_second=speed,
            megabytes_per_second=speed / 10,
            epochs=[dict(images_per_second=each) for each in (1, 0.9 * speed, speed)],
        )
        for loader, speed in (("loader", 100), ("loader_DALI", 900))
        for cache in ("cold", "warm")
    ]
    rows[3].update(bottleneck="GPU", evidence="its JPEG engine is busy")
    return [
        *rows,
        replace(rows[0], loader="loader_LMDB", status="fail", error="no room", log="x.log"),
    ]


@pytest.mark.parametrize("there", [True, False], ids=["with_a_table", "without"])
def test_loaders_and_their_tables(visit, site_of, there):
    results = {"a-training": ("running", measured()[1])}
    if there:
        results["a-loading"] = "loading", loading_rows()
    page = visit(at=site_of(results))
    page.locator("input[value=loader]").check()
    tick(page, "DALI")
    assert script(page) == (SRC / "loader_DALI.py").read_text()
    assert "cp src/loader_DALI.py my_loader.py" in page.inner_text("#commands")
    if not there:
        assert "No table of this kind" in page.inner_text("#found") and not shown_bars(page)
        return
    assert address(page) == "#loader=DALI&at=a-loading"
    bars = shown_bars(page)
    assert bars[:2] == [
        f"baseline, {cache} 100 images/s 1.00x 10.0 MB/s 90 to 100; 1 run, 2 epochs"
        for cache in ("cold", "warm")
    ]
    assert bars[2].startswith("DALI, cold your choice") and "9.00x 90.0 MB/s" in bars[2]
    assert "loader_DALI is limited by GPU: its JPEG engine is busy." in page.inner_text("#gain")
    tick(page, "LMDB")
    assert "no figure: FAIL: no room" in " ".join(shown_bars(page))


def test_a_baseline_that_moved_is_told_and_a_failed_run_has_no_figure(visit, site_of):
    _, rows = measured()
    rows[0].runs[-1]["images_per_second"] *= 2
    rows.append(replace(rows[1], techniques=["profile"], status="skip", error="no time"))
    rows.append(replace(rows[1], techniques=["gone"], images_per_second=1e9))
    page = visit("#train=profile", site_of({"moved": ("running", rows)}))
    (mine,) = [bar for bar in shown_bars(page) if "your choice" in bar]
    assert mine.endswith("no figure: SKIP: no time") and "gone" not in page.inner_text(".bars")
    why = SITE.report.warning(rows).replace("**", "")
    assert why and page.locator(".warning").inner_text() == why
    assert re.search(r"\d\.\d\dx ±\d", page.inner_text(".bars"))


# ------------------------------------------------------------------------ take
def test_copy_download_and_address(visit):
    folder = [each for each in SITE.records(FILES) if each["family"] == "train"][-1]["folder"]
    page = visit(
        f"#train=DDP,amp&from=cache&view=diff&at={folder}",
        permissions=["clipboard-read", "clipboard-write"],
    )
    text = merged(("DDP", "amp"))
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == "my_train.py"
    assert Path(download.value.path()).read_bytes() == text.encode()
    for button, copied in (
        ("#copy-script", text),
        ("#commands button >> nth=0", "./compose.sh DDP amp > my_train.py"),
    ):
        page.click(button)
        page.wait_for_function("document.querySelector('#done').textContent.startsWith('Copied')")
        assert page.evaluate("navigator.clipboard.readText()") == copied
        page.evaluate("document.querySelector('#done').textContent = ''")
    page.click("#copy-link")
    page.wait_for_function("document.querySelector('#done').textContent")
    other = visit("#" + page.evaluate("navigator.clipboard.readText()").partition("#")[2])
    for each in (page, other):
        assert each.evaluate("[state.chosen, state.from, state.view, state.record.folder]") == [
            ["DDP", "amp"],
            ["cache"],
            "diff",
            folder,
        ]
    # an address that is typed, with names that do not exist or exclude each other
    other.evaluate("location.hash = 'train=DP,DDP,nothing,<b>,fused&at=nowhere&view=%'")
    other.wait_for_function("state.chosen.includes('fused')")
    assert script(other) in (merged(("DDP", "fused")), merged(("DP", "fused")))


def test_from_a_web_host_without_https(visit, site):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        server.RequestHandlerClass.func.log_message = lambda *_: None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = visit("#train=amp", at=f"http://localhost:{server.server_port}")
        # without https a browser has no navigator.clipboard
        page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        page.click("#copy-script")
        page.wait_for_function("document.querySelector('#done').textContent.startsWith('Copied')")
        page.evaluate("document.body.append(make('textarea', { id: 'pasted' }))")
        page.focus("#pasted")
        page.keyboard.press("Control+V")
        assert page.input_value("#pasted") == merged(("amp",)) == script(page)
        server.shutdown()


# ------------------------------------------------------------------------ for everybody
def test_all_by_keyboard_with_a_visible_focus(visit):
    page = visit("#train=")
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("""() => {
          const it = document.activeElement, style = getComputedStyle(it);
          return [it.id || it.value || (it.type === "radio" ? "none" : it.textContent.trim()),
                  style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
        }""")
        )
        if reached[-1][0] == "amp" and "amp" not in chosen(page):
            page.keyboard.press("Space")
        if reached[-1][0] == "none" and "DALI" not in chosen(page):
            page.keyboard.press("ArrowDown")
    names = [name for name, _ in reached]
    for name in (
        "train",
        "amp",
        "profile",
        "clear",
        "record",
        "download",
        "copy-link",
        "script",
        "pin",
        "fold",
        "code",
    ):
        assert name in names, name
    assert all(is_visible for name, is_visible in reached if name != names[-1])
    assert {"amp", "DALI"} <= set(chosen(page))
    assert script(page) == merged(tuple(sorted(filter(None, chosen(page)))))


@pytest.mark.parametrize("size", [(360, 740), (1280, 900)], ids=lambda size: f"{size[0]}px")
def test_both_colour_schemes_and_sizes(visit, size):
    page = visit("#train=DDP,amp", size=size)
    assert page.evaluate(SHIFTS) < 0.01
    for scheme in "dark", "light":
        page.emulate_media(color_scheme=scheme)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") == (scheme == "light")
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
    too_small = page.evaluate("""[...document.querySelectorAll("button, select, summary, input")]
      .map((it) => (it.closest("label") ?? it).getBoundingClientRect())
      .filter((box) => box.height && box.height < 22).length""")
    assert too_small == 0


@pytest.mark.parametrize(
    "name", ["docs/whatif", "docs/techniques", "results/h100-first-run/README"]
)
def test_pages_of_text_fit_the_window(visit, site, name):
    page = visit(f"{name}.html", size=(360, 900))
    for width in 360, 1280:
        page.set_viewport_size(dict(width=width, height=900))
        assert page.evaluate("document.documentElement.scrollWidth") == width
    page.click("nav a >> text=All scripts")
    page.wait_for_load_state()
    assert page.url == f"{site.as_uri()}/index.html#scripts"


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: npm install axe-core")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize(
    "address",
    [
        "",
        "#loader=DALI",
        "#train=DALI&from=DDP,cache&view=diff",
        "docs/loading.html",
        "docs/whatif.html",
    ],
)
def test_axe_finds_nothing(visit, address, width, scheme):
    page = visit(address, size=(width, 900), color_scheme=scheme)
    page.locator("summary").evaluate_all("all => all.forEach(it => { it.parentNode.open = true; })")
    page.add_script_tag(path=AXE)
    found = page.evaluate("axe.run({ preload: false })")
    assert [(each["id"], each["impact"]) for each in found["violations"]] == []


def test_without_javascript_it_is_a_list_of_scripts(visit):
    page = visit(java_script_enabled=False)
    assert page.locator("#scripts li").count() == len(list(SRC.glob("*.py")))
    assert page.locator("#scripts").is_visible() and not page.locator("#choose").is_visible()
    assert "Without JavaScript this page is a list" in page.inner_text("header")
