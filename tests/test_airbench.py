"""benchmarks/airbench.py: the pictures that it writes, and what it reads of a script's columns."""

import shutil

import pytest
import torch
from PIL import Image

import airbench
from helpers import ROOT, assert_one_line, benchmark, run_forked

SCRIPT = ROOT / "benchmarks" / "airbench.py"
# prints as airbench's scripts do: a training to warm up, and then one after the other
PRINTS = """\
import torch
found = torch.load("cifar10/train.pt")
assert found["images"].dtype == torch.uint8 and found["images"].shape[1:] == (32, 32, 3)
print("|  run     |  epoch  |  train_loss  |  train_acc  |  val_acc  |  tta_val_acc  |  seconds  |")
for run in ("warmup", 0, 1, 2):
    name = f"{run}".rjust(6)
    for epoch in range(2):
        print(f"|  {name}  |  {epoch:5}  |      1.0000  |     0.5000  |   0.5000  |               |"
              "    1.0000  |")
        name = " " * 6
    print(f"|  {name}  |   eval  |      1.0000  |     0.9000  |   0.{len(found['labels'])}  |"
          f"       0.94{len(str(run))}0  |    2.5{len(str(run))}00  |")
    print("-" * 60)
END
"""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Return a dataset of 32 x 32 pictures whose red tells their numbers."""
    top = tmp_path_factory.mktemp("pictures")
    for split, count in (("train", 2), ("test", 1)):
        for label in ("cat", "dog"):
            (top / split / label).mkdir(parents=True)
            for k in range(count):
                Image.new("RGB", (32, 32), (k, 7, 9)).save(top / split / label / f"{k}.png")
    return top


def outcome(folder, dataset, end, *words):
    script = folder / "airbench_like.py"
    script.write_text(PRINTS.replace("END", end))
    return benchmark(SCRIPT, folder, script, dataset, "--result_dir", folder, *words)


def test_the_pictures_are_written_as_airbench_reads_them(pictures, tmp_path):
    airbench.write_pictures(pictures, tmp_path / "cifar10")
    train, test = (torch.load(tmp_path / "cifar10" / f"{name}.pt") for name in ("train", "test"))
    assert train["labels"].tolist() == [0, 0, 1, 1] and test["labels"].tolist() == [0, 1]
    assert train["classes"] == ["cat", "dog"]
    assert train["images"][3, 5, 6].tolist() == [1, 7, 9] and len(test["images"]) == 2


def test_trainings_are_counted_without_the_first_that_warms_up(pictures, tmp_path):
    done, (row,), text = outcome(
        tmp_path, pictures, "import time; time.sleep(600)", "--trainings", 2
    )
    assert done.returncode == 0, done.stderr  # it was stopped: its sleep is long
    assert [(run["top1"], run["plain_top1"], run["seconds"]) for run in row["runs"]] == [
        (0.9410, 0.4, 2.51)
    ] * 2
    assert row["name"] == "airbench_like.py" and row["runs"][0]["wall_seconds"] > 0
    assert "| airbench_like.py | 2 | 94.10% (94.10% to 94.10%) | 40.00% (" in text
    assert text in done.stdout and "torch" in row["machine"]["packages"]
    assert airbench.shows([row])[2] == "airbench_like.py: 94.10% in 2.51 s of training"


def test_a_script_that_fails_is_told(pictures, tmp_path):
    (tmp_path / "bad.py").write_text("raise ValueError('no GPU')")
    done, (row,), text = benchmark(
        SCRIPT, tmp_path, tmp_path / "bad.py", pictures, "--result_dir", tmp_path
    )
    assert done.returncode == 1 and row["status"] == "fail" and "ValueError: no GPU" in text


def test_pictures_of_another_size_are_refused(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "data")
    Image.new("RGB", (28, 32)).save(tmp_path / "data/train/cat/small.png")
    done = run_forked(SCRIPT, tmp_path / "any.py", tmp_path / "data", "--result_dir", tmp_path)
    assert_one_line(done, 1, "airbench.py: error: ", "have to be 32 x 32", "(32, 28, 3)")
