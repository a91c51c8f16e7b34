"""What loading.sh runs: a loader and the baseline, cold and warm, and what holds them back."""

import contextlib
import ctypes
import datetime
import json
import mmap
import os
import random
import shlex
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

import report
from running import (ROOT, Stopped, check_options, conclude, cores, failure, folder_of_its_own,
                     guarded, packages, stop, stop_on_signals)

USAGE = "usage: ./loading.sh SCRIPT DATASET [--result_dir DIR] [OPTION ...]"
MOST_SAMPLES = 10_000  # of a larger data set so many are read, unless --samples says otherwise
CLEARLY = 0.8  # below this part of the other, a speed is clearly lower
AMPLE = 3  # a disk that gives so many times what a loader takes is not what it waits for
BUSY = 0.7  # from this share on, cores or a GPU are taken to be what limits
ARM_SECONDS = 0.002  # a disk with a moving arm answers later than this, one without sooner
MEMORY = {"tmpfs", "ramfs"}
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre", "beegfs", "glusterfs"}


def usage(reason):
    print(f"{USAGE}: {reason}", file=sys.stderr)
    sys.exit(2)


def find_script(name):
    """The loader of this name in src/, or at this path; exit 2 if it is none."""
    src = ROOT / "src"
    for path in (Path(name), src / name, src / f"{name}.py"):
        if path.is_file():
            if "--data_source" not in path.read_text(errors="replace"):
                usage(f"{path} is no loader")
            if path.stem == "loader" and path.resolve() != src / "loader.py":
                usage(f"{path} has the baseline's name: give it another")
            return path.resolve()
    names = ", ".join(sorted(path.name for path in src.glob("loader*.py")))
    usage(f"there is no script {name!r}: name one of {names}, or a path")


def parse(arguments):
    """What is to be done.

    Returns (script, the module loader, its options, the samples, words for every loader, words
    for the script alone). Exit 2 where something is wrong.
    """
    if len(arguments) < 2 or any(word.startswith("-") for word in arguments[:2]):
        usage("a SCRIPT and a DATASET, please")
    script = find_script(arguments[0])
    if not os.path.isdir(arguments[1]):
        usage(f"there is no folder {arguments[1]!r}")
    sys.path.insert(0, str(ROOT / "src"))
    import loader  # seconds, for torch
    parser = loader.build_parser()
    parser.prog = "loading.sh"
    parser.set_defaults(result_dir=ROOT / "results")
    folder = os.path.abspath(arguments[1])
    args, own = parser.parse_known_args([*arguments[2:], f"--data_source={folder}"])
    if args.cold:
        usage("cold is what it reads anyway, and warm too")
    pictures = loader.open_pictures(parser, args, None)
    if not args.samples and len(pictures) > MOST_SAMPLES:
        args.samples = MOST_SAMPLES
    common = []
    for name, value in vars(args).items():
        if name != "result_dir" and value != parser.get_default(name):
            words = value if isinstance(value, list) else [value]
            common += [f"--{name}", *words] if len(words) > 1 else [f"--{name}={words[0]}"]
    return script, loader, args, pictures, common, own


# ----------------------------------------------------------------------------------- storage
def cached(paths):
    """The share of these files whose middle is in the page cache; None where nobody can tell.

    By mincore(2), which tells only who owns or may write a file, and loads nothing: a read with
    RWF_NOWAIT would have the kernel read ahead.
    """
    hits = 0
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            status, found = os.fstat(file), ctypes.c_ubyte()
            if status.st_uid != os.geteuid() and not os.access(path, os.W_OK):
                return None
            if not status.st_size:
                continue
            middle = status.st_size // 2 // mmap.PAGESIZE * mmap.PAGESIZE
            with mmap.mmap(file, 1, access=mmap.ACCESS_COPY, offset=middle) as mapped:
                page = ctypes.c_char.from_buffer(mapped)
                failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(page)),
                                                   ctypes.c_size_t(1), ctypes.byref(found))
                del page  # or the map cannot be closed
        except (AttributeError, OSError):
            return None
        finally:
            os.close(file)
        if failed:
            return None
        hits += found.value & 1
    return hits / len(paths)


def file_system(path):
    """(type, device) of the file system that holds `path`."""
    path = os.path.realpath(path)
    inside = [part for part in psutil.disk_partitions(all=True)
              if os.path.commonpath([path, part.mountpoint]) == part.mountpoint]
    mount = max(inside, key=lambda part: len(part.mountpoint))
    return mount.fstype, mount.device


def rotates(path):
    """What the kernel says of the disk under `path`: True, False, or None where it says nothing."""
    number = os.stat(path).st_dev
    disk = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    with contextlib.suppress(OSError):
        for folder in (disk, disk.resolve().parent):  # of a partition, its disk
            if (folder / "queue/rotational").exists():
                return (folder / "queue/rotational").read_text().strip() == "1"
    return None


