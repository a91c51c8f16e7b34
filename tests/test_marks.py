"""Variants are their baseline plus marked blocks, within budgets; and tests of the checker."""

import random
import re

import pytest

from helpers import SRC
from marks import MARKER, added, problems, tokens

VARIANTS = sorted(path for base in ("train", "loader") for path in SRC.glob(f"{base}_*.py"))
# Tokens (without comments) that a variant may add. Raise one only with a reason that its readers
# would accept.
BUDGETS = {
    "train_cudnn": 9,
    "train_channels_last": 18,
    "train_DP": 40,  # a model that it cannot copy is refused, however it was wrapped
    "train_compile": 33,
    "train_amp": 86,  # validation in half precision, too: it is a part of the whole time
    "train_progressive": 165,
    "train_graphs": 206,  # each shape has graphs, which leave no trace; older PyTorch is told, and
    # no warning of a stream that is meant
    "train_profile": 232,
    "train_DDP": 227,  # --sync_bn is refused without GPUs and with graphs, and a resume if machines
    # have other checkpoints
    "train_fused": 86,  # a resumed or skipped first step would otherwise train wrong, unsaid
    "train_LMDB": 547,  # two processes build one file; a cut file is an error and no crash; a map of
    # a terabyte would be refused under `ulimit -v`
    "train_DALI": 918,  # images are the baseline's to 2/255, in its order; what DALI shows wrong
    # or cannot read is refused, and the file named by one more pipeline: each takes long on a GPU
    "train_cache": 1446,  # augmentation has torchvision's distribution; what does not fit, also in a
    # container or job, is refused; decoded images are kept for later runs, if the user says so; the
    # first epoch and compiling need not wait until all are decoded, and one may be left early
    "loader_LMDB": 801,
    "loader_DALI": 1425,
}  # DALI: what it shows wrong or cannot read is named
BASELINES = {"train": 2000, "loader": 1975}
# What no variant may lose: patterns of lines, a comment and the docstring's start.
VITAL = {
    "train": (
        r"\.backward\(\)",
        r"(optimizer|scheduler)\.step\(|step\(optimizer\)",
        "# the loss stays on the device",
        '"""Train',
    ),
    "loader": (r"first\.to\(device", r"order\.manual_seed\(", "# the epoch's line", '"""Read'),
}


def baseline_of(variant):
    return variant.with_name(variant.stem.split("_")[0] + ".py").read_text()


def ids(path):
    return path.stem


@pytest.mark.parametrize("variant", VARIANTS, ids=ids)
def test_variant_is_its_baseline_plus_marked_blocks(variant):
    assert problems(baseline_of(variant), variant.read_text()) == []
    assert MARKER in variant.read_text()


@pytest.mark.parametrize("variant", VARIANTS, ids=ids)
def test_variant_is_within_its_budget(variant):
    assert variant.stem in BUDGETS, "add it to BUDGETS, with the tokens that it may add"
    assert added(baseline_of(variant), variant.read_text()) <= BUDGETS[variant.stem]


@pytest.mark.parametrize("name", BASELINES)
def test_baseline_is_within_its_budget(name):
    text = (SRC / f"{name}.py").read_text()
    assert tokens(text) <= BASELINES[name]
    assert text.count("rank == 0:") <= 2


@pytest.mark.parametrize("path", sorted(SRC.glob("*.py")), ids=ids)
def test_form(path):
    text = path.read_text()
    assert all(len(line) <= 100 for line in text.splitlines())
    assert text.startswith("# /// script\n") and "\t" not in text and text.endswith("\n")
    assert not any(
        line.startswith(("import train", "from train", "from .", "import loader", "from loader"))
        for line in text.splitlines()
    )
    assert all(line == line.rstrip() for line in text.splitlines())


