"""Time a loader and the baseline, cold and warm, and name the bottleneck: loading.sh runs this."""

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import report
import runs
from options import Parser
from records import Loading

with contextlib.suppress(ImportError):  # --help needs no packages
    import psutil

ROOT = runs.ROOT
USAGE = "./loading.sh SCRIPT DATASET [--result_dir DIR] [OPTION ...]"
ABOUT = """Time a loader and the baseline, each cold (from the disk) and warm (from memory), and
name the bottleneck. For the cold runs the files of DATASET, and no others, are dropped from the
page cache, which needs no root. Writes DIR/loading.md and DIR/loading.json."""
MOST_SAMPLES = 10_000  # read from a larger dataset, unless --samples says otherwise
CLEARLY_SLOWER = 0.8  # a cold run below this part of the warm one
AMPLE = 3  # a disk that gives so many times what a loader reads does not hold it back
BUSY = 0.7  # cores or a GPU are the limit from this share on
ARM_SECONDS = 0.002  # a disk with a moving arm takes longer than this to answer
MEMORY = {"tmpfs", "ramfs"}
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre", "beegfs", "glusterfs"}


def find_script(name, usage):
    """Return the path of a loader, given by its name in src/ or by a path.

    Call `usage` with what is wrong if it is none.
    """
    src = ROOT / "src"
    for path in (Path(name), src / name, src / f"{name}.py"):
        if path.is_file():
            if "--split" not in path.read_text(errors="replace"):
                usage(f"{path} is not a loader: it has no option --split")
            if path.stem == "loader" and path.resolve() != src / "loader.py":
                usage(f"{path} has the same name as the baseline: rename it")
            return path.resolve()
    names = ", ".join(sorted(path.name for path in src.glob("loader*.py")))
    usage(f"there is no script {name!r}: name one of {names}, or a path")


def build_parser():
    """Return the parser of the driver's own options."""
    parser = Parser("loading.sh", USAGE, ABOUT)
    parser.epilog = (
        "OPTION ... go to both loaders, or to SCRIPT if only it has them: python src/loader.py --help\n"
        f"Of a larger DATASET, {MOST_SAMPLES:,} samples are read; --samples sets another number."
    )
    add = parser.add_argument
    add("SCRIPT", help="a loader: its name in src/, such as loader_DALI.py, or a path")
    add("DATASET", help="its folder: train/<class>/*, or pairs of images as docs/loading.md says")
    parser.add_result_dir()
    return parser


def parse(arguments):
    """Return (script, the module loader, its options, the samples, words for all loaders, words
    for this script). Exit 2 if something is wrong."""
    driver = build_parser()
    named, rest = driver.parse_known_args(arguments)
    script = find_script(named.SCRIPT, driver.error)
    if not os.path.isdir(named.DATASET):
        driver.error(f"there is no folder {named.DATASET!r}")
    runs.need_packages()
    loader = runs.module_of(ROOT / "src" / "loader.py")  # takes seconds: it imports torch
    parser = loader.build_parser()
    parser.prog = "loading.sh"
    parser.set_defaults(result_dir=named.result_dir)
    args, own = parser.parse_known_args([*rest, f"--dataset={os.path.abspath(named.DATASET)}"])
    if args.cold:
        driver.error("leave out --cold: every loader runs cold and warm")
    pictures = loader.open_images(parser, args, None)
    if not args.samples and len(pictures) > MOST_SAMPLES:
        args.samples = MOST_SAMPLES
    common = [
        word
        for name, value in vars(args).items()  # all: a copy may have other defaults
        if name not in ("cold", "result_dir") and value is not None
        for word in ([f"--{name}", *value] if isinstance(value, list) else [f"--{name}={value}"])
    ]
    return script, loader, args, pictures, common, own


# ------------------------------------------------------------------------------ the disk
def file_system(path):
    """Return (type, device) of the file system that holds `path`."""
    path = os.path.realpath(path)
    inside = [
        part
        for part in psutil.disk_partitions(all=True)
        if os.path.commonpath([path, part.mountpoint]) == part.mountpoint
    ]
    mount = max(inside, key=lambda part: len(part.mountpoint))
    return mount.fstype, mount.device


