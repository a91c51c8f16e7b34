"""The records of running.sh and loading.sh: what a row holds. Only this module reads and writes them."""

import dataclasses
import enum
import json
from pathlib import Path
from typing import Any


class Verdict(enum.Enum):
    """What running.sh says of a technique; the value is the word in the record."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference"
    NOT_CLEAR = "not clear"
    RAN_ONCE = "ran once"
    TRIED_AGAIN = "tried again"


@dataclasses.dataclass(kw_only=True)
class Parts:
    """Where the seconds of a run went; whatif/parts.py has a reader's names for them."""

    start: float
    prepare: float
    first_step: float
    steps: float
    waiting: float
    validation: float
    checkpoints: float
    between: float
    end: float

    @classmethod
    def of(cls, record, lines, seconds):
        """Return the parts of a run of so many `seconds`; None if its record lacks some of them.

        `lines` are the seconds from the start of the process to the end of each epoch's line. The
        script tells the time of its first step, validation and checkpoints, and of all steps.
        """
        epochs, first = record["epochs"], record.get("first_step_seconds")
        if first is None or len(lines) != len(epochs) or "val_seconds" not in epochs[-1]:
            return None  # of an older script, of another one, or of a run that was resumed
        one, later = epochs[0], epochs[1:]
        # how much of its data_wait the first step has is not known, so its other steps are taken
        # to need as long as those of the second epoch
        busy = later[0]["seconds"] * (1 - later[0]["data_wait"]) if later else one["seconds"]
        in_first = min(one["seconds"] * one["data_wait"], max(0, one["seconds"] - first - busy))
        waiting = in_first + sum(each["seconds"] * each["data_wait"] for each in later)
        saved, validated = (
            [each[key] for each in epochs] for key in ("save_seconds", "val_seconds")
        )
        known = sum(each["seconds"] for each in later) + sum(validated[1:]) + sum(saved[:-1])
        return cls(
            start=max(0, lines[0] - record["warmup_seconds"] - validated[0]),
            prepare=record["warmup_seconds"] - one["seconds"],
            first_step=first,
            steps=sum(each["seconds"] for each in epochs) - first - waiting,
            waiting=waiting,
            validation=sum(validated),
            checkpoints=sum(saved),
            between=max(0, lines[-1] - lines[0] - known),
            end=max(0, seconds - lines[-1] - saved[-1]),
        )

    @classmethod
    def written(cls, *found):
        """Return what `of` returns as a dict for the file, or None."""
        parts = cls.of(*found)
        return parts and dataclasses.asdict(parts)


@dataclasses.dataclass(kw_only=True)
class Row:
    """What every row has: how a run ended, where and with what.

    `status` is ok, fail or skip. Without ok there is an `error`, and of fail the path of its `log`.
    None is what a row does not have. `other` holds the rest of the script's own record.
    """

    status: str = "ok"
    date: str | None = None
    machine: dict | None = None
    command: str | None = None
    options: dict | None = None
    epochs: list | None = None
    images_per_second: float | None = None
    runs: list | None = None  # [{number, rates, images_per_second, ...}], of all rows of a set
    error: str | None = None
    log: str | None = None
    stopped: str | None = None  # what ended the table, in the last row
    other: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, found):
        """Return the row of a dict of the file."""
        names = {field.name for field in dataclasses.fields(cls)} - {"other"}
        mine = {name: value for name, value in found.items() if name in names}
        return cls(**mine, other={name: found[name] for name in found if name not in names})

    def written(self):
        """Return the row as a dict for the file."""
        mine = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            k: value for k, value in mine.items() if k != "other" and value is not None
        } | self.other

    @property
    def has_failed(self):
        """Return whether the run failed; a skip is no failure."""
        return self.status == "fail"

    def update(self, **values):
        """Set some fields."""
        for name, value in values.items():
            setattr(self, name, value)


@dataclasses.dataclass(kw_only=True)
class Training(Row):
    """A row of running.sh: a set of techniques, in the grid or on top of the set `on`."""

    row: str | None = None
    column: str | None = None
    techniques: list = dataclasses.field(default_factory=list)
    processes: int | None = None
    left_out: dict | None = None  # {technique: why it was not tried}
    validated: str | None = None  # on how many images, if not on all
    val_top1: float | None = None
    train_seconds: float | None = None
    warmup_seconds: float | None = None
    on: list | None = None
    kept: bool | None = None
    ratio: float | None = None  # to the set `on`, of `n` runs, ± `spread`
    spread: float | None = None
    n: int | None = None
    settled: bool | None = None
    verdict: Verdict | None = None
    failed: str | None = None  # what a later run ended with

    def __post_init__(self):
        if isinstance(self.verdict, str):
            self.verdict = Verdict(self.verdict)

    @property
    def peak_memory_bytes(self):
        """Return the most memory on the first GPU; None on a CPU."""
        return self.other.get("peak_memory_bytes")

    @property
    def has_failed(self):
        """Return whether one of the runs failed."""
        return super().has_failed or bool(self.failed and self.failed.startswith("FAIL"))

    def written(self):
        found = super().written()
        return found | ({"verdict": self.verdict.value} if self.verdict else {})


@dataclasses.dataclass(kw_only=True)
class Loading(Row):
    """A row of loading.sh: a loader with a cold or a warm page cache."""

    loader: str | None = None
    cache: str | None = None
    storage: dict | None = None
    samples: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    megabytes_per_second: float | None = None
    cores_busy: float | None = None
    disk_megabytes_per_second: float | None = None
    bottleneck: str | None = None  # IO, CPU or GPU
    evidence: str | None = None

    @property
    def gpu_busy(self):
        """Return the share of the time in which the GPU worked; None without one."""
        return self.other.get("gpu_busy")


KINDS = {"running": Training, "loading": Loading}


def read(path, kind=None):
    """Return the rows in a file, of the kind that is its name; of other kinds the plain JSON."""
    found = json.loads(Path(path).read_text())
    row = KINDS.get(kind or Path(path).stem)
    return [row.read(each) for each in found] if row else found


def write(rows, path):
    """Write rows to a file, never half."""
    replace(path, json.dumps(rows, indent=1, default=lambda row: row.written()) + "\n")


def replace(path, text):
    """Write a file beside its place and move it there."""
    part = path.with_suffix(f"{path.suffix}.part")
    part.write_text(text)
    part.replace(path)
