"""Sets switched within one training: states, gradients, batches and compiled functions."""

import collections
import contextlib
import copy
import dataclasses
import gc
import importlib
import itertools
import json
import os
import pickle
import random
import re
import sys
import time
import types
import warnings
import weakref
from multiprocessing import connection

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import lr_scheduler

from forked_runs import fork
from helpers import AMP_OPTION, HANG
from test_whatif_loading import Endless
from whatif import confirm, parts, report, trials
from whatif import session as session_module
from whatif.inside import batches, clock, hooks, models, places, plans, proving, state, watch
from whatif.options import parse
from whatif.techniques import amp
from whatif.techniques import batch as larger
from whatif.techniques import compile as compiling

ALL = ["amp", "channels_last", "fused", "compile", "batch"]
LAST = torch.channels_last
SGD = importlib.import_module("torch.optim.sgd")
HOOKED = [
    (torch.utils.data.DataLoader, "__init__"),
    (torch.utils.data.DataLoader, "__iter__"),
    (torch.autograd, "backward"),
    (torch.amp.GradScaler, "scale"),
    (torch.amp.GradScaler, "__init__"),
    (torch.optim.Optimizer, "__init__"),
    (torch.optim.Optimizer, "add_param_group"),
    *((getattr(lr_scheduler, name), "__init__") for name in hooks.SCHEDULERS),
    (torch.amp.autocast_mode.autocast, "__enter__"),
    (torch.utils.data.distributed.DistributedSampler, "set_epoch"),
    (nn.utils, "clip_grad_norm_"),
    (nn.utils, "clip_grad_value_"),
    (nn.DataParallel, "__init__"),
    (nn.parallel.DistributedDataParallel, "__init__"),
    (nn.Module, "__call__"),
    (watch.Run, "active"),
]
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.05),
    "momentum": lambda weights: torch.optim.SGD(weights, 0.05, 0.9, weight_decay=0.01),
    "nesterov": lambda weights: torch.optim.SGD(weights, 0.05, 0.9, nesterov=True),
    "foreach": lambda weights: torch.optim.SGD(weights, 0.05, 0.9, foreach=True),
    "fused": lambda weights: torch.optim.SGD(weights, 0.05, 0.9, fused=True),
    "adam": lambda weights: torch.optim.Adam(weights, 0.01),
    "adam, foreach": lambda weights: torch.optim.Adam(weights, 0.01, foreach=True),
    "adam, fused": lambda weights: torch.optim.Adam(weights, 0.01, fused=True, amsgrad=True),
    "adamw, Tensor lr": lambda weights: torch.optim.AdamW(weights, torch.tensor(0.01)),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, 0.01),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, 0.01, momentum=0.5),
}


def spec_of(folder, **more):
    (folder / "records").touch()
    return (
        dict(
            mode="turns",
            techniques=[],
            only=ALL,
            cwd=str(folder),
            roots=[str(folder)],
            folder=str(folder),
            cores=2,
            seconds=1,
            least_steps=5,
            window=0.001,
            deadline=time.time() + 60,
            free=[],
        )
        | more
    )