def read_speed(paths, threads, seconds=3):
    """Return the MB/s at which this many threads read files, for at most so many seconds."""
    start = time.perf_counter()

    def size(path):
        late = time.perf_counter() > start + seconds
        return 0 if late else len(Path(path).read_bytes())

    with ThreadPoolExecutor(max(1, threads)) as pool:
        return sum(pool.map(size, paths)) / 1e6 / (time.perf_counter() - start)


def answer_seconds(path):
    """Return the time in which the disk gives one byte from the middle of a file."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        start = time.perf_counter()
        os.pread(file.fileno(), 1, os.fstat(file.fileno()).st_size // 2)
        return time.perf_counter() - start


def measure_storage(loader, files, threads):
    """Read some of `files` without decoding them: what the disk gives.

    Return a dict: kind (HDD, SSD, network or memory), file_system, device, and answer_seconds and
    cold_megabytes_per_second (None in memory, where a cold run makes no sense).
    """
    some = random.Random(0).sample(files, min(len(files), 256))
    name, device = file_system(some[0])
    result = dict(
        file_system=name,
        device=device,
        answer_seconds=None,
        cold_megabytes_per_second=None,
        kind="memory",
    )
    if name not in MEMORY:
        loader.drop_from_cache(some)
        result["cold_megabytes_per_second"] = read_speed(some, threads)
        loader.drop_from_cache(some)
        answer = result["answer_seconds"] = statistics.mean(map(answer_seconds, some[:64]))
        result["kind"] = "network" if name in NETWORK else "HDD" if answer > ARM_SECONDS else "SSD"
    return result


# ------------------------------------------------------------------------------ a run
class GPUWatch:
    """Sample how busy the first GPU is while a `with` block lasts, if there is one."""

    def __init__(self):
        self.samples, self.process = [], None

    def __enter__(self):
        with contextlib.suppress(FileNotFoundError):
            number = os.getenv("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            asked = [
                "--query-gpu=utilization.gpu,utilization.jpeg",
                "--format=csv,noheader,nounits",
            ]
            self.process = subprocess.Popen(
                ["nvidia-smi", "-i", number, *asked, "-lms", "200"],
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            threading.Thread(target=self.collect, daemon=True).start()
        return self

    def collect(self):
        for line in self.process.stdout:
            kernels, _, engine = map(str.strip, line.partition(","))
            if kernels.isdecimal():  # the engine is [N/A] on a GPU that has none
                engine = int(engine) / 100 if engine.isdecimal() else 0
                self.samples.append((time.monotonic(), int(kernels) / 100, engine))

    def __exit__(self, *_):
        if self.process:
            self.process.kill()
            self.process.wait()

    def busy(self, start, end):
        """Return the mean shares of time, 0 to 1, between two moments; None without a GPU."""
        samples = [sample[1:] for sample in self.samples if start <= sample[0] <= end]
        if not samples:
            return dict(gpu_busy=None, gpu_kernels_busy=None, jpeg_engine_busy=None)
        kernels, engine = map(statistics.mean, zip(*samples))
        return dict(
            gpu_busy=statistics.mean(map(max, samples)),
            gpu_kernels_busy=kernels,
            jpeg_engine_busy=engine,
        )


def work_so_far():
    """Return (CPU seconds, bytes read from disk) of all processes that this one has started."""
    seconds, size = 0.0, 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            seconds += sum(process.cpu_times()[:4])  # with those of its children that have ended
            size += process.io_counters().read_bytes
    return seconds, size


def run(script, words, folder, state):
    """Run a loader. Return (status, exit code, its record and how busy it kept the machine, or
    {"error"})."""
    record = folder / f"{script.stem}.json"
    log = folder / f"{script.stem}_{state}.log"
    for old in (record, log):
        old.unlink(missing_ok=True)
    command = [sys.executable, str(script), *words, "--result_dir", str(folder)]
    marks = []  # (moment, CPU seconds, bytes read) at the start and after each epoch

    def watch(line, seconds):
        if line is None:
            runs.show(
                f"{script.name} {state}: {seconds:.0f} s, epochs done: {max(0, len(marks) - 1)}"
            )
        elif line.startswith(("epoch ", f"{script.stem}: ")):
            marks.append((time.monotonic(), *work_so_far()))

    with GPUWatch() as gpu:
        code, _ = runs.follow(command + ["--cold"] * (state == "cold"), log, watch)
    if code or not record.exists() or len(marks) < 2:
        return runs.failure(code, log)
    details = json.loads(record.read_text())
    record.replace(folder / f"{script.stem}_{state}.json")
    first, last = marks[1 if len(marks) > 2 else 0], marks[-1]  # without the warm-up
    seconds, cpu_seconds, size = (after - before for before, after in zip(first, last))
    details |= dict(
        cores_busy=cpu_seconds / seconds,
        disk_megabytes_per_second=size / 1e6 / seconds,
        **gpu.busy(first[0], last[0]),
    )
    return "ok", 0, details


def bottleneck(cold, warm, storage, workers):
    """Return (IO, CPU or GPU; the evidence) from a loader's two rows; `cold` may be None."""
    speed, needs = warm.images_per_second, warm.megabytes_per_second
    from_disk = warm.disk_megabytes_per_second
    if from_disk > needs / 2:
        return "IO", (
            f"even in the warm run {from_disk:.1f} of {needs:.1f} MB/s come from the "
            "disk, because the dataset does not fit in memory"
        )
    compared = "the files are in memory"
    if cold:
        slow, disk = cold.images_per_second, storage["cold_megabytes_per_second"]
        compared = f"{slow:,.0f} images/s cold and {speed:,.0f} warm"
        if "lmdb" in warm.options:  # the files that were read alone are not those that it reads
            disk = 0
        else:
            compared += (
                f"; the disk alone gives {disk:,.1f} MB/s, the loader reads {needs:,.1f} "
                "MB/s when warm"
            )
        apart = max(report.speeds(cold)) < min(report.speeds(warm))
        if slow < CLEARLY_SLOWER * speed and apart and disk < AMPLE * needs:
            return "IO", compared
    busy, cores, gpu = warm.cores_busy, runs.cores(), warm.gpu_busy or 0
    used = f"{busy:.1f} of {cores} cores busy"
    if warm.gpu_busy is not None:
        used += f", the GPU {gpu:.0%}"
    if warm.other.get("jpeg_engine_busy"):
        used += (
            f" (its JPEG engine {warm.other['jpeg_engine_busy']:.0%}, its kernels "
            f"{warm.other['gpu_kernels_busy']:.0%})"
        )
    if gpu < BUSY and busy < BUSY * cores:
        if 0 < workers < cores and busy >= BUSY * workers:
            used += ", as many as there are workers: try more --workers"
        else:
            full = "the cores are not" if warm.gpu_busy is None else "neither is"
            used += f", so {full} full: try a larger --batch_size or more --workers"
    return "GPU" if gpu > busy / cores else "CPU", f"{used}; {compared}"


