"""whatif.py, on small scripts in whatif_scripts/."""

import json
import math
import re
import shutil
import signal
import sys
from types import MethodType, SimpleNamespace

import pytest
import torch
from helpers import ROOT, assert_one_line, free_port, processes_of, run, start, torchrun, wait_until

import whatif

SCRIPTS = ROOT / "tests" / "whatif_scripts"
WHATIF = [sys.executable, ROOT / "whatif.py"]
ONCE = ["--seconds", 0.5, "--runs", 1]  # figures are not what is tested


def copy_of(name, folder):
    shutil.copy(SCRIPTS / name, folder)
    return folder


def record_of(folder):
    return folder.parent / f"{folder.name}.json"


def facts_of(folder):
    """Return what the last run of `ask` in `folder` has seen of the script."""
    return json.loads(record_of(folder).read_text())["facts"]


def ask(folder, *words, only, options=ONCE):
    """Run whatif.py in `folder` with --only; return (its rows by name, its output)."""
    record = record_of(folder)
    done = run(*WHATIF, *options, "--only", only, "--json", record, *words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not processes_of(folder)
    return {row["name"]: row for row in json.loads(record.read_text())["rows"]}, done.stdout


@pytest.mark.fault(77)
def test_techniques_losses_advice_and_files(tmp_path):
    folder = copy_of("plain_loop.py", tmp_path)
    before = (folder / "plain_loop.py").read_bytes()
    rows, out = ask(folder, "plain_loop.py", "--size", 8, only="amp,fused")
    assert list(rows) == ["as it is", "amp bfloat16", "fused"]
    for row in rows.values():
        assert len(row["runs"]) == 1 and len(row["runs"][0]["rates"]) == whatif.WINDOWS
        assert row["rate"] > 0 and row["ratio"] > 0 and row["runs"][0]["losses"]
    assert "other losses" in rows["amp bfloat16"]["verdict"]
    assert "losses" not in rows["fused"]["verdict"]
    one, other = (rows[name]["runs"][0]["losses"] for name in ("as it is", "fused"))
    n = min(20, len(one), len(other))
    assert other[:n] == pytest.approx(one[:n], rel=1e-4)
    assert "Net, SGD" in out and "plain_loop.py:46: a DataLoader without workers" in out
    assert re.search(r"amp float16: it needs an NVIDIA GPU", out)
    # the plain run wrote, the others did not
    assert {path.name for path in folder.iterdir()} == {"plain_loop.py", "run", "started.txt"}
    assert {path.name for path in (folder / "run").iterdir()} <= {"last.pt", "last.pt.part"}
    assert (folder / "started.txt").read_text() == "once\n"
    assert (folder / "plain_loop.py").read_bytes() == before


def test_what_the_script_has_already_is_not_tried(tmp_path):
    rows, out = ask(copy_of("gan.py", tmp_path), "gan.py", only="amp,compile")
    assert list(rows) == ["as it is"]
    assert max(map(abs, rows["as it is"]["runs"][0]["losses"])) < 10  # without the scaler's factor
    assert "Linear, Sequential, Adam, Adam" in out or "Sequential, Linear, Adam, Adam" in out
    assert "amp bfloat16, compile: already there" in out


@pytest.mark.fault(77)
def test_no_loader_and_a_technique_that_fails(tmp_path):
    rows, out = ask(copy_of("recurrent.py", tmp_path), "recurrent.py",
                    only="no_loading,workers,amp,channels_last,fused")
    assert list(rows) == ["as it is", "amp bfloat16", "fused"]
    assert re.fullmatch(r"RuntimeError: this model takes no autocast \(recurrent.py:\d+\)",
                        rows["amp bfloat16"]["verdict"])
    assert rows["fused"]["runs"] and "losses" not in rows["fused"]["verdict"]
    assert "steps/s" in out and "without a torch DataLoader" in out
    assert "channels_last: the model has no 2-D convolution" in out


def test_known_brakes_are_named(tmp_path):
    _, out = ask(copy_of("brakes.py", tmp_path), "brakes.py", only="plain,fused")
    assert "MobileNetV3, Adadelta" in out
    assert "brakes.py:18: without persistent_workers=True, spawn starts all workers again" in out
    assert "DistributedSampler without set_epoch" in out and "DataParallel copies" in out
    assert "fused: torch has no fused Adadelta" in out


def test_waiting_for_data_and_validation(tmp_path):
    rows, out = ask(copy_of("slow_data.py", tmp_path), "slow_data.py", only="no_loading,batch")
    assert list(rows) == ["as it is", "no_loading", "no_loading + batch"]
    assert rows["no_loading + batch"]["verdict"].startswith("another training")
    assert "\n  Data: " in out and "with cached batches it is" in out
    run_, cached = rows["as it is"]["runs"][0], rows["no_loading"]["runs"][0]
    assert run_["wait"] > cached["wait"]
    # validation sleeps as long as an epoch waits: with it in both rates, this could not exceed 2
    assert rows["no_loading"]["ratio"] > 2
    assert "src/train_cache.py" in out
    # the workers of the plain run are there; those of a run without loading would take the cores
    assert re.fullmatch("1+0+", (tmp_path / "workers.txt").read_text())


def test_shards_with_a_loader_each(tmp_path):
    """Each is timed from its second step; a loader with larger batches says how large they are."""
    rows, out = ask(copy_of("shards.py", tmp_path), "shards.py", only="batch")
    (run_,) = rows["as it is"]["runs"]
    assert "samples/s" in out
    assert run_["step_samples"] == pytest.approx(8, rel=0.2)
    assert rows["batch"]["verdict"] == "another training"


def test_what_is_unusual_and_common(tmp_path):
    rows, out = ask(copy_of("unusual.py", tmp_path), "unusual.py", only="no_loading,amp")
    assert {"as it is", "no_loading"} < {*rows}, out  # and amp, with or without loading
    for row in rows.values():
        (run_,) = row["runs"]
        assert run_["step_samples"] == pytest.approx(4, rel=0.2)  # a batch
    assert {path.name for path in (tmp_path / "out" / "deep").iterdir()} <= {"last.pt", "best.pt"}
    assert {path.name for path in tmp_path.iterdir()} == {"unusual.py", "out"}
    assert "  unusual.py:" in out  # as seen from where whatif.py was called


def test_habits_of_scripts(tmp_path):
    rows, out = ask(copy_of("habits.py", tmp_path), "habits.py", only="fused")
    assert list(rows) == ["as it is", "fused"]
    for row in rows.values():  # 8 a step, without validation; the first 10 of an optimizer are lost
        (run_,) = row["runs"]
        assert run_["step_samples"] == pytest.approx(9, rel=0.2), out
    assert len(list((tmp_path / "runs").iterdir())) == 1  # of the plain run
    assert "\nNet, SGD; " in out  # not its layers, which the backward pass calls again


@pytest.mark.fault(77)
def test_later_runs_leave_all_files_as_they_are(tmp_path):
    tmp_path /= 110 * "д"  # 220 bytes
    tmp_path.mkdir()
    copy_of("files.py", tmp_path)
    (tmp_path / "older.pt").write_text("weights of an older training")
    rows, out = ask(tmp_path, "files.py", only="fused")
    assert rows["fused"]["runs"], out
    names = {path.name for path in tmp_path.iterdir()}
    assert {"files.py", "older.pt", "state.txt", "archive", "new.txt", "latest", "last.pt",
            "all.tar", "hard.txt"} <= names
    assert (tmp_path / "older.pt").read_text() == "weights of an older training"
    # at most what the plain run was writing when it was ended
    assert len(names) <= 13 and len(list((tmp_path / "archive").iterdir())) <= 2, names


def explored(speeds, folder, monkeypatch, names=("fused",), **options):
    """Return (a Session, the row of the set it chose) of runs with these speeds.

    `speeds` has them one after another, or gives that of a set of techniques. A speed may be
    (speed, the share of time that steps wait for data).
    """
    speed_of = speeds if callable(speeds) else lambda _, left=iter(speeds): next(left)
    args = SimpleNamespace(**dict(
        seconds=1, minutes=60, runs=4, arguments=[], script="x.py") | options)
    session = whatif.Session(args, folder, folder / "x.py", folder)

    def run_once(spec, *_):
        speed = speed_of(spec["techniques"])
        speed, wait = speed if isinstance(speed, tuple) else (speed, 0)
        return dict(windows=[dict(seconds=1, steps=speed, samples=speed, wait=wait)] * 5, error="",
                    facts=dict(processes=1, training=[0]), memory=None, losses=[1.0] * 20)
    monkeypatch.setattr(whatif, "run_once", run_once)
    monkeypatch.setattr(whatif.Row, "doubt", None)
    session.measure(session.rows[0])
    session.extra = {}
    return session, whatif.explore(session, names)


def test_what_pays_no_more_is_not_advised(tmp_path, monkeypatch):
    speeds = [100, 100, 115, *[100, 92] * 4]  # plain, plain, fused, plain, fused, ...
    session, best = explored(speeds, tmp_path, monkeypatch)
    assert best is session.rows[0] and not session.rows[1].is_kept()


def test_what_gains_in_its_first_run_is_built_upon(tmp_path, monkeypatch):
    """As in running.sh: 1.05x is inside the uncertainty of one run, and the table says so."""
    session, best = explored([100, 105, 117], tmp_path, monkeypatch, ("fused", "tf32"), runs=1)
    assert best.techniques == ("fused", "tf32") and best.ratio(session.rows[0])[0] == 1.17
    assert [row.techniques for row in whatif.chain(best)] == [("fused", "tf32"), ("fused",)]
    assert not any(row.gains() or "pays" in row.verdict() for row in whatif.chain(best))


def test_what_gained_nothing_is_tried_again_on_top_of_what_gained(tmp_path, monkeypatch):
    _, best = explored([100, 100, 150, 160], tmp_path, monkeypatch, ("fused", "compile"), runs=1)
    assert best.techniques == ("compile", "fused")


def test_the_best_of_a_kind_is_kept(tmp_path, monkeypatch):
    gains = {"amp bfloat16": 1.2, "amp float16": 1.3, "channels_last": 1.3, "fused": 0.9,
             "cudnn": 1, "tf32": 1.03, "compile": 1.5, "compile reduce-overhead": 1.4, "batch": 2}
    session, best = explored(lambda names: 100 * math.prod(map(gains.get, names)), tmp_path,
                             monkeypatch, [*gains])
    assert best.techniques == ("amp float16", "channels_last", "tf32", "compile")
    tried = [row.techniques for row in session.rows]
    assert tried[:5] == [(), ("amp bfloat16",), ("amp float16",), ("amp float16", "channels_last"),
                         ("amp float16", "channels_last", "fused")]
    assert tried[-1] == (*best.techniques, "cudnn")  # again, on top of all
    assert "pays" in best.verdict() and len(best.runs) > 1


@pytest.mark.parametrize("sums", [False, True], ids=["still waits", "gains"])
@pytest.mark.parametrize("loads, tried, best", [
    (300, ["as it is", "no_loading", "workers", "no_loading + amp bfloat16",
           "no_loading + amp bfloat16 + fused", "no_loading + amp bfloat16 + compile",
           "workers + amp bfloat16 + compile"], "workers"),
    (1200, ["as it is", "amp bfloat16", "amp bfloat16 + fused", "amp bfloat16 + no_loading",
            "amp bfloat16 + workers", "amp bfloat16 + no_loading + compile",
            "amp bfloat16 + workers + compile"], "amp bfloat16 + workers")],
    ids=["it waits", "it waits with amp"])
def test_without_loading_while_steps_wait(loads, tried, best, sums, tmp_path, monkeypatch):
    """And at the end the sum of what gained, with real loading."""
    def speed(names):
        computes = 1000 * (4 if "amp bfloat16" in names else 1) * (1.5 if "compile" in names else 1)
        loaded = 1e9 if "no_loading" in names else 2 * loads if "workers" in names else loads
        if sums and {"workers", "compile"} < {*names}:
            loaded = 1e9
        return min(loaded, computes), max(0, 1 - loaded / computes)
    session, found = explored(speed, tmp_path, monkeypatch, (
        "no_loading", "workers", "amp bfloat16", "fused", "compile"))
    assert [row.name() for row in session.rows] == tried
    assert found.name() == (tried[-1] if sums else best)


def test_loading_that_takes_the_cores_from_steps(tmp_path, monkeypatch, capsys):
    """Seen on a GPU with 16 cores and 16 workers: no step waits, but all are slower."""
    def speed(names):
        computes = 1000 * (2 if "fused" in names else 1) * (1.5 if "compile" in names else 1)
        return computes if "no_loading" in names else min(computes, 1400)
    session, best = explored(speed, tmp_path, monkeypatch, ("no_loading", "fused", "compile"))
    assert [row.name() for row in session.rows] == [
        "as it is", "fused", "fused + no_loading", "fused + no_loading + compile",
        "fused + compile"]
    assert best.name() == "fused" and "pays (1.50x of fused + no_loading)" in (
        session.rows[3].verdict())
    session.facts |= dict(device="cpu", lines=[], loaders=[], training=[], seen=[], models=[],
                          optimizers=[])
    session.told.clear()
    whatif.report(session, best)
    out = capsys.readouterr().out
    assert "\nCached batches are 1.43x as fast as fused: faster loading is next.\n" in out
    assert "\n  no_loading\n" in out and "\n  The CPU, which loads data and" in out


def test_loading_that_waits_in_the_first_run_only_is_tried_last(tmp_path, monkeypatch):
    """Files are in memory after it."""
    speeds = [(100, 0.2), 120, *[130] * 9]
    session, _ = explored(speeds, tmp_path, monkeypatch, ("workers", "fused"), runs=2)
    assert [row.name() for row in session.rows[:3]] == ["as it is", "fused", "fused + workers"]


@pytest.mark.parametrize("speed", [150, 100])
def test_it_tells_that_steps_wait_for_data_with_a_technique(speed, tmp_path, monkeypatch, capsys):
    """Waiting may hide all that it gains."""
    session, best = explored([100, (speed, 0.3)], tmp_path, monkeypatch, runs=1)
    session.facts |= dict(device="cpu", lines=[], training=[], seen=[], models=[],
                          optimizers=[dict(at="x.py:1", text="SGD()")])
    whatif.report(session, best)
    assert "With fused, steps wait for data 30% of the time" in capsys.readouterr().out


def test_a_technique_that_fails_after_some_windows_does_not_pay(tmp_path, monkeypatch):
    window = dict(seconds=1, steps=10, samples=10, wait=0)
    facts = dict(processes=1, training=[0])
    results = [dict(windows=5 * [window], error="", facts=facts, memory=None, losses=[1.0]),
               dict(windows=3 * [window], error="RuntimeError: loss is NaN", losses=[])]
    args = SimpleNamespace(seconds=1, minutes=1, runs=1, arguments=[])
    session = whatif.Session(args, tmp_path, tmp_path / "x.py", tmp_path)
    monkeypatch.setattr(whatif, "run_once", lambda *_: results.pop(0))
    session.measure(session.rows[0])
    session.extra = {}
    row = session.attempt(session.rows[0], "fused")
    assert not row.runs and row.verdict() == "RuntimeError: loss is NaN"


def test_float16_with_fused_leaves_out_a_first_step_that_overflows(monkeypatch):
    """PyTorch would leave SGD's momentum uninitialised."""
    weights = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(50)]
    optimizer = torch.optim.SGD(weights, 0.1, momentum=0.9, fused=True)
    run = SimpleNamespace(fused=[optimizer], scales=False, scaler=torch.amp.GradScaler("cpu"))
    monkeypatch.setattr(whatif, "torch", torch, raising=False)  # imported in runs only
    monkeypatch.setattr(whatif.Run, "active", run)
    optimizer.step = MethodType(whatif.Run.scaled_step, optimizer)
    for factor in (float("inf"), 1, 1):
        optimizer.zero_grad()
        loss = sum(factor * each.sum() for each in weights)
        whatif.Run.scale(run, torch.amp.GradScaler.scale, run.scaler, loss).backward()
        del [torch.full((1000,), float("nan")) for _ in range(50)][:]  # for what is uninitialised
        optimizer.step()
    for each in weights:
        assert torch.allclose(each, torch.tensor(-0.1 - 0.19))