@pytest.fixture
def make_run(monkeypatch, tmp_path):
    """Return a function that makes a Run with its hooks, which are gone after the test."""
    for owner, name in HOOKED:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(
        torch.optim.Optimizer,
        "profile_hook_step",
        staticmethod(torch.optim.Optimizer.profile_hook_step),
    )
    classes = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    for owner in classes:  # one that has hooks gets none of the new run
        step = owner.__dict__.get("step")
        if step and owner is not torch.optim.Optimizer:
            monkeypatch.setattr(
                owner,
                "step",
                getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step,
            )
    for owner in vars(lr_scheduler).values():
        if isinstance(owner, type) and hasattr(owner, "step"):
            monkeypatch.setattr(owner, "step", owner.step)
    monkeypatch.setattr(hooks.os, "register_at_fork", lambda **_: None)
    monkeypatch.setattr(plans.files, "hold_everything", lambda spec: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    added, register = [], hooks.register_optimizer_step_post_hook
    monkeypatch.setattr(
        hooks, "register_optimizer_step_post_hook", lambda hook: added.append(register(hook))
    )

    def make(**more):
        run = watch.Run(spec_of(tmp_path, **more))
        run.parsers.install = lambda: None
        run.install()
        run.plan = itertools.repeat(None)
        run.settings = dict(cudnn=False, tf32="highest")
        return run

    yield make
    for hook in added:
        hook.remove()


def records(folder):
    return [json.loads(line) for line in (folder / "records").read_text().splitlines()]


class Net(nn.Module):
    """Two convolutions, a norm and a line, with a weight that no step uses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 5, 3),
            nn.ReLU(),
        )
        self.last, self.unused = nn.Linear(5, 2), nn.Linear(2, 2)

    def forward(self, images):
        return self.last(self.layers(images).mean((2, 3)))


def images(step, count=4):
    return torch.randn(count, 3, 9, 9, generator=torch.Generator().manual_seed(step))


def train(net, optimizers, steps, run=None, turns={}, after=lambda step: None, ahead=0):
    """Train, with sets switched before some steps: {step: set}. Return the losses."""
    losses = []
    for step in range(ahead, ahead + steps):
        if run and step == 1 and not run.models.chosen:
            run.models.choose(1)
        if run and step in turns:
            run.switch(turns[step])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = (net(images(step)) - 1).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        after(step)
        losses.append(loss.item())
    return losses


def new_net():
    torch.manual_seed(0)
    return Net()


def values_of(net):
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def assert_alike(one, other, **limits):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], **limits, msg=lambda text, name=name: f"{name}: {text}"
        )


# ----------------------------------------------------------------------- sets switched and back
TURNS = {
    2: ("channels_last",),
    4: (),
    5: ("fused",),
    7: ("channels_last", "fused"),
    9: (),
    10: ("fused",),
    12: ("channels_last",),
    13: (),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_training_that_switches_ends_where_it_would_without(make_run, kind):
    net = new_net()
    want = train(net, [OPTIMIZERS[kind](net.parameters())], 16)
    want_end = values_of(net)
    run, net = make_run(), new_net()
    optimizer = OPTIMIZERS[kind](net.parameters())
    before = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    strides = [each.stride() for each in net.parameters()]

    def check(step):
        """Momentum and gradients have the weights' layout; the kernels find the step."""
        for weight in net.layers.parameters():
            if weight.dim() == 4:
                assert weight.is_contiguous(
                    memory_format=LAST if "channels_last" in run.names else torch.contiguous_format
                )
            assert weight.grad.stride() == weight.stride()
            for value in optimizer.state[weight].values():
                if getattr(value, "shape", None) == weight.shape:
                    assert value.stride() == weight.stride()

    assert train(net, [optimizer], 16, run, TURNS, check) == pytest.approx(want, rel=1e-4)
    assert_alike(values_of(net), want_end, rtol=1e-4, atol=1e-5)
    after = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    assert after == before and [each.stride() for each in net.parameters()] == strides
    assert not run.failed and not run.unfused and "step" not in vars(optimizer)


@pytest.mark.parametrize("kind", ["momentum", "adam", "adam, fused"])
def test_state_put_back_gives_the_same_training_to_the_bit(make_run, kind):
    run, net = make_run(), new_net()
    optimizer = OPTIMIZERS[kind](net.parameters())
    train(net, [optimizer], 3, run)
    kept = state.State([net], [optimizer])
    want, end = train(net, [optimizer], 4, run, ahead=3), values_of(net)
    for names in ("channels_last",), ("fused",), ("channels_last", "fused"), ("amp bfloat16",):
        kept.put_back()
        train(net, [optimizer], 3, run, {3: names}, ahead=3)
        kept.put_back()  # while the set is on, as at the end of a round
        assert train(net, [optimizer], 4, run, {3: ()}, ahead=3) == want
        assert_alike(values_of(net), end, rtol=0, atol=0)


def test_fused_kernels_take_the_place_of_foreach(make_run, monkeypatch):
    taken = []
    for name in ("_fused_sgd", "_multi_tensor_sgd", "_single_tensor_sgd"):
        real = getattr(SGD, name)
        monkeypatch.setattr(
            SGD,
            name,
            lambda *args, real=real, name=name, **more: (taken.append(name), real(*args, **more))[
                1
            ],
        )
    run, net = make_run(), new_net()
    train(net, [OPTIMIZERS["foreach"](net.parameters())], 4, run, {1: ("fused",), 3: ()})
    assert taken == ["_multi_tensor_sgd", "_fused_sgd", "_fused_sgd", "_multi_tensor_sgd"]


def test_the_device_is_that_of_the_optimizers_tensors(make_run):
    """Here they train without a module."""
    run = make_run()
    run.plan = None
    points = torch.zeros(2, device="meta", requires_grad=True)
    sgd = torch.optim.SGD([points], 0.1)
    points.sum().backward()
    sgd.step()
    assert run.device == "meta" and not run.models.known


def test_groups_and_optimizers_that_come_later(make_run):
    """A group is added under a set, and each epoch makes its own optimizers."""

    def trained(run=None, turns={}):
        net, extra = new_net(), nn.Linear(2, 2)
        nn.init.ones_(extra.weight)
        net.extra = extra
        losses = []
        for epoch in range(3):
            one = torch.optim.Adam(net.layers.parameters(), 0.01)
            other = torch.optim.SGD(net.last.parameters(), 0.05, 0.9)

            def after(step, epoch=epoch, other=other):
                if step == 4 * epoch + 1:
                    other.add_param_group(dict(params=[*extra.parameters()], lr=0.1))
                    if run:
                        groups = other.param_groups
                        assert [group.get("fused") for group in groups] == [
                            True if "fused" in run.names else None
                        ] * 2

            losses += train(net, [one, other], 4, run, turns, after, ahead=4 * epoch)
        if run:
            run.switch(())
            assert [group.get("fused") for group in other.param_groups] == [None, None]
        return losses, values_of(net)

    want = trained()
    got = trained(make_run(), {3: ("fused",), 9: ("channels_last",)})
    assert got[0] == pytest.approx(want[0], rel=1e-4)
    assert_alike(got[1], want[1], rtol=1e-4, atol=1e-5)


def test_a_step_of_the_users_own_is_not_taken_for_a_fused_one(make_run):
    """It would get gradients that are still scaled."""

    class Own(torch.optim.Adam):
        def step(self, closure=None):
            for weight in self.param_groups[0]["params"]:
                if weight.grad is not None:
                    weight.data.sub_(weight.grad, alpha=0.1)

    run, net = make_run(), new_net()
    optimizer = Own(net.parameters())
    train(net, [optimizer], 2, run)
    run.switch(("fused",))
    assert not optimizer.param_groups[0]["fused"] and not hasattr(
        optimizer, "_step_supports_amp_scaling"
    )


def test_scripts_that_save_or_copy_a_model_under_a_set(make_run):
    run, net = make_run(), new_net()
    optimizer = OPTIMIZERS["momentum"](net.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    state.stand_still([scheduler])
    train(net, [optimizer], 3, run, {2: ("channels_last", "amp bfloat16")})
    some = images(9)
    net.eval()
    want = net.layers[0].weight.mean()
    for other in copy.deepcopy(net), pickle.loads(pickle.dumps(net)):
        assert other.layers[0].weight is not net.layers[0].weight
        other.layers[0].weight.data.zero_()
        assert (other(some) - net(some)).abs().max() > 1e-4  # it computes with its own weights
    assert net.layers[0].weight.mean() == want
    pickle.dumps([optimizer.state_dict(), scheduler.state_dict()])
    assert net.forward.__name__ == "forward"


def test_data_parallel_is_changed_from_outside():
    """Inside, copies on other GPUs would call the forward of the first one."""
    net = Net()
    parallel = nn.DataParallel(net)
    parallel.device_ids = [0]
    assert models.inside(parallel) is net
    parallel.device_ids = [0, 1]
    assert models.inside(parallel) is parallel


@pytest.mark.parametrize(
    "lines, counts",
    [
        (["if number == last:"], True),
        (["if number % 100 == last:"], False),
        (["step = number // 2", "if step >= last:"], True),
        (["step = number % 2", "if step >= last:"], False),
    ],
)
def test_a_loop_may_rely_on_the_number_of_a_batch(tmp_path, lines, counts):
    file = tmp_path / "train.py"
    lines = ["for number, batch in enumerate(loader):", *lines, "    continue"]
    file.write_text("\n    ".join(lines))
    frame = types.SimpleNamespace(f_code=types.SimpleNamespace(co_filename=str(file)))
    assert places.counts_batches(frame, 2) == counts


def test_repeated_epochs_end_once_many_batches_made_no_step():
    loaders = batches.Loaders(types.SimpleNamespace(cycle=1))
    loaders.flood = batches.FLOOD
    with pytest.raises(StopIteration):
        loaders.repeat(0)
    assert loaders.ends and not loaders.flood


@pytest.mark.parametrize("kind", [Endless, torch.utils.data.DataLoader])
def test_repeated_epochs_end_as_those_of_the_script(make_run, kind):
    loaders = make_run().loaders
    loader = kind(torch.ones(8, 1), batch_size=2)
    loaders.kept[0].keep(torch.ones(2, 1))
    loaders.chosen, loaders.repeats, loaders.ends = [0], True, True
    assert [len([*loader]) for _ in range(3)] == [4, 4, 4]


@pytest.mark.parametrize("changing", [[], [0]])
def test_workers_of_a_whole_run_stay_unless_the_dataset_changes(make_run, changing):
    make_run(techniques=["workers"], training=[0], workers=1, changing=changing)
    loader = torch.utils.data.DataLoader(torch.ones(4, 1))
    assert loader.num_workers == 1 and loader.persistent_workers == (not changing)


@pytest.mark.parametrize(
    "before, now, grew",
    [
        ([(1, 4), (1, 4), (2, 4)], [(5, 4), (5, 4), (6, 4)], False),  # noise of a GAN
        ([(1, 4), (2, 4)], [(5, 8), (6, 8)], True),
        ([(1, 4), (2, 4)], [(5, 4), (5, 4), (6, 4), (6, 4)], True),  # one call for each four
        ([(1, 3), (2, 3)], [(5, 3), (6, 3)], True),  # of a size that is not the batch's
    ],
)
def test_a_model_whose_batch_does_not_grow_is_seen(before, now, grew):
    net, sizes = nn.Linear(2, 2), models.Sizes()
    for times, calls in (1, before), (2, now):
        for step, samples in calls:
            sizes.note(net, times, step, ([torch.ones(samples, 2)], {}))
    assert sizes.unchanged(2, 4) is (None if grew else net)
    assert sizes.unchanged(1, 4) is None


def test_series_of_several_lengths_are_no_pictures():
    series = [torch.ones(16, 96, 7), torch.ones(16, 144, 4)]
    assert batches.samples_in(series) == 16
    assert [len(each) for each in larger.joined([series, series])] == [32, 32]
    pictures = [torch.ones(3, 8, 9), torch.ones(3, 7, 9)]
    assert batches.samples_in(pictures) == 2
    assert len(larger.joined([pictures, pictures])) == 4


# ----------------------------------------------------------------------- float16 and its scaler
class Sharp(nn.Module):
    """Its gradients grow too large for float16 if the loss is scaled a lot."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, some):
        return (self.weight * some).sum()


HALF = ("amp float16",)


def sharp_run(make_run, make=lambda weights: torch.optim.SGD(weights, 0.01, 0.9)):
    run, net = make_run(), Sharp()
    optimizer = make(net.parameters())
    net(torch.ones(4)).backward()
    run.models.choose(1)
    optimizer.zero_grad()
    return run, net, optimizer


def infinite(scaler):
    """Let the next gradients overflow."""
    return torch.full((4,), 3e38 / scaler.get_scale() * 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: torch.optim.SGD(weights, 0.01, 0.9),
        lambda weights: torch.optim.SGD(weights, 0.01, 0.9, fused=True),
        lambda weights: torch.optim.Adam(weights, 0.01, fused=True),
        lambda weights: torch.optim.AdamW(weights, 0.01),
    ],
    ids=["sgd", "fused sgd", "fused adam", "adamw"],
)
@pytest.mark.parametrize("names", [HALF, (*HALF, "fused")], ids=["amp", "amp+fused"])
def test_a_skipped_step_is_counted_and_changes_nothing(make_run, make, names):
    run, net, optimizer = sharp_run(make_run, make)
    run.switch(names)
    scale, steps = run.scaler.get_scale(), run.steps
    net(infinite(run.scaler)).backward()
    optimizer.step()
    assert net.weight.tolist() == [1] * 4 and run.steps == steps + 1
    assert amp.scale_of(run) == scale / 2
    for _ in range(2):  # momentum is not what memory held before
        optimizer.zero_grad()
        net(torch.ones(4)).backward()
        optimizer.step()
    assert run.steps == steps + 3 and 0.9 < net.weight[0] < 1
    want = Sharp()
    plain = make(want.parameters())
    for _ in range(2):
        plain.zero_grad()
        want(torch.ones(4)).backward()
        plain.step()
    torch.testing.assert_close(net.weight, want.weight, rtol=1e-3, atol=1e-4)
    run.switch(())
    assert run.scaler is None and "step" not in vars(optimizer)


def test_a_window_with_a_skipped_step_is_thrown_away(make_run, tmp_path):
    run, net, optimizer = sharp_run(make_run)
    turns = plans.Turns(run)
    run.switch(HALF)
    found = []

    def plan():
        found.append((yield from turns.timed(HALF)))
        found.append((yield from turns.timed(HALF)))
        while True:
            yield

    turns.known = {HALF: 1.0, (): 1.0}
    turns.base = {"memory": 0}
    run.plan = plan()
    for step in range(30):
        optimizer.zero_grad()
        net(infinite(run.scaler) if step == 4 else torch.ones(4)).backward()
        optimizer.step()
    assert found[0] is None and found[1]["steps"] >= plans.LEAST
    assert [each["thrown_away"] for each in records(tmp_path) if "thrown_away" in each] == [[*HALF]]


def test_a_window_of_one_step_that_other_work_interrupts_is_thrown_away(make_run):
    """The step after a pause whose beginning is not known does not count; later windows have 3."""
    run, net, optimizer = sharp_run(make_run)
    turns = plans.Turns(run)
    turns.shortest, turns.known, turns.base = 1, {(): 1.0}, {"memory": 0}
    found = []

    def plan():
        for _ in range(2):
            found.append((yield from turns.timed(())))
        while True:
            yield

    run.plan = plan()
    for step in range(12):
        optimizer.zero_grad()
        net(torch.ones(4)).backward()
        if step == plans.WARM["cpu"] + 1:
            run.clock.pause()  # validation
        optimizer.step()
    assert found[0] is None and found[1]["steps"] == plans.LEAST


def test_windows_of_float16_wait_for_20_steps_without_a_skip(make_run):
    run, net, optimizer = sharp_run(
        make_run, lambda weights: torch.optim.SGD(weights, 0.01, 0.9, fused=True)
    )
    run.switch(HALF)
    done = []

    def plan():
        yield from plans.calm_down(run)
        done.append(run.steps)
        while True:
            yield

    run.plan, begin = plan(), run.steps
    for step in range(60):
        optimizer.zero_grad()
        net(infinite(run.scaler) if step == 9 else torch.ones(4)).backward()
        optimizer.step()
    assert done[0] - begin - 10 in (amp.CALM, amp.CALM + 1)


@pytest.mark.parametrize("plain, taken", [(0.001, 2), (1.0, 6), (None, 6)])
def test_a_set_with_much_longer_steps_is_given_up(make_run, monkeypatch, plain, taken):
    """bfloat16 without instructions for it would take all of the time."""
    monkeypatch.setattr(plans, "SLOW", (5.0, 0.01))
    run, net, optimizer = sharp_run(make_run)
    done = []

    def plan():
        yield from plans.calm_down(run, plain=plain)
        done.append(run.steps - begin)
        while True:
            yield

    run.plan, begin = plan(), run.steps
    for _ in range(9):
        time.sleep(0.02)
        net(torch.ones(4)).backward()
        optimizer.step()
    assert done == [taken + 1]  # the plan begins at the end of a step
    assert bool(run.failed) == (taken == 2)
    assert not run.failed or re.match(r"a step takes 0.\d s, \d+ times as long", run.failed)


def test_clipping_sees_unscaled_gradients(make_run):
    run = make_run()
    nets = [Sharp(), Sharp()]
    optimizers = [torch.optim.SGD(net.parameters(), 0.01) for net in nets]
    for net in nets:
        net(torch.ones(4)).backward()
    run.models.choose(1)
    run.switch(HALF)
    norms = []
    for net, optimizer in zip(nets, optimizers):  # one after the other, as a GAN
        optimizer.zero_grad()
        net(torch.ones(4)).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0).item())  # a generator
        optimizer.step()
    for net, optimizer in zip(nets, optimizers):  # all clipped before any steps
        optimizer.zero_grad()
        net(torch.ones(4)).backward()
        norms.append(nn.utils.clip_grad_norm_([*net.parameters()], 1.0).item())
        nn.utils.clip_grad_value_(net.weight, 0.25)
    for optimizer in optimizers:
        optimizer.step()
    assert norms == pytest.approx([2, 2, 2, 2])
    for net in nets:
        assert net.weight.tolist() == pytest.approx([1 - 0.01 * 0.5 - 0.01 * 0.25] * 4)


def test_several_optimizers_see_one_scale_in_a_step(make_run):
    run = make_run()
    net = nn.ModuleList([Sharp(), Sharp()])
    net.forward = lambda some: net[0](some) + net[1](some)
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in net]
    net(torch.ones(4)).backward()
    run.models.choose(1)
    run.switch(HALF)
    run.scaler._growth_interval = 1  # the scale grows after each step
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        net(torch.ones(4)).backward()
        for optimizer in optimizers:
            optimizer.step()
    for each in net:
        assert each.weight.tolist() == pytest.approx([0.97] * 4)


def test_a_step_without_gradients_under_float16(make_run):
    run, net, optimizer = sharp_run(make_run)
    run.switch(HALF)
    optimizer.zero_grad()
    steps = run.steps
    optimizer.step()
    assert run.steps == steps + 1 and not run.skipped


def test_a_closure_and_schedulers_that_wrapped_the_step(make_run):
    run, net, optimizer = sharp_run(make_run)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    wrapped = vars(optimizer)["step"]
    run.switch(HALF)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(4))
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that a scheduler stepped before its optimizer
        assert optimizer.step(closure).item() == 4
        scheduler.step()
    assert net.weight.tolist() == pytest.approx([0.99] * 4)
    run.switch(())
    assert vars(optimizer)["step"] is wrapped
    optimizer.step(closure)
    scheduler.step()
    assert scheduler.get_last_lr() == [0.0025]


def test_a_scaler_of_the_scripts_own_is_put_back(make_run):
    run, net = make_run(), Sharp()
    optimizer = torch.optim.SGD(net.parameters(), 0.01, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=3)

    def step(some):
        optimizer.zero_grad()
        scaler.scale(net(some)).backward()
        scaler.step(optimizer)
        scaler.update()

    step(torch.ones(4))
    run.models.choose(1)
    assert "amp" in run.seen and run.last_loss == 4  # without the scale
    kept = state.State([net], run.optimizers, scalers=run.live("scalers"))
    want = scaler.state_dict()
    run.switch(("fused",))
    step(torch.full((4,), float("inf")))
    assert scaler.get_scale() == 512 and net.weight.isfinite().all()
    for _ in range(4):
        step(torch.ones(4))
    kept.put_back()
    assert scaler.state_dict() == want and scaler.get_scale() == 1024


# ----------------------------------------------------------------------- state
def test_state_is_put_back(make_run):
    run, net = make_run(), new_net()
    net.register_buffer("queue", torch.zeros(3))
    optimizers = [
        OPTIMIZERS["momentum"](net.layers.parameters()),
        torch.optim.Adam(net.last.parameters(), 0.01),
    ]
    train(net, optimizers, 1, run)
    train(net, optimizers, 2, run, ahead=1)
    kept = state.State([net], optimizers)

    def now():
        return (
            values_of(net),
            [copy.deepcopy(each.state_dict()) for each in optimizers],
            torch.rand(1),
            random.random(),
            np.random.rand(),
        )

    want = now()
    assert want[0]["layers.1.num_batches_tracked"] == 3
    for round in range(2):
        net.queue = torch.ones(3)  # in place of the buffer
        optimizers[0].param_groups[0]["lr"] = 7
        train(net, optimizers, 3, run, ahead=9)
        if round:  # an optimizer may forget, or begin to know more
            optimizers[1].state.clear()
            optimizers[0].state[net.layers[0].weight]["more"] = torch.ones(1)
            optimizers[0].state[net.unused.weight]["momentum_buffer"] = torch.ones(2, 2)
        kept.put_back()
        got = now()
        assert_alike(got[0], want[0], rtol=0, atol=0)
        assert got[2:] == want[2:]
        for one, other in zip(got[1], want[1]):
            assert one["param_groups"] == other["param_groups"]
            assert one["state"].keys() == other["state"].keys()
            for key in one["state"]:
                assert_alike(one["state"][key], other["state"][key], rtol=0, atol=0)
                assert [
                    str(each.device) for each in one["state"][key].values() if each is not None
                ] == ["cpu"] * sum(each is not None for each in one["state"][key].values())


SCHEDULERS = {
    "StepLR": lambda it: lr_scheduler.StepLR(it, 2),
    "OneCycleLR": lambda it: lr_scheduler.OneCycleLR(it, 0.1, total_steps=4),
    "LambdaLR": lambda it: lr_scheduler.LambdaLR(it, lambda step: 1 / (step + 1)),
    "plateau": lambda it: lr_scheduler.ReduceLROnPlateau(it, patience=0),
    "sequence": lambda it: lr_scheduler.SequentialLR(
        it, [lr_scheduler.ConstantLR(it, 0.1, 2), lr_scheduler.ExponentialLR(it, 0.9)], [2]
    ),
    "chain": lambda it: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(it, 0.1, 9), lr_scheduler.ExponentialLR(it, 0.9)]
    ),
    "cyclic": lambda it: lr_scheduler.CyclicLR(it, 0.01, 0.1, 3),
}


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["float", "Tensor"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_are_put_back_and_stand_still(make_run, kind, rate):
    run = make_run()
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], copy.copy(rate), 0.9)
    try:
        scheduler = SCHEDULERS[kind](optimizer)
    except (TypeError, ValueError, RuntimeError) as error:
        pytest.skip(f"torch itself refuses this: {error}")
    assert scheduler in run.live("schedulers")
    words = [1.0] if kind == "plateau" else []

    def step():
        weight.grad = torch.ones(2)
        optimizer.step()
        scheduler.step(*words)

    def now():
        return float(optimizer.param_groups[0]["lr"]), copy.deepcopy(
            {
                name: value
                for name, value in scheduler.state_dict().items()
                if isinstance(value, (int, float))
            }
        )

    step()
    kept = state.State([], [optimizer], run.live("schedulers"))
    want = now()
    for _ in range(2):
        step()
    following = now()
    kept.put_back()
    assert now() == want
    for _ in range(2):
        step()
    assert now() == following != want
    kept.put_back()
    state.stand_still(run.live("schedulers"))
    for _ in range(9):  # beyond the end of a cycle too
        step()
    assert now() == want
    assert isinstance(optimizer.param_groups[0]["lr"], type(rate))
    pickle.dumps(
        {
            name: value
            for name, value in scheduler.state_dict().items()
            if kind != "LambdaLR" and not name.startswith("_")
        }
    )


# ----------------------------------------------------------------------- kept batches
Pair = collections.namedtuple("Pair", "images labels")


@dataclasses.dataclass
class Own:
    """A batch in a class of its own, as detection and graphs have them."""

    images: torch.Tensor
    more: dict


def give(kept, many, times=1):
    return [kept.next(times) for _ in range(many)]


def kept_of(*some, settle=True):
    kept = batches.Kept()
    given = [kept.keep(each) for each in some]
    if settle:
        kept.settle()
    return kept, given


def changed(kind):
    """Return (a batch, what a step does with it, how to read it)."""
    one = torch.arange(6.0).view(2, 3)
    return {
        "in place": ([one, one + 1], lambda batch: batch[0].mul_(2), lambda batch: batch[0]),
        "pop": (
            dict(x=one, y=one),
            lambda batch: (batch.pop("y"), batch["x"].add_(1)),
            lambda batch: batch["x"] + 0 * batch["y"],
        ),
        "append": (
            [one, [one]],
            lambda batch: batch[1].append(one[:1] + len(batch[1])),
            lambda batch: torch.cat(batch[1]),
        ),
        "namedtuple": (
            Pair(one, one),
            lambda batch: batch.images.zero_(),
            lambda batch: batch.images,
        ),
        "own": (
            Own(one, dict(y=one)),
            lambda batch: (batch.more.pop("y").zero_(), setattr(batch, "images", None)),
            lambda batch: batch.images + batch.more["y"],
        ),
        "list of own": (
            [Own(one, {})],
            lambda batch: setattr(batch[0], "images", None),
            lambda batch: batch[0].images,
        ),
        "gradient": (
            [one],
            lambda batch: batch[0].requires_grad_().sum().backward(),
            lambda batch: (
                batch[0].clone() if batch[0].grad is None and not batch[0].requires_grad else None
            ),
        ),
        "data": ([one], lambda batch: setattr(batch[0], "data", one[:1]), lambda batch: batch[0]),
        "tensor": (one, lambda batch: batch.neg_(), lambda batch: batch),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["in place", "pop", "append", "namedtuple", "own", "list of own", "gradient", "data", "tensor"],
)
def test_a_batch_is_as_the_loader_gave_it_whatever_steps_do(kind):
    batch, step, read = changed(kind)
    want = read(batch).clone()
    kept, (given,) = kept_of(batch, settle=False)
    assert type(given) is type(batch)
    step(given)
    kept.settle()
    for _ in range(3):
        again = kept.next(1)
        assert type(again) is type(batch)
        assert read(again).tolist() == want.tolist()
        step(again)


def test_clones_are_freed_unless_steps_change_batches():
    kept, _ = kept_of(torch.ones(2), torch.ones(2))
    assert not kept.is_changed and not kept.clones
    kept, given = kept_of(torch.ones(2), torch.ones(2), settle=False)
    given[1].add_(1)
    kept.settle()
    assert kept.is_changed and len(kept.clones) == 2


def test_smaller_last_batches_are_dropped_but_not_other_shapes():
    kept, _ = kept_of(*(torch.full((size, 2), float(size)) for size in (4, 4, 4, 1)))
    assert [len(each) for each in give(kept, 4)] == [4, 4, 4, 4] and kept.cycle() == 1
    kept, _ = kept_of(*(torch.ones(4, size) for size in (4, 3, 5)))
    assert [each.shape[1] for each in give(kept, 6)] == [4, 3, 5, 4, 3, 5] and kept.cycle() == 3
    kept, _ = kept_of(torch.ones(4, 2), torch.ones(1, 2))  # only one is whole
    assert [len(each) for each in give(kept, 2)] == [4, 1]


def test_batches_are_joined():
    some = [
        dict(x=torch.full((2, 3), float(at)), name="a", pair=Pair(torch.ones(2), [at]))
        for at in range(3)
    ]
    kept, _ = kept_of(*some)
    for times, want in (2, [0, 0, 1, 1]), (4, [0, 0, 1, 1, 2, 2, 0, 0]):
        batch = kept.next(times)
        assert batch["x"][:, 0].tolist() == want and batch["name"] == "a"
        assert type(batch["pair"]) is Pair and len(batch["pair"].images) == 2 * times
    assert [*kept.joins] == [4]  # of one size
    kept, given = kept_of(torch.ones(2), torch.zeros(2), settle=False)
    given[0].add_(1)
    kept.settle()
    kept.next(1)
    for _ in range(2):
        batch = kept.next(2)
        assert batch.tolist() == [1, 1, 0, 0]
        batch.add_(1)
    detection = [torch.ones(3, 4, 5), torch.ones(3, 5, 4)], [dict(box=1), dict(box=2)]
    assert [len(each) for each in larger.joined([detection, detection])] == [4, 4]
    encoded = larger.joined([collections.UserDict(ids=torch.ones(2, 3))] * 2)  # of transformers
    assert type(encoded) is collections.UserDict and encoded["ids"].shape == (4, 3)
    for wrong in [torch.ones(2, 3), torch.ones(2, 4)], [Own(torch.ones(1), {})] * 2:
        with pytest.raises(ValueError, match="cannot be joined"):
            larger.joined(wrong)


def test_memory_of_kept_batches_has_a_limit(monkeypatch):
    kept, _ = kept_of(*[torch.ones(10)] * 20)
    assert len(kept.batches) == batches.KEPT
    monkeypatch.setattr(batches, "KEPT_BYTES", 100)
    kept, given = kept_of(*(torch.full((10,), float(at)) for at in range(5)))
    assert len(kept.batches) == 2 and given[4].tolist() == [4] * 10  # two are kept always


def test_a_loader_gives_its_kept_batches_without_end(make_run):
    run = make_run()
    data = torch.utils.data.TensorDataset(torch.arange(11.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)

    def step(some):
        net(torch.ones(len(some), 4)).sum().backward()
        optimizer.step()

    for (some,) in loader:
        step(some)
    run.models.choose(3)
    run.loaders.begin_repeats()
    assert len(run.loaders.kept[0].batches) == 2
    seen = []
    for (some,) in loader:
        seen.append(some.tolist())
        step(some)
        if len(seen) == 5:
            run.switch(("batch x2",))
        if len(seen) == 7:
            break
    assert seen[:5] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2 + [[0, 1, 2, 3]]
    assert seen[5] == seen[6] == [*range(8)]
    with torch.no_grad():  # validation is as it was
        assert len([*loader]) == 3


# ----------------------------------------------------------------------- compiled functions
class Broken(Net):
    """Its parts are compiled one by one, because a line in between cannot be."""

    def forward(self, images):
        images = self.layers(images)
        torch._dynamo.graph_break()
        return self.part(images)

    def part(self, images):
        images = images.mean((2, 3))
        torch._dynamo.graph_break()
        return self.last(images)


def surroundings(inputs):
    half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return half, tuple(
        each.stride() for each in inputs if isinstance(each, torch.Tensor) and each.dim() == 4
    )


@pytest.fixture
def recorded(monkeypatch):
    """Let torch.compile take a backend that notes where a graph is made, and where it is called."""
    made, called = [], []

    def backend(graph, inputs):
        where = surroundings(inputs)
        made.append(where)

        def call(*args):
            called.append((where, surroundings(args)))
            return graph.forward(*args)

        return call

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda what, mode=None: real(what, backend=backend))
    torch._dynamo.reset()
    yield made, called
    torch._dynamo.reset()


SETS = [
    ("compile",),
    ("amp bfloat16", "compile"),
    ("channels_last", "compile"),
    ("amp float16", "compile"),
    ("amp bfloat16", "channels_last", "compile"),
]


@pytest.mark.parametrize(
    ("kind", "script"),
    [
        (Net, None),
        (Broken, torch.float32),
        (Broken, torch.bfloat16),
        pytest.param(Broken, None, marks=pytest.mark.slow),
        pytest.param(Net, torch.float32, marks=pytest.mark.slow),
        pytest.param(Net, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_what_is_compiled_for_one_set_is_not_called_in_another(make_run, recorded, kind, script):
    made, called = recorded
    torch.manual_seed(0)
    run, net = make_run(), kind()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def step(at):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # autocast of float32 does nothing on a CPU
            with torch.autocast("cpu", script, enabled=bool(script)):
                output = net(images(at))
        output.float().square().mean().backward()
        optimizer.step()
        return output.dtype

    step(0)
    run.models.choose(1)
    counts = {}
    for turn in range(2):
        for at, names in enumerate(SETS):
            run.switch(names)
            before = len(made), len(called)
            for again in range(2):
                assert step(2 * at + again) == (
                    torch.float32
                    if script is None or any("amp" in name for name in names)
                    else torch.bfloat16
                    if script is torch.bfloat16
                    else torch.float32
                )
            assert not run.failed
            since = called[before[1] :]
            assert since and all(where == there for where, there in since)
            halves = {where[0] for where, _ in since}
            wanted = next(
                (getattr(torch, name.split()[1]) for name in names if "amp" in name),
                script if script is torch.bfloat16 else None,
            )
            assert halves == {wanted}
            layouts = [strides for where, _ in since for strides in where[1] if strides[1] != 1]
            assert bool(layouts) != ("channels_last" in names)
            counts.setdefault(names, []).append(len(made) - before[0])
    assert all(first and not later for first, later in counts.values()), counts


def test_a_cache_on_the_disk_that_mixes_types_is_left_alone(monkeypatch):
    from torch._functorch import config

    monkeypatch.setattr(config, "enable_autograd_cache", True)
    monkeypatch.setattr(compiling.inspect, "getsource", lambda it: "autocast_state")
    compiling.keep_apart()
    assert config.enable_autograd_cache
    monkeypatch.setattr(compiling.inspect, "getsource", lambda it: "disable_amp")
    compiling.keep_apart()
    assert not config.enable_autograd_cache


def test_a_compiled_step_of_an_optimizer_still_compiles(make_run, recorded):
    _, net = make_run(), new_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01, 0.9)
    step = torch.compile(lambda: optimizer.step())
    net(images(0)).square().mean().backward()
    before = values_of(net)
    step()
    assert (values_of(net)["last.weight"] != before["last.weight"]).any()
    assert recorded[0]


# ----------------------------------------------------------------------- sets that fail
class Faulty(Net):
    """Fails under autocast: in forward, in backward, or for want of memory."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.is_failing = kind, True

    def forward(self, images):
        output = super().forward(images)
        if not torch.is_autocast_enabled("cpu") or not self.is_failing:
            return output
        if self.kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        if self.kind == "forward":
            raise RuntimeError("no autocast here")
        output.register_hook(self.fail)
        return output

    @staticmethod
    def fail(gradient):
        raise RuntimeError("no backward here")


def drive(run, net, optimizer, measured, most=4000):
    """Take steps until the plan says that it is done; return the losses."""
    losses = []
    done = []

    def plan():
        yield from measured()
        done.append(True)
        while True:
            yield

    run.plan = plan()
    while not done and len(losses) < most:
        optimizer.zero_grad()
        loss = (net(images(0)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert done
    return losses


def turns_of(run, net, optimizer, wanted, rounds=3):
    """Prepare turns that measure these sets for some rounds; return (Turns, plan)."""
    for step in range(3):
        train(net, [optimizer], 1, run, ahead=step)
    turns = plans.Turns(run)
    turns.prepare()
    left = [rounds]

    def sets():
        left[0] -= 1
        return [each for each in wanted if each not in turns.failed] if left[0] >= 0 else []

    turns.wanted = sets
    return turns


def test_a_script_on_the_second_gpu_is_timed_there(make_run, monkeypatch):
    """Its current device may be the first one: "cuda:1", without set_device."""
    run, net = make_run(), Net()
    optimizer = OPTIMIZERS["momentum"](net.parameters())
    current, used = [0], []

    @contextlib.contextmanager
    def device(number):
        before, current[0] = current[0], number
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "synchronize", used.append)
    monkeypatch.setattr(watch, "place_of", lambda optimizer: ("cuda", 1))
    seen = []

    def plan(run):
        while True:
            run.synchronize()
            seen.append(current[0])
            yield

    monkeypatch.setattr(plans, "by_turns", plan)
    run.plan = None
    train(net, [optimizer], 3, run)
    assert seen == [1, 1, 1] and {*used} == {1} and current == [0]


def test_where_an_optimizers_weights_are():
    weights = [torch.zeros(1, device="meta"), torch.zeros(1)]
    assert clock.place_of(torch.optim.SGD(weights, 0.1)) == ("meta", None)
    optimizer = types.SimpleNamespace(
        param_groups=[dict(params=[types.SimpleNamespace(device=torch.device("cuda:1"))])]
    )
    assert clock.place_of(optimizer) == ("cuda", 1)
    assert clock.place_of(types.SimpleNamespace(param_groups=[])) == ("cpu", None)


def test_cuda_graphs_come_before_more_windows_of_what_stays_open(monkeypatch):
    """The host of a small model scatters so that nothing is certain before the time ends."""
    now, noise = [0.0], random.Random(0)
    monkeypatch.setattr(plans, "time", types.SimpleNamespace(time=lambda: now[0]))
    spec = dict(deadline=180.0, only=["fused", "channels_last", "compile"])
    run = types.SimpleNamespace(
        spec=spec, agree=lambda value: value, ranks=lambda: (0, 1), device="cuda", cycle=1
    )
    turns = plans.Turns(run)
    turns.state = types.SimpleNamespace(put_back=lambda: None)
    turns.why, turns.known, looked = {}, {(): 0.01}, []
    turns.may_gain_workers = lambda waiting: False
    turns.look_for(["fused", "channels_last", "compile"])

    def window(names):
        now[0] += 0.5
        rate = noise.gauss(1.1 if names else 1.0, 0.2)
        turns.windows.append(dict(names=names, rate=max(0.2, rate), at=now[0]))
        turns.known.setdefault(names, 0.01)
        yield

    def consider_graphs():
        looked.append((now[0], {each["names"] for each in turns.windows}))
        return False
        yield

    turns.window, turns.consider_graphs = window, consider_graphs
    list(turns.measure())
    assert now[0] > 170  # it stays open
    assert looked[0][0] < 90 and any("compile" in names for names in looked[0][1])


@pytest.mark.parametrize(
    "write, data_time, best, until",
    [
        (False, 0.05, (), "last"),
        (False, 0.2, (), "deadline"),
        (True, 0.01, (), "last"),
        (True, 0.05, (), "half"),
        (True, 0.05, ("fused",), "deadline"),
    ],
)
def test_turns_end_where_what_may_gain_can_still_be_proved(
    write, data_time, best, until, tmp_path, monkeypatch
):
    """With --write a proof takes as long as the turns, and workers are known only after them."""
    words = ["--write", str(tmp_path / "p")] if write else []
    args = parse([*words, "--minutes", "10", "-m", "json"])
    session, specs = session_module.Session(args, args.command, tmp_path, tmp_path), []

    def run_once(command, spec, limit, show):
        specs.append(spec)
        return dict(windows=[], failed=[], error="no", ended=True)

    monkeypatch.setattr(session_module.run, "run_once", run_once)
    session.take_turns()
    spec = specs[0] | dict(only=["fused", "workers"])
    run = types.SimpleNamespace(
        spec=spec, agree=lambda value: value, ranks=lambda: (0, 1), device="cpu", cycle=1
    )
    monkeypatch.setattr(plans.parts, "only_steps", lambda *_: dict(seconds=1.0, wait=data_time))
    run.watched = {}
    turns = plans.Turns(run)
    turns.why, turns.known = {}, {(): 1.0}
    turns.look_for(["fused"])
    turns.search.best = lambda found, failed: best
    turns.wanted()
    now = time.time()
    want = dict(deadline=now + 180, half=now + 300, last=now + 560)[until]
    assert turns.until == pytest.approx(want, abs=15)


@pytest.mark.parametrize("kind", ["forward", "backward", "memory", "step"])
def test_a_set_that_fails_is_given_up_and_the_training_is_as_before(
    make_run, monkeypatch, tmp_path, kind
):
    run = make_run()
    torch.manual_seed(0)
    net = Faulty(kind)
    optimizer = OPTIMIZERS["momentum"](net.parameters())
    bad = ("amp bfloat16",)
    if kind == "step":
        bad = ("fused",)

        def refuse(*args, **options):
            raise RuntimeError("no step here")

        monkeypatch.setattr(SGD, "_fused_sgd", refuse)
    good = ("channels_last",)
    turns = turns_of(run, net, optimizer, [bad, good])
    want = values_of(net)
    losses = drive(run, net, optimizer, turns.measure)
    assert all(np.isfinite(losses))
    why = turns.failed[bad]
    assert [*turns.failed] == [bad] and (
        "OutOfMemoryError: CUDA out of memory" in why
        if kind == "memory"
        else f"no {kind} here" in why or "no autocast here" in why
    )
    fails = [each["fails"] for each in records(tmp_path) if "fails" in each]
    assert fails == [[[*bad], why]]
    names = [each["names"] for each in turns.windows]
    assert bad not in names and names.count(good) >= 3 and names.count(()) >= 3
    assert run.names == () and not run.failed
    assert not [key for key in run.models.forwards if "amp bfloat16" in key[1]]
    # measure() ends with the state put back; one step follows in which nothing is switched
    turns.state.put_back()
    assert_alike(values_of(net), want, rtol=0, atol=0)


class Viewed(Net):
    """Its .view() fails below weights in channels_last."""

    def forward(self, images):
        output = self.layers(images)
        return (
            self.last(output.view(len(output), 5, -1).mean(2)) + output.view(len(output), -1).mean()
        )


def test_a_model_whose_view_fails_in_channels_last_trains_on(make_run):
    run, net = make_run(), Viewed()
    optimizer = OPTIMIZERS["momentum"](net.parameters())
    bad = ("channels_last",)
    turns = turns_of(run, net, optimizer, [bad])
    want = values_of(net)
    drive(run, net, optimizer, turns.measure)
    assert "view size is not compatible" in turns.failed[bad] and run.names == ()
    turns.state.put_back()
    assert_alike(values_of(net), want, rtol=0, atol=0)


def test_nothing_of_a_failed_forward_is_in_memory_when_the_plain_one_runs(make_run, monkeypatch):
    run, net = make_run(), new_net()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    held = []

    class Large:
        """What a forward has computed."""

    real, alive = Net.forward, []

    def forward(module, some):
        if torch.is_autocast_enabled("cpu"):
            large = Large()  # in a frame that the error's traceback holds
            held.append(weakref.ref(large))
            raise torch.OutOfMemoryError("CUDA out of memory")
        alive.append(held and held[-1]() is not None)
        return real(module, some)

    monkeypatch.setattr(Net, "forward", forward)
    train(net, [optimizer], 2, run)
    del alive[:]
    run.switch(("amp bfloat16",))
    net(images(0))
    assert run.failed.startswith("OutOfMemoryError") and len(held) == 1 and alive == [False]


def test_a_proof_counts_the_steps_that_turns_count():
    """Two others that step in turn, each less often than MANY times, do not lead."""
    one, two, three = (OPTIMIZERS["sgd"](new_net().parameters()) for _ in range(3))
    proof = proving.Proving({})
    proof.plan = itertools.repeat(None)
    for optimizer in one, *[two, three] * 6, one:
        proof.step(optimizer)
    assert proof.steps == 2
    for _ in range(11):
        proof.step(two)
    assert proof.steps == 3


@pytest.mark.parametrize(
    "turn, until, last",
    [
        ("ab", 99, "b"),
        ("abc", 99, "c"),
        ("acab", 99, "bc"),
        ("aaaaab", 99, "b"),
        ("ab", 8, "a"),
        ("ba", 99, "a"),
        ("abbb", 99, "b"),
        ("a", 99, "a"),
    ],
    ids=[
        "a GAN",
        "three",
        "in turn",
        "five of a critic",
        "a generator that ends",
        "a generator first",
        "more of a generator",
        "one",
    ],
)
@pytest.mark.parametrize("steps", range(7, 12))
def test_states_are_exchanged_where_no_graph_waits_for_another_optimizer(turn, until, last, steps):
    """A GAN's generator steps after the discriminator, through a graph of before that."""
    optimizers = {name: OPTIMIZERS["sgd"](new_net().parameters()) for name in "abc"}
    proof = proving.Proving(dict(warm=1, steps=1, least_steps=steps, seconds=1, warm_seconds=0))
    seen = []
    proof.exchange = lambda: seen.append(number)
    proof.send = lambda **_: None
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setattr(proving.os, "_exit", sys.exit)
        for number, name in enumerate(turn * 20):
            if number < until or name == "a":
                proof.step(optimizers[name])
    (number,) = seen
    assert (turn * 20)[number] in last


def test_a_proof_counts_the_steps_of_optimizers_that_are_made_for_each_batch():
    proof = proving.Proving({})
    proof.plan, net = iter(range(99)), new_net()
    for _ in range(20):
        optimizer = OPTIMIZERS["sgd"](net.parameters())
        proof.step(optimizer)
        del optimizer  # kept all the same: its states are exchanged when the script has ended
    assert proof.steps == 20 and len(proof.optimizers) == 1


def test_a_proof_keeps_losses_of_the_steps_with_the_others_states(monkeypatch):
    monkeypatch.setattr(proving, "LOSSES", 2)
    one, net = OPTIMIZERS["sgd"](new_net().parameters()), new_net()
    proof = proving.Proving(dict(warm=1, steps=1, least_steps=9, seconds=1, warm_seconds=0))
    proof.exchange, sent = list, {}
    proof.send = lambda **record: sent.update(record)
    monkeypatch.setattr(proving.os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        for _ in range(99):
            proof.backward(lambda *_: None, (net(torch.ones(2, 3, 8, 8)).sum(),))
            proof.step(one)
    assert len(sent["losses"]) == 2 and len(sent["compared"]) == 2  # of the three


def test_states_of_frozen_objects_are_found():
    """gc.get_objects() leaves out what was there at gc.freeze()."""
    net = new_net()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        found = proving.things_of([optimizer])
        assert gc.get_freeze_count() >= count  # as the script wants it
    finally:
        gc.unfreeze()
    assert {id(net), id(optimizer)} <= {*map(id, found.values())}  # others may be there, too
    proving.things_of([])
    assert gc.get_freeze_count() == 0


def test_a_window_that_began_anew_does_not_lose_a_script_that_ends(monkeypatch):
    """It ends two steps after the one that takes most of the window."""
    one, clock, sent = proving.Proving(dict(steps=None, seconds=1.0)), [0.0], {}
    one.device, one.exchange = "cpu", lambda: None
    one.send = lambda **record: sent.update(record)
    monkeypatch.setattr(proving, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(proving, "compiled", lambda: 0)
    for _ in one.window():
        if one.steps == 5:
            break
        clock[0] += 9.0 if one.steps == 2 else 0.25
        one.steps += 1
    one.ended()
    assert sent["ended"] and sent["first"] == 0 and sent["whole"]["steps"] == 3


@pytest.mark.parametrize(
    "steps, compiles_at, slow, first, last",
    [(None, 99, 99, 0, 4), (None, 99, 1, 3, 7), (None, 3, 99, 4, 8), (4, 1, 1, 0, 4)],
    ids=["usual steps", "between epochs", "compiling", "given steps"],
)
def test_a_proofs_window_has_usual_steps(monkeypatch, steps, compiles_at, slow, first, last):
    """The run that chooses the steps begins anew; the other runs time the same ones."""
    one, clock = proving.Proving(dict(steps=steps, seconds=1.0)), [0.0]
    one.device = "cpu"
    monkeypatch.setattr(proving, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(proving, "compiled", lambda: one.steps >= compiles_at)
    for _ in one.window():
        clock[0] += 9.0 if one.steps == slow else 0.25
        one.steps += 1
    assert (one.first, one.steps) == (first, last)


def test_a_set_without_a_whole_window_is_given_up(make_run, monkeypatch):
    """Each step compiles, or the scaler skips steps for ever."""
    run, net = make_run(), new_net()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    turns = turns_of(run, net, optimizer, [("channels_last",)], rounds=6)
    monkeypatch.setattr(plans, "compiled", lambda: run.steps if run.names else 0)
    drive(run, net, optimizer, turns.measure)
    assert "in each window" in turns.failed["channels_last",]
    assert run.names == ()


def test_errors_of_the_script_itself_stay_errors(make_run):
    run, net = make_run(), Faulty("forward")
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    train(net, [optimizer], 2, run)
    with pytest.raises(RuntimeError, match="no autocast here"), torch.autocast("cpu"):
        net(images(0))
    with pytest.raises(RuntimeError):
        net(torch.ones(1))
    assert not run.failed
    run.spec["mode"] = "fixed"  # of a whole run the error is the result
    run.switch(("amp bfloat16",))
    with pytest.raises(RuntimeError, match="no autocast here"):
        net(images(0))


# ----------------------------------------------------------------------- several processes
OPTIONS = [
    {},
    dict(find_unused_parameters=True),
    dict(gradient_as_bucket_view=True),
    dict(static_graph=True),
    dict(broadcast_buffers=False, find_unused_parameters=True),
]


class Calm(Net):
    """Without a norm, so that the gradient of a batch is the mean of those of its halves."""

    def __init__(self):
        super().__init__()
        self.layers[1] = nn.Identity()

    def forward(self, images, is_whole=True):
        return super().forward(images)


def gradients_of(net, optimizer, rank, step, ranks=2):
    """Return the gradients of a step for a rank's part of a batch, in the plain layout."""
    some = images(step, 4).chunk(ranks)[rank] if ranks > 1 else images(step, 4)
    optimizer.zero_grad()
    (net(some) - 1).square().mean().backward()
    found = {
        name: each.grad.contiguous().clone()
        for name, each in net.named_parameters()
        if each.grad is not None and "unused" not in name
    }
    return {name.removeprefix("module."): each for name, each in found.items()}


def calm_net(unused):
    torch.manual_seed(0)
    net = Calm()
    if not unused:
        del net.unused
    return net


def check_wrappers(run, rank):
    """Gradients after each switch are those of one process with the whole batch."""
    calls = []

    def hook(state, bucket):
        calls.append(True)
        return allreduce_hook(None, bucket)

    for number, options in enumerate([*OPTIONS, "hook"]):
        has_hook, options = options == "hook", {} if options == "hook" else options
        unused = "find_unused_parameters" in options
        net = calm_net(unused)
        ddp = nn.parallel.DistributedDataParallel(net, **options)
        if has_hook:
            ddp.register_comm_hook(None, hook)
        alone = calm_net(unused)
        make = OPTIMIZERS["momentum"]
        optimizer, other = make(ddp.parameters()), make(alone.parameters())
        run.models = models.Models(run)
        run.models.known[ddp] = dict(steps={1, 2}, role="trains")
        run.models.calls = nn.Module.__call__, nn.Module.__call__
        run.models.choose(1)
        before = vars(ddp).keys()
        for step in range(6):
            if step in (2, 4):
                reducer = ddp.reducer
                run.switch(("channels_last", "fused") if step == 2 else ())
                assert ddp.reducer is not reducer and vars(ddp).keys() >= before
                assert net.layers[0].weight.is_contiguous(
                    memory_format=LAST if step == 2 else torch.contiguous_format
                )
            got = gradients_of(ddp, optimizer, rank, step)
            want = gradients_of(alone, other, 0, step, ranks=1)
            assert_alike(got, want, rtol=1e-4, atol=1e-5)
            optimizer.step()
            other.step()
        assert ddp.gradient_as_bucket_view == options.get("gradient_as_bucket_view", False)
        assert not has_hook or len(calls) >= 6
        run.switch(())


def check_turns(run, rank):
    """Both ranks take the same sets, to the same step; sets that fail on one fail on both."""
    torch.manual_seed(0)
    net = calm_net(False)
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = OPTIMIZERS["momentum"](ddp.parameters())
    run.models, run.lead = models.Models(run), clock.Lead()
    run.models.watch()
    ended, taken, wanted = [], [], {("channels_last",), ("fused",)}
    assert run.agree(rank) == 0

    def plan():
        yield from plans.watch(run)
        taken.append(run.steps)
        turns = plans.Turns(run)
        turns.prepare()
        real = turns.timed

        def timed(names):
            taken.append((names, run.steps))
            if names == ("amp bfloat16",) and len(turns.windows) > 9:
                run.failed = "not here" if rank == 0 else ""
            if rank == 0 and turns.failed and {*turns.known} >= {(), *wanted}:
                turns.deadline = turns.until = 0  # rank 1 has time left
            return real(names)

        turns.timed = timed
        yield from turns.measure()
        ended.append((taken, sorted(turns.failed), run.names))
        while True:
            yield

    run.plan, run.steps = plan(), 0
    while not ended:
        optimizer.zero_grad()
        (ddp(images(run.steps)) - 1).square().mean().backward()
        optimizer.step()
        time.sleep(0.002 * rank)  # their clocks differ
    both = [None, None]
    torch.distributed.all_gather_object(both, ended)
    assert both[0] == both[1]
    assert {names for names, _ in both[0][0][0][1:]} >= {(), *wanted}
    assert both[0][0][1] == [("amp bfloat16",)]
    weights = [None, None]
    torch.distributed.all_gather_object(weights, [each.tolist() for each in net.parameters()])
    assert weights[0] == weights[1]


def rank_of_two(rank, folder):
    """What each of two processes does."""
    os.dup2(os.open(folder / f"errors{rank}", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    plans.files.hold_everything = lambda spec: None
    plans.WATCH_SECONDS = 0.1, 5.0
    gc.freeze()  # as turns do
    run = watch.Run(spec_of(folder, only=["amp", "channels_last", "fused"]))
    run.parsers.install = lambda: None
    run.install()
    run.plan = itertools.repeat(None)
    check_wrappers(run, rank)
    check_turns(run, rank)
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads can abort a process that ends with frozen objects


def test_two_processes_have_the_gradients_of_one(tmp_path):
    ranks = [fork(rank_of_two, rank, tmp_path) for rank in range(2)]
    while left := [each for each in ranks if each.exitcode is None]:
        assert connection.wait([each.sentinel for each in left], HANG), "the ranks hang"
        told = [path.read_text() for path in tmp_path.glob("errors*")]
        assert not any(each.exitcode for each in ranks), "\n".join(told)


# ----------------------------------------------------------------------- whole runs
class Machine:
    """A fake of whole processes and of the clock: how fast each set is, and what it loses."""

    def __init__(self, monkeypatch, speeds, minutes=10.0, start=5.0, losses=None, errors=()):
        self.now, self.calls, self.speeds, self.start = 0.0, [], speeds, start
        self.losses, self.errors, self.noise = losses or {}, dict(errors), random.Random(0)
        fake = types.SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        for module in confirm, session_module, trials:
            monkeypatch.setattr(module, "time", fake)
        monkeypatch.setattr(confirm.run, "run_once", self.run_once)
        args = types.SimpleNamespace(
            minutes=minutes,
            seconds=6.0,
            only=ALL + ["cudnn", "tf32"],
            script=None,
            name="a.py",
            kind="script",
        )
        self.session = session_module.Session(args, ["python", "a.py"], "/", "/tmp")
        self.session.clock = 0.0
        self.session.found = dict(
            facts=dict(
                device="cpu",
                cores=2,
                training=[0],
                loaders=[
                    dict(
                        workers=0,
                        threaded=False,
                        at="a.py:1",
                        method="fork",
                        persistent=False,
                        pin=False,
                    )
                ],
                models=[],
                optimizers=[],
                seen=[],
            ),
            watched=dict(steps=100, seconds=12.0, whole=13.0, wait=2.0, batches=1)
            | dict(next=0.2, other=0.0, gaps=[0.1] * 103, set_up=3, compiled=False, cycle=1),
        )

    def turns(self, names, speedup, n=8, step=0.1):
        """Add windows of a set by turns."""
        for at in range(len(self.session.windows), len(self.session.windows) + 2 * n + 1):
            mine = at % 2 == 1
            self.session.windows.append(
                dict(
                    names=names if mine else (),
                    rate=(speedup if mine else 1) / step,
                    at=float(at),
                    steps=10,
                    seconds=10 * step / (speedup if mine else 1),
                    unit="steps",
                    memory=None,
                    finite=True,
                )
            )

    def turns_of(self, names):
        """Add windows of a set that gains by each of its techniques."""
        for count in range(1, len(names) + 1):
            self.turns(names[:count], 1.2**count)
            self.turns(names[-1:], 1.2)

    def run_once(self, command, spec, limit, show):
        names = (*spec["techniques"], *command[2:])
        self.calls.append((names, spec["seed"], spec["mode"], spec["seconds"]))
        self.now += self.start + spec["seconds"]
        if names in self.errors:
            return dict(error=self.errors[names], windows=[], failed=[])
        speed = self.speeds.get(names, 1.0)
        step = 0.13 / (speed() if callable(speed) else speed)
        draw = self.losses.get(names, self.losses.get("all", lambda: 1 + self.noise.gauss(0, 0.01)))
        one = draw() if draw else None
        losses = [] if one is None else [one] * 60
        window = dict(seconds=100 * (step - 0.01), steps=100, samples=0, wait=2.0, whole=100 * step)
        return dict(
            error="", windows=[window], losses=losses, memory=None, facts=self.session.facts()
        )

    def confirmed(self):
        made = confirm.Confirmation(self.session, lambda text: None)
        made.measure()
        return made


FUSED = ("fused",)


def test_pairs_until_they_agree_at_least_three_in_swapped_order(monkeypatch):
    machine = Machine(monkeypatch, {FUSED: 1.3})
    machine.turns(FUSED, 1.3)
    made = machine.confirmed()
    pairs = [call for call in machine.calls if call[3]]
    assert [call[0] for call in pairs] == [(), FUSED, FUSED, (), (), FUSED]
    assert [call[1] for call in pairs] == [0, 0, 1, 1, 2, 2]
    assert {call[2] for call in machine.calls} == {"fixed"}
    # a fourth plain run, a short one, so that losses can be compared; it has a seed of its own
    assert [call for call in machine.calls if not call[3]] == [((), 4, "fixed", 0)]
    line = made.line()
    assert line["confirmed"] and line["n"] == 3 and line["low"] > 1 and not line["why"]
    assert line["speedup"] == pytest.approx(1.3, rel=0.05) and made.is_advised()
    assert made.losses == [made.losses[0]] and made.losses[0]["changes"] is False


def test_pairs_go_on_while_they_do_not_agree(monkeypatch):
    draw = random.Random(3)
    machine = Machine(monkeypatch, {FUSED: lambda: draw.uniform(0.8, 1.6)}, minutes=20)
    machine.turns(FUSED, 1.3)
    assert machine.confirmed().line()["n"] > 3


@pytest.mark.parametrize("given", [0.7, 0.3])  # too short for three pairs, and for one
def test_what_is_not_confirmed_says_why(monkeypatch, given):
    machine = Machine(monkeypatch, {FUSED: 1.3}, minutes=given)
    machine.turns(FUSED, 1.3)
    made = machine.confirmed()
    assert not made.line()["confirmed"] and "no time for enough runs" in made.line()["why"]
    assert made.is_advised()  # what turns showed stands
    (minutes,) = re.findall(r"enough runs \(--minutes (\d+)\)$", made.line()["why"])
    machine = Machine(monkeypatch, {FUSED: 1.3}, minutes=int(minutes))  # those that are advised
    machine.turns(FUSED, 1.3)
    assert machine.confirmed().line()["confirmed"]
    draw = itertools.cycle([0.7, 1.4])
    machine = Machine(monkeypatch, {FUSED: lambda: next(draw)}, minutes=4)
    machine.turns(FUSED, 1.3)
    assert "differ too much" in machine.confirmed().line()["why"]
    machine = Machine(monkeypatch, {}, errors={FUSED: "RuntimeError: no (a.py:3)"})
    machine.turns(FUSED, 1.3)
    line = machine.confirmed().line()
    assert line["why"] == "fused: RuntimeError: no (a.py:3)" and not line["confirmed"]
    machine = Machine(monkeypatch, {FUSED: 0.8})  # slower as a whole
    machine.turns(FUSED, 1.3)
    made = machine.confirmed()
    assert made.line()["confirmed"] and not made.is_advised()
    machine = Machine(monkeypatch, {})
    machine.turns(FUSED, 0.9)
    made = machine.confirmed()
    assert made.line() is None and not machine.calls and not made.forecast_lines()


@pytest.mark.parametrize("error", ["", "ValueError: no GPU (a.py:3)"])
def test_the_scripts_own_option_is_tried(error, monkeypatch):
    """In place of what whatif does; if it fails, lines are advised. Other techniques stay."""
    names, by_option = ("amp bfloat16", "fused"), ("fused", "--amp")
    machine = Machine(
        monkeypatch, {names: 1.5, by_option: 1.4}, errors={by_option: error} if error else {}
    )
    machine.session.found["facts"] |= dict(options=[AMP_OPTION], models=[])
    machine.turns_of(names)
    made = machine.confirmed()
    assert machine.calls[-1][0] == by_option and made.is_advised() and made.line()["confirmed"]
    told = made.line()["options"]
    assert told["words"] == ("--amp",) and told["why"] == error
    assert error or told["speedup"] == pytest.approx(1.4, rel=0.05)
    result = session_module.result_of(machine.session, made)
    assert report.advice.options_of("amp bfloat16", result.facts, {}) == ["--amp"] * (not error)
    (line,) = report.option_lines(result.confirmation["options"])
    assert line.endswith(f"it failed: {error}" if error else "x in one whole run")


def test_what_changes_the_training_is_named(monkeypatch):
    """The loosest technique is left out first, and the one without which it does not change."""
    names = ("amp bfloat16", "fused")
    machine = Machine(monkeypatch, {names: 1.5}, losses={names: lambda: 2.0})
    machine.turns_of(names)
    made = machine.confirmed()
    assert made.losses[0]["changes"] and made.losses[0]["culprit"] == "amp bfloat16"
    assert not made.is_advised()
    machine = Machine(monkeypatch, {names: 1.5}, losses={names: lambda: 2.0, FUSED: lambda: 2.0})
    machine.turns_of(names)
    assert machine.confirmed().losses[0]["culprit"] == "fused"
    machine = Machine(
        monkeypatch, {names: 1.5}, losses={"all": lambda: float("nan"), (): lambda: 1.0}
    )
    machine.turns_of(names)
    made = machine.confirmed()
    assert made.losses[0]["changes"] and "not finite" in made.losses[0]["why"]
    machine = Machine(monkeypatch, {names: 1.5}, losses={"all": lambda: None})
    machine.turns_of(names)
    assert "cannot be seen" in machine.confirmed().losses[0]["why"]


def test_the_part_of_the_forecast_that_was_off(monkeypatch):
    """Turns promised twice the speed; whole runs take as long as before."""
    machine = Machine(monkeypatch, {FUSED: 1.05})
    machine.turns(FUSED, 2.0)
    machine.session.found["loading"] = dict(rate=50.0)
    made = machine.confirmed()
    line = made.line()
    assert "compute of fused by" in line["off"] and "baseline" not in line["off"]
    machine = Machine(monkeypatch, {FUSED: 1.3})
    machine.turns(FUSED, 1.3)
    machine.session.found["loading"] = dict(rate=50.0)
    made = machine.confirmed()
    assert made.line()["off"] == ""
    (one,) = made.forecast_lines()
    assert one["how"] == "sum" and 1 < one["speedup"] < 1.3  # loading is not faster
    assert "compute and loading, one after the other" in report.forecast_line(one)


# ----------------------------------------------------------------------- what turns cannot measure
def test_a_set_without_memory_runs_in_a_process_of_its_own(monkeypatch):
    machine = Machine(monkeypatch, {("compile",): 1.4})
    machine.turns(FUSED, 1.0)
    why = "OutOfMemoryError: CUDA out of memory"
    machine.session.failed = [
        [("compile",), why],
        [("batch x2",), why],
        [("tf32",), "ValueError"],
        [("amp bfloat16",), why],
    ]
    machine.errors = {("amp bfloat16",): why}
    trials.Trials(machine.session, lambda text: None).measure()
    assert [call[0] for call in machine.calls] == [(), ("compile",), (), ("amp bfloat16",)]
    row = machine.session.rows()[-1]
    assert row.techniques == ("compile",) and row.speedup == pytest.approx(1.4, rel=0.05)
    assert (row.n, row.low, row.verdict) == (1, None, "open")
    assert row.note == "by turns it ran out of memory; in a process of its own"
    assert machine.session.failed == [
        [("batch x2",), why],
        [("tf32",), "ValueError"],
        [("amp bfloat16",), f"{why} (in a process of its own)"],
    ]


def test_without_turns_each_technique_runs_in_processes_of_its_own(monkeypatch):
    machine = Machine(
        monkeypatch,
        {FUSED: 1.2, ("amp bfloat16",): 1.5, ("amp bfloat16", "fused"): 1.8},
        minutes=20,
    )
    session = machine.session
    machine.turns((), 1.0, n=0)
    session.found |= dict(
        no_turns="Turns cannot change a model that FSDP shards.",
        why_not=dict.fromkeys(["cudnn", "tf32", "amp float16"], "no GPU"),
    )
    trials.Trials(session, lambda text: None).measure()
    assert [(row.techniques, row.n) for row in session.rows()] == [
        (("amp bfloat16",), 3),
        (FUSED, 3),
    ]
    assert session.best() == ("amp bfloat16", "fused")
    made = machine.confirmed()
    assert made.line()["confirmed"] and made.is_advised() and not made.line()["off"]
    monkeypatch.setattr(report.advice, "write", lambda name, *_: f"write {name}")
    result = session_module.result_of(session, made)
    text = report.text_of(result)
    assert "Turns cannot change a model that FSDP shards." in text
    assert "Each set ran in a process of its own." in text and "baseline" in text
    machine.session.args.minutes = 0  # the sum was not confirmed
    assert not machine.confirmed().is_advised()


class FSDPLinear(nn.Linear):
    """As fully_shard names the class of a module."""


def test_a_sharded_model_is_measured_as_it_is(make_run, tmp_path, monkeypatch):
    run = make_run(seconds=0.05)
    monkeypatch.setattr(plans, "WATCH_SECONDS", (0.0, 1.0))
    net = FSDPLinear(4, 1)
    assert models.is_sharded(net) == "FSDP"
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    loader = torch.utils.data.DataLoader(torch.ones(9, 4), batch_size=2)
    run.plan = None
    ended = []
    monkeypatch.setattr(run, "finish", lambda: (ended.append(True), setattr(run, "is_over", True)))
    while not ended:
        for some in loader:
            net(some).sum().backward()
            optimizer.step()
    told = {key: value for each in records(tmp_path) for key, value in each.items()}
    assert told["no_turns"] == "Turns cannot change a model that FSDP shards."
    assert told["window"]["names"] == [] and told["window"]["rate"] > 0
    assert told["window"]["unit"] == "samples" and told["facts"]["models"]


def test_weights_that_train_later_are_noted_at_the_first_step():
    """They may get their first gradient while the script is still watched."""
    early, late = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([early, late], 0.1, momentum=0.9)
    one = types.SimpleNamespace(numbers={optimizer: 0}, optimizer_facts=[{}])
    for grads in ((torch.ones(2), None), (torch.ones(2), torch.ones(2))):
        early.grad, late.grad = grads
        optimizer.step()
        watch.Run.note_idle(one, optimizer)
        assert one.optimizer_facts == [dict(has_idle=True)]
    watch.Run.note_idle(one, torch.optim.SGD([early], 0.1))  # one that is not known


@contextlib.contextmanager
def watching(net, place_of):
    """Watch a model's calls, at places that `place_of` names; give what runs them by the step."""
    run = types.SimpleNamespace(steps=0, see=lambda *_: None)

    def describe_model(module):
        return dict(role=models.facts.role_of(module), at=place_of(module), calls=[], spots=[])

    def note_call(about, *_):
        about["calls"] = [*dict.fromkeys([*about["calls"], place_of(net)])]

    run.about = types.SimpleNamespace(describe_model=describe_model, note_call=note_call)
    seen = models.Models(run)
    seen.watch()
    try:
        yield run, seen
    finally:
        seen.stop()


def test_a_model_that_an_attack_calls_in_eval_mode_first_has_all_its_lines():
    net = nn.Linear(2, 2)
    with watching(net, lambda module: "train" if module.training else "attack") as (run, seen):
        for run.steps in range(2):
            for is_training in False, True:
                net.train(is_training)(torch.ones(1, 2))
            about = seen.known[net]
            assert about["role"] == "trains" and about["calls"] == ["train", "attack"]


def test_a_model_whose_weights_rest_by_turns_has_all_its_lines():
    """A GAN's generator learns from a discriminator that does not; an evaluation is no line."""
    net = nn.Linear(2, 2)
    place = [""]
    with watching(net, lambda module: place[0]) as (run, seen):
        for run.steps in range(3):
            for place[0] in "for the generator", "train":
                net.requires_grad_(place[0] == "train")(torch.ones(1, 2))
        with torch.no_grad():
            place[0] = "evaluate"
            net(torch.ones(1, 2))
        about = seen.known[net]
        assert about["role"] == "trains" and about["calls"] == ["train", "for the generator"]


class Grid(nn.Module):
    """Computes with constants that are parameters, as the geometry of monodepth2 does."""

    def __init__(self, trains):
        super().__init__()
        self.points = nn.Parameter(torch.ones(2), requires_grad=trains)

    def forward(self, x):
        return x * self.points


def test_constants_are_no_network():
    grid, layer, frozen = Grid(False), Grid(True), nn.Linear(2, 2).requires_grad_(False)
    with watching(grid, lambda module: "train") as (run, seen):
        frozen(layer(grid(torch.ones(1, 2))))
        assert {*seen.known} == {layer, frozen}


def test_a_stall_beside_an_evaluation_is_no_period():
    """Else each window would take as many steps as lie between both."""
    steps = [0.03] * 400
    assert plans.cycle_of(times_of([*steps[:9], 3.0, *steps, 0.2, *steps])) == 1
    rollouts = times_of([*steps[:9], 0.5, *steps[:9], 0.3, *steps[:9], 0.5])
    assert plans.cycle_of(rollouts) == 10 and plans.is_regular(rollouts)
    assert not plans.is_regular(times_of([*steps[:9], 0.5, *steps[:9], 0.3, *steps[:7], 0.5]))
    stalls = [*steps[:9], 0.5, *steps[:6], 0.2, *steps[:2], 0.5, *steps[:3], 0.2, *steps[:5], 0.5]
    assert plans.cycle_of(times_of([*stalls, *steps[:9], 0.5])) == 10


def test_a_process_that_ends_without_a_word_is_noted_and_started_again():
    one = types.SimpleNamespace(notes=[], epochs=True)
    assert not session_module.Session.goes_on(one, dict(error="", done=True)) and not one.notes
    assert session_module.Session.goes_on(one, dict(error="", now=["fused"]))
    assert one.notes == ["The measured process ended early, which ended a part of the measurement."]


def test_a_set_that_is_cut_off_has_failed():
    """It is not taken for one that relies on the length of an epoch, and was tried."""
    one = types.SimpleNamespace(notes=[], epochs=False, failed=[])
    result = dict(error="cut off after 9 s", now=["fused"], done=True)
    assert session_module.Session.goes_on(one, result | dict(is_cut=True)) and not one.epochs
    assert one.failed == [[("fused",), "cut off after 9 s"]]
    assert session_module.Session.goes_on(one, result) and one.epochs


def test_a_loader_that_was_not_measured_is_told(monkeypatch):
    """A set was cut off, and with it the process that would have measured its loader."""
    session = Machine(monkeypatch, {}).session
    session.only = ["fused", "workers"]
    session.failed = [[FUSED, "cut off after 9 s"]]
    told = "the loader was not measured by itself"
    assert session.not_tried() == {"workers": told}
    session.found["why_not"] = {"workers": "already there"}
    assert not session.not_tried()
    session.found |= dict(why_not={}, loading=dict(rate=20.0))
    assert not session.not_tried()


def test_the_set_that_was_due_when_the_time_ended_is_told(monkeypatch):
    """Both techniques gain, and the table has no row of both."""
    machine = Machine(monkeypatch, {})
    machine.session.only = ["fused", "channels_last"]
    machine.session.found["loading"] = dict(rate=20.0)
    machine.turns(FUSED, 1.2)
    assert [*machine.session.not_tried()] == ["channels_last"]
    machine.turns(("channels_last",), 1.5)
    why = "no time was left for it by turns (--minutes)"
    assert machine.session.not_tried() == {"channels_last + fused": why}
    machine.turns(("channels_last", "fused"), 1.8)
    assert not machine.session.not_tried()


def test_an_error_without_time_for_another_process_is_told(monkeypatch):
    session = Machine(monkeypatch, {}, minutes=0.5).session
    session.args.write = None
    session.clock = session.began = 0.0
    error = dict(error="ValueError: no (a.py:3)", now=["fused"], failed=[], done=True)
    error["windows"] = [dict(names=[], rate=1.0, at=1.0, steps=3, seconds=1.0)]
    monkeypatch.setattr(session_module.run, "run_once", lambda *rest: error)
    assert session.take_turns() is None
    assert session.failed == [[("fused",), "ValueError: no (a.py:3)"]]


def test_another_process_takes_the_time_that_nothing_has_to_be_proved_in(monkeypatch):
    session = Machine(monkeypatch, {}, minutes=1).session
    session.args.write = "fast.patch"
    session.clock = session.began = time.monotonic()
    error = dict(error="ValueError: no (a.py:3)", now=["fused"], failed=[], done=True)
    error["windows"] = [dict(names=[], rate=1.0, at=1.0, steps=3, seconds=1.0)] * 3
    told = [error, dict(error="", windows=[], failed=[], turns_over=time.time(), done=True)]
    session.epochs = True
    monkeypatch.setattr(session_module.run, "run_once", lambda *rest: told.pop(0))
    assert session.take_turns() is None and not told


def times_of(gaps):
    return [0.0, *itertools.accumulate(gaps)]


def watched(monkeypatch, gaps, wait=0.0):
    """Return what plans.watch() tells of steps so many seconds apart, by a clock of the test's."""
    now, told = [0.0], {}
    fake = types.SimpleNamespace(perf_counter=lambda: now[0], time=lambda: now[0])
    monkeypatch.setattr(plans, "time", fake)
    monkeypatch.setattr(clock, "time", fake)
    run = types.SimpleNamespace(
        clock=clock.Clock(lambda: None),
        loaders=types.SimpleNamespace(batches=1, at_an_end=lambda: False),
        models=types.SimpleNamespace(choose=lambda steps: None),
        places=types.SimpleNamespace(frames=lambda: []),
        steps=1,
        spec={},
        agree=lambda value: value,
        ranks=lambda: (0, 1),
        facts=dict,
        send=lambda **record: told.update(record),
    )
    plan = plans.watch(run)
    next(plan)
    for gap in gaps:
        now[0] += gap
        run.clock.fetched(1, wait)
        run.clock.step()
        run.steps += 1
        if next(plan, "over") == "over":
            return told["watched"]
    raise AssertionError(f"not enough: {len(run.times)} steps in {now[0]} s")


@pytest.mark.parametrize(
    "gaps, set_up, seconds",
    [
        ([0.01] * 300, 3, 2.0),
        ([3.0] * 9, 3, 12.0),  # with the first steps 20 s
        ([6.0] * 9, 3, 6.0),
        ([30.0] * 9, 1, 30.0),
        ([30.0] + [0.01] * 300, 1, 2.0),  # an evaluation before the second step
        ([0.01] * 3 + [30.0] + [0.01] * 300, 3, 30.02),  # after the fourth
    ],
    ids=["fast", "slow", "slower", "slowest", "evaluation", "evaluation later"],
)
def test_how_long_steps_are_watched(monkeypatch, gaps, set_up, seconds):
    found = watched(monkeypatch, gaps)
    assert found["set_up"] == set_up and found["seconds"] == pytest.approx(seconds, abs=0.03)
    assert found["steps"] == len(found["gaps"]) - set_up


def test_first_steps_of_a_compiled_model_set_up(monkeypatch):
    """Its CUDA graphs are made after the first step, which compiles."""
    monkeypatch.setattr(plans, "compiled", lambda: 5)
    found = watched(monkeypatch, [0.01, 3.0, *[0.01] * 300])
    told = parts.of_watched(parts.only_steps(found, 0.01), 0.0)
    assert told["next"] == pytest.approx(3.02) and told["aside"] < 0.01


def test_an_evaluation_after_the_first_steps_is_no_step(monkeypatch):
    """Even if nothing else was seen after these."""
    found = watched(monkeypatch, [0.01] * 3 + [30.0] + [0.01] * 300)
    for gaps, seconds in (found["gaps"], found["seconds"]), ([*[0.01] * 3, 30.0], 30.0):
        told = parts.only_steps(found | dict(gaps=gaps, seconds=seconds, whole=seconds), 0.01)
        assert told["other"] == pytest.approx(29.99) and told["seconds"] < 0.1


def test_a_process_beside_the_measured_one_says_so_at_once(make_run, tmp_path):
    """Else one that ends before its first count would be taken for the one that is measured."""
    run = make_run()
    next(plans.watch_only(run))
    assert [each["beside"] for each in records(tmp_path)] == [{}]


def test_a_step_of_several_batches_needs_them_all():
    """Gradients of four batches: the loader has to give four times as many as there are steps."""
    one = types.SimpleNamespace(
        windows=[dict(names=[], steps=20, seconds=2.0)],
        search=types.SimpleNamespace(best=lambda found, failed: ()),
        run=types.SimpleNamespace(watched=dict(batches=4.0)),
        estimates=dict,
        failed={},
    )
    assert plans.Choice.needed(one) == 40