# ------------------------------------------------------------------------------- the checker
@pytest.mark.parametrize("variant", VARIANTS, ids=ids)
class TestCheckerFinds:
    @pytest.fixture
    def baseline(self, variant):
        return baseline_of(variant)

    @pytest.fixture
    def lines(self, variant):
        return variant.read_text().splitlines()

    def caught(self, baseline, lines):
        return problems(baseline, "\n".join(lines) + "\n") != []

    def test_deleted_vital_line(self, variant, baseline, lines):
        for word in VITAL[variant.stem.split("_")[0]]:
            found = [i for i, line in enumerate(lines) if re.search(word, line)]
            assert found, word
            for at in found:
                assert self.caught(baseline, lines[:at] + lines[at + 1 :])

    def test_each_deleted_line_of_the_baseline(self, variant, baseline, lines):
        block = False
        for at, line in enumerate(lines):
            block = (block or line.strip() == MARKER) and bool(line.strip())
            if not block and line.strip() and is_turn(at, variant):
                assert self.caught(baseline, lines[:at] + lines[at + 1 :]), f"{at + 1}: {line}"

    def test_each_swap_of_two_lines(self, variant, baseline, lines):
        block = False
        for at in range(len(lines) - 1):
            block = (block or lines[at].strip() == MARKER) and bool(lines[at].strip())
            if not block and lines[at] != lines[at + 1] and is_turn(at, variant):
                swapped = lines[:at] + [lines[at + 1], lines[at]] + lines[at + 2 :]
                assert self.caught(baseline, swapped), f"{at + 1}: {lines[at]}"

    def test_each_dropped_mark(self, baseline, lines):
        for at in [i for i, line in enumerate(lines) if line.strip() == MARKER]:
            assert self.caught(baseline, lines[:at] + lines[at + 1 :])

    def test_other_spellings_of_the_mark(self, baseline, lines):
        for at in [i for i, line in enumerate(lines) if line.strip() == MARKER]:
            for spelling in ("# New #", "#new#", "# new", "## new ##"):
                line = lines[at].replace(MARKER, spelling)
                assert self.caught(baseline, lines[:at] + [line] + lines[at + 1 :])

    def test_a_mark_over_the_baseline(self, baseline, lines):
        for at in (
            at
            for at, line in enumerate(lines)
            if "loss_function = " in line or "    epochs = []" in line
        ):
            marked = lines[:at] + ["    " + MARKER, "    # why", *lines[at : at + 1], ""]
            assert self.caught(baseline, marked + lines[at + 1 :])

    def test_a_missing_reason(self, baseline, lines):
        for at in [i for i, line in enumerate(lines) if line.strip() == MARKER]:
            assert self.caught(baseline, lines[: at + 1] + lines[at + 2 :]) or lines[
                at + 2
            ].strip().startswith("# ")

    def test_each_changed_default(self, baseline, lines):
        changed = 0
        for at, line in enumerate(lines):
            if "default=" in line and line in baseline.splitlines():
                worse = line.replace("default=", "default=None or ")
                assert self.caught(baseline, lines[:at] + [worse] + lines[at + 1 :])
                changed += 1
        assert changed >= 8

    def test_changed_comment_docstring_and_end(self, variant, baseline, lines):
        *_, comment, docstring = VITAL[variant.stem.split("_")[0]]
        (at,) = [i for i, line in enumerate(lines) if line.startswith(docstring)]
        assert self.caught(baseline, [*lines[:at], lines[at] + " ", *lines[at + 1 :]])
        assert self.caught(baseline, lines + ["", "print()"])
        assert self.caught(baseline, lines[:-1])
        (at,) = [i for i, line in enumerate(lines) if line.strip().startswith(comment)]
        assert self.caught(baseline, lines[:at] + ["# two"] + lines[at + 1 :])

    def test_white_space(self, baseline, lines):
        for at in random.Random(0).sample(range(len(lines)), 40):
            if not lines[at].strip():
                assert self.caught(baseline, lines[:at] + ["", *lines[at:]])
            else:
                assert (
                    lines[at].strip() == MARKER
                    or self.caught(baseline, lines[:at] + ["  " + lines[at]] + lines[at + 1 :])
                    or in_block(lines, at)
                )


def is_turn(at, variant):
    """Choose some lines in each variant: together all of the baseline's."""
    return at % len(VARIANTS) == VARIANTS.index(variant)


def in_block(lines, at):
    while at >= 0 and lines[at].strip():
        if lines[at].strip() == MARKER:
            return True
        at -= 1
    return False


def test_the_prefix_of_inline_metadata_is_no_exception():
    baseline = '# /// script\n# dependencies = [\n#     "torch",\n#\n# ]\n# ///\nx = 1\n'
    marked = baseline.replace("#\n", '#\n#     # new #\n#     # one file\n#     "lmdb",\n#\n')
    unmarked = baseline.replace("#\n", '#\n#     "lmdb",\n#\n')
    assert problems(baseline, marked) == []
    assert problems(baseline, unmarked) != []