def test_a_record_with_losses_that_are_not_finite(tmp_path, monkeypatch):
    session, best = explored([100, 150], tmp_path, monkeypatch, runs=1, json=tmp_path / "x.json")
    session.rows[1].runs[0]["losses"][3] = float("nan")
    session.unit = "samples"
    whatif.write_record(session, best)
    row = json.loads(session.args.json.read_text())["rows"][1]
    assert row["runs"][0]["losses"][3] is None and row["verdict"].startswith("other losses")


def test_processes_that_the_script_spawns(tmp_path):
    rows, out = ask(copy_of("ddp.py", tmp_path), "ddp.py", free_port(), only="plain")
    assert rows["as it is"]["rate"] > 0 and "2 process(es)" in out
    facts = facts_of(tmp_path)
    assert whatif.advice("channels_last", facts, {}).startswith(
        "before DistributedDataParallel or DataParallel gets the model\n            layers.to(")
    assert "\n            layers.compile()" in whatif.advice("compile", facts, {})


def test_an_optimizer_that_comes_to_a_spawned_process(tmp_path):
    copy_of("pickled.py", tmp_path)
    rows, out = ask(tmp_path, "pickled.py", only="fused")
    assert rows["as it is"]["rate"] > 0, out
    assert "fused: the optimizer is made in another process" in out