def measure_storage(loader, files, threads):
    """Reads some of `files` with nothing else going on: what the disk gives, cold and warm.

    Returns a dict: kind (HDD, SSD, network or memory), file_system, device, rotational, cached
    (the share that the kernel holds when told to forget it; None: it does not tell), droppable
    (whether cold can be measured), answer_seconds (mean of cold reads of
    one byte), cold_megabytes_per_second, warm_megabytes_per_second.
    """
    some = random.Random(0).sample(files, min(len(files), 256))
    name, device = file_system(some[0])
    result = dict(file_system=name, device=device, rotational=rotates(some[0]), droppable=False,
                  answer_seconds=None, cold_megabytes_per_second=None)

    def read(paths, seconds=3.0):
        """Megabytes a second, by so many threads, for at most so long."""
        until, start = time.perf_counter() + seconds, time.perf_counter()
        def size(path):
            return len(Path(path).read_bytes()) if time.perf_counter() < until else 0
        with ThreadPoolExecutor(max(1, threads)) as pool:
            return sum(pool.map(size, paths)) / 1e6 / (time.perf_counter() - start)
    loader.drop_from_cache(some)
    held = None if name in MEMORY else cached(some)
    result["cached"] = held
    result["droppable"] = name not in MEMORY and (held is None or held < 0.1)
    if result["droppable"]:
        loader.drop_from_cache(some)
        result["cold_megabytes_per_second"] = read(some)
        loader.drop_from_cache(some)
        answers = []
        for path in some[:64]:
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
                start = time.perf_counter()
                os.pread(file.fileno(), 1, os.fstat(file.fileno()).st_size // 2)
                answers.append(time.perf_counter() - start)
        result["answer_seconds"] = statistics.mean(answers)
    read(some)
    result["warm_megabytes_per_second"] = read(some)
    slow = (result["answer_seconds"] or 0) > ARM_SECONDS
    result["kind"] = ("memory" if name in MEMORY else "network" if name in NETWORK else
                      "HDD" if slow or result["rotational"] and not result["droppable"] else "SSD")
    return result


# --------------------------------------------------------------------------------------- runs
class GPUWatch:
    """Samples how busy the first GPU's kernels and its JPEG engine are, while a `with` block
    lasts."""

    def __init__(self):
        self.samples, self.process, self.columns = [], None, 0

    def __enter__(self):
        for engines in ("utilization.gpu,utilization.jpeg", "utilization.gpu"):
            command = ["nvidia-smi", "-i", "0", f"--query-gpu={engines}",
                       "--format=csv,noheader,nounits"]
            try:
                if subprocess.run(command, capture_output=True).returncode == 0:
                    self.columns = len(engines.split(","))
                    self.process = subprocess.Popen([*command, "-lms", "200"], text=True,
                                                    stdout=subprocess.PIPE)
                    threading.Thread(target=self.collect, daemon=True).start()
                    break
            except FileNotFoundError:
                break
        return self

    def collect(self):
        for line in self.process.stdout:
            shares = [float(word) / 100 if word.strip().isdecimal() else 0
                      for word in line.split(",")]  # [N/A] where there is no such engine
            if len(shares) == self.columns:
                self.samples.append((time.monotonic(), *shares))

    def __exit__(self, *_):
        if self.process:
            self.process.kill()
            self.process.wait()

    def busy(self, start, end):
        """The mean shares between two moments, 0 to 1: of either, of kernels, of the engine.

        None without a GPU; the engine's is None where the driver does not know it, 0 where there
        is none.
        """
        samples = [shares for moment, *shares in self.samples if start <= moment <= end]
        kernels, engine = [*map(statistics.mean, zip(*samples)), None, None][:2]
        either = statistics.mean(map(max, samples)) if samples else None
        return dict(gpu_busy=either, gpu_kernels_busy=kernels, jpeg_engine_busy=engine)


def work_of(pid):
    """(CPU seconds, bytes read from disk) so far of a process and all that it started."""
    seconds, size = 0.0, 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                seconds += sum(process.cpu_times()[:4])  # its own, and of ended children
                size += process.io_counters().read_bytes
    return seconds, size


def run(script, words, folder, state):
    """Runs a loader. Returns (status, exit code, its record and what it kept busy, or an error)."""
    log = folder / f"{script.stem}_{state}.log"
    record = folder / f"{script.stem}.json"
    record.unlink(missing_ok=True)
    command = [sys.executable, str(script), *words, "--result_dir", str(folder)]
    command += ["--cold"] if state == "cold" else []
    marks = []
    with open(log, "w") as output, GPUWatch() as gpu:
        print(f"$ {shlex.join(command)}", file=output, flush=True)
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, errors="replace",
                                   start_new_session=True)
        try:
            for line in process.stdout:
                output.write(line)
                output.flush()
                if line.startswith(("epoch ", f"{script.stem}: ")):
                    marks.append((time.monotonic(), *work_of(process.pid)))
            code = process.wait()
        except BaseException:
            stop(process)
            raise
    if code or not record.exists():
        return failure(code, log)
    details = json.loads(record.read_text())
    record.replace(folder / f"{script.stem}_{state}.json")
    first, last = marks[1 if len(marks) > 2 else 0], marks[-1]
    seconds = last[0] - first[0]
    details |= dict(cores_busy=(last[1] - first[1]) / seconds,
                    disk_megabytes_per_second=(last[2] - first[2]) / 1e6 / seconds,
                    **gpu.busy(first[0], last[0]))
    return "ok", 0, details


