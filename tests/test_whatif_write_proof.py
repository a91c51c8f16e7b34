"""whatif --write: the proof, what is left out of a patch, the exit statuses, and --compare."""

import functools
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from forked_runs import start_forks
from helpers import AMP_OPTION, HANG, ROOT, run, start
from test_whatif_write import LOOP, Seen
from whatif import confirm, forecast, options, session
from whatif.write import compare, proof

pytestmark = pytest.mark.fault("patch of unusual files")

SCRIPTS = ROOT / "tests" / "whatif_scripts"
PAGE = (ROOT / "docs" / "whatif_write.md").read_text()


class Script:
    """Takes the place of run_once: what a script and its changed copy give.

    `wrong` is called with the text of the copy, and returns an error, None, or a factor of the
    losses. `gain` is how much faster the copy is.
    """

    def __init__(self, wrong=lambda text: None, gain=1.5, stop=False):
        self.wrong, self.gain, self.stop, self.specs = wrong, gain, stop, []

    def __call__(self, command, spec, *_):
        self.specs.append(spec | dict(command=command))
        if spec["mode"] != "proof":
            return self.turns(spec)
        if self.stop and len(self.specs) > 4:
            raise KeyboardInterrupt
        text = "".join(open(path).read() for path in spec["files"].values())
        found = self.wrong(text) if text else None
        base = dict(windows=[], error="", traceback="", states=None, compared=[], log="why")
        if isinstance(found, str):
            return base | dict(error=found)
        if isinstance(found, list):
            return base | dict(windows=[dict(steps=9, seconds=1)], first=5, states=found)
        k, is_copy = spec["seed"], bool(text) or len(command) > 4
        seconds = (1 + 0.001 * k) / (self.gain if is_copy else 1)
        losses = [(found or 1) * (1 + 0.01 * k) + 0.001 * is_copy] * 60
        return base | dict(windows=[dict(steps=9, seconds=seconds)], losses=losses, first=5)

    @staticmethod
    def turns(spec):
        names = [(), *[each for number in range(7) for each in (("amp bfloat16", "fused"), ())]]
        watched = dict(seconds=2.0, steps=40, samples=400, wait=0.1, whole=2.2, batches=1.0)
        watched |= dict(next=0.2, other=0.0, gaps=[0.05] * 43, set_up=3, compiled=False, cycle=1)
        windows = [
            dict(
                names=names_of,
                rate=200 + number / 9 if names_of else 100,
                at=number,
                steps=4,
                seconds=1.0,
                unit="samples",
                memory=None,
                finite=True,
            )
            for number, names_of in enumerate(names)
        ]
        singles = [
            dict(each, names=name, rate=150 + each["at"] / 9)
            for each in windows
            if each["names"]
            for name in (("amp bfloat16",), ("fused",))
        ]
        return dict(
            windows=windows + singles,
            failed=[],
            error="",
            watched=watched,
            turns_began=time.time(),
            turns_over=time.time(),
            loading=None,
            facts=Seen(LOOP).facts | dict(seen=[], lines=[]),
            why_not={},
        )


@pytest.fixture
def whatif(tmp_path, monkeypatch, capsys):
    """Return a function that runs whatif --write on a script; the files and the report with it."""
    folder = tmp_path / "training"
    folder.mkdir()
    (folder / "train.py").write_text(LOOP)
    monkeypatch.chdir(folder)

    def call(script, *words, text=LOOP):
        (folder / "train.py").write_text(text)
        monkeypatch.setattr(session.run, "run_once", script)
        args = options.parse(["--write", "fast.patch", "--json", "found.json", *words, "train.py"])
        one = session.Session(args, args.command, folder, tmp_path)
        status = session.measure_all(one)
        assert (folder / "train.py").read_text() == text
        record = json.loads((folder / "found.json").read_text())
        return SimpleNamespace(
            status=status,
            record=record,
            text=capsys.readouterr().out,
            patch=folder / "fast.patch",
            session=one,
        )

    return call


def test_a_proved_patch_is_handed_out(whatif):
    found = whatif(Script())
    told = found.record["proof"]
    assert found.status == 0 and told["proved"] and told["n"] >= 3 and told["low"] > 1
    assert found.patch.read_text() == found.record["patch"]["diff"]
    assert "Apply it: git apply fast.patch    # or: patch -p1 < fast.patch" in found.text
    assert "+optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)" in found.text
    assert "What to write" not in found.text and "(n=3)" in found.text
    assert found.record["confirmation"] is None and found.record["reasons"] == {}


