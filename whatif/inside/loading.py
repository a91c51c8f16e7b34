"""Measure the user's own training DataLoader by itself, in the process of the script.

A copy of the loader with the same arguments and another number of workers is read as fast as it
goes. Its order of indices has no end, so the rate is one of full workers, and what the end of an
epoch costs is a figure of its own. An IterableDataset is read over its own epochs.
"""

import contextlib
import inspect
import multiprocessing
import signal
import sys
import threading
import time
import warnings

import torch
from torch.utils import data

from whatif.inside import worker_threads
from whatif.inside.facts import length_of, start_method
from whatif.inside.stacks import Stacks
from whatif.report import speed

WINDOWS = 12  # one lasts this part of the seconds for all
STEADY = 0.05  # both halves of a window agree: a third of the window is enough
GAINS = 1.1  # a number of workers that is not this much faster gains nothing
KEEPS_UP = 1.05  # times the rate that the step needs
BEGIN = 30.0  # seconds in which all workers should have started


class TooLong(BaseException):
    """The dataset did not give a batch in time. No `except Exception` of the user's stops it."""


@contextlib.contextmanager
def alarm(seconds):
    """Raise TooLong in the main thread after some seconds."""
    usable = (
        signal.getitimer(signal.ITIMER_REAL)[0] == 0
        and threading.current_thread() is threading.main_thread()
    )
    if not usable:
        yield
        return
    is_on = True

    def ring(*_):
        if is_on:
            raise TooLong(f"no batch within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), 1)  # again, if the first is caught
    try:
        yield
    finally:
        is_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


def begin(loader):
    """Do what DataLoader.__iter__ does, past any hook."""
    if not (loader.persistent_workers and loader.num_workers):
        return loader._get_iterator()
    if loader._iterator is None:
        loader._iterator = loader._get_iterator()
    else:
        loader._iterator._reset(loader)
    return loader._iterator


@contextlib.contextmanager
def without_hooks():
    """Let DataLoaders, also those with an __iter__ of their own, be read past any hook."""
    hooked = data.DataLoader.__iter__
    data.DataLoader.__iter__ = begin
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        data.DataLoader.__iter__ = hooked


class Endless:
    """An order of indices that goes on over the ends of epochs until it is told to stop.

    All copies of a loader share it: none reads again what another has read just before.
    """

    def __init__(self, order):
        self.order, self.current, self.stopped = order, None, False

    def __getattr__(self, name):
        if name == "order":
            raise AttributeError(name)
        return getattr(self.order, name)

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        self.stopped = False
        while not self.stopped:
            is_new = self.current is None
            if is_new:
                self.current = iter(self.order)
            try:
                indices = next(self.current)
            except StopIteration:
                self.current = None
                if is_new:
                    return  # an epoch without a batch
                continue
            yield indices


def keeps_an_iterator(loader):
    """Return whether a loader takes all its epochs from one iterator that it has made already."""
    return any(
        name != "_iterator" and hasattr(type(value), "__next__")
        for name, value in vars(loader).items()
    )


def order_of(loader):
    """Return what a loader takes its order from."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def copy_of(loader, workers, order=None, pinned=None, timeout=0):
    """Return a DataLoader with the same arguments, `workers` and persistent workers.

    No __init__ runs: a subclass keeps its attributes, and nothing that it has done is done twice.
    """
    kind = data.DataLoader if keeps_an_iterator(loader) else type(loader)
    copy = object.__new__(kind)
    values = dict(
        vars(loader),
        num_workers=workers,
        persistent_workers=workers > 0,
        _iterator=None,
        prefetch_factor=(loader.prefetch_factor or 2) if workers else None,
        timeout=(loader.timeout or timeout) if workers else 0,
    )
    if pinned is not None:
        values["pin_memory"] = pinned
    if order is not None:
        values["sampler" if loader.batch_sampler is None else "batch_sampler"] = order
    copy.__dict__.update(values)
    return copy


def said(error):
    """Return one line about an error: of one in a worker, the last line of its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    if isinstance(error, TooLong) or "Traceback" in str(error):
        return text
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def shut(iterator, children):
    """End the workers of an iterator, and all processes that are not among `children`."""
    utils = data._utils
    interval = utils.MP_STATUS_CHECK_INTERVAL
    utils.MP_STATUS_CHECK_INTERVAL = 0.2  # how long it waits for a worker that is busy
    try:
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
    except Exception:
        pass  # what is left is ended below
    finally:
        utils.MP_STATUS_CHECK_INTERVAL = interval
    for child in multiprocessing.active_children():
        if child.pid not in children:
            with contextlib.suppress(Exception):  # torch's handler tells that a worker was killed
                child.kill()
            with contextlib.suppress(Exception):
                child.join(2)


class Reading:
    """One copy of a loader while it is read."""

    def __init__(self, loader, order):
        self.loader, self.order = loader, order
        self.workers = loader.num_workers
        self.prefetch = loader.prefetch_factor or 0
        self.epochs, self.reason, self.iterator, self.is_cut = [], None, None, False
        self.children = {child.pid for child in multiprocessing.active_children()}
        self.before, self.use, self.pids = {}, {}, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        iterator = self.iterator if self.loader._iterator is None else self.loader._iterator
        self.iterator = None
        shut(iterator, self.children)
        self.loader.__dict__["_iterator"] = None

    def read(self, window, limit):
        """Read until the rate is steady for `window` seconds, for `limit` seconds at most."""
        until = time.perf_counter() + limit
        try:
            with alarm(limit + window):
                while self.epoch(window, until):
                    pass
        except TooLong as error:
            self.is_cut = True  # the iterator may have lost a batch
            if not self.epochs[0][1]:
                self.reason = said(error)
        except (Exception, SystemExit) as error:
            self.reason = said(error)
        if self.before:
            self.use = worker_threads.in_use(
                self.before, worker_threads.cpu_times(self.pids), time.perf_counter() - self.marked
            )

    def epoch(self, window, until):
        """Read an epoch, or the rest of what is needed. Return whether to go on."""
        times, began = [], time.perf_counter()
        self.epochs.append((began, times))
        look = window / 10
        self.iterator = iter(self.loader)
        for _ in self.iterator:
            times.append(time.perf_counter())
            if not self.before and self.workers:
                self.mark()
            if times[-1] > until:
                return False
            if times[-1] - began > look:
                look = times[-1] - began + window / 10
                if self.is_enough(window):
                    return False
        if not times:
            self.reason = (
                "the loader gives no batch"
                if len(self.epochs) == 1
                else ("the loader gives its data once only")
            )
        return bool(times) and time.perf_counter() < until and not self.is_enough(window)

    def mark(self):
        self.pids = [
            child.pid
            for child in multiprocessing.active_children()
            if child.pid not in self.children
        ]
        self.before, self.marked = worker_threads.cpu_times(self.pids), time.perf_counter()

    def steady(self, window=0):
        """Return [(batches, seconds)] of the epochs' parts in which all workers are at work.

        The first batch of each worker and what was loaded in advance meanwhile are left out, and
        the part holds as many batches of each worker.
        """
        step, parts = max(self.workers, 1), []
        full = step * self.prefetch + step - 1
        for _, times in self.epochs:
            first = next(
                (
                    number
                    for number in range(min(full, 2 * step - 1), len(times))
                    if number >= full or window and times[number] - times[0] > window
                ),
                None,
            )
            if first is None and not self.workers:
                first = 0
            if first is None or len(times) - 1 - first < step:
                continue
            count = (len(times) - 1 - first) // step * step
            parts.append((count, times[first + count] - times[first]))
        return parts

    def is_enough(self, window):
        parts = self.steady(window)
        batches, seconds = (sum(column) for column in zip(*parts)) if parts else (0, 0)
        if seconds >= window:
            return True
        if not parts:  # short epochs are counted whole
            whole = [times[-1] - began for began, times in self.epochs[1:] if times]
            return sum(whole) >= 2 * window
        if seconds < window / 3 or batches < 16 * max(self.workers, 1) or len(parts) > 1:
            return False
        step, times = max(self.workers, 1), self.epochs[-1][1]
        half = batches // 2 // step * step
        second = times[-1] - times[-1 - half]
        return abs(2 * second / seconds * batches / (2 * half) - 1) < STEADY

    def figures(self, window):
        """Return the rate and what it rests on. `rough` ones rest on few batches or starts."""
        batches = sum(len(times) for _, times in self.epochs)
        row = dict(
            workers=self.workers,
            rate=None,
            seconds=None,
            batches=batches,
            rough=False,
            start=None,
            between=None,
            closing=None,
        )
        if self.reason:
            row["reason"] = self.reason
        if not batches:
            return row
        parts = self.steady(window)
        count, seconds = (sum(column) for column in zip(*parts)) if parts else (0, 0)
        row["start"] = next(times[0] - began for began, times in self.epochs if times)
        later = [times[0] - began for began, times in self.epochs[1:] if times]
        if later:
            row["between"] = sum(later) / len(later)
        if count < 2 or seconds <= 0 or seconds < window / 3:
            whole = [(len(times), times[-1] - began) for began, times in self.epochs[1:] if times]
            if not whole:
                began, times = self.epochs[0]
                whole = [(len(times), times[-1] - began)]
            if count < 2 or sum(part[1] for part in whole) > 2 * seconds:
                count, seconds = (sum(column) for column in zip(*whole))
                row["rough"] = True
        row["rate"] = count / max(seconds, 1e-9)
        row["seconds"] = round(seconds, 3)
        return row

    def between(self, row, limit):
        """Add what the end of an epoch costs, with workers that stay and that start again."""
        stops = isinstance(self.order, Endless)
        if not stops or self.reason or self.is_cut or row["between"] is not None:
            return
        try:
            with alarm(limit):
                self.order.stopped = True
                last = time.perf_counter()
                for _ in self.iterator:  # what the workers were told to load already
                    last = time.perf_counter()
                ended, began = time.perf_counter() - last, time.perf_counter()
                self.iterator = iter(self.loader)
                next(self.iterator)
                row["between"] = ended + time.perf_counter() - began
        except (Exception, SystemExit, TooLong) as error:
            row["reason"] = f"the second epoch: {said(error) or 'no batch'}"
            return
        if self.workers:
            began = time.perf_counter()
            shut(self.loader._iterator, self.children)
            row["closing"] = time.perf_counter() - began


def asks_for_worker(loader):
    """Return whether an IterableDataset asks which worker it is in, as its first batch shows."""
    if loader.worker_init_fn is not None or isinstance(loader.dataset, data.IterDataPipe):
        return True
    code, found = data.get_worker_info.__code__, []

    def called(frame, event, _):
        if event == "call" and frame.f_code is code:
            found.append(frame)

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        with alarm(5):
            next(iter(copy_of(loader, 0)), None)
    except (Exception, SystemExit, TooLong):
        pass  # the measurement tells it
    finally:
        sys.setprofile(before)
    if found:
        return True
    with contextlib.suppress(Exception):
        return "get_worker_info" in inspect.getsource(type(loader.dataset))
    return False


class Measurement:
    """The rows of one loader, within a number of seconds."""

    def __init__(self, loader, seconds, cores, is_users, needed):
        self.loader, self.seconds, self.is_users = loader, seconds, is_users
        self.cores, self.needed = cores, needed
        self.window, self.end = seconds / WINDOWS, time.perf_counter() + seconds
        self.began, self.numbers = time.perf_counter(), None
        self.order = Endless(order_of(loader))
        self.is_iterable = isinstance(loader.dataset, data.IterableDataset)
        own = type(loader).__iter__ is not data.DataLoader.__iter__
        self.kept = keeps_an_iterator(loader)
        self.result = dict(
            loader=type(loader).__name__,
            dataset=type(loader.dataset).__name__,
            as_is=dict(
                workers=loader.num_workers,
                pinned=bool(loader.pin_memory),
                persistent=bool(loader.persistent_workers) or self.kept,
                prefetch=loader.prefetch_factor,
                batch=loader.batch_size,
                length=length_of(loader),
                method=start_method(loader),
            ),
            rate=None,
            needed=needed,
            rows=[],
            shares=[],
            lines=[],
            looks=0,
            between={},
            threads={},
            best=None,
            enough=None,
            notes=[],
            summary="",
        )
        if self.kept:
            self.note(f"{type(loader).__name__} keeps its workers between epochs")
        elif own:
            self.note(f"{type(loader).__name__} has an __iter__ of its own, which is measured too")

    def note(self, text):
        if text not in self.result["notes"]:
            self.result["notes"].append(text)

    def note_untried(self, numbers):
        told = ", ".join(map(str, numbers))
        self.note(f"no time was left for {told} worker{'s' * (numbers != [1])}")

    def left(self):
        return self.end - time.perf_counter()

    def row(self, workers, window, limit, pinned=None, between=False, stacks=None):
        """Measure one number of workers. Return its row, which may hold a reason only."""
        copy = copy_of(self.loader, workers, self.order, pinned, timeout=limit + 2 * window + 1)
        if workers and start_method(self.loader) == "fork" and "cv2" in sys.modules:
            self.numbers = torch.full((workers,), -1, dtype=torch.int32).share_memory_()
            copy.__dict__["worker_init_fn"] = worker_threads.CountThreads(
                copy.worker_init_fn, self.numbers
            )
        with Reading(copy, self.order) as reading:
            with stacks or contextlib.nullcontext():
                reading.read(window, limit)
            row = reading.figures(window)
            drained = workers * reading.prefetch / (row["rate"] or 1e-9)
            if between and drained < max(self.left() / 3, window):
                reading.between(row, max(self.left() / 2, window))
            if reading.use and not self.result["threads"].get("note"):
                self.see_threads(reading)
        row["pinned"] = bool(self.loader.pin_memory if pinned is None else pinned)
        self.result["rows"].append(row)
        return row

    def see_threads(self, reading):
        """Note whether threads of the workers fight for cores."""
        use, numbers = reading.use, [] if self.numbers is None else self.numbers.tolist()
        cv2 = max((number for number in numbers if number > 0), default=None)
        found = worker_threads.libraries(reading.pids[0]) if use["busy"] > 1 else set()
        text = worker_threads.note(use, found | {"cv2"} if cv2 else found, cv2)
        self.result["threads"] = dict(use, cv2=cv2, note=text)
        if text and use["cores"] > 1:  # else they may take turns, as where other programs run
            self.note(text)

    def run(self):
        workers = self.loader.num_workers
        repeats = self.is_iterable and not asks_for_worker(self.loader)
        alone = self.look_inside()
        as_is = (
            alone
            if not workers
            else self.row(workers, 1.5 * self.window, 0.75 * self.left(), between=True)
        )
        self.result["rate"] = as_is["rate"]
        if as_is["rate"] is None and alone["rate"] is None:
            return
        if repeats:
            self.note(
                "each worker gives the same data again: the IterableDataset does not ask "
                "get_worker_info, so more workers are not tried"
            )
            return
        self.try_numbers(as_is, alone)
        self.try_pinned()

    def look_inside(self):
        """See where the time of a worker goes, in this process. Return the row of no workers."""
        workers, threads = self.loader.num_workers, torch.get_num_threads()
        stacks = Stacks(self.is_users, self.loader.collate_fn)
        if workers:
            torch.set_num_threads(1)  # as a worker has it
        try:
            row = self.row(
                0, 1.5 * self.window, 0.4 * self.seconds, stacks=stacks, between=not workers
            )
        finally:
            torch.set_num_threads(threads)
        self.result.update(shares=stacks.shares(), lines=stacks.users_lines(), looks=stacks.looks)
        if workers and threads > 1 and row["rate"] and row["rate"] * self.window > 2:
            self.result["rows"].remove(row)  # without workers, torch computes with all its threads
            row = self.row(0, self.window, 2 * self.window)
        return row

    def try_numbers(self, as_is, alone):
        """Measure 1, 2, 4 ... workers; with little time, only the larger numbers."""
        workers = self.loader.num_workers
        powers = range(self.cores.bit_length() + 1)
        numbers = sorted({min(2**power, self.cores) for power in powers} - {workers})
        if as_is.get("reason"):  # it failed, and more workers fail as well
            numbers = [number for number in numbers if number < max(workers, 2)][:1]
        cost = 1.5 * self.window + (as_is["start"] if workers and as_is["start"] else 0.3)
        fitting = int(max(self.left(), 0) // cost)
        if fitting < len(numbers):
            tried = numbers[-fitting:] if fitting else []
            self.note_untried(sorted({*numbers} - {*tried}))
            numbers = tried
        best, without_gain, known = alone["rate"] or 0, 0, as_is["rate"] or 0
        for place, number in enumerate(numbers):
            if self.left() < self.window:
                self.note_untried(numbers[place:])
                break
            limit = max(self.window, self.left() / (len(numbers) - place) * 1.5)
            row = self.row(number, self.window, min(limit, self.left()), between=not workers)
            if row.get("reason"):
                break
            # few workers may be slower than none where more, as the script has, gain
            if number > workers or known < GAINS * best:
                best = max(best, known)
                without_gain = without_gain + 1 if row["rate"] < GAINS * best else 0
                best = max(best, row["rate"])
            if without_gain == 2 or self.needed and row["rate"] > 3 * self.needed:
                break

    def try_pinned(self):
        best = best_of(self.result["rows"])
        if (
            best
            and best["workers"]
            and torch.cuda.is_available()
            and not self.loader.pin_memory
            and self.left() > self.window
        ):
            self.row(best["workers"], self.window, self.left(), pinned=True)

    def conclude(self):
        """Add the best number of workers, one that is enough, and a sentence."""
        result, rows = self.result, self.result["rows"]
        result["between"] = between_epochs(rows, result["as_is"])
        best = best_of(rows)
        if best is None:
            reasons = [row["reason"] for row in rows if row.get("reason")]
            result["summary"] = f"the loader cannot be measured: {reasons[0] if reasons else ''}"
            return
        target = KEEPS_UP * self.needed if self.needed else best["rate"] / GAINS
        if best["rate"] < target:
            target = best["rate"] / GAINS  # none is enough: the fewest that are as fast
        fitting = [row for row in rows if (row["rate"] or 0) >= target and row["workers"] > 0]
        enough = min(fitting, key=lambda row: row["workers"], default=best)
        result["best"] = dict(workers=best["workers"], rate=best["rate"])
        result["enough"] = dict(
            workers=enough["workers"],
            rate=enough["rate"],
            keeps_up=enough["rate"] >= KEEPS_UP * self.needed if self.needed else None,
        )
        result["summary"] = summary(result)


def best_of(rows):
    return max((row for row in rows if row["rate"]), key=lambda row: row["rate"], default=None)


def between_epochs(rows, as_is):
    """Return the seconds between epochs as it is, and with workers that start or stay."""
    row = next((row for row in rows if row["workers"] == as_is["workers"]), None)
    if not as_is["workers"] or row is None or row["between"] is None:
        known = [row for row in rows if row["workers"] and row["between"] is not None]
        other = known[-1] if known else {}
    else:
        other = row
    fresh = None
    if other.get("start") is not None:
        fresh = other["start"] + (other["closing"] or 0)
    kept = other.get("between")
    if not as_is["workers"]:
        own = row and row["between"]
    elif as_is["persistent"]:
        own = kept if other is row else None
    else:
        own = fresh if other is row else row and row["start"]
    return dict(as_is=own, workers=other.get("workers"), fresh=fresh, persistent=kept)


def named(workers):
    return (
        "no workers give"
        if not workers
        else ("1 worker gives" if workers == 1 else f"{workers} workers give")
    )


def summary(result):
    """Return a sentence about the number of workers."""
    enough, best, needed = result["enough"], result["best"], result["needed"]
    text = f"{named(enough['workers'])} {speed(enough['rate'])} batches/s"
    if needed:
        text += (
            f" and keep{'s' * (enough['workers'] == 1)} up with the step ({speed(needed)})"
            if enough["keeps_up"]
            else f"; the step could take {speed(needed)}"
        )
    elif enough["workers"] != best["workers"]:
        text += f", the best is {speed(best['rate'])} with {best['workers']}"
    as_is = result["as_is"]["workers"]
    if enough["workers"] != as_is and result["rate"]:
        text += f"; as it is, {named(as_is)} {speed(result['rate'])}"
    return text


def measure_loader(loader, seconds, cores, is_users, needed=None):
    """Return batches a second of a DataLoader by itself, and where its time goes.

    `cores`: workers that are tried at most. `is_users`: tells whether a frame runs the user's code.
    `needed`: batches/s that the step computes. The copies start after the loader's place in its
    order; no process is left behind.
    """
    if (
        isinstance(loader.dataset, data.IterDataPipe)
        and torch.distributed.is_available()
        and (torch.distributed.is_initialized())
    ):
        reason = "a DataPipe of several processes cannot be read by one of them"
        return dict(loader=type(loader).__name__, rate=None, rows=[], reason=reason, summary=reason)
    measurement = Measurement(loader, seconds, cores, is_users, needed)
    with without_hooks():
        measurement.run()
    measurement.conclude()
    return measurement.result | dict(seconds=round(time.perf_counter() - measurement.began, 2))


class Beside:
    """Read a loader in a thread while the main thread computes.

    with Beside(loader, workers=4) as beside:
        ...                    # compute
        beside.mark()          # from here on
        ...                    # compute
        rate = beside.rate()   # batches/s since the mark
    """

    def __init__(self, loader, workers):
        self.reading = Reading(
            copy_of(loader, workers, Endless(order_of(loader)), timeout=BEGIN), None
        )
        self.count, self.reason, self.is_on = 0, None, True

    def __enter__(self):
        reading = self.reading
        full = reading.workers * (reading.prefetch + 1)
        try:
            with without_hooks(), alarm(BEGIN):  # workers are forked by the main thread
                reading.iterator = iter(reading.loader)
                for _ in range(full):
                    next(reading.iterator)
        except (Exception, StopIteration, SystemExit, TooLong) as error:
            self.reason = said(error) or "the epoch ended before all workers had started"
        self.thread = threading.Thread(target=self.read, name="whatif loading", daemon=True)
        self.mark()
        if self.reason is None:
            self.thread.start()
        return self

    def read(self):
        try:
            while self.is_on:
                for _ in self.reading.iterator:
                    self.count += 1
                    if not self.is_on:
                        return
                self.reading.iterator = begin(self.reading.loader)
        except Exception as error:
            if self.is_on:
                self.reason = said(error)

    def mark(self):
        """Count from here on."""
        self.marked = self.count, time.perf_counter()

    def rate(self):
        """Return batches/s since the mark, or None if the loader failed; see `reason`."""
        count, moment = self.marked
        seconds = time.perf_counter() - moment
        return None if self.reason or not seconds else (self.count - count) / seconds

    def __exit__(self, *_):
        self.is_on = False
        if self.thread.ident:
            self.thread.join(0.5)
        self.reading.__exit__()
        if self.thread.ident:
            self.thread.join(2)