def bottleneck(cold, warm, storage, workers):
    """(IO, CPU or GPU; the evidence), from a loader's two rows, the cold one perhaps None."""
    speed, needs = warm["images_per_second"], warm["megabytes_per_second"]
    busy, of, gpu = warm["cores_busy"], cores(), warm["gpu_busy"]
    engines = f"{busy:.1f} of {of} cores busy"
    if gpu is not None:
        engines += f", the GPU {gpu:.0%}"
    if warm["jpeg_engine_busy"]:
        engines += (f" (its JPEG engine {warm['jpeg_engine_busy']:.0%}, kernels "
                    f"{warm['gpu_kernels_busy']:.0%})")
    if warm["disk_megabytes_per_second"] > needs / 2:
        return "IO", (f"even warm it reads {warm['disk_megabytes_per_second']:.1f} of {needs:.1f} "
                      "MB/s from the disk: the data set does not fit the page cache")
    if cold:
        slow = cold["images_per_second"]
        if (slow < CLEARLY * speed and max(report.speeds(cold)) < min(report.speeds(warm))
                and storage["cold_megabytes_per_second"] < AMPLE * needs):
            return "IO", (f"cold {slow:,.0f} images/s against {speed:,.0f} warm; the disk alone "
                          f"gives {storage['cold_megabytes_per_second']:,.1f} MB/s, warm the "
                          f"loader takes {needs:,.1f}")
        same = (f"cold {slow:,.0f} images/s, warm {speed:,.0f}, and the disk alone gives "
                f"{storage['cold_megabytes_per_second']:,.1f} MB/s cold where the loader takes "
                f"{needs:,.1f}")
    else:
        same = ("the files are in memory" if storage["kind"] == "memory" else
                "the kernel keeps the files in memory")
    if gpu is not None and gpu >= BUSY and gpu >= busy / of:
        return "GPU", f"{engines}; {same}"
    if busy < BUSY * of and 0 < workers < of and busy >= BUSY * workers:
        engines += f", all {workers} workers: raise --num_workers"
    elif busy < BUSY * of and (gpu or 0) < BUSY:
        engines += (": neither cores nor GPU are full, so a larger --batch_size or more "
                    "--num_workers may help")
    return ("GPU" if (gpu or 0) > busy / of else "CPU"), f"{engines}; {same}"


def main():
    stop_on_signals()
    script, loader, args, pictures, common, own = parse(sys.argv[1:])
    folder = args.result_dir.resolve() / "loading"
    lock = folder_of_its_own(folder, "loading.sh")  # held until the process ends
    shared = dict(date=datetime.date.today().isoformat(), packages=packages(),
                  command=shlex.join(["./loading.sh", *sys.argv[1:]]))
    baseline = ROOT / "src" / "loader.py"
    scripts = {baseline: common}
    if script != baseline:
        scripts[script] = common + own
    check_options(script, common + own, "loading.sh")
    rows, interrupted = [], ""
    try:
        storage = measure_storage(loader, pictures.files(), args.num_workers)
        print(report.storage_line(storage), flush=True)
        states = ("cold", "warm") if storage["droppable"] else ("warm",)
        for path, words in scripts.items():
            done = {}
            for state in states:
                print(f"{path.name:<18} {state}  ", end="", flush=True)
                status, code, details = run(path, words, folder, state)
                if not rows and code == 2:
                    print(f"\n{details['error']}", file=sys.stderr)
                    sys.exit(2)
                rows.append(dict(loader=path.stem, cache=state, status=status, storage=storage,
                                 **shared, **details))
                done[state] = rows[-1]
                print(report.loading_summary(rows[-1]), flush=True)
                if status != "ok":
                    break
            if done.get("warm", {}).get("status") == "ok":
                name, evidence = bottleneck(done.get("cold"), done["warm"], storage,
                                            args.num_workers)
                done["warm"] |= dict(bottleneck=name, evidence=evidence)
                print(f"{path.name:<18} {name}: {evidence}", flush=True)
    except Stopped as reason:
        interrupted = f"Stopped by {reason} after {len(rows)} runs."
        print(f"\n{interrupted}", file=sys.stderr)
    conclude(rows, report.write_loading, args.result_dir / "loading", interrupted)


if __name__ == "__main__":
    guarded(main, "loading.sh")