def test_original_and_copy_time_the_same_steps_by_turns(whatif):
    script = Script()
    whatif(script)
    specs = [each for each in script.specs if each["mode"] == "proof"]
    timed = [bool(each["files"]) for each in specs if each["steps"] != 3]
    assert timed == [True, False, False, True, True, False]
    assert {(each["warm"], each["steps"]) for each in specs[1:6]} == {(5, 9)}
    assert [each["seed"] for each in specs[:6]] == [0, 0, 1, 1, 2, 2]
    assert not any(each["techniques"] for each in specs)
    assert [bool(each["load_from"]) for each in specs] == [False] * 7  # nothing was saved here


@pytest.mark.parametrize(
    "wrong",
    [
        lambda text: "ValueError: no bfloat16" if "autocast" in text else None,
        lambda text: ["model Net 0 does not load"] if "autocast" in text else None,
        lambda text: 2 if "autocast" in text else None,
    ],
    ids=["fails", "states", "losses"],
)
def test_what_breaks_a_patch_is_left_out(whatif, wrong):
    found = whatif(Script(wrong))
    assert found.status == 3 and found.record["proof"]["techniques"] == ["fused"]
    assert "autocast" not in found.patch.read_text() and "fused=True" in found.patch.read_text()
    assert re.match(
        "with it (the changed copy: |the training changes: )",
        found.record["reasons"]["amp bfloat16"],
    )
    assert "Not in the patch\n  amp bfloat16: with it" in found.text


@pytest.mark.parametrize(
    "wrong, gain, kind",
    [
        (lambda text: "ValueError: never", 2, "fails"),
        (lambda text: 3, 2, "changes"),
        (lambda text: None, 1, "same"),
        (lambda text: None, 0.5, "same"),
    ],
)
def test_a_patch_that_is_not_proved_is_not_handed_out(whatif, wrong, gain, kind):
    found = whatif(Script(wrong, gain))
    assert found.status == 4 and not found.patch.exists()
    assert found.record["proof"]["kind"] == kind and found.record["patch"]["diff"] is None
    assert "Not proved" in found.text and "No patch is handed out" in found.text


def test_of_two_that_fail_together_the_one_that_gains_less_is_left_out(whatif):
    """Lightning refuses to clip gradients of a fused optimizer under mixed precision."""

    class Both(Script):
        def __call__(self, command, spec, *rest):
            found = super().__call__(command, spec, *rest)
            for each in found["windows"] if spec["mode"] == "turns" else ():
                each["rate"] *= 0.9 if each["names"] == ("fused",) else 1
            return found

    found = whatif(
        Both(
            lambda text: (
                "RuntimeError: both" if "autocast" in text and "fused=True" in text else None
            )
        )
    )
    assert found.status == 3 and found.record["proof"]["techniques"] == ["amp bfloat16"]
    assert {*found.record["reasons"]} == {"fused"}


