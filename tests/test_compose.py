"""Techniques join: all sets, any order, into the baseline and into a user's own copy."""

import ast
import collections
import functools
import itertools
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import compose_check
from helpers import ROOT, SRC, TECHNIQUES, run, train

# Choose one: DataParallel or DDP; one source of data.
EXCLUSIVE = [("DDP", "DP"), ("DALI", "LMDB", "cache")]


def sets_of_techniques():
    """Every set that holds no two of one exclusive group, the empty one left out."""
    for count in range(1, len(TECHNIQUES) + 1):
        for chosen in itertools.combinations(TECHNIQUES, count):
            if not any(len(set(group) & set(chosen)) > 1 for group in EXCLUSIVE):
                yield chosen


SETS = list(sets_of_techniques())
PAIRS = [chosen for chosen in SETS if len(chosen) == 2]
WHOLE = [chosen for chosen in SETS if not any(set(chosen) < set(other) for other in SETS)]
FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def joined(text, name):
    """The three-way merge of one technique over `text`."""
    path = Path(FOLDER.name) / "current.py"
    path.write_text(text)
    done = subprocess.run(["git", "merge-file", "-q", path, SRC / "train.py",
                           SRC / f"train_{name}.py"])
    assert done.returncode == 0, name
    return path.read_text()


def merged(current, techniques):
    """The three-way merge of `techniques`, in their order, over the text `current`."""
    return functools.reduce(joined, techniques, current)


def compose(*words, script=ROOT / "compose.sh"):
    return run(script, *words)


def test_the_sets_are_all_of_one_from_each_group():
    """768 of eleven techniques, and the profile with or without each; the empty set is no set."""
    assert len(SETS) == 3 * 4 * 2 ** (len(TECHNIQUES) - 5) - 1
    assert len(WHOLE) == 6


@pytest.mark.parametrize("order", ["alphabetical", "reversed", "by chance"])
def test_every_set_joins_in_any_order_into_one_text(order):
    baseline, orders = (SRC / "train.py").read_text(), random.Random(0)
    for chosen in SETS:
        if order == "by chance":
            if orders.random() > 0.15:
                continue
            mixed = orders.sample(chosen, len(chosen))
        else:
            mixed = chosen[::-1] if order == "reversed" else chosen
        text = merged(baseline, mixed)
        assert text == merged(baseline, chosen), chosen
        if order == "alphabetical":
            ast.parse(text)
            blocks = sum((SRC / f"train_{name}.py").read_text().count("# new #") for name in chosen)
            assert text.count("# new #") == blocks


@pytest.mark.parametrize("chosen", [*PAIRS[::5], *WHOLE], ids="_".join)
def test_compose_prints_just_the_merge(chosen):
    done = compose(*chosen)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == merged((SRC / "train.py").read_text(), chosen)
    assert compose(*reversed(chosen), chosen[0]).stdout == done.stdout


def test_f70_just_those_of_a_group_are_refused_together_and_it_says_why():
    """Two techniques of one group -> one line names both and says why, exit 2; two of different
    groups are not refused.

    Refused where their merge truly conflicts, and nowhere else.
    """
    for one, other in itertools.combinations(TECHNIQUES, 2):
        done = compose("profile", other, one)
        assert (done.returncode == 2) == any({one, other} <= set(group) for group in EXCLUSIVE)
        if done.returncode == 2:
            assert done.stdout == "" and len(done.stderr.splitlines()) == 1
            assert f"{one} and {other} exclude each other" in done.stderr
            reasons = [text.split("# new #\n")[1:] for text in (
                (SRC / f"train_{name}.py").read_text() for name in (one, other))]
            for blocks in reasons:  # each one's own words
                assert any(block.splitlines()[0].strip("# ") in done.stderr for block in blocks)