def main():
    script, loader, args, pictures, common, own = parse(sys.argv[1:])
    folder = args.result_dir.resolve() / "loading"
    _lock = runs.folder_of_its_own(folder, "loading.sh")  # held until the process ends
    baseline = ROOT / "src" / "loader.py"
    scripts = {baseline: common, script: common + own}
    runs.check_options(script, common + own, "loading.sh")
    shared, rows, interrupted = runs.setting("./loading.sh"), [], ""
    try:
        storage = measure_storage(loader, pictures.files(), args.workers)
        runs.say(report.storage_line(storage))
        for path, words in scripts.items():
            done = {}
            for state in ("cold", "warm") if storage["kind"] != "memory" else ("warm",):
                status, code, details = run(path, words, folder, state)
                if not rows and code == 2:  # the others would refuse these options too
                    runs.refuse(details["error"])
                about = dict(loader=path.stem, cache=state, status=status, storage=storage)
                rows.append(Loading.read(about | shared | details))
                runs.say(f"{path.name:<18} {state}  {report.loading_summary(rows[-1])}")
                if status != "ok":
                    break
                done[state] = rows[-1]
            if "warm" in done:
                name, evidence = bottleneck(done.get("cold"), done["warm"], storage, args.workers)
                done["warm"].update(bottleneck=name, evidence=evidence)
                runs.say(f"{path.name:<18} {name}: {evidence}")
    except runs.Stopped as reason:
        interrupted = f"Stopped by {reason} after {len(rows)} runs."
        print(f"\n{interrupted}", file=sys.stderr)
    runs.conclude(rows, report.write_loading, args.result_dir / "loading", interrupted)


if __name__ == "__main__":
    runs.guarded(main, "loading.sh")