class OnGpu(Script):
    """A GPU, on which the extra lines make the copy faster or slower."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def __call__(self, command, spec, *rest):
        found = super().__call__(command, spec, *rest)
        if spec["mode"] == "turns":
            return found | dict(
                facts=found["facts"]
                | dict(Seen(COPIES, device="cuda").facts, seen=[], lines=[], busy=None)
            )
        text = "".join(open(path).read() for path in spec["files"].values())
        if "non_blocking=True" in text:
            found["windows"][0]["seconds"] /= self.factor
        return found


COPIES = LOOP.replace("    output =", "    images = images.to(device)\n    output =").replace(
    "batch_size=8", "batch_size=8, pin_memory=True"
)


@pytest.mark.parametrize("factor, is_written", [(1.1, True), (0.9, False)])
def test_extra_lines_are_written_if_the_proof_is_not_slower_with_them(
    whatif, tmp_path, factor, is_written
):
    found = whatif(OnGpu(factor), text=COPIES)
    assert found.status == 0
    assert ("images.to(device, non_blocking=True)" in found.patch.read_text()) == is_written
    assert found.record["proof"]["extras"] == ["non_blocking"] * is_written


@pytest.mark.parametrize("minutes, is_tried", [(10, False), (15, True)])
def test_extra_lines_give_way_to_the_patch_if_time_is_short(whatif, monkeypatch, minutes, is_tried):
    now = [0.0]

    class Slow(OnGpu):
        def __call__(self, *rest):
            now[0] += 60  # seconds of each run
            return super().__call__(*rest)

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    found = whatif(script := Slow(1.1), "--minutes", str(minutes), text=COPIES)
    assert found.record["proof"]["proved"] and found.record["proof"]["n"] == 3
    assert found.record["proof"]["extras"] == ["non_blocking"] * is_tried
    assert sum(each["mode"] == "proof" for each in script.specs) == (10 if is_tried else 7)


@pytest.mark.parametrize("given, in_vain", [(5, 2), (1, 0)])
def test_the_minutes_that_three_pairs_need_are_told_and_are_enough(
    whatif, monkeypatch, given, in_vain
):
    """Where there is no time for one pair, none is begun: what a run takes is known by its start."""
    now = [0.0]

    class Minute(Script):
        def __call__(self, *rest):
            now[0] += 60
            return super().__call__(*rest) | dict(turns_began=time.time() + 54)

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    found = whatif(script := Minute(), "--minutes", str(given))
    assert found.status == 4 and found.record["proof"]["kind"] == "time"
    assert [each["mode"] for each in script.specs] == ["turns", *["proof"] * in_vain]
    (minutes,) = re.findall(r"no time for three pairs of runs \(--minutes (\d+)\)", found.text)
    now[0] = 0.0
    assert int(minutes) > 7 and whatif(Minute(), "--minutes", minutes).status == 0


class WithOption(Script):
    """A script whose option for mixed precision does nothing, and `slows` it in the proof.

    The losses are as the script's, if `alike`: else another technique has changed their digits.
    """

    def __init__(self, slows, alike=True):
        super().__init__()
        self.slows, self.alike = slows, alike

    def __call__(self, command, spec, *rest):
        found = super().__call__(command, spec, *rest)
        if spec["mode"] == "turns":
            return found | dict(facts=found["facts"] | dict(options=[AMP_OPTION]))
        if "--amp" in command:
            found["windows"][0]["seconds"] *= self.slows
            if self.alike:
                found["losses"] = [1 + 0.01 * spec["seed"]] * 60  # as the script's
        return found


@pytest.mark.parametrize("slows, alike", [(1.5, True), (1.0, True), (1.43, False)])
def test_lines_take_the_place_of_an_option_that_does_nothing(whatif, slows, alike):
    """It is not faster, or seems to be by chance, with losses of which no digit differs.

    Or it is 1.05x instead of 1.5x, by what is written beside the option.
    """
    script = WithOption(slows, alike)
    found = whatif(script)
    with_option = [each for each in script.specs if "--amp" in each["command"]]
    assert len(with_option) <= 3
    assert found.status == 0 and found.record["patch"]["options"] == {}
    assert "with torch.autocast" in found.patch.read_text()


@pytest.mark.parametrize(
    "more, told",
    [
        (dict(ended=True, code=1, total=70), "it ended with status 1 after 70 steps: why"),
        (dict(ended=True, code=0, total=70), "it goes on where the other side ends by itself"),
    ],
)
def test_a_copy_that_ends_otherwise_is_not_proved(whatif, more, told):
    """A script may tell an error by sys.exit, which no traceback shows."""

    class Ends(Script):
        def __call__(self, command, spec, *rest):
            found = super().__call__(command, spec, *rest)
            return found | more if spec.get("files") else found

    found = whatif(Ends())
    assert found.status == 4 and told in found.record["proof"]["why"]


def test_a_script_that_fails_without_the_patch_too_is_told_as_its_own(whatif):
    class Ends(Script):
        def __call__(self, command, spec, *rest):
            found = super().__call__(command, spec, *rest)
            return found | dict(ended=True, code=1, total=70) if "files" in spec else found

    found = whatif(Ends())
    assert found.status == 4 and not found.patch.exists()
    assert found.record["proof"]["why"] == (
        "the script as it is: it ended with status 1 after 70 steps: why"
    )


@pytest.mark.parametrize(
    "code, told",
    [
        (0, "the script as it is: model Net 0 does not load"),
        (1, "the changed copy: it ended with status 1 after 70 steps: why"),
    ],
)
def test_states_of_the_copy_that_do_not_load_are_no_fault_of_the_script(whatif, code, told):
    class Refuses(Script):
        def __call__(self, command, spec, *rest):
            found = super().__call__(command, spec, *rest)
            text = "".join(open(path).read() for path in spec.get("files", {}).values())
            if text:
                self.has_amp = "autocast" in text
                fails = self.has_amp and code
                return found | dict(ended=True, code=code, total=70) if fails else found
            refuses = "files" in spec and getattr(self, "has_amp", False)
            self.has_amp = False
            return found | dict(states=["model Net 0 does not load"]) if refuses else found

    found = whatif(Refuses())
    assert found.status == 3 and found.record["proof"]["techniques"] == ["fused"]
    assert found.record["reasons"]["amp bfloat16"].startswith(f"with it {told}")


def test_losses_that_cannot_be_compared_prove_nothing(whatif):
    class Short(Script):
        def __call__(self, *words):
            found = super().__call__(*words)
            return found | dict(losses=found.get("losses", [])[:20])

    found = whatif(Short())
    assert found.status == 4 and "cannot be compared" in found.record["proof"]["why"]


class Library(Script):
    """A library makes the optimizer and calls the model."""

    def __call__(self, command, spec, *_):
        facts = Seen(LOOP, library="lib").facts
        facts["optimizers"][0]["library"] = "lib"
        if spec["mode"] == "turns":
            return self.turns(spec) | dict(facts=facts)
        seconds = 1.0 if spec["techniques"] else 2.0 + spec["seed"] / 100
        return dict(
            windows=[dict(steps=9, samples=0, seconds=seconds, whole=2.0, wait=0.1)],
            error="",
            losses=[1.0] * 60,
            facts=facts,
            memory=None,
        )


def test_nothing_that_could_be_written(whatif):
    """Then the set is confirmed as without --write, and told in words."""
    found = whatif(Library())
    assert found.status == 3 and not found.patch.exists() and found.record["patch"] is None
    assert {*found.record["reasons"]} == {"amp bfloat16", "fused"}
    assert found.record["confirmation"]["n"] >= 3
    assert "What to write\n  amp bfloat16" in found.text


class HalfALibrary(Script):
    """A library makes the optimizer; amp can be written, but makes the copy slower."""

    def __call__(self, command, spec, *_):
        found = super().__call__(command, spec)
        if spec["mode"] == "turns":
            found["facts"]["optimizers"][0]["library"] = "lib"
        return found


def test_what_could_not_be_written_is_advised_though_the_patch_is_slower(whatif):
    found = whatif(HalfALibrary(gain=0.8))
    assert found.status == 4 and not found.patch.exists()
    assert "amp bfloat16: it is slower" in " ".join(found.text.split())
    told = found.text.split("What to write\n")[1]
    assert told.startswith("  fused\n") and "torch.autocast" not in told


class Slow(Script):
    def __call__(self, command, spec, *_):
        found = self.turns(spec)
        return found | dict(windows=[dict(each, rate=100) for each in found["windows"]])


def test_nothing_gains_and_an_old_patch_stays(whatif):
    old = "an old one\n"
    with open("fast.patch", "w") as file:
        file.write(old)
    found = whatif(Slow(), "--minutes", "0.2")
    assert found.status == 0 and found.patch.read_text() == old
    assert found.record["patch"] is None and found.record["proof"] is None


def test_ctrl_c_while_proving_writes_no_patch(whatif):
    found = whatif(Script(stop=True))
    assert found.status == 130 and not found.patch.exists() and "stopped" in found.text
    assert found.record["patch"]["file"] is None and found.record["stopped"]


def test_the_patch_of_a_copied_folder_is_for_the_folder(whatif, tmp_path, monkeypatch):
    made = session.Session

    class Copied(made):
        def __init__(self, args, command, cwd, folder):
            copy = tmp_path / "copy"
            copy.mkdir()
            (copy / "train.py").write_text(LOOP)
            super().__init__(args, command, copy, folder)
            self.source = str(cwd)

    monkeypatch.setattr(session, "Session", Copied)
    found = whatif(Script(), "--copy")
    assert found.status == 0 and "Apply it: git apply fast.patch " in found.text
    assert run("git", "apply", "--check", "fast.patch", cwd=found.patch.parent).returncode == 0


def test_the_page_names_all_keys_of_the_record(whatif):
    found = whatif(Script()).record
    rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", PAGE, re.M))
    assert {*found["patch"]} == {*re.findall(r"`(\w+)`", rows["patch"])}
    assert {*found["proof"]} == {*re.findall(r"`(\w+)`", rows["proof"])}
    statuses = (ROOT / "docs" / "whatif.md").read_text()
    assert {"0", "3", "4"} <= {*re.findall(r"^\| (\d+) \|", statuses, re.M)}


@pytest.mark.parametrize(
    "words, told",
    [
        (["--write", "/none/x.patch"], "in a folder that can be written"),
        (["--write", "/"], "name a file"),
    ],
)
def test_a_place_that_cannot_be_written_is_told_at_once(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit) as end:
        options.parse([*words, "train.py"])
    assert end.value.code == 2 and told in capsys.readouterr().err


# ------------------------------------------------------------------------------- --compare
def write_record(path, rates, **more):
    windows = [dict(names=[], rate=rate) for rate in rates]
    path.write_text(
        json.dumps(
            dict(
                windows=windows,
                script="train.py",
                arguments=[],
                unit="steps",
                machine=dict(gpu=None, device="cpu", cores=2, processes=1),
            )
            | more
        )
    )
    return str(path)


@pytest.mark.parametrize(
    "new, above, status", [(100, 5, 0), (90, 5, 5), (97, 5, 0), (97, 0, 5), (120, 5, 0)]
)
def test_compare_fails_if_the_script_became_slower(tmp_path, new, above, status, capsys):
    old = write_record(tmp_path / "old.json", [100 + n / 10 for n in range(8)])
    new = write_record(tmp_path / "new.json", [new + n / 10 for n in range(8)])
    words = ["--compare", old, new, "--fail-above", str(above)]
    assert compare.main(options.parse(words)) == status, capsys.readouterr()


def test_a_noisy_record_is_not_slower_for_certain(tmp_path):
    old = write_record(tmp_path / "old.json", [100, 60, 130, 90, 110, 70])
    new = write_record(tmp_path / "new.json", [90, 120, 55, 80, 100, 65])
    assert compare.main(options.parse(["--compare", old, new])) == 0


@pytest.mark.parametrize(
    "text, told",
    [
        (None, "No such file"),
        ("{}", "no record"),
        ("x", "no record"),
        ('{"windows": []}', "no record"),
        (dict(script="other.py"), "cannot be compared; script: train.py and other.py"),
        (dict(machine=dict(cores=8)), "cannot be compared; "),
        ([100], "too few windows"),
    ],
)
def test_records_that_cannot_be_compared(tmp_path, text, told, capsys):
    old = write_record(tmp_path / "old.json", [100] * 6)
    new = tmp_path / "new.json"
    if isinstance(text, str):
        new.write_text(text)
    elif text is not None:
        write_record(
            new,
            text if isinstance(text, list) else [100] * 6,
            **text if isinstance(text, dict) else {},
        )
    assert compare.main(options.parse(["--compare", old, str(new)])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_compare_from_the_command_line(tmp_path):
    old = write_record(tmp_path / "old.json", [100 + n for n in range(6)], loader=dict(rate=20))
    new = write_record(tmp_path / "new.json", [50 + n for n in range(6)], loader=dict(rate=10))
    done = run(sys.executable, ROOT / "whatif", "--compare", old, new)
    assert done.returncode == 5 and "slower beyond the interval" in done.stdout
    assert "the loader by itself: 20 batches/s before, 10 now" in done.stdout
    assert run(sys.executable, ROOT / "whatif", "--compare", old).returncode == 2


def test_a_forecast_that_was_off_is_told(whatif, monkeypatch):
    sides = {
        (): forecast.Forecast(0.8, 0.1, 0, 0.8, 0.9),
        ("amp bfloat16", "fused"): forecast.Forecast(0.4, 0.1, 0, 0.4, 0.5),
    }
    monkeypatch.setattr(
        confirm.Outlook, "forecast_of", lambda self, names, *_: sides.get(names, sides[()])
    )
    one = confirm.Outlook(None)
    assert one.step_off(("amp bfloat16", "fused"), 1.0, 0.5) == ""
    said = (
        "The forecast was 1.80x to 2.00x: a step of the script took 111 ms in place of 800 ms "
        "to 900 ms, one of its copy 74.. ms in place of 400 ms to 500 ms."
    )

    class Loads(Script):
        @staticmethod
        def turns(spec):
            return Script.turns(spec) | dict(loading=dict(rate=10.0, rows=[], as_is={}))

    found = whatif(Loads())  # nine steps a second, and 1.5 times as many
    assert re.fullmatch(said, found.record["proof"]["off"])
    assert re.search(said, " ".join(found.text.split()))


# --------------------------------------------------------------------- real scripts, by parts
@pytest.fixture
def once(tmp_path, monkeypatch):
    """Return a function that prepares one run of each side, in forks."""
    monkeypatch.setattr(session.run, "start", start_forks)
    monkeypatch.chdir(tmp_path)
    return functools.partial(prove_once, tmp_path)


def prove_once(folder, names, script="waits_for_data.py"):
    """Return a Proof of which each side is to be run once, for some steps, and its Patch."""
    text = (SCRIPTS / script).read_text()
    (folder / "train.py").write_text(text)
    args = options.parse(
        ["--write", str(folder / "x.patch"), "--seconds", "0.3", str(folder / "train.py")]
    )
    (folder / "tmp").mkdir()
    one = session.Session(args, [sys.executable, "train.py"], folder, str(folder / "tmp"))
    one.found = dict(facts=Seen(text).facts)
    prover = proof.Prover(one, names, dict(workers=1), lambda text: None)
    found = proof.Proof(one, {proof.MAIN: prover.patch}, lambda text: None)
    return found, prover.patch


def test_a_copy_runs_and_exchanges_its_states_with_the_original(once, tmp_path):
    """All that a CPU can do: no line fails, and each side loads what the other has saved."""
    found, made = once(["amp float16", "channels_last", "fused", "workers"])
    assert not made.reasons
    before = sorted(os.listdir(tmp_path))
    for side in proof.MAIN, proof.PLAIN:
        one = found.run(side, 0, 0.3)
        assert one, found.why + found.traceback
        assert len(one["losses"]) >= 50
        found.warm, found.steps = found.warm or one["first"], found.steps or one["steps"]
    assert sorted(os.listdir(tmp_path)) == before  # the checkpoint was held back
    assert found.runs[proof.PLAIN][0]["steps"] == found.runs[proof.MAIN][0]["steps"]
    assert found.judge(proof.MAIN)["kind"] == "time"


def break_copy(found, *edits):
    """Change the copy that a Proof runs: each (old, new)."""
    copy = Path(next(iter(found.files[proof.MAIN].values())))
    text = copy.read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    copy.write_text(text)


def test_a_copy_that_renames_weights_is_found(once):
    found, made = once(["fused"])
    break_copy(
        found,
        ("nn.Flatten(), nn.Linear", "nn.Sequential(nn.Flatten()), nn.Linear"),
        ("nn.Linear(144, 2))", "nn.Sequential(nn.Linear(144, 2)))"),
    )
    assert found.run(proof.MAIN, 0, 0.3) and not found.run(proof.PLAIN, 0, 0.3, False)
    assert found.kind == proof.FAILS and "does not load" in found.why


def test_the_error_of_a_copy_is_told_after_its_first_steps_too(once):
    found, made = once(["fused"])
    break_copy(found, ("total += loss.item()", "assert not total, 'broken'; total += 1"))
    assert not found.run(proof.MAIN, 0, 0.3)
    assert found.why.startswith("the changed copy: AssertionError: broken (")
    assert "assert not total" in found.traceback


def test_ctrl_c_ends_a_real_proof(tmp_path):
    """Nothing is left of it, in the folder or among the processes."""
    text = (SCRIPTS / "waits_for_data.py").read_text()
    (tmp_path / "train.py").write_text(text)
    process = start(
        [
            sys.executable,
            ROOT / "whatif",
            "--write",
            "fast.patch",
            "--seconds",
            "1",
            "--only",
            "workers",
            "train.py",
        ],
        cwd=tmp_path,
        start_new_session=True,
    )
    line = ""
    while "verdict" not in line:  # the table; the loader, then the proof come next
        line = process.stdout.readline()
        assert line, process.stderr.read()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 130, out + err
    assert not (tmp_path / "fast.patch").exists() and (tmp_path / "train.py").read_text() == text
