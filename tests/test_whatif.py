"""whatif/ on small scripts of whatif_scripts/: what a user sees of each kind of script.

The first are commands as a user gives them; the other runs are forks (forked_runs.py).
"""

import json
import math
import re
import shutil
import signal
import sys
import zipapp

import pytest

from forked_runs import Scripts, windows_of
from helpers import ROOT, free_port, processes_of, run, start, wait_until
from whatif import advice, confirm, report, session, stats
from whatif.inside import places, traces

WHATIF = [sys.executable, ROOT / "whatif"]
AMP = ("amp bfloat16",)


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    folder = tmp_path / "a project"
    folder.mkdir()
    return Scripts(folder, monkeypatch)


def rate_of(result, names=()):
    """Return the median rate of a set's windows."""
    return stats.statistics.median(each["rate"] for each in windows_of(result, *names))


def a_step(result, names=()):
    """Return how many samples a step has, by counts."""
    found = [
        each["rate"] * each["seconds"] / each["steps"]
        for each in windows_of(result, *names)
        if each["unit"] == "samples"
    ]
    assert found
    return found


def models(result):
    return {each["name"]: each["role"] for each in result["facts"]["models"]}


# ---------------------------------------------------------------------- commands as a user gives
def test_ctrl_c_prints_the_unfinished_table(tmp_path):
    """And `-m`."""
    shutil.copy(Scripts.source("recurrent.py"), tmp_path)
    (tmp_path / "tmp").mkdir()
    process = start(
        [*WHATIF, "--only", "fused", "-m", "recurrent"],
        cwd=tmp_path,
        env={"TMPDIR": str(tmp_path / "tmp")},
    )

    def has_windows():
        return any('"window"' in path.read_text() for path in tmp_path.glob("tmp/*/1/records"))

    wait_until(has_windows)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130 and not err
    assert "Stopped: this table is not finished" in out and "What holds it back" in out
    assert re.search(r"^baseline .* steps/s", out, re.M)
    assert not processes_of(tmp_path) and not [*tmp_path.glob("tmp/whatif*")]


