"""compose.sh: all sets of techniques join in any order, also into a user's edited copy."""

import ast
import collections
import functools
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import black
import pytest

import compose
import helpers
import layout
from helpers import ROOT, SRC, TECHNIQUES, SmallDisk, replaced, run, shared, tiny, train

# Techniques of which a script can have one: parallel training, and the source of data.
EXCLUSIVE = [("DDP", "DP"), ("DALI", "LMDB", "cache"), ("compile", "graphs")]


def sets_of_techniques():
    """Yield every set but the empty one that has at most one technique of each exclusive group."""
    for count in range(1, len(TECHNIQUES) + 1):
        for chosen in itertools.combinations(TECHNIQUES, count):
            if not any(len(set(group) & set(chosen)) > 1 for group in EXCLUSIVE):
                yield chosen


SETS = list(sets_of_techniques())
PAIRS = [chosen for chosen in SETS if len(chosen) == 2]
KNOWN = {*map(frozenset, SETS)}
WHOLE = [  # nothing can be added to these
    chosen
    for chosen in SETS
    if not any({*chosen, name} in KNOWN for name in {*TECHNIQUES} - {*chosen})
]
FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def joined(text, name):
    """Return `text` with one technique, merged by git itself."""
    path = Path(FOLDER.name) / "current.py"
    path.write_text(text)
    done = subprocess.run(
        ["git", "merge-file", "-q", path, SRC / "train.py", SRC / f"train_{name}.py"]
    )
    assert done.returncode == 0, name
    return path.read_text()


def merged(current, techniques):
    """Return the text `current` with `techniques`, merged one after the other in this order."""
    return functools.reduce(joined, techniques, current)


def hash_of(text):
    return hashlib.sha256(text.encode()).hexdigest()


def sets_joined(tmp_path_factory):
    """Return {"amp cudnn": what its script is like} of all sets, which takes git seconds."""

    def join(path):
        baseline, found = (SRC / "train.py").read_text(), {}
        for chosen in SETS:
            text = merged(baseline, chosen)
            if len(chosen) <= 3 or chosen in WHOLE:  # it takes long
                ast.parse(text)
            found[" ".join(chosen)] = dict(hash=hash_of(text), blocks=text.count("# new #"))
        path.write_text(json.dumps(found))

    return json.loads(shared(tmp_path_factory, "sets.json", join).read_text())


def copy_with(folder, *edits):
    """Write a user's copy of train.py with each (old, new) replaced."""
    return helpers.edited("train", folder, *edits).rename(folder / "mine.py")


def run_compose(*words, **options):
    return run(ROOT / "compose.sh", *words, **options)


def test_the_sets_are_all_of_one_from_each_group():
    assert len(SETS) == 3 * 4 * 3 * 2 ** (len(TECHNIQUES) - 7) - 1
    assert len(WHOLE) == 12


def test_every_set_joins(tmp_path_factory):
    blocks = {name: (SRC / f"train_{name}.py").read_text().count("# new #") for name in TECHNIQUES}
    found = sets_joined(tmp_path_factory)
    assert len(found) == len(SETS)
    for chosen in SETS:
        assert found[" ".join(chosen)]["blocks"] == sum(blocks[name] for name in chosen)


def test_sets_join_in_any_order_into_one_text(tmp_path_factory):
    baseline, orders = (SRC / "train.py").read_text(), random.Random(0)
    found = sets_joined(tmp_path_factory)
    mixed = [orders.sample(chosen, len(chosen)) for chosen in orders.sample(SETS, 40)]
    for order in [*(chosen[::-1] for chosen in [*PAIRS, *WHOLE]), *mixed]:
        text = merged(baseline, order)
        assert hash_of(text) == found[" ".join(sorted(order))]["hash"], order


def test_compose_prints_just_the_merge():
    baseline = (SRC / "train.py").read_text()
    for chosen in (*PAIRS[::5], *WHOLE):
        assert compose.join([*reversed(chosen), chosen[0]]) == merged(baseline, chosen), chosen
    done = run_compose(*reversed(chosen), chosen[0])
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == merged(baseline, chosen)