def test_groups_follow_from_the_scripts(project):
    code = "import running; print(running.groups())"
    found = run(sys.executable, "-c", code, cwd=project)
    assert found.stdout.strip() == str(
        {"data": [["DALI", "LMDB", "cache"]],
         "compute": [["amp"], ["channels_last"], ["compile"], ["cudnn"], ["fused"], ["stem"]],
         "parallel": [["DDP", "DP"]]}), found.stderr
    # a new technique is one new file
    (project / "src/train_clip.py").write_text((SRC / "train_cudnn.py").read_text().replace(
        "    # cuDNN times its", "    # one more: cuDNN times its"))
    (project / "src/train_cudnn.py").unlink()
    assert "['clip']" in run(sys.executable, "-c", code, cwd=project).stdout
    joined = run(project / "compose.sh", "clip", "amp")
    assert joined.returncode == 0 and "one more: " in joined.stdout and "autocast" in joined.stdout


@pytest.mark.parametrize("words", [
    [], ["nothing"], ["amp", "nothing"], ["a[$(touch x)]"], ["../src/train"], ["--into"],
    ["--help"], [""], ["--into", "no/such/file.py", "amp"], ["am*"]])
def test_f70_wrong_use(words, tmp_path):
    """No technique, an unknown one, `a[$(touch x)]`, --into without a file or with one that is not
    there -> one line, exit 2, nothing printed, executed or written."""
    done = run(ROOT / "compose.sh", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""
    assert list(tmp_path.iterdir()) == []
    if words == ["nothing"]:
        assert all(name in done.stderr for name in TECHNIQUES)


def test_f66_from_another_folder_through_a_link_with_a_space(project, tmp_path):
    """From another folder, through a link, in a path with a space -> the same text as ever."""
    link = tmp_path / "link.sh"
    link.symlink_to(project / "compose.sh")
    done = run(link, "amp", "cudnn", cwd="/")
    assert done.returncode == 0 and done.stdout == compose("amp", "cudnn").stdout


# ---------------------------------------------------------------- into a user's own copy
# What people change: (what stands in the baseline, what they write there).
USUAL_EDITS = {
    "model": [('        layers, channels = [], 3\n', '        layers, channels = [], 3  # mine\n'),
              ('''    classes = len(train_set.classes)
    if args.model == "conv11":
        model = Conv11(args.width, classes)
''', '''    classes = len(train_set.classes)
    if args.model == "mine":
        model = Mine(classes)
    elif args.model == "conv11":
        model = Conv11(args.width, classes)
'''), ('''class Conv11(nn.Module):''', '''class Mine(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.head = nn.Linear(32, classes)

    def forward(self, images):
        return self.head(self.features(images).flatten(1))


class Conv11(nn.Module):'''), ('default="conv11"', 'default="mine"')],
    "data": [('''    val_transform = transforms.Compose([
        transforms.Resize(val_size), transforms.CenterCrop(val_size), transforms.PILToTensor()])
''', '''    val_transform = transforms.Compose([
        transforms.Resize((val_size, val_size)), transforms.PILToTensor()])
'''), ('''    train_transform = transforms.Compose([*crop, transforms.PILToTensor()])
''', '''    train_transform = transforms.Compose([*crop, transforms.RandomRotation(5),
                                          transforms.PILToTensor()])
'''), ('''\
    train_set = class_folders(parser, args.dataset, ("train", "training"), train_transform)
''', '''    train_set = datasets.ImageFolder(args.dataset / "train", train_transform)
'''), ('''\
    val_set = class_folders(parser, args.dataset, ("val", "test", "testing"), val_transform)
''', '''    val_set = datasets.ImageFolder(args.dataset / "val", val_transform)
''')],
    "import": [("from tqdm import tqdm\n", "from tqdm import tqdm\n\nimport wave as my_code\n")],
    "loss": [("    loss_function = nn.CrossEntropyLoss()\n",
              "    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)\n")],
    "optimizer": [('''\
    optimizer = torch.optim.SGD(model.parameters(), args.lr, 0.9, weight_decay=5e-4, nesterov=True)
''', '''    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr / 30)
'''), ('''    # the learning rate rises for a fifth of all steps, then falls to zero
    total = args.epochs * steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.2 * total), (total - step) / (0.8 * total)))
''', '''    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * steps)
''')],
    "defaults": [('default=120, help="pictures', 'default=40, help="pictures'),
                 ('default=5, help="passes', 'default=2, help="passes'),
                 ('default=32, help="pixels', 'default=24, help="pixels'),
                 ('default=0.1, help="peak', 'default=0.05, help="peak')],
    "option": [('''\
    add("--resume", help="a checkpoint, or auto: RESULT_DIR's own if there is one")
''', '''    add("--resume", help="a checkpoint, or auto: RESULT_DIR's own if there is one")
    add("--note", default="", help="what this run is about")
''')],
    "metric": [('''                correct += torch.stack([hits[:, 0].sum(), hits.sum()])
''', '''                correct += torch.stack([hits[:, 0].sum(), hits.sum()])
                confident += output.softmax(1).amax(1).sum()
'''), ('''        correct = torch.zeros(2, device=device)
''', '''        correct = torch.zeros(2, device=device)
        confident = torch.zeros((), device=device)
'''), ('''        if rank == 0:
            state =''', '''        print(f"confidence {confident.item() / len(val_set):.2f}")
        if rank == 0:
            state =''')],
}


def edited(names, text=None):
    text = text or (SRC / "train.py").read_text()
    for name in names:
        for old, new in USUAL_EDITS[name]:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
    return text


@pytest.mark.parametrize("edits", [*[[name] for name in USUAL_EDITS], list(USUAL_EDITS)],
                         ids="_".join)
def test_every_set_joins_a_users_copy(edits, tmp_path):
    users = edited(edits)
    for chosen in [*SETS[::5], *WHOLE] if len(edits) > 1 else [*PAIRS, *WHOLE]:
        mine = merged(users, chosen)
        ast.parse(mine)
        # all of the user's lines and all of the techniques' are there
        plain = merged((SRC / "train.py").read_text(), chosen)
        assert added(users, mine) == added((SRC / "train.py").read_text(), plain)


def added(before, after):
    """(The lines that `after` has more often than `before`, those that it has less often.)"""
    old, new = (collections.Counter(text.splitlines()) for text in (before, after))
    return new - old, old - new


@pytest.mark.parametrize("chosen", [("amp", "cudnn"), ("DDP", "amp"), ("DP",)], ids="_".join)
def test_a_users_copy_with_techniques_runs(chosen, tmp_path, digits):
    mine = tmp_path / "my_train.py"
    mine.write_text(edited(USUAL_EDITS))
    mine.chmod(0o750)
    done = run(ROOT / "compose.sh", "--into", mine, *chosen)
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(mine.stat().st_mode) == 0o750
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my_train.py"]
    record, output = train(mine, "--dataset", digits, "--result_dir", tmp_path / "runs",
                           "--note", "mine")
    assert record["options"]["note"] == "mine" and record["options"]["batch_size"] == 40
    assert len(record["epochs"]) == 2 and output.count("confidence") == 2


def test_one_after_the_other_is_as_all_at_once(tmp_path):
    mine = tmp_path / "my_train.py"
    mine.write_text(edited(USUAL_EDITS))
    for name in ("cudnn", "DDP", "amp"):
        assert run(ROOT / "compose.sh", "--into", mine, name).returncode == 0
    at_once = merged(edited(USUAL_EDITS), ("amp", "DDP", "cudnn"))
    assert mine.read_text() == at_once
    again = run(ROOT / "compose.sh", "--into", mine, "amp")
    assert again.returncode == 0 and "already" in again.stderr
    assert mine.read_text() == at_once


@pytest.mark.parametrize("technique, old, new", [
    ("amp", "            loss = loss_function(output, labels)\n",
     "            loss = loss_function(output, labels) + 1e-4 * output.square().mean()\n"),
    ("DDP", '    sampler = RandomSampler(train_set, generator=torch.Generator())\n',
     "    sampler = my_sampler(train_set)\n"),
    ("amp", "            optimizer.step()\n", "            optimizer.step(lambda: loss)\n"),
    ("DDP", "    rank = 0\n", "")])
def test_f70_conflict_names_the_place_and_leaves_the_file(technique, old, new, tmp_path):
    """--into a copy whose own edits a technique conflicts with -> it names technique, file and
    line, exit 1; the copy stays as it was, nothing beside it."""
    text = (SRC / "train.py").read_text()
    assert text.count(old) == 1
    mine = tmp_path / "my train.py"
    mine.write_text(text.replace(old, new))
    before = mine.read_bytes()
    done = run(ROOT / "compose.sh", "--into", mine, "cudnn", technique)
    assert done.returncode == 1
    assert mine.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == [mine.name]
    last = done.stderr.splitlines()[-1]
    at = text[:text.index(old)].count("\n") + 1
    (named,) = [int(word) for word in last.replace("line ", "line").split() if word[:4] == "line"
                for word in [word[4:]]]
    assert technique in last and "my train.py" in last and abs(named - at) <= 3, last
    assert not new or new.strip() in done.stderr


LAMBDA = """    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.2 * total), (total - step) / (0.8 * total)))
"""
UNREAD = {
    "net": ("            output = net(images)\n",
            "            images = normalize(images)\n            output = model(images)\n"),
    "val_sampler": ("(val_set, sampler=val_sampler, persistent_workers=workers > 0, **loading)",
                    "(val_set, batch_size=200)"),
    "sampler": ("(train_set, sampler=sampler, drop_last", "(train_set, shuffle=True, drop_last")}
UNSET = {"correct": "hits", "net": "network", "losses": "history"}


@pytest.mark.parametrize("name", UNREAD)
def test_into_a_copy_that_does_not_read_what_a_technique_sets_warns(name, tmp_path):
    """It merges cleanly, but each process would go its own way, or count pictures twice."""
    old, new = UNREAD[name]
    text = (SRC / "train.py").read_text()
    assert text.count(old) == 1
    mine = tmp_path / "mine.py"
    mine.write_text(text.replace(old, new))
    done = run(ROOT / "compose.sh", "--into", mine, "cudnn", "fused", "DDP")
    (warning,) = done.stderr.splitlines()
    assert done.returncode == 0 and "DistributedDataParallel" in mine.read_text()
    assert f"warning: DDP may not do all that it should in {mine}: it sets {name}," in warning
    assert old.strip().splitlines()[0] in warning


@pytest.mark.parametrize("name", UNSET)
def test_into_a_copy_that_does_not_set_what_a_technique_reads_warns(name, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(re.sub(rf"\b{name}\b", UNSET[name], (SRC / "train.py").read_text()))
    done = run(ROOT / "compose.sh", "--into", mine, "DDP")
    assert done.returncode == 0 and f"it reads {name}, which is not set there" in done.stderr


def test_into_a_copy_that_sets_again_what_a_technique_sets_warns(tmp_path):
    mine = tmp_path / "-mine lr=1.py"
    again = "    torch.backends.cudnn.benchmark = False\n"
    mine.write_text((SRC / "train.py").read_text().replace(
        "    # ------------------------------------------------------------------------------- opt",
        again + "    # --- opt"))
    done = run(ROOT / "compose.sh", "--into", mine.name, "cudnn", "amp", cwd=tmp_path)
    (warning,) = done.stderr.splitlines()
    assert done.returncode == 0 and "benchmark = True" in mine.read_text()
    assert warning.endswith("it sets torch.backends.cudnn.benchmark, which is set again behind it: "
                            + again.strip())


def test_no_usual_edit_is_warned_of():
    texts = {path.stem: path.read_text() for path in sorted(SRC.glob("train*.py"))}
    schedules = [edited([], texts["train"].replace(old, new)) for old, new in (
        (LAMBDA, "    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)\n"),
        (LAMBDA, "    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30 * steps)\n"))]
    pairs = [(variant, users) for variant in texts for users in (edited(USUAL_EDITS), *schedules)]
    for users in map(edited, ([name] for name in USUAL_EDITS)):
        pairs += ("train_DDP", users), ("train_cache", users)
    for variant, users in pairs:
        joined = "" if variant == "train" else merged(users, [variant.removeprefix("train_")])
        assert compose_check.misses(texts["train"], texts[variant], users, joined) == []


def test_another_script_is_no_copy(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text((ROOT / "tools" / "loading.py").read_text())
    done = run(ROOT / "compose.sh", "--into", mine, "DDP")
    assert done.returncode == 1 and mine.read_text() == (ROOT / "tools" / "loading.py").read_text()
    assert "less than a third" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_copy_of_which_there_is_no_history_says_so(project, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text((SRC / "train.py").read_text().replace(
        "            loss.backward()\n            optimizer.step()\n", ""))
    done = run(project / "compose.sh", "--into", mine, "amp")
    assert done.returncode == 1 and "with the whole git history of" in done.stderr
    assert "both rewrite the place (shown above)" in done.stderr


def test_into_an_older_copy_takes_the_techniques_of_its_time(project, tmp_path):
    """The baseline moves on; a copy made before is merged against the version it came from."""
    def git(*words):
        done = run("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", project, *words)
        assert done.returncode == 0, done.stderr
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "old")
    amp = project / "src" / "train_amp.py"  # mended later, over the same baseline
    amp.write_text(amp.read_text().replace("small gradients vanish", "small gradients get lost"))
    git("commit", "-qam", "mended")
    mine = tmp_path / "mine.py"
    mine.write_text(edited(["loss", "defaults"]))
    for path in (project / "src").glob("train*.py"):
        path.write_text(path.read_text().replace("labels", "targets").replace("images", "inputs"))
    git("commit", "-qam", "new names")
    done = run(project / "compose.sh", "--into", mine, "amp", "DDP")
    assert done.returncode == 0, done.stderr
    assert "comes from" in done.stderr
    text = merged(edited(["loss", "defaults"]), ("amp", "DDP"))
    assert mine.read_text() == text.replace("small gradients vanish", "small gradients get lost")


def test_into_follows_a_link_and_refuses_a_folder(tmp_path):
    (tmp_path / "there").mkdir()
    mine = tmp_path / "there" / "mine.py"
    shutil.copy(SRC / "train.py", mine)
    link = tmp_path / "link.py"
    link.symlink_to(mine)
    assert run(ROOT / "compose.sh", "--into", link, "cudnn").returncode == 0
    assert link.is_symlink() and mine.read_text() == (SRC / "train_cudnn.py").read_text()
    assert run(ROOT / "compose.sh", "--into", tmp_path / "there", "cudnn").returncode == 2


# all whole sets hold compile, which takes the longest
@pytest.mark.parametrize("chosen", [
    *[each for each in PAIRS if "compile" not in each][::5], *WHOLE], ids="_".join)
def test_some_pairs_and_each_whole_set_run_alone_in_a_folder(chosen, tmp_path, digits):
    """All pairs run on a GPU, by test_gpu.py."""
    script = tmp_path / "alone" / "my_train.py"
    script.parent.mkdir()
    script.write_text(merged((SRC / "train.py").read_text(), chosen))
    record, _ = train(script, "--dataset", digits, "--epochs", 1, "--batch_size", 40, "--steps", 2,
                      "--result_dir", tmp_path / "runs", "--workers", 0, "--width", 4,
                      "--image_size", 16, cwd=script.parent)
    assert record["script"] == "my_train" and len(record["epochs"]) == 1
    assert 0 < record["epochs"][-1]["loss"] < 10


def test_shell_scripts_are_executable():
    for script in [*ROOT.glob("*.sh"), ROOT / ".ci" / "run"]:
        assert os.access(script, os.X_OK), script
        assert script.read_text().startswith("#!/usr/bin/env bash")


def test_shell_scripts_pass_shellcheck():
    shellcheck = shutil.which("shellcheck") or Path(sys.executable).with_name("shellcheck")
    if not Path(shellcheck).exists():
        pytest.skip("shellcheck is not installed")
    done = run(shellcheck, "--external-sources", *ROOT.glob("*.sh"), ROOT / ".ci" / "run")
    assert done.returncode == 0, done.stdout