def test_an_archive_a_copy_and_a_launcher(tmp_path):
    """`python whatif.pyz --copy -- torchrun ... ddp.py`."""
    zipapp.create_archive(
        ROOT / "whatif", tmp_path / "w.pyz", filter=lambda path: "__pycache__" not in path.parts
    )
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(Scripts.source("ddp.py"), folder)
    done = run(
        sys.executable,
        tmp_path / "w.pyz",
        "--only",
        "amp",
        "--minutes",
        0.1,
        "--copy",
        "--json",
        tmp_path / "out.json",
        "--",
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        f"--master_port={free_port()}",
        "ddp.py",
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["machine"]["processes"] == 2 and record["baseline"]["rate"] > 0
    assert done.stdout.count("What holds it back") == 1
    assert [path.name for path in folder.iterdir()] == ["ddp.py"] and not processes_of(folder)
    assert {path.name for path in tmp_path.iterdir()} == {"a folder", "w.pyz", "out.json"}


# ------------------------------------------------------------------- what is counted and timed
@pytest.mark.fault("unusual training under whatif")
def test_work_between_steps_that_is_longer_than_a_window_counts(scripts):
    """Five steps of 2 ms and 0.1 s without a step are at most 45 steps/s, not 500."""
    result = scripts.once("rollout.py", only=["fused"])
    assert 20 < rate_of(result) < 45.5
    cycle = result["watched"]["cycle"]  # 1: stalls of a busy machine lay between the rollouts
    assert cycle in (1, 5) and all(each["steps"] % cycle == 0 for each in result["windows"])
    assert result["watched"]["steps"] / result["watched"]["seconds"] < 90


@pytest.mark.fault("unusual training under whatif")
def test_pictures_of_several_sizes_are_counted_as_samples(scripts):
    result = scripts.once("detection.py", only=["amp", "batch"], rounds=4)
    assert a_step(result) == pytest.approx([5] * len(windows_of(result)))
    assert a_step(result, ["batch x2"]) == pytest.approx([10] * len(windows_of(result, "batch x2")))
    assert result["facts"]["loaders"][0]["batch"] == 5 and windows_of(result, *AMP)


@pytest.mark.fault("unusual training under whatif")
@pytest.mark.parametrize("how", ["steps", "epochs"])
def test_the_start_and_the_end_of_workers_are_data_time(how, scripts):
    """A worker takes 0.05 s to start and 0.15 s to end, a step 0.02 s."""
    result = scripts.once("new_iterator.py", how)
    watched = result["watched"]
    waits = [*map(float, (scripts.folder / "waits.txt").read_text().split())]
    own = waits[4 : 4 + watched["steps"]]  # by the script's clock; the first are not watched
    assert len(own) == watched["steps"] and 0.8 * sum(own) < watched["wait"] < 1.1 * sum(own)
    assert watched["wait"] / watched["seconds"] > 0.5
    assert result["facts"]["training"] == [0] and rate_of(result) > 8 / 0.2  # no worker starts


@pytest.mark.fault("unusual training under whatif")
def test_a_thread_that_reads_the_loader_is_no_data_time(scripts):
    """It waits 8 ms a batch, the steps of 30 ms for none."""
    result = scripts.once("prefetch_thread.py", watch=0.4)
    watched = result["watched"]
    assert watched["wait"] < 0.004 * watched["steps"] and watched["steps"] > 3
    assert result["facts"]["loaders"][0]["threaded"] and result["facts"]["training"] == [0]
    assert not report.also_seen(result["facts"])  # it loads while steps run


def test_validation_is_not_in_the_rate_and_workers_end(scripts):
    """Steps wait 0.08 s a batch; validation sleeps as long as an epoch of them."""
    result = scripts.once("slow_data.py", watch=1.0, only=["amp"])
    watched = result["watched"]
    assert watched["wait"] / watched["seconds"] > 0.5
    assert watched["whole"] - watched["seconds"] > 0.35
    assert watched["began"] > 0 <= watched["next"]
    assert rate_of(result) > 2 * 4 / 0.08  # batches are repeated
    assert result["log"].splitlines()[-1] == "0 workers"


@pytest.mark.parametrize("name, samples", [("shards.py", 8), ("unusual.py", 4), ("habits.py", 8)])
def test_batches_of_unusual_loaders_are_counted(name, samples, scripts):
    """A loader for each shard, one without end, and two equal ones in one line."""
    result = scripts.once(name, only=["amp"])
    assert a_step(result) == pytest.approx([samples] * len(windows_of(result)), rel=0.02)
    assert windows_of(result, *AMP)
    assert len(result["facts"]["models"]) == 1  # not its layers, which backward calls again


def test_changed_batches_popped_keys_accumulation_and_a_short_schedule(scripts):
    """A window holds whole optimizer steps: four batches of three."""
    result = scripts.once("in_place.py", only=["amp", "fused"], rounds=2)
    assert not result["failed"] and result["steps"] > 40, result["log"]
    assert a_step(result) == pytest.approx([12] * len(windows_of(result)))
    assert windows_of(result, *AMP) and windows_of(result, "fused")
    assert result["watched"]["batches"] == pytest.approx(4, rel=0.2)


# ----------------------------------------------------------------------- models and optimizers
@pytest.mark.fault("unusual training under whatif")
def test_a_part_that_is_called_once_is_no_model(scripts):
    result = scripts.once("measured_part.py", only=["channels_last"])
    assert models(result) == {"net": "trains"} and windows_of(result, "channels_last")
    for name in "amp bfloat16", "compile":
        assert "wide" not in advice.write(name, result["facts"])


@pytest.mark.fault("unusual training under whatif")
def test_lazy_layers_are_a_model_once_they_have_their_shapes(scripts):
    result = scripts.once("lazy.py", only=["channels_last"])
    assert not result["error"] and models(result) == {"net": "trains"}
    assert windows_of(result, "channels_last")


@pytest.mark.fault("unusual training under whatif")
def test_a_trace_sees_nothing_of_this(scripts):
    """Else its graphs differ, and torch.jit.trace's own check fails."""
    result = scripts.once("traced.py", only=["fused"])
    assert not result["error"] and windows_of(result, "fused")
    assert models(result) == {"net": "trains"}
    found = [(each["text"], each["is_early"]) for each in result["facts"]["sites"]["traces"]]
    assert [(text.rpartition("(")[0], is_early) for text, is_early in found] == [
        ("torch.jit.trace(net, torch.ones", True),
        ("return torch.jit._get_trace_graph", True),
        ("torch.jit.trace", True),
        ("torch.jit.trace", False),
    ]
    text = advice.write("compile", result["facts"])  # a compiled model cannot be traced
    assert text.startswith("below traced.py:25  draw(net, torch.ones(2, 3, 8, 8)), which cannot ")
    assert "cannot trace a compiled model (traced.py:30)\n" in text and "net.compile()\n" in text


STEPS = "for x in batches:\n    if i == 0:\n        trace(net)\n    sgd.step()\n"


@pytest.mark.parametrize(
    "text, stack, below, late",
    [
        ("sgd = SGD(net)\ntrace(net)\n", [2], 2, False),
        ("trace(net)\nsgd = SGD(net)\n", [1], 0, False),  # it is above already
        (f"sgd = SGD(net)\n{STEPS}", [4], 0, True),
        ("def log(m):\n    trace(m)\nsgd = SGD(net)\nlog(net)\n", [2, 4], 4, False),
        ("def make():\n    trace(net)\n    return net\nsgd = SGD(make())\n", [2, 4], 4, False),
        ("def main():\n    sgd = SGD(net)\ntrace(net)\nmain()\n", [3], 0, True),
    ],
)
def test_where_a_model_is_compiled_that_is_traced(tmp_path, text, stack, below, late):
    """`stack` are the lines that run in the trace, innermost first; SGD() is where it is made."""
    file = str(tmp_path / "train.py")
    (tmp_path / "train.py").write_text(text)
    found = traces.Traces(places.Places(tmp_path), [])
    lines = [(file, line) for line in stack]
    site = dict(at=found.places.line_of(*lines[0]), lines=lines, early=True, first=False)
    found.found.append(site)
    made = text[: text.index("SGD")].count("\n") + 1
    place, at = dict(at=f"train.py:{made}"), f"train.py:{stack[0]}"
    for kind in "above", "before":
        line = found.of({kind: place})["below"].get("at", "train.py:0")
        assert line == f"train.py:{below if kind == 'above' else 0}"
    assert found.of(dict(above=place))["late"] == [at] * late
    assert found.of(dict(before=place))["late"] == [at] * (late or bool(below))  # DDP gets it
    found.stack = lambda: lines
    found.begin()  # they have called the training, too
    assert found.of(dict(above=place)) == dict(below={}, late=[at])
    site["first"] = True  # no optimizer was made before it
    assert found.of(dict(above=place)) == dict(below={}, late=[])
    assert found.of(dict(before=place))["late"] == [at]


def test_a_loader_that_is_used_once_does_not_train(scripts):
    result = scripts.once("full_batch.py", only=["fused"])
    assert result["facts"]["training"] == [] and windows_of(result)[0]["unit"] == "steps"
    for name in "workers", "batch x2":
        assert result["why_not"][name] == "the script trains without a torch DataLoader"


@pytest.mark.fault("unusual training under whatif")
def test_a_package_that_lies_elsewhere_is_the_users(scripts, tmp_path, monkeypatch):
    package = tmp_path / "library" / "our_package"
    package.mkdir(parents=True)
    scripts.copy("elsewhere.py", package).rename(package / "__init__.py")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    facts = scripts.once("elsewhere.py")["facts"]
    for about, text in (
        (facts["models"][0], "net(x).mean().backward()"),
        (facts["optimizers"][0], "optimizer = torch.optim.AdamW(net.param"),
        (facts["loaders"][0], "batches = DataLoader("),
    ):
        assert about["at"].startswith(f"{package}/__init__.py:") and about["text"].startswith(text)


@pytest.mark.fault("unusual training under whatif")
def test_options_that_are_unpacked_and_self(scripts):
    facts = scripts.once("spread_options.py")["facts"]
    assert 'in for_loader (spread_options.py:7): "num_workers": 2' in advice.write(
        "workers", facts, dict(workers=2)
    )
    fused = advice.write("fused", facts)
    assert "in for_adam (spread_options.py:8): fused=True" in fused
    assert facts["models"][0]["local"] == "self.critic"
    assert 'torch.autocast("cpu", torch.bfloat16)(self.critic)(...)' in advice.write(*AMP, facts)


@pytest.mark.fault("unusual training under whatif")
def test_networks_that_do_not_train_are_named_and_changed(scripts):
    """And a model that trains in eval mode is one. The teacher refuses autocast."""
    result = scripts.once("teacher.py", only=["amp", "channels_last"])
    assert models(result) == {"pupil": "eval", "teacher": "frozen"}
    (failed,) = result["failed"]
    assert failed == [[*AMP], "ValueError: the teacher has been changed"]
    assert windows_of(result, "channels_last") and not result["error"]
    (told,) = [each for each in report.also_seen(result["facts"]) if "Teacher" in each]
    assert told.startswith("teacher.py:") and "does not train" in told
    assert "teacher (frozen)" in advice.write("channels_last", result["facts"])


@pytest.mark.fault("unusual training under whatif")
def test_networks_of_one_line_are_told_apart(scripts):
    """And a teacher that the script tried before its first step is found where steps call it."""
    facts = scripts.once("targets.py", only=["amp"])["facts"]
    found = {(each["local"], each["role"]) for each in facts["models"]}
    assert found == {("a", "trains"), ("b", "trains"), ("teacher", "frozen")}
    assert report.also_seen(facts) == [
        "targets.py:27: teacher (Linear) does not train, but each step computes it"
    ]


@pytest.mark.fault("unusual training under whatif")
def test_a_network_in_a_loss_does_not_train_and_is_changed(scripts):
    result = scripts.once("perceptual.py", only=["amp", "channels_last"])
    assert models(result) == {"painter": "trains", "criterion": "frozen"}
    assert windows_of(result, *AMP) and windows_of(result, "channels_last")
    assert report.also_seen(result["facts"]) == [
        "perceptual.py:21: criterion (PerceptualLoss) does not train, but each step computes it"
    ]
    assert "likewise: criterion (frozen) (perceptual.py:21)" in advice.write(*AMP, result["facts"])


@pytest.mark.fault("unusual training under whatif")
def test_tensors_that_train_without_a_module(scripts):
    result = scripts.once("tensors.py", only=["amp", "fused"])
    assert not result["facts"]["models"] and result["facts"]["device"] == "cpu"
    assert "no torch.nn.Module is called" in result["why_not"]["amp bfloat16"]
    assert windows_of(result, "fused") and "hidden losses" in result["facts"]["seen"]


@pytest.mark.fault("unusual training under whatif")
def test_a_to_of_its_own_and_autocast_of_float32(scripts):
    result = scripts.once("own_to.py", only=["amp", "channels_last"])
    assert not result["failed"] and "amp" not in result["facts"]["seen"]
    assert windows_of(result, *AMP) and windows_of(result, "channels_last")
    assert "for weights in net.parameters():" in advice.write("channels_last", result["facts"])
    assert "or at own_to.py:" in advice.write(*AMP, result["facts"])


@pytest.mark.fault("unusual training under whatif")
def test_several_optimizers_and_a_gradient_penalty(scripts):
    result = scripts.once("penalty.py", only=["amp", "fused"])
    assert models(result) == {"critic": "trains", "generator": "trains"}
    assert {each["name"] for each in result["facts"]["optimizers"]} == {
        "for_critic",
        "for_generator",
    }
    assert windows_of(result, *AMP) and windows_of(result, "fused") and not result["failed"]


def test_what_the_script_has_already_is_not_tried(scripts):
    """A scaler, autocast, and a compiled function; losses are those before the scaler."""
    result = scripts.once("gan.py", mode="fixed")
    assert max(map(abs, confirm.numbers(result["losses"]))) < 10
    result = scripts.once("gan.py", only=["fused"])
    assert {each["kind"] for each in result["facts"]["models"]} == {"Linear", "Sequential"}
    assert result["why_not"]["amp bfloat16"] == result["why_not"]["compile"] == "already there"
    assert windows_of(result, "fused")


@pytest.mark.fault("start methods of LMDB workers", "start methods of loading workers")
def test_known_brakes_are_named(scripts):
    """Workers that are spawned again for each epoch, and more."""
    result = scripts.once("brakes.py", only=["fused"])
    (loader,) = result["facts"]["loaders"]
    assert loader["method"] == "spawn" and loader["workers"] == 1
    assert a_step(result) == pytest.approx([4] * len(windows_of(result)))
    told = "\n".join(report.also_seen(result["facts"]))
    assert re.search(r"brakes.py:17: without persistent_workers=True, spawn starts all", told)
    assert "DistributedSampler without set_epoch" in told
    assert "DataParallel copies" not in told  # without a GPU it only calls the model
    assert "DataParallel copies" in "\n".join(
        report.also_seen(result["facts"] | dict(seen=["DataParallel"]))
    )
    assert result["why_not"]["fused"] == "torch has no fused Adadelta"


@pytest.mark.fault("unusual training under whatif")
def test_one_loss_that_is_not_finite_is_no_fault(scripts):
    """It is told, but the set does not count as one that changes the training."""
    runs = [
        scripts.once("one_nan.py", mode="fixed", seed=k, least_steps=60, seconds=0.1)
        for k in (0, 1)
    ]
    losses = [confirm.numbers(each["losses"]) for each in runs]
    assert all(sum(not math.isfinite(loss) for loss in run) == 1 for run in losses)
    assert all(map(math.isfinite, stats.mean_losses(losses)))


# ------------------------------------------------------------------------- processes that train
@pytest.mark.fault("unusual training under whatif")
def test_each_process_that_trains_is_told(scripts):
    """The first one is measured; two are counted beside it. A step sleeps 20 ms."""
    one = scripts.session("population.py", only=["fused"])
    of_rounds(one, 4)
    assert not one.take_turns()
    (note,) = session.result_of(one, None).notes
    found = re.fullmatch(
        r"2 more processes train beside it: pid (\d+) at ([\d.]+) steps/s, "
        r"pid (\d+) at ([\d.]+) steps/s",
        note,
    )
    assert found and found[1] != found[3], note
    assert all(0 < float(found[number]) < 50.5 for number in (2, 4)) and windows_of(
        dict(windows=one.windows), "fused"
    )


def of_rounds(one, rounds, **more):
    """Let a session take so many rounds of turns in each process, with short windows."""
    plain = one.spec
    one.spec = lambda mode, names=(), **options: plain(
        mode, names, **options | dict(rounds=rounds, window=0.02, loader_seconds=0) | more
    )


def test_ranks_take_turns_together(scripts, monkeypatch):
    """As within torchrun; below DistributedDataParallel the layout changes, too."""
    for name, value in dict(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost"
    ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("whatif.run.RANKS", 2)
    result = scripts.once("ddp.py", only=["amp", "channels_last"])
    assert not result["error"] and not result["failed"] and not result["others"], result
    assert windows_of(result, *AMP) and windows_of(result, "channels_last")
    assert a_step(result) == pytest.approx([2 * 16] * len(windows_of(result)))
    assert result["facts"]["processes"] == 2 and "set_epoch" in result["facts"]["seen"]
    text = advice.write("channels_last", result["facts"])
    assert re.match(r"(above ddp.py:\d+|before Dist).*\n +layers.to\(", text), text


def test_a_process_that_is_spawned(scripts):
    """It gets the model and the optimizer of the first one."""
    scripts.copy("pickled.py")
    result = scripts.once("pickled.py", only=["fused", "amp"])
    assert windows_of(result, *AMP) and not result["error"], result
    assert result["why_not"]["fused"] == "the optimizer is made in another process"


@pytest.mark.fault("start methods of LMDB workers", "start methods of loading workers")
@pytest.mark.parametrize("method, how", [("fork", "context"), ("forkserver", "all")])
def test_workers_of_each_start_method(method, how, scripts):
    """Of a DataLoader's own context, or set for all; forkserver is the default of Python 3.14.

    The test of brakes has spawned workers.
    """
    result = scripts.once("start_methods.py", method, how, only=["fused"])
    assert windows_of(result, "fused") and a_step(result) == pytest.approx(
        [4] * len(windows_of(result))
    ), result
    (loader,) = result["facts"]["loaders"]
    assert loader["method"] == method and loader["workers"] == 1


# -------------------------------------------------------------------------- scripts that end
@pytest.mark.fault("script that whatif cannot measure")
def test_a_script_that_ends_early_is_started_again(scripts):
    one = scripts.session("short.py", only=["fused"])
    of_rounds(one, 20, always=True)  # of three steps or more a window: 100 are too few for all
    assert not one.take_turns()
    assert one.number == 2 and len(windows_of(dict(windows=one.windows), "fused")) >= 4
    (note,) = one.notes
    assert re.fullmatch("The script came to its own end after 100 steps, .*", note)
    assert not (scripts.folder / "end.txt").exists()


@pytest.mark.fault("script that whatif cannot measure")
def test_a_technique_that_fails_is_named_and_the_rest_goes_on(scripts):
    one = scripts.session("recurrent.py", only=["amp", "channels_last", "fused"])
    of_rounds(one, 2)
    assert not one.take_turns()
    text = report.text_of(session.result_of(one, None))
    assert "amp bfloat16: RuntimeError: this model takes no autocast\n" in text
    assert one.number == 1 and windows_of(dict(windows=one.windows), "fused")
    assert "channels_last: the model has no 2-D convolution" in text
    assert " steps/s, data time 0%" in text


def test_what_only_fails_because_an_epoch_never_ends_is_run_with_its_epochs(scripts):
    one = scripts.session("list_of_epoch.py", only=["fused"])
    of_rounds(one, 2)
    assert not one.take_turns()
    assert one.number == 2 and one.epochs and not one.failed and not one.notes
    assert windows_of(dict(windows=one.windows), "fused")


def test_a_loop_that_compares_the_number_of_a_batch_gets_whole_epochs(scripts):
    result = scripts.once("last_batch.py", only=["fused"])
    assert not result["error"] and windows_of(result, "fused")


# -------------------------------------------------------------------------------------- files
@pytest.mark.fault("script that whatif cannot measure")
def test_nothing_trained_on_repeated_batches_reaches_a_file(scripts):
    for name in ("files.py", "plain_loop.py"):
        scripts.copy(name)
    folder = scripts.folder
    (folder / "older.pt").write_text("weights of an older training")
    before = sorted(path.name for path in folder.iterdir())
    result = scripts.once("files.py", mode="fixed")
    assert not result["error"] and sorted(path.name for path in folder.iterdir()) == before
    result = scripts.once("files.py", only=["fused"], rounds=3)
    assert windows_of(result, "fused") and result["steps"] > 80, result["log"]
    assert (folder / "older.pt").read_text() == "weights of an older training"
    names = {path.name for path in folder.iterdir()}
    assert len(names) <= 13 and len([*folder.glob("archive/*")]) <= 2, names  # while it watched

    result = scripts.once("plain_loop.py", "--size", 8, only=["amp", "fused"])
    assert windows_of(result, *AMP) and windows_of(result, "fused") and not result["failed"]
    assert (folder / "started.txt").read_text() == "once\n"
    assert {path.name for path in folder.glob("run/*")} <= {"last.pt", "last.pt.part"}


# ------------------------------------------------------------------------------ whole sessions
def documented_keys():
    """Return the keys of a record in docs/whatif.md."""
    text = (ROOT / "docs" / "whatif.md").read_text()
    rows = text.split("<!-- keys -->")[1].split("<!-- /keys -->")[0].strip().splitlines()[2:]
    return {key for row in rows for key in row.split("|")[1].strip().split(", ")}


def test_a_whole_session_and_its_record(scripts, capsys, monkeypatch):
    """Turns, the loader, three pairs of whole processes, losses: and `--json`.

    Which set is the best and how long runs take is not left to this machine.
    """
    plain = session.Session.spec
    monkeypatch.chdir(scripts.folder)
    for owner, name, value in (
        (session.run, "catch_signals", lambda: None),
        (session, "LOADER_MOST", 1.0),
        (
            session.Session,
            "spec",
            lambda *args, **more: plain(*args, **more | dict(rounds=1, window=0.02)),
        ),
        (session.Session, "best", lambda _: ("fused",)),
        (confirm, "LEAST_SECONDS", 0.1),
        (confirm.Confirmation, "fits", lambda self, *_: len(self.took) < 6),
    ):
        monkeypatch.setattr(owner, name, value)
    scripts.copy("plain_loop.py")
    args = scripts.arguments("plain_loop.py", "--size", 8, only=["amp", "fused"], seconds=0.1)
    args.json = scripts.folder.parent / "out.json"
    assert session.main(args) == 0
    out, record = capsys.readouterr().out, json.loads(args.json.read_text())
    assert record.keys() == documented_keys()
    assert record["confirmation"]["n"] >= 3 and record["losses"][0]["techniques"] == ["fused"]
    assert not re.search("steps|seen", record["losses"][0]["why"]), record["losses"]
    assert record["advice"].keys() <= {"fused"} and record["forecast"]
    assert record["version"] == report.VERSION and not record["stopped"]
    assert "amp bfloat16" in {row["name"] for row in record["rows"]}
    assert all(window["rate"] > 0 for window in record["windows"])
    assert record["loader"]["rate"] and "The loader by itself" in out
    assert "plain_loop.py:46: a DataLoader without workers" in out
    assert "amp float16: it needs an NVIDIA GPU" in " ".join(out.split())
    assert re.search("^Time: start .*compute", out, re.M)
    assert {path.name for path in scripts.folder.iterdir()} <= {
        "plain_loop.py",
        "run",
        "started.txt",
    }


@pytest.mark.fault("script that whatif cannot measure")
@pytest.mark.parametrize(
    "fault, told",
    [
        ("raises", "ValueError: my own fault (faulty.py:14)"),
        ("killed", "it was killed by signal 9"),
    ],
)
def test_faults_of_the_script_are_told_in_one_line(fault, told, scripts, capsys, monkeypatch):
    one = scripts.session("faulty.py", fault)
    with pytest.raises(SystemExit) as end:
        session.measure_all(one)
    assert str(end.value.code).startswith(f"whatif: faulty.py, as it is: {told}")
    assert "\n" not in end.value.code
    err = capsys.readouterr().err
    assert "runpy" not in err and ('faulty.py", line 14' in err) == (fault == "raises")


@pytest.mark.parametrize("every, last", [(1, 1), (3, 9)])
def test_an_evaluation_between_the_first_steps_is_no_step(every, last, scripts):
    """A step of 4 ms beside evaluations of half a second, without a loader and with gradients."""
    one = scripts.session("first_evaluation.py", every, last, only=["fused"])
    of_rounds(one, 1, loader_seconds=0)
    assert not one.take_turns()
    found, parts = one.baseline(), one.parts()
    assert found["step_seconds"] < 0.05 and found["data_time"] > 0.002 and found["cycle"] == 1
    assert parts["next"] < 0.4 and parts["aside"] > 0.49 * min(2, last)


def test_lines_of_a_worker_have_the_path_from_the_folder(scripts):
    one = scripts.session("slow_data.py", only=["fused"])
    of_rounds(one, 1, loader_seconds=2)
    assert not one.take_turns()
    lines = one.found["loading"]["lines"]
    assert lines and all(each["at"].startswith("slow_data.py:") for each in lines)
