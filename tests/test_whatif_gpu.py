"""What whatif measures of a GPU: on a simulated one, and on one that sleeps for known times."""

import time
import types

import pytest
import torch

from whatif.inside import clock, gpu, plans

KERNELS = 300  # of a step


class Device:
    """A GPU with one queue, and the clock of its host, in seconds."""

    def __init__(self):
        self.host, self.free = 0.0, 0.0  # now, and when the queue is empty

    def launch(self, start, work):
        """Start a kernel, which takes the host `start` seconds and the GPU `work`."""
        self.host += start
        self.free = max(self.host, self.free) + work

    def synchronize(self):
        self.host = max(self.host, self.free)

    def event(self, enable_timing):
        def record():
            event.at = max(self.host, self.free)

        def wait():
            self.host = max(self.host, event.at)

        event = types.SimpleNamespace(record=record, synchronize=wait)
        event.elapsed_time = lambda other: 1000 * (other.at - event.at)
        return event


@pytest.fixture
def device(monkeypatch):
    made = Device()
    cuda = types.SimpleNamespace(
        Event=made.event,
        synchronize=made.synchronize,
        _sleep=lambda cycles: made.launch(1e-6, cycles / 1.9e9),
    )
    monkeypatch.setattr(gpu, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(gpu, "time", types.SimpleNamespace(perf_counter=lambda: made.host))
    return made


def seconds_of(device, monkeypatch, steps, in_flow, pauses=()):
    """Return what a clock finds of steps that the host prepares for 5 ms and the GPU does in 20."""
    monkeypatch.setattr(clock, "time", types.SimpleNamespace(perf_counter=lambda: device.host))
    found = clock.Clock(device.synchronize, gpu.mark)

    def step():
        device.host += 5e-3
        for _ in range(20):
            device.launch(1e-5, 1e-3)
        found.step()

    step()  # a window comes after a step
    found.begin(in_flow)
    for number in range(steps):
        step()
        if number in pauses:
            found.pause()
            device.host += 1.0  # an evaluation
            found.resume()
    return found.end()["seconds"]


def test_a_window_in_flow_has_steps_as_they_follow_each_other(device, monkeypatch):
    """Without a pause a step takes the GPU 20 ms, while the host prepares the next one."""
    assert seconds_of(device, monkeypatch, 1, True) == pytest.approx(0.020)
    assert seconds_of(device, monkeypatch, 10, True) == pytest.approx(0.200)
    assert seconds_of(device, monkeypatch, 1, False) == pytest.approx(0.025, rel=0.01)
    assert seconds_of(device, monkeypatch, 10, False) == pytest.approx(0.205, rel=0.01)


def test_a_pause_does_not_count_in_a_window_in_flow(device, monkeypatch):
    """The step after it begins with a GPU that stands still."""
    took = seconds_of(device, monkeypatch, 4, True, pauses=[1])
    assert took == pytest.approx(0.085, rel=0.01)


def test_windows_of_long_steps_are_one_step_on_a_gpu():
    turns = types.SimpleNamespace(run=types.SimpleNamespace(cycle=1), length=plans.WINDOW["cuda"])
    found = []
    for turns.shortest in (plans.SHORTEST["cuda"], plans.SHORTEST["cpu"]):
        for seconds in (0.3, 0.06):
            turns.known = {(): seconds}
            found.append(plans.Turns.steps_of(turns, ()))
    assert found == [1, 4, 3, 4]


def share_of(step, called=True):
    """Return the share that is found of a script whose steps call `step`."""
    run = types.SimpleNamespace(on_forward=None, gpu=None)
    plan = gpu.queued_share(run, 5)
    next(plan)
    try:
        while True:
            if called and run.on_forward:
                begin, run.on_forward = run.on_forward, None
                begin()
            step()
            next(plan)
    except StopIteration as stop:
        assert run.on_forward is None
        return stop.value


@pytest.mark.parametrize(
    ("start", "work", "share"), [(10e-6, 4e-6, 0.4), (8e-6, 7e-6, 0.875), (5e-6, 50e-6, 1.0)]
)
def test_a_queued_step_takes_the_gpus_own_time(device, start, work, share):
    def step():
        for _ in range(KERNELS):
            device.launch(start, work)

    assert share_of(step) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(("start", "work"), [(10e-6, 4e-6), (5e-6, 50e-6)])
def test_a_host_that_waits_on_the_way_is_found_all_the_same(device, start, work):
    """A script may read its loss before backward()."""

    def step():
        for kernel in range(KERNELS):
            device.launch(start, work)
            if kernel == KERNELS // 3:
                device.synchronize()

    assert (share_of(step) < 0.9) == (start > work)


def test_nothing_is_found_where_no_model_is_called(device):
    """It takes all of its steps, as other processes do that wait for this one in each of them."""
    steps = []
    assert share_of(lambda: steps.append(device.launch(1e-5, 1e-5)), called=False) is None
    assert len(steps) == 10


def test_a_step_without_a_call_of_a_model_does_not_count(device):
    def step():
        for _ in range(KERNELS):
            device.launch(10e-6, 4e-6)

    called = iter([False, True, True, False, *[True] * 6])
    run = types.SimpleNamespace(on_forward=None, gpu=None)
    plan = gpu.queued_share(run, 5)
    with pytest.raises(StopIteration) as found:
        while next(plan) is None:
            if next(called):
                run.on_forward()
            step()
    assert found.value.value == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize("share", [0.5, 0.95, None])
def test_cuda_graphs_are_tried_where_the_host_holds_the_gpu_back(monkeypatch, share):
    """Where no model's call is seen, nothing is known, and they are tried."""
    asked, told, on = [], [], [()]

    def queued_share(run, steps):
        asked.append(on[-1])
        return share
        yield

    monkeypatch.setattr(plans.gpu, "queued_share", queued_share)
    monkeypatch.setattr(plans, "calm_down", lambda run, least: iter(()))
    run = types.SimpleNamespace(
        spec=dict(deadline=9e9, only=["fused", "compile"]),
        device="cuda",
        agree=lambda value: value,
        ranks=lambda: (0, 1),
        switch=on.append,
        send=lambda **record: told.append(record),
    )
    turns = plans.Turns(run)
    turns.why, put_back = {}, []
    turns.state = types.SimpleNamespace(put_back=lambda: put_back.append(on[-1]))
    turns.look_for(["fused", "compile"])
    turns.search.best = lambda found, failed: ("fused",)
    with pytest.raises(StopIteration) as found:
        next(turns.consider_graphs())
    is_tried = share != 0.95
    assert found.value.value == is_tried
    assert asked == [("fused",)] and put_back == [()]  # the state is that of before
    assert (plans.GRAPHS in turns.names) == is_tried
    assert told == [dict(why_not=turns.why)] and (plans.GRAPHS in turns.why) != is_tried
    assert is_tried or "takes 95% of its time" in turns.why[plans.GRAPHS]


@pytest.mark.gpu
@pytest.mark.parametrize("is_held_back", [True, False])
def test_a_real_gpu_that_sleeps_for_known_times(is_held_back):
    def step():
        for _ in range(10):
            torch.cuda._sleep(1_000_000 if is_held_back else 20_000_000)  # 0.5 ms, or 10
            time.sleep(0.005 if is_held_back else 0)

    share = share_of(step)
    assert share < 0.5 if is_held_back else share > 0.9