def test_torchrun(tmp_path):
    copy_of("ddp.py", tmp_path)
    command = torchrun(ROOT / "whatif.py", *ONCE, "--only", "channels_last", "ddp.py")
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("What holds it back") == 1 and "2 process(es)" in done.stdout
    assert re.search(r"^channels_last +[\d,.]+  \d", done.stdout, re.M), done.stdout
    assert "set_epoch" not in done.stdout
    assert not processes_of(tmp_path)


@pytest.mark.fault(77)
@pytest.mark.parametrize("fault, told", [("raises", "ValueError: my own fault"),
                                         ("killed", "killed by signal 9")])
def test_faults_of_the_script_are_told_in_one_line(tmp_path, fault, told):
    copy_of("faulty.py", tmp_path)
    done = run(*WHATIF, *ONCE, "faulty.py", fault, cwd=tmp_path)
    assert done.returncode == 1 and told in done.stderr.splitlines()[-1], done.stderr
    assert "runpy" not in done.stderr and "whatif.py\", line" not in done.stderr
    assert ('faulty.py", line 14' in done.stderr) == (fault == "raises")


@pytest.mark.parametrize("sent, told", [
    (dict(error="EOFError: EOF when reading a line (x.py:3)"), "it asks for input, but"),
    (dict(error="EOFError: Ran out of input"), "EOFError: Ran out of input"),
    (dict(done=True), "it ended without a step of an optimizer"),
    (dict(done=True, steps=1), "it ended after 1 steps, before the warm-up was over"),
    ({}, "it ended with status 1: the last line"),
    (dict(done=True, windows=[dict(steps=1)]), "")])