@pytest.mark.fault("join that is refused")
def test_techniques_of_one_group_are_refused_with_the_reason():
    """Every pair that conflicts is refused, and no other."""
    for one, other in itertools.combinations(TECHNIQUES, 2):
        reason = compose.excluded(one, other)
        assert bool(reason) == any({one, other} <= set(group) for group in EXCLUSIVE), reason
        if not reason:
            continue
        assert f"{one} and {other} exclude each other" in reason
        for name in (one, other):  # the reason quotes both scripts
            comments = re.findall(r"# ([^#\s].*)", (SRC / f"train_{name}.py").read_text())
            assert any(f'{name}: "{comment}"' in reason for comment in comments), reason
        done = run_compose("profile", other, one)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr == f"compose.sh: {reason}\n"


def test_groups_follow_from_the_scripts(project):
    code = "import running; print(running.groups())"
    found = run(sys.executable, "-c", code, cwd=project / "tools")
    assert found.stdout.strip() == str(
        {
            "data": [["DALI", "LMDB", "cache"]],
            "compute": [
                names.split()
                for names in "amp,channels_last,compile graphs,cudnn,fused,progressive".split(",")
            ],
            "parallel": [["DDP", "DP"]],
        }
    ), found.stderr
    # a new technique is one new file
    text = re.sub("# new #\n *# .*", "# new #\n    # mine", (SRC / "train_cudnn.py").read_text())
    (project / "src/train_clip.py").write_text(text)
    (project / "src/train_cudnn.py").unlink()
    assert "['clip']" in run(sys.executable, "-c", code, cwd=project / "tools").stdout
    # two that change the same line are one list of the same group
    (project / "src/train_clap.py").write_text(text.replace("benchmark = True", "benchmark = None"))
    found = run(sys.executable, "-c", code, cwd=project / "tools").stdout
    assert "['clap', 'clip']" in found.partition("'parallel'")[0]
    # one in the place of DP and DDP is a parallel one, whatever it calls
    text = (SRC / "train_DP.py").read_text().replace("DataParallel(", "replicated(")
    (project / "src/train_FSDP.py").write_text(text)
    found = run(sys.executable, "-c", code, cwd=project / "tools").stdout
    assert "'parallel': [['DDP', 'DP', 'FSDP']]" in found
    joined = run(project / "compose.sh", "clip", "amp")
    assert joined.returncode == 0 and "# mine\n" in joined.stdout and "autocast" in joined.stdout