def test_why_a_run_failed(sent, told):
    why = whatif.why_failed(dict(windows=[]) | sent, 1, "a line\nthe last line\n")
    assert why.startswith(told) and bool(why) == bool(told)


@pytest.mark.fault(77)
def test_wrong_use(tmp_path):
    assert_one_line(run(*WHATIF, "missing.py"), 2, "missing.py: there is no such script")
    assert_one_line(run(*WHATIF, "--only", "warp", "x.py"), 2, "warp", "channels_last")
    assert_one_line(run(*WHATIF, "--seconds", 0, "x.py"), 2, "above 0")
    for path in (tmp_path, tmp_path / "none" / "x.json"):
        assert_one_line(run(*WHATIF, "--json", path, "x.py"), 2, f"--json {path}: ")


@pytest.mark.fault(77)
def test_a_copy_leaves_nothing_and_a_script_may_end(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    rows, out = ask(copy_of("faulty.py", folder), "--copy", "faulty.py", "ends", only="plain",
                    options=["--seconds", 4, "--runs", 1])
    assert rows["as it is"]["rate"] > 0
    assert [path.name for path in folder.iterdir()] == ["faulty.py"]
    assert {path.name for path in tmp_path.iterdir()} == {"a folder", "a folder.json"}


def test_ctrl_c_prints_the_unfinished_table(tmp_path):
    copy_of("recurrent.py", tmp_path)
    (tmp_path / "tmp").mkdir()
    with open(tmp_path / "out.txt", "w") as out:
        process = start([*WHATIF, *ONCE, "--only", "fused", "recurrent.py"], cwd=tmp_path,
                        stdout=out, env={"TMPDIR": str(tmp_path / "tmp")})
        wait_until(lambda: re.search("^as it is", (tmp_path / "out.txt").read_text(), re.M))
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    text = (tmp_path / "out.txt").read_text()
    assert "Stopped: this table is not finished" in text and "What holds it back" in text
    assert not processes_of(tmp_path) and not list((tmp_path / "tmp").iterdir())


def test_a_window_in_which_something_is_compiled_does_not_count():
    windows, compiled = [], [0]
    clock = whatif.Clock(0.05, lambda: None, windows.append, lambda: compiled[0])
    while not clock.step(0):
        if clock.measures and not windows:
            compiled[0] = 1
    assert len(windows) == whatif.WINDOWS and clock.lost == 1


def rows_of(*rates, losses=((1.0,) * 20,) * 2):
    """Return (a base, a row on it), each with one run of these rates."""
    base = whatif.Row()
    row = whatif.Row(("fused",), base)
    for number, (one, some, lost) in enumerate(zip((base, row), rates, losses)):
        one.runs.append(dict(number=number, rates=some, losses=list(lost)))
    return base, row


def test_verdicts(monkeypatch):
    for rate in 50, 100, 300:  # nothing has run twice: the machine may have been busy
        assert rows_of([100, 101, 99], [rate] * 3)[1].verdict() == "ran once"
        assert not rows_of([100, 101, 99], [rate] * 3)[1].gains()
    monkeypatch.setattr(whatif.Row, "doubt", 0.2)
    assert rows_of([100, 101, 99], [150, 151, 149])[1].verdict() == "pays"
    assert rows_of([100, 101, 99], [50, 51, 49])[1].verdict() == "slower"
    assert rows_of([100, 101, 99], [115, 116, 114])[1].verdict() == "ran once"
    assert rows_of([60, 100, 140], [90, 150, 210])[1].verdict() == "ran once"
    with monkeypatch.context() as known:  # by how much runs differ on this machine
        known.setattr(whatif.Row, "doubt", 0.01)
        assert rows_of([100, 101, 99], [115, 116, 114])[1].verdict() == "pays"
        assert rows_of([100, 100.2, 99.8], [99.9, 100, 100.3])[1].verdict() == "no difference"
    ones, twos, nan = (1.0,) * 20, (2.0,) * 20, (float("nan"),) * 20
    for other in (twos, nan):
        row = rows_of([100] * 3, [200] * 3, losses=(ones, other))[1]
        assert not row.is_kept() and "other losses" in row.verdict()
    noisy = [1 + 0.5 * (-1) ** k for k in range(20)]
    assert rows_of([100] * 3, [200] * 3, losses=(ones, noisy))[1].is_kept()


def test_runs_are_repeated_by_turns_until_the_difference_is_clear(monkeypatch):
    monkeypatch.setattr(whatif.Row, "doubt", 0.08)
    base, row = rows_of([100, 101, 102], [104, 105, 107])
    speeds, calls = {base: 100, row: 105}, []
    session = SimpleNamespace(args=SimpleNamespace(runs=4), has_time=lambda runs: True)

    def measure(one):
        calls.append(one)
        one.runs.append(dict(number=1 + len(calls), rates=[speeds[one]] * 3, losses=[1.0] * 20))
        return True
    session.measure = measure
    whatif.Session.settle(session, row)
    assert calls == [base, row] * 2 and row.is_kept()


def test_the_lines_to_write_are_python_where_they_stand(tmp_path):
    """A function that makes the optimizer does not know the model; calls take several lines."""
    (tmp_path / "made.py").write_text("""import torch
from torch import nn

def build(weights):
    return torch.optim.SGD(weights, 0.1)

def train(model, optimizer):
    while True:
        loss = nn.functional.mse_loss(
            model(torch.rand(4, 8)),
            torch.rand(4, 8))
        loss = loss + model(torch.rand(4, 8)).mean()
        outputs = wrapped(torch.rand(4, 8))
        loss = loss + outputs["mean"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

class Wrapped(nn.Linear):
    def forward(self, x):
        return {"mean": super().forward(x).mean()}

wrapped = Wrapped(8, 8)

def main():
    network = nn.Linear(8, 8)
    sgd = build(network.parameters())
    train(network, sgd)

main()
""")
    ask(tmp_path, "made.py", only="plain")
    facts = facts_of(tmp_path)
    assert whatif.advice("compile", facts, {}).startswith("""\
above made.py:27  sgd = build(network.parameters())
            network.compile()""")
    amp = whatif.advice("amp bfloat16", facts, {})
    assert """
            instead of model(...): torch.autocast("cpu", torch.bfloat16)(model)(...).float()
""" in amp
    assert "likewise: model (made.py:12), wrapped (made.py:13)" in amp
    facts["models"].reverse()
    assert """
            with torch.autocast("cpu", torch.bfloat16):
                outputs = wrapped(torch.rand(4, 8))
            and a loss outside of the model takes the output's tensors as .float()
""" in whatif.advice("amp bfloat16", facts, {})
    assert whatif.advice("compile", facts, {}).startswith("""\
below the line that makes wrapped
            wrapped.compile()""")


def test_what_is_called_within_a_longer_statement(tmp_path):
    """A model may be called in a lambda, several times, by a name that cannot be found."""
    script = tmp_path / "within.py"
    script.write_text("""import torch
from torch import nn

class Data(torch.utils.data.IterableDataset):
    def __iter__(self):
        while torch.utils.data.get_worker_info() is None:
            yield torch.rand(3, 4, 4)

net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, 8))
every = [
    torch.optim.SGD(net.parameters(), 0.1)]
parts = {"é": nn.Conv2d(3, 4, 1)}
sgd = torch.optim.SGD(
    parts["é"].parameters(), 0.1)
apply = lambda x: parts["é"](x)
for output in torch.utils.data.DataLoader(Data(), 4):
    for one in (output,): loss = (net(  # net, of output / 2
        one / 2) + net(output) - net(one)).mean()
    loss = loss + apply(output).mean()
    one, *rest = net(
        output)
    (loss + one.mean()).backward()
    sgd.step()
""")
    ask(tmp_path, "within.py", only="plain")
    facts = facts_of(tmp_path)
    assert [each["name"] for each in facts["models"]] == ["net", "parts['é']"]
    for each, told in zip(facts["models"], (
            "within.py:17  for one in (output,): loss = (net(  # net, of output / 2",
            """within.py:15  apply = lambda x: parts["é"](x)""")):
        assert whatif.advice("amp bfloat16", facts | dict(models=[each]), {}).startswith(f"""{told}
            instead of {each["name"]}(...): \
torch.autocast("cpu", torch.bfloat16)({each["name"]})(...).float()
""")
    last = whatif.advice("channels_last", facts, {})
    assert re.match(r"above within.py:10  every = \[\n +net.to\(memory_format", last)
    assert "likewise: net (within.py:18), net (within.py:20), parts['é'] (" in last
    assert "workers" not in whatif.reasons(facts)  # Data knows of workers


def test_what_a_library_makes_and_calls(tmp_path):
    library = tmp_path / "site-packages" / "fitter"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("""import torch

def fit(model, data):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        for batch in torch.utils.data.DataLoader(data, 4):
            model(batch).mean().backward()
            optimizer.step()
""")
    (tmp_path / "fits.py").write_text("""import sys
sys.path.insert(0, "site-packages")
import fitter, torch
fitter.fit(torch.nn.Linear(8, 8), torch.rand(64, 8))
""")
    ask(tmp_path, "fits.py", only="plain")
    facts = facts_of(tmp_path)
    begin = ("inside fitter, which has to be told to do this:\n"
             "        fits.py:4  fitter.fit(torch.nn.Linear")
    for name in "amp bfloat16", "workers", "fused":
        assert whatif.advice(name, facts, dict(workers=2)).startswith(begin)
    assert 'model(...): torch.autocast("cpu", torch.bfloat16)(model)(...).float()\n' in (
        whatif.advice("amp bfloat16", facts, {}))
    for of in facts["loaders"] + facts["optimizers"]:
        of["library"] = "transformers"
    assert whatif.advice("workers", facts, dict(workers=2)).endswith(
        "TrainingArguments: dataloader_num_workers=2, dataloader_persistent_workers=True")
    facts["models"][0]["library"] = ""  # as in a Trainer with a compute_loss of the user's
    assert whatif.advice("amp bfloat16", facts, {}).endswith("TrainingArguments: bf16=True")


def test_models_that_other_objects_hold(tmp_path):
    """They are named as the user's lines can; a variable of a comprehension is not there later."""
    (tmp_path / "held.py").write_text("""import types, torch
from torch import nn

class Trainer:
    def __init__(self):
        self.nets = {"g": nn.Linear(8, 8)}
        self.optimizers = {name: torch.optim.SGD(net.parameters(), 0.1, foreach=True)
                           for name, net in self.nets.items()}

    def step(self):
        x = torch.rand(4, 8)
        (self.nets["g"](x) + state.net(x)).mean().backward()
        self.optimizers["g"].step()

state = types.SimpleNamespace(net=nn.Linear(8, 8))
sgd = torch.optim.SGD(state.net.parameters(), 0.1)
trainer = Trainer()
while True:
    trainer.step()
""")
    ask(tmp_path, "held.py", only="plain")
    facts = facts_of(tmp_path)
    assert {each["name"]: each["above"]["at"] for each in facts["models"]} == {
        "self.nets['g']": "held.py:7", "state.net": "held.py:16"}
    assert [each["local"] for each in facts["models"]] == ["self.nets['g']", "state.net"]
    assert "fused=True in place of foreach=True" in whatif.advice("fused", facts, {})


def test_the_first_technique_is_tried_even_if_no_time_is_left_to_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr(whatif.Session, "has_time", lambda _, runs=1: runs <= 1)
    session, _ = explored([100, 150, 150, 150], tmp_path, monkeypatch, ("fused", "tf32"))
    assert [row.name() for row in session.rows] == ["as it is", "fused"]
    assert session.left_out == {"tf32": "no time left (--minutes)"}


def test_each_model_is_changed_where_it_is_known(tmp_path):
    """netD does not exist above the first optimizer; net is named as where its optimizer is."""
    (tmp_path / "several.py").write_text("""import torch
from torch import nn

def train(module, optimizer):
    module(torch.rand(4, 8)).mean().backward()
    optimizer.step()

netG = nn.Linear(8, 8)
optG = torch.optim.SGD(netG.parameters(), 0.1)
netD = nn.DataParallel(nn.Linear(8, 8))
optD = torch.optim.SGD(netD.parameters(), 0.1)
early = nn.Linear(8, 8)
early(torch.rand(4, 8))
optE = torch.optim.SGD(early.parameters(), 0.1)
late = nn.Sequential(early)
parts = nn.ModuleDict({"head": nn.Linear(8, 8)})
optP = torch.optim.SGD(parts.parameters(), 0.1)
while True:
    train(netD, optD)
    train(netG, optG)
    train(early, optE)
    train(late, optE)
    train(parts["head"], optP)
    nn.Linear(8, 8)(torch.rand(4, 8))
""")
    ask(tmp_path, "several.py", only="plain")
    facts = facts_of(tmp_path)
    told = {}
    for model in facts["models"]:
        above, line, *_ = whatif.advice("compile", facts | dict(models=[model]), {}).split("\n")
        told[line.strip()] = above
    assert told == {
        "netG.compile()": "above several.py:9  optG = torch.optim.SGD(netG.parameters(), 0.1)",
        "netD.module.compile()": "above several.py:11  "
                                 "optD = torch.optim.SGD(netD.parameters(), 0.1)",
        "early.compile()": "above several.py:14  optE = torch.optim.SGD(early.parameters(), 0.1)",
        "late.compile()": "below the line that makes late",
        "parts.head.compile()": "below the line that makes parts.head",
        "model.compile()": "below the line that makes model"}
    assert len(facts["models"]) == 6  # the last is a new one in each step
    everything = whatif.advice("compile", facts, {})
    assert "likewise: " in everything and "netG (several.py:9)" in everything