@pytest.mark.fault("join that is refused")
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nothing"],
        ["amp", "nothing"],
        ["a[$(touch x)]"],
        ["../src/train"],
        ["--into"],
        [""],
        ["--into", "no/such/file.py", "amp"],
        ["am*"],
        ["amp", "--verify"],
        ["amp", "--into", "my.py"],
    ],
)
def test_wrong_use(words, tmp_path):
    """One line says why, and nothing is printed, executed or written."""
    done = run_compose(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""
    assert list(tmp_path.iterdir()) == []
    if words == ["nothing"]:
        assert all(name in done.stderr for name in TECHNIQUES)


@pytest.mark.fault("another folder or a link")
def test_from_another_folder_through_a_link_with_a_space(project, tmp_path):
    link = tmp_path / "link.sh"
    link.symlink_to(project / "compose.sh")
    done = run(link, "amp", "cudnn", cwd="/")
    assert done.returncode == 0 and done.stdout == compose.join(["cudnn", "amp"])


def test_it_needs_no_packages(tmp_path):
    """Python and git are enough: -I -S hides all that is installed beside the standard library."""
    done = run(sys.executable, "-I", "-S", ROOT / "tools", "compose", "amp", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == (SRC / "train_amp.py").read_text()


# ---------------------------------------------------------------- into a user's own copy
LAMBDA = """\
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(done + step, args.epochs * steps)
    )
"""
# What people change: {subject: [(text of the baseline, what they write instead)]}.
USUAL_EDITS = {
    "model": [
        ("    channels = 3\n", "    channels = 3  # mine\n"),
        (
            """    if args.model == "conv11":
        model = conv11(args.width, len(classes))
""",
            """    if args.model == "mine":
        model = Mine(len(classes))
    elif args.model == "conv11":
        model = conv11(args.width, len(classes))
""",
        ),
        (
            """def conv11(width, classes):""",
            """class Mine(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.head = nn.Linear(32, classes)

    def forward(self, images):
        return self.head(self.features(images).flatten(1))


def conv11(width, classes):""",
        ),
        ('default="conv11"', 'default="mine"'),
    ],
    "data": [
        (
            """    val_transform = transforms.Compose(
        [transforms.Resize(val_size), transforms.CenterCrop(val_size), transforms.PILToTensor()]
    )
""",
            """    val_transform = transforms.Compose(
        [transforms.Resize((val_size, val_size)), transforms.PILToTensor()]
    )
""",
        ),
        (
            """    train_transform = transforms.Compose([*crop, transforms.PILToTensor()])
""",
            """    train_transform = transforms.Compose([*crop, transforms.RandomRotation(5),
                                          transforms.PILToTensor()])
""",
        ),
        (
            """\
    train_set = open_folder(args.dataset, "train training", train_transform)
""",
            """    train_set = datasets.ImageFolder(args.dataset / "train", train_transform)
""",
        ),
        (
            """\
    val_set = open_folder(args.dataset, "val valid validation test testing", val_transform)
""",
            """    val_set = datasets.ImageFolder(args.dataset / "val", val_transform)
""",
        ),
    ],
    "import": [("from tqdm import tqdm\n", "from tqdm import tqdm\n\nimport wave as my_code\n")],
    "loss": [
        (
            "    loss_function = nn.CrossEntropyLoss()\n",
            "    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)\n",
        )
    ],
    "optimizer": [
        (
            """\
    optimizer = torch.optim.SGD(model.parameters(), args.lr, 0.9, weight_decay=5e-4, nesterov=True)
""",
            """    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr / 30)
""",
        ),
        (
            LAMBDA,
            """\
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * steps)
""",
        ),
    ],
    "defaults": [
        ('default=120, help="images', 'default=40, help="images'),
        ('default=5, help="passes', 'default=2, help="passes'),
        ('default=32, help="height', 'default=24, help="height'),
        ('default=0.1, help="highest', 'default=0.05, help="highest'),
    ],
    "option": [
        (
            """\
    add("--resume", help="a checkpoint, or auto: the one in RESULT_DIR if there is one")
""",
            """    add("--resume", help="a checkpoint, or auto: the one in RESULT_DIR if there is one")
    add("--note", default="", help="what this run is about")
""",
        )
    ],
    "metric": [
        (
            """                correct += (output.topk(len(correct)).indices.T == labels).sum(1)
""",
            """                correct += (output.topk(len(correct)).indices.T == labels).sum(1)
                confident += output.softmax(1).amax(1).sum()
""",
        ),
        (
            """        correct = losses.new_zeros(min(5, len(classes)))
""",
            """        correct = losses.new_zeros(min(5, len(classes)))
        confident = torch.zeros((), device=device)
""",
        ),
        (
            """        if rank == 0 and (tick > save_at or epoch + 1 == args.epochs):
            states =""",
            """        log(f"confidence {confident.item() / len(val_set):.2f}")
        if rank == 0 and (tick > save_at or epoch + 1 == args.epochs):
            states =""",
        ),
    ],
}


def edited(names, text=None):
    edits = [edit for name in names for edit in USUAL_EDITS[name]]
    return replaced(text or (SRC / "train.py").read_text(), *edits)


@pytest.mark.parametrize(
    "edits", [*[[name] for name in USUAL_EDITS], list(USUAL_EDITS)], ids="_".join
)
def test_every_set_joins_a_users_copy(edits, tmp_path):
    users = edited(edits)
    for chosen in [*SETS[::20], *WHOLE] if len(edits) > 1 else [*PAIRS[::10], *WHOLE[::3]]:
        mine = merged(users, chosen)
        ast.parse(mine)
        # all of the user's lines and all of the techniques' are there
        plain = merged((SRC / "train.py").read_text(), chosen)
        assert added(users, mine) == added((SRC / "train.py").read_text(), plain)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_each_technique_joins_a_copy_with_another_model(name):
    text = re.sub(
        r"def conv11\(.*?\n\n\n",
        "class Mine(nn.Module):\n    pass\n\n\n",
        (SRC / "train.py").read_text(),
        flags=re.DOTALL,
    )
    users = text.replace("model = conv11(args.width, len(classes))", "model = Mine()")
    assert users.count("Mine") == 2 and "conv11(" not in users
    assert (
        compose.warnings(
            *(compose.script(each) for each in ("train", f"train_{name}")),
            users,
            merged(users, [name]),
        )
        == []
    )


def added(before, after):
    """(The lines that `after` has more often than `before`, those that it has less often.)"""
    old, new = (collections.Counter(text.splitlines()) for text in (before, after))
    return new - old, old - new


def formatters():
    """Return {name: command} of what people format with: standard input to standard output."""
    ruff, black = ([sys.executable, "-m", name] for name in ("ruff", "black"))
    quiet = [*ruff, "format", "--isolated", "--config", "format.quote-style='single'"]
    named = [
        (name, words, width)
        for width in (79, 88, 100, 120)
        for name, words in (("ruff", [*ruff, "format", "--isolated"]), ("black", [*black, "-q"]))
    ]
    return {
        f"{name}, {width}": [*words, f"--line-length={width}", "-"]
        for name, words, width in (*named, ("ruff, single quotes", quiet, 88))
    }


@pytest.fixture
def one_origin(monkeypatch):
    """The copies are of the present train.py: the history is not searched each time."""
    monkeypatch.setattr(compose, "find_origin", lambda yours: None)


@pytest.fixture
def formats_once(monkeypatch):
    """Each formatter runs once for a text, and black without a process of its own.

    The same copy is joined with each technique. The processes are those of the test of a formatted
    copy that joins as if it were not.
    """
    as_process = layout.formatted

    @functools.cache
    def once(*command):
        *words, text = command
        if Path(words[0]).name != "black":
            return as_process(words, text)
        widths = [int(word[14:]) for word in words if word.startswith("--line-length=")]
        mode = black.Mode(line_length=(widths or [88])[0], string_normalization="-S" not in words)
        return black.format_str(text, mode=mode)

    monkeypatch.setattr(layout, "formatted", lambda command, text: once(*command, text))


# the others lie between these
COMMON = "ruff, 79", "black, 88", "ruff, 120", "ruff, single quotes, 88"


@pytest.mark.fault("formatted copy")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in COMMON else pytest.mark.slow) for name in formatters()],
)
@pytest.mark.parametrize("there", [True, False], ids=["formatter", "no_formatter"])
def test_each_technique_joins_a_formatted_copy(
    name, there, one_origin, formats_once, monkeypatch, tmp_path
):
    """Nothing is refused, and with the formatter there the result is formatted as the copy is."""
    command, mine = formatters()[name], tmp_path / "my_train.py"
    text = layout.formatted(command, (SRC / "train.py").read_text())
    if not there:
        monkeypatch.setattr(layout, "formatters", lambda path: iter(()))
    # black takes long; one half of the techniques has the formatter, the other has not
    step = 5 if there and name.startswith("black") else 2
    for technique in TECHNIQUES[there::step]:
        mine.write_text(text)
        said = []
        assert compose.add_to(str(mine), [technique], told=said.append)
        assert not [line for line in said if "warning" in line], said
        joined = mine.read_text()
        assert layout.difference(joined, compose.script(f"train_{technique}")) == 0, technique
        if there:
            assert name.startswith("black") or joined == layout.formatted(command, joined)


@pytest.mark.fault("formatted copy")
def test_lines_of_a_technique_are_no_hazard_in_a_formatted_copy(one_origin, tmp_path):
    """LMDB writes a file as DDP's rule wants it, though in other quotes than src/train_LMDB.py."""
    path, said = tmp_path / "my_train.py", []
    path.write_text(
        layout.formatted(formatters()["ruff, single quotes, 88"], (SRC / "train.py").read_text())
    )
    assert compose.add_to(str(path), ["DDP", "LMDB"], told=said.append)
    assert "part', 'ab')" in path.read_text() and "warning" not in " ".join(said), said


def test_imports_are_sorted_as_ruff_and_isort_sort_them():
    """So sorting them does not change a copy."""
    done = run(
        sys.executable, "-m", "ruff", "check", "--isolated", "--select", "I", SRC / "train.py"
    )
    assert done.returncode == 0, done.stdout


def test_joined_scripts_are_formatted_and_import_only_what_they_use(tmp_path):
    for chosen in [*PAIRS, *WHOLE]:
        (tmp_path / f"{'_'.join(chosen)}.py").write_text(
            merged((SRC / "train.py").read_text(), chosen)
        )
    config = ["--config", ROOT / "pyproject.toml"]
    done = run(sys.executable, "-m", "ruff", "format", "--check", *config, tmp_path)
    assert done.returncode == 0, done.stdout
    done = run(sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("chosen", [("amp", "cudnn"), ("DDP", "amp"), ("DP",)], ids="_".join)
def test_a_users_copy_with_techniques_runs(chosen, tmp_path, digits):
    mine = tmp_path / "my_train.py"
    mine.write_text(edited(USUAL_EDITS))
    mine.chmod(0o750)
    done = run_compose("--into", mine, *chosen)
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(mine.stat().st_mode) == 0o750
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my_train.py"]
    record, output = train(
        mine, "--dataset", digits, "--result_dir", tmp_path / "runs", "--note", "mine"
    )
    assert record["options"]["note"] == "mine" and record["options"]["batch_size"] == 40
    assert len(record["epochs"]) == 2 and output.count("confidence") == 2


def test_one_after_the_other_is_as_all_at_once(tmp_path):
    mine = tmp_path / "my_train.py"
    mine.write_text(edited(USUAL_EDITS))
    for name in ("cudnn", "DDP", "amp"):
        assert run_compose("--into", mine, name).returncode == 0
    at_once = merged(edited(USUAL_EDITS), ("amp", "DDP", "cudnn"))
    assert mine.read_text() == at_once
    again = run_compose("--into", mine, "amp")
    assert again.returncode == 0 and "already" in again.stderr
    assert mine.read_text() == at_once


@pytest.mark.fault("join that is refused")
@pytest.mark.parametrize(
    "technique, old, new",
    [
        (
            "amp",
            "            loss = loss_function(output, labels)\n",
            "            loss = loss_function(output, labels) + 1e-4 * output.square().mean()\n",
        ),
        (
            "DDP",
            "    sampler = torch.utils.data.RandomSampler("
            "train_set, generator=torch.Generator())\n",
            "    sampler = my_sampler(train_set)\n",
        ),
        ("amp", "            optimizer.step()\n", "            optimizer.step(lambda: loss)\n"),
        ("DDP", "    rank = 0\n", ""),
    ],
)
def test_a_conflict_names_the_place_and_leaves_the_file(technique, old, new, tmp_path):
    text, mine = (SRC / "train.py").read_text(), tmp_path / "my train.py"
    mine.write_text(replaced(text, (old, new)))
    before = mine.read_bytes()
    done = run_compose("--into", mine, "cudnn", technique)
    assert done.returncode == 1
    assert mine.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == [mine.name]
    last = done.stderr.splitlines()[-1]
    at = text[: text.index(old)].count("\n") + 1
    named = int(re.search(r"line (\d+)", last)[1])
    assert technique in last and "my train.py" in last and abs(named - at) <= 3, last
    assert not new or new.strip() in done.stderr


UNREAD = {
    "net": (
        "            output = net(images)\n",
        "            images = normalize(images)\n            output = model(images)\n",
    ),
    "val_sampler": ("(val_set, sampler=val_sampler, **loading)", "(val_set, batch_size=200)"),
    "sampler": ("train_set, sampler=sampler, drop_last", "train_set, shuffle=True, drop_last"),
}
UNSET = {"correct": "hits", "net": "network", "losses": "history"}


@pytest.mark.parametrize("name", UNREAD)
def test_into_a_copy_that_does_not_read_what_a_technique_sets_warns(name, tmp_path):
    """It merges without a conflict, but the processes train apart or count pictures twice."""
    mine, (old, _) = copy_with(tmp_path, UNREAD[name]), UNREAD[name]
    done = run_compose("--into", mine, "cudnn", "fused", "DDP")
    (warning,) = [line for line in done.stderr.splitlines() if "warning" in line]
    assert done.returncode == 0 and "DistributedDataParallel" in mine.read_text()
    assert f"warning: DDP may not work as it should in {mine}: it changes {name}," in warning
    assert old.strip().splitlines()[0] in warning


@pytest.mark.parametrize("name", UNSET)
def test_into_a_copy_that_does_not_set_what_a_technique_reads_warns(name, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(re.sub(rf"\b{name}\b", UNSET[name], (SRC / "train.py").read_text()))
    done = run_compose("--into", mine, "DDP")
    assert done.returncode == 0 and f"it uses {name}, which your copy does not have" in done.stderr


def test_into_a_copy_that_sets_again_what_a_technique_sets_warns(tmp_path):
    again = "    torch.backends.cudnn.benchmark = False\n"
    title = f"    # {'-' * 79} opt"
    mine = copy_with(tmp_path, (title, again + title)).rename(tmp_path / "-mine lr=1.py")
    done = run_compose("--into", mine.name, "cudnn", "amp", cwd=tmp_path)
    (warning,) = [line for line in done.stderr.splitlines() if "warning" in line]
    assert done.returncode == 0 and "benchmark = True" in mine.read_text()
    assert warning.endswith(
        "it sets torch.backends.cudnn.benchmark, and your copy sets it again "
        f"later: {again.strip()}"
    )


def test_no_usual_edit_is_warned_of():
    texts = {path.stem: path.read_text() for path in sorted(SRC.glob("train*.py"))}
    schedules = [
        edited([], texts["train"].replace(old, new))
        for old, new in (
            (
                LAMBDA,
                "    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(\n"
                "        optimizer, args.epochs * steps\n    )\n",
            ),
            (LAMBDA, "    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30 * steps)\n"),
        )
    ]
    pairs = [(variant, users) for variant in texts for users in (edited(USUAL_EDITS), *schedules)]
    for users in map(edited, ([name] for name in USUAL_EDITS)):
        pairs += ("train_DDP", users), ("train_cache", users)
    for variant, users in pairs:
        joined = "" if variant == "train" else merged(users, [variant.removeprefix("train_")])
        assert compose.warnings(texts["train"], texts[variant], users, joined) == []


FORMATTERS = [
    ["ruff", "format", "--isolated", "--line-length=79"],
    ["black", "-q", "--line-length=120"],
]


@pytest.mark.fault("formatted copy")
@pytest.mark.parametrize("command", FORMATTERS, ids=lambda command: command[0] + command[-1][14:])
def test_a_formatted_copy_joins_as_if_it_were_not(command, tmp_path):
    tool = shutil.which(command[0]) or shutil.which(command[0], path=Path(sys.executable).parent)
    if not tool:
        pytest.skip(f"needs {command[0]}")
    mine, plain = tmp_path / "mine.py", tmp_path / "plain.py"
    mine.write_text(edited(["loss", "optimizer", "metric"]))
    plain.write_text(merged(mine.read_text(), ("DALI", "DDP", "amp", "fused")))
    run(tool, *command[1:], mine, plain)
    done = run_compose("--into", mine, "amp", "fused", "DDP", "DALI")
    assert done.returncode == 0, done.stderr
    ast.parse(mine.read_text())
    assert added(plain.read_text(), mine.read_text()) == ({}, {})


def test_another_script_is_no_copy(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text((ROOT / "tools" / "loading.py").read_text())
    done = run_compose("--into", mine, "DDP")
    assert done.returncode == 1 and mine.read_text() == (ROOT / "tools" / "loading.py").read_text()
    assert "less than a third" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_copy_of_which_there_is_no_history_says_so(project, tmp_path):
    step = "            loss.backward()\n            optimizer.step()\n"
    mine = copy_with(tmp_path, (step, ""))
    done = run(project / "compose.sh", "--into", mine, "amp")
    assert done.returncode == 1 and "it may join in a full clone" in done.stderr
    assert "both change the lines shown above" in done.stderr


def test_into_an_older_copy_takes_the_techniques_of_its_time(project, tmp_path):
    """The baseline moves on; a copy made before is merged against the version it came from."""

    def git(*words):
        done = run("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", project, *words)
        assert done.returncode == 0, done.stderr

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "old")
    amp = project / "src" / "train_amp.py"  # mended later, over the same baseline
    amp.write_text(amp.read_text().replace("gradients become zero", "gradients get lost"))
    git("commit", "-qam", "mended")
    mine = tmp_path / "mine.py"
    mine.write_text(edited(["loss", "defaults"]))
    for path in (project / "src").glob("train*.py"):
        path.write_text(path.read_text().replace("labels", "targets").replace("images", "inputs"))
    git("commit", "-qam", "new names")
    done = run(project / "compose.sh", "--into", mine, "amp", "DDP")
    assert done.returncode == 0, done.stderr
    assert "was copied from an older train.py" in done.stderr
    text = merged(edited(["loss", "defaults"]), ("amp", "DDP"))
    assert mine.read_text() == text.replace("gradients become zero", "gradients get lost")


def test_windows_line_ends_are_refused(tmp_path):
    mine = tmp_path / "my train.py"
    mine.write_bytes((SRC / "train.py").read_bytes().replace(b"\n", b"\r\n"))
    before = mine.read_bytes()
    done = run_compose("--into", mine, "amp")
    assert done.returncode == 1 and mine.read_bytes() == before
    assert f"sed -i 's/\\r$//' '{mine}'" in done.stderr and len(done.stderr.splitlines()) == 1


def test_bytes_that_are_not_utf8_stay_as_they_are(tmp_path):
    mine, extra = tmp_path / "mine.py", "# caf\u00e9\n".encode("latin-1")
    mine.write_bytes((SRC / "train.py").read_bytes() + extra)
    assert run_compose("--into", mine, "cudnn").returncode == 0
    assert mine.read_bytes() == (SRC / "train_cudnn.py").read_bytes() + extra


def test_the_users_git_settings_do_not_matter(tmp_path):
    """With merge.conflictStyle=diff3 git would show three versions of the conflict."""
    mine = copy_with(tmp_path, ("optimizer.step()\n", "optimizer.step(lambda: loss)\n"))
    (tmp_path / ".gitconfig").write_text("[merge]\n\tconflictStyle = diff3\n")
    done = run_compose("--into", mine, "amp", env={"HOME": str(tmp_path)})
    assert done.returncode == 1 and "|||||||" not in done.stderr
    assert done.stderr == run_compose("--into", mine, "amp").stderr


@pytest.mark.fault("full disk")
def test_a_full_disk_leaves_the_copy(tmp_path):
    with SmallDisk(tmp_path / "disk", kilobytes=28, bytes_a_file=16 << 10) as disk:
        mine = disk.folder / "mine.py"
        shutil.copy(SRC / "train.py", mine)
        done = run_compose("--into", mine, "DALI", **disk.options)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
        assert mine.read_bytes() == (SRC / "train.py").read_bytes()
        assert [path.name for path in disk.folder.iterdir()] == [mine.name]


def test_into_refuses_a_template_and_options_without_dashes(project, tmp_path):
    before = (project / "src/train.py").read_bytes()
    done = run(project / "compose.sh", "--into", project / "src/train.py", "amp")
    assert done.returncode == 2 and "copy it, and name the copy" in done.stderr
    assert (project / "src/train.py").read_bytes() == before
    mine = shutil.copy(SRC / "train.py", tmp_path / "mine.py")
    done = run_compose("--into", mine, "amp", "--verify", "--dataset", "D")
    assert (
        done.returncode == 2 and "options for your script stand behind --verify --" in done.stderr
    )


def test_into_follows_a_link_and_refuses_a_folder(tmp_path):
    (tmp_path / "there").mkdir()
    mine = tmp_path / "there" / "mine.py"
    shutil.copy(SRC / "train.py", mine)
    link = tmp_path / "link.py"
    link.symlink_to(mine)
    assert run_compose("--into", link, "cudnn").returncode == 0
    assert link.is_symlink() and mine.read_text() == (SRC / "train_cudnn.py").read_text()
    assert run_compose("--into", tmp_path / "there", "cudnn").returncode == 2


def runs_alone(chosen, folder, digits):
    """Run the techniques `chosen`, joined into one script, with a small model that is traced."""
    script = folder / "my_train.py"
    folder.mkdir()
    baseline = (SRC / "train.py").read_text()
    joined = merged(baseline.replace("range(1, 12)", "range(1, 4)"), chosen)
    script.write_text(joined.replace(*helpers.SOON))
    record, _ = train(script, *tiny(digits, folder / "runs", epochs=1, steps=2), cwd=folder)
    assert record["script"] == "my_train" and len(record["epochs"]) == 1
    assert 0 < record["epochs"][-1]["loss"] < 10


@pytest.mark.parametrize("chosen", PAIRS[::5], ids="_".join)
def test_some_pairs_run_alone_in_a_folder(chosen, tmp_path, digits):
    """All pairs run on a GPU, by test_gpu.py."""
    runs_alone(chosen, tmp_path / "alone", digits)


@pytest.mark.parametrize(
    "chosen",
    [
        # without a GPU DP changes nothing
        pytest.param(chosen, marks=[pytest.mark.slow] if {"DP", "compile"} <= {*chosen} else [])
        for chosen in WHOLE
        if "graphs" not in chosen or "cache" in chosen
    ],
    ids="_".join,
)
def test_each_whole_set_runs_alone_in_a_folder(chosen, tmp_path, digits):
    """On a GPU, with code that is compiled, by test_gpu.py; here graphs change nothing."""
    runs_alone(chosen, tmp_path / "alone", digits)


def test_shell_scripts_are_executable():
    for script in [*ROOT.glob("*.sh"), ROOT / ".ci" / "run"]:
        assert os.access(script, os.X_OK), script
        assert script.read_text().startswith("#!/usr/bin/env bash")


def test_shell_scripts_pass_shellcheck():
    shellcheck = shutil.which("shellcheck") or Path(sys.executable).with_name("shellcheck")
    if not Path(shellcheck).exists():
        pytest.skip("shellcheck is not installed")
    scripts = [*ROOT.glob("*.sh"), *ROOT.glob("[!.]*/*.sh"), ROOT / ".ci" / "run"]
    done = run(shellcheck, "--external-sources", *scripts)
    assert done.returncode == 0, done.stdout
