"""The advice of whatif: places, names, arguments and libraries, on scripts in this process."""

import ast
import functools
import importlib
import json
import re
import sys
import textwrap
import types

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from helpers import ROOT
from whatif import advice, report, techniques
from whatif.inside import changes, places
from whatif.inside import facts as inside_facts
from whatif.techniques import NAMES
from whatif.write import patch


def reasons(facts, names=NAMES):
    return techniques.reasons(facts, names)


# ------------------------------------------------------------------------ scripts in this process
class Watched:
    """Runs scripts in `folder`, and describes their models, optimizers and loaders."""

    def __init__(self, folder, monkeypatch, roots=()):
        self.folder, self.patch = folder, monkeypatch
        self.places = places.Places(folder, [folder, *roots])
        for module in [*sys.modules.values()]:  # the project's own are no user's
            file = getattr(module, "__file__", None) or ""
            if file.startswith(str(ROOT)):
                self.places.known[file] = False
        self.describe = inside_facts.Facts(self.places)
        self.models, self.steps, self.step = {}, {}, 0
        self.optimizers, self.loaders, self.autocasts = [], [], []
        self.depth = 0
        data = torch.utils.data
        self.wrap(nn.Module, "__call__", self.call)
        self.wrap(Optimizer, "__init__", self.optimizer)
        self.wrap(data.DataLoader, "__init__", self.loader)
        self.wrap(nn.DataParallel, "__init__", self.wrapper)
        self.wrap(torch.autocast, "__enter__", self.autocast)
        self.hook = register_optimizer_step_post_hook(self.stepped)

    def wrap(self, owner, name, function):
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args, **kwargs):
            return function(original, *args, **kwargs)

        self.patch.setattr(owner, name, wrapped)

    def call(self, original, module, *args, **kwargs):
        if self.depth:
            return original(module, *args, **kwargs)
        self.depth += 1
        try:
            if module not in self.models:
                self.models[module] = self.describe.describe_model(module)
            self.steps.setdefault(module, set()).add(self.step)
            output = original(module, *args, **kwargs)
            self.describe.note_call(self.models[module], output, args, kwargs)
            return output
        finally:
            self.depth -= 1

    def optimizer(self, original, optimizer, params, defaults):
        given = dict(defaults)
        original(optimizer, params, defaults)
        self.optimizers.append(self.describe.describe_optimizer(optimizer, given))

    def loader(self, original, loader, *args, **kwargs):
        original(loader, *args, **kwargs)
        self.loaders.append(self.describe.describe_loader(loader, args, kwargs))

    def wrapper(self, original, parallel, module, *args, **kwargs):
        self.describe.note_wrapper(parallel, module)
        original(parallel, module, *args, **kwargs)

    def autocast(self, original, context):
        self.autocasts.append(self.describe.describe_autocast(context))
        return original(context)

    def stepped(self, *_):
        self.step += 1

    def run(self, source, name="train.py"):
        file = self.folder / name
        file.write_text(textwrap.dedent(source))
        module = types.ModuleType("script_of_a_test")
        module.__file__ = str(file)
        self.patch.setitem(sys.modules, module.__name__, module)  # for the source of its classes
        self.space = vars(module)
        exec(compile(file.read_text(), str(file), "exec"), self.space)
        return self.facts()

    def facts(self):
        self.describe.name_again(self.models)
        kept = places.outermost(self.steps)
        seen = {each for module in kept for each in inside_facts.traits(module)}
        return dict(
            models=[self.models[module] for module in kept],
            optimizers=self.optimizers,
            loaders=changes.changes_in(self.places, self.loaders),
            training=[*range(len(self.loaders))],
            seen=sorted(seen),
            device="cpu",
            cores=4,
            processes=1,
            capability=0,
            autocasts=self.autocasts,
            files=self.places.files(),
            settings=inside_facts.settings_in(self.places),
            name_of_torch=inside_facts.name_of_torch(self.places, self.optimizers),
        )


@pytest.fixture
def watched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {*sys.modules}
    watch = Watched(tmp_path, monkeypatch)
    yield watch
    watch.hook.remove()
    for name in {*sys.modules} - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def package(folder, name, source):
    """Make a package of one file; return the folder to import it from."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(textwrap.dedent(source))
    importlib.invalidate_caches()
    return folder


def on_gpu(facts):
    return facts | dict(device="cuda", capability=9)


LOOP = """
for _ in range(2):
    loss = model(torch.rand(4, 8)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


# ------------------------------------------------------------------------------- places and names
def test_a_package_outside_the_folder_of_the_call_is_the_users(
    watched, tmp_path_factory, monkeypatch
):
    elsewhere = package(
        tmp_path_factory.mktemp("lib"),
        "mine",
        """
        import torch

        def fit(model):
            data = torch.utils.data.TensorDataset(torch.rand(8, 8))
            loader = torch.utils.data.DataLoader(data, batch_size=4)
            optimizer = torch.optim.Adam(model.parameters())
            for x, in loader:
                loss = model(x).mean()
                loss.backward()
                optimizer.step()
        """,
    )
    monkeypatch.syspath_prepend(elsewhere)
    facts = watched.run("""
        import torch
        from mine import fit
        net = torch.nn.Linear(8, 1)
        fit(net)
        """)
    file = elsewhere / "mine" / "__init__.py"
    assert facts["loaders"][0]["at"] == f"{file}:6"
    assert facts["optimizers"][0]["at"] == f"{file}:7"
    assert facts["models"][0]["at"] == f"{file}:9" and not facts["models"][0]["library"]
    assert advice.write("fused", facts).startswith(f"{file}:7  optimizer = torch.optim.Adam(")
    assert advice.write("workers", facts).startswith(f"{file}:6  loader = ")


def test_which_files_are_the_users(tmp_path):
    environment = tmp_path / "venv" / "lib" / "python3" / "site-packages"
    found = places.Places(tmp_path, [tmp_path])
    inner = places.Places(tmp_path, [environment / "mine"])
    yes = [tmp_path / "x.py", tmp_path / "a" / "b.py", "/opt/somebody/lib/b.py", "train.py"]
    no = [
        environment / "timm" / "x.py",
        ast.__file__,
        json.__file__,
        torch.__file__,
        pytest.__file__,
        advice.__file__,
        places.__file__,
        "<string>",
        "<frozen runpy>",
    ]
    assert [found.is_users_file(str(file)) for file in yes] == [True] * len(yes)
    assert [found.is_users_file(str(file)) for file in no] == [False] * len(no)
    assert inner.is_users_file(str(environment / "mine" / "train.py"))  # python -m mine.train
    assert not inner.is_users_file(str(environment / "timm" / "x.py"))
    # a library that was installed from a clone is still a library, but not in one's own folder
    assert not found.is_users_file(
        "/opt/transformers/src/transformers/trainer.py", "transformers.trainer"
    )
    assert found.is_users_file(str(tmp_path / "timm" / "y.py"), "timm.y")
    assert found.shown(str(tmp_path / "a" / "b.py")) == "a/b.py" == found.shown("a/b.py")
    assert found.shown("/opt/somebody/lib/b.py") == "/opt/somebody/lib/b.py"


def test_the_line_says_self_and_not_a_global(watched):
    facts = watched.run("""
        import torch

        class Agent(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.actor = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))

            def act(self, x):
                logits = self.actor(x)
                return logits.log_softmax(-1)

        agent = Agent()
        optimizer = torch.optim.Adam(agent.parameters())
        for _ in range(2):
            loss = -agent.act(torch.randn(8, 8))[:, 0].mean()
            loss.backward()
            optimizer.step()
        """)
    (model,) = facts["models"]
    assert model["local"] == "self.actor"
    assert """
            with torch.autocast("cpu", torch.bfloat16):
                logits = self.actor(x)
            logits = logits.float()
""" in advice.write("amp bfloat16", facts)
    assert advice.write("compile", facts).startswith(
        "below train.py:7  self.actor = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn."
        "Linear(8, 2))\n            self.actor.compile()\n"
    )


def test_no_property_or_call_of_the_users_runs(watched):
    facts = watched.run("""
        import torch
        from torch import nn
        calls = []

        class Holder:
            def __init__(self):
                self.nets = {"g": nn.Linear(8, 8)}

            @property
            def net(self):
                calls.append("net")
                return self.nets["g"]

            def __getattr__(self, name):
                calls.append(name)
                raise AttributeError(name)

        holder, index = Holder(), "g"
        optimizer = torch.optim.SGD(holder.nets["g"].parameters(), 0.1)
        layers = nn.ModuleList([nn.Linear(8, 8)])
        for _ in range(2):
            one = holder.net(torch.rand(4, 8))
            two = holder.nets[index](one)
            three = layers[-1](two)
            three.mean().backward()
            optimizer.step()
        """)
    assert [each["local"] for each in facts["models"]] == ["holder.nets['g']", "layers[-1]"]
    assert watched.space["calls"] == ["net"] * 2  # by the script itself


def test_a_part_that_is_called_before_the_first_step_is_no_model(watched):
    facts = watched.run("""
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
                size = self.features(torch.zeros(1, 3, 8, 8)).numel()
                self.head = nn.Linear(size, 2)

            def forward(self, images):
                return self.head(self.features(images))

        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(2):
            output = model(torch.randn(4, 3, 8, 8))
            output.mean().backward()
            optimizer.step()
        """)
    (model,) = facts["models"]
    assert model["kind"] == "Net" and model["at"] == "train.py:18"
    assert "likewise" not in advice.write("amp bfloat16", facts)


def test_outermost_models():
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    part, apart = whole[0], nn.Linear(2, 2)
    assert places.outermost({part: {0}, whole: {0, 1}, apart: {0}}) == [whole, apart]
    assert places.outermost({part: {0}, whole: {0}}) == [whole]
    assert places.outermost({part: {0, 1}, whole: {0, 1}}) == [part, whole]  # called by itself
    assert places.outermost({part: {1, 2}}) == [part]


def test_the_lines_to_write_are_python_where_they_stand(watched):
    """A function that makes the optimizer does not know the model; calls take several lines."""
    facts = watched.run("""\
        import torch
        from torch import nn

        def build(weights):
            return torch.optim.SGD(weights, 0.1)

        def train(model, optimizer):
            for _ in range(2):
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
    assert advice.write("compile", facts).startswith("""\
above train.py:27  sgd = build(network.parameters())
            network.compile()""")
    amp = advice.write("amp bfloat16", facts)
    assert (
        """
            instead of model(...): torch.autocast("cpu", torch.bfloat16)(model)(...).float()
"""
        in amp
    )
    assert "likewise: model (train.py:12), wrapped (train.py:13)" in amp
    facts["models"].reverse()
    assert """
            with torch.autocast("cpu", torch.bfloat16):
                outputs = wrapped(torch.rand(4, 8))
            and a loss outside of the model takes the output's tensors as .float()
""" in advice.write("amp bfloat16", facts)
    assert advice.write("compile", facts).startswith("""\
below the line that makes wrapped
            wrapped.compile()""")


def test_what_is_called_within_a_longer_statement(watched):
    """A model may be called in a lambda, several times, by a name that cannot be found."""
    facts = watched.run("""\
        import torch
        from torch import nn

        class Data(torch.utils.data.IterableDataset):
            def __iter__(self):
                for _ in range(8):
                    torch.utils.data.get_worker_info()
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
    assert [each["name"] for each in facts["models"]] == ["net", "parts['é']"]
    for each, told in zip(
        facts["models"],
        (
            "train.py:18  for one in (output,): loss = (net(  # net, of output / 2",
            """train.py:16  apply = lambda x: parts["é"](x)""",
        ),
    ):
        assert advice.write("amp bfloat16", facts | dict(models=[each])).startswith(f"""{told}
            instead of {each["name"]}(...): \
torch.autocast("cpu", torch.bfloat16)({each["name"]})(...).float()
""")
    last = advice.write("channels_last", facts)
    assert re.match(r"above train.py:11  every = \[\n +net.to\(memory_format", last)
    assert "net (train.py:19), net (train.py:21), parts['é'] (" in last
    assert "workers" not in reasons(facts)  # Data knows of workers


def test_tuples_get_a_with_block(watched):
    facts = watched.run("""
        import torch

        class GPT(torch.nn.Linear):
            def forward(self, x, y):
                logits = super().forward(x)
                return logits, (logits - y).square().mean()

        model = GPT(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            logits, loss = model(torch.rand(4, 8), torch.rand(4, 8))
            loss.backward()
            optimizer.step()
        """)
    assert """
            with torch.autocast("cpu", torch.bfloat16):
                logits, loss = model(torch.rand(4, 8), torch.rand(4, 8))
            logits, loss = (each.float() for each in (logits, loss))
        watch""" in advice.write("amp bfloat16", facts)


def test_models_that_other_objects_hold(watched):
    """They are named as the user's lines can; a variable of a comprehension is not there later."""
    facts = watched.run("""\
        import types, torch
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
        for _ in range(2):
            trainer.step()
        """)
    assert {each["name"]: each["above"]["at"] for each in facts["models"]} == {
        "self.nets['g']": "train.py:7",
        "state.net": "train.py:16",
    }
    assert [each["local"] for each in facts["models"]] == ["self.nets['g']", "state.net"]
    assert "fused=True in place of foreach=True" in advice.write("fused", facts)


def test_each_model_is_changed_where_it_is_known(watched):
    """netD does not exist above the first optimizer; net is named as where its optimizer is."""
    facts = watched.run("""\
        import torch
        from torch import nn

        def train(module, optimizer):
            module(torch.rand(4, 8)).mean().backward()
            optimizer.step()

        netG = nn.Linear(8, 8)
        optG = torch.optim.SGD(netG.parameters(), 0.1)
        netD = nn.Linear(8, 8)
        optD = torch.optim.SGD(netD.parameters(), 0.1)
        early = nn.Linear(8, 8)
        early(torch.rand(4, 8))
        optE = torch.optim.SGD(early.parameters(), 0.1)
        late = nn.Sequential(early)
        parts = nn.ModuleDict({"head": nn.Linear(8, 8)})
        optP = torch.optim.SGD(parts.parameters(), 0.1)
        for _ in range(2):
            train(netD, optD)
            train(netG, optG)
            train(early, optE)
            train(late, optE)
            train(parts["head"], optP)
        """)
    told = {}
    for model in facts["models"]:
        above, line, *_ = advice.write("compile", facts | dict(models=[model])).split("\n")
        told[line.strip()] = above
    assert told == {
        "netG.compile()": "above train.py:9  optG = torch.optim.SGD(netG.parameters(), 0.1)",
        "netD.compile()": "above train.py:11  optD = torch.optim.SGD(netD.parameters(), 0.1)",
        "early.compile()": "above train.py:14  optE = torch.optim.SGD(early.parameters(), 0.1)",
        "late.compile()": "below the line that makes late",
        "parts['head'].compile()": "below the line that makes parts['head']",
    }
    everything = advice.write("compile", facts)
    assert "likewise: " in everything and "netG (train.py:9)" in everything


@pytest.mark.parametrize("sets", [False, True])
def test_a_base_class_that_makes_optimizers_may_not_know_the_model(watched, monkeypatch, sets):
    """It makes those of other classes, too, which have no such attribute."""
    monkeypatch.syspath_prepend(watched.folder)
    (watched.folder / "base_of_trainers.py").write_text(
        "import torch\n"
        "class Base:\n"
        f"    def __init__(self): {'self.net = None' if sets else 'pass'}\n"
        "    def make(self, weights):\n"
        "        return torch.optim.SGD(weights, 0.1)\n"
    )
    facts = watched.run("""\
        import torch
        from base_of_trainers import Base

        class Trainer(Base):
            def prepare(self):
                self.net = torch.nn.Conv2d(3, 4, 3)
                self.sgd = self.make(self.net.parameters())

        one = Trainer()
        one.prepare()
        for _ in range(2):
            one.net(torch.rand(4, 3, 8, 8)).mean().backward()
            one.sgd.step()
        """)
    text = advice.write("compile", facts)
    assert text.split("\n")[1].strip() == "self.net.compile()"
    assert text.startswith(
        "above base_of_trainers.py:5  return torch.optim.SGD(weights, 0.1)\n"
        if sets
        else "above train.py:7  self.sgd = self.make(self.net.parameters())\n"
    )


@pytest.mark.parametrize("more, name", [("", "th"), ("import torch", "torch")])
def test_what_to_write_has_the_scripts_name_of_torch(watched, more, name):
    facts = watched.run(f"""\
        import torch as th
        {more}
        net = th.nn.Conv2d(3, 4, 3)
        sgd = th.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            loss = net(th.rand(4, 3, 8, 8)).mean()
            loss.backward()
            sgd.step()
        """)
    those = "amp bfloat16", "amp float16", "channels_last", "cudnn", "tf32"
    told = " ".join(advice.write(each, on_gpu(facts)) for each in those)
    assert {*re.findall(r"\w+(?=\.(?:autocast|bfloat16|channels_last|set_|amp))", told)} == {name}


def test_a_line_that_gets_a_list_has_no_float_of_it(watched):
    """The model gives a tensor in another line, as the generator of CUT does."""
    facts = watched.run("""\
        import torch

        class Net(torch.nn.Linear):
            def forward(self, x, encodes=False):
                return [super().forward(x)] if encodes else super().forward(x)

        net = Net(2, 2)
        sgd = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            features = net(torch.ones(1, 2), encodes=True)
            output = net(features[0])
            output.mean().backward()
            sgd.step()
        """)
    text = advice.write("amp bfloat16", facts)
    assert "    features = net(" in text and "features = features.float()" not in text
    assert "takes the output's tensors as .float()" in text


def test_a_model_that_a_function_gets_is_changed_where_it_is_made(watched):
    """No optimizer was made with it: it is a loss with a model in it that one has."""
    facts = watched.run("""\
        import torch

        def train(model, loss_of, sgd):
            for _ in range(2):
                output = model(torch.ones(1, 2))
                loss = loss_of(output).mean()
                loss.backward()
                sgd.step()

        def main():
            net, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
            sgd = torch.optim.SGD([*net.parameters(), *critic.parameters()], 0.1)
            adversary = torch.nn.Sequential(critic, torch.nn.Sigmoid())
            train(net, adversary, sgd)

        main()
        """)
    made = patch.make(facts, ("compile",), {}, watched.folder)
    (text,) = [each.decode() for each in made.files.values()]
    assert not made.reasons and "    net.compile()\n" in text
    assert "Sigmoid())\n    # new #\n" in text and "    adversary.compile()\n" in text


def test_nothing_changes_below_a_live_wrapper(watched):
    """Neither the layout nor a compiled function; the model is changed before it is wrapped."""
    facts = watched.run("""\
        import torch
        from torch import nn
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
        model = nn.DataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.rand(4, 3, 8, 8)).mean().backward()
            optimizer.step()
        """)
    for name, change in (
        ("channels_last", "net.to(memory_format=torch.channels_last)"),
        ("compile", "net.compile()"),
    ):
        assert advice.write(name, facts).startswith(
            f"above train.py:4  model = nn.DataParallel(net)\n            {change}\n"
        )
    facts["models"][0] |= dict(before=None, bare="", name="model.module")  # a wrapper not seen
    assert advice.write("channels_last", facts).startswith(
        "before DistributedDataParallel or DataParallel gets the model\n            model.to("
    )
    facts["optimizers"] = []  # it came to a process that was spawned
    assert advice.write("compile", facts).startswith("in the process that trains, before its first")


@pytest.mark.parametrize("device", ["", ".cpu()"])
def test_a_model_that_is_made_in_a_wrapper_is_changed_below_it(watched, device):
    facts = watched.run(f"""\
        import torch
        from torch import nn

        model = nn.DataParallel(nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Flatten())){device}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.rand(4, 3, 8, 8)).mean().backward()
            optimizer.step()
        """)
    assert advice.write("compile", facts).startswith(
        "below train.py:4  model = nn.DataParallel(nn.Sequential(\n"
        "            model.module.compile()\n"
    )
    made = patch.make(facts, ("compile", "channels_last"), {}, watched.folder)
    text = next(iter(made.files.values())).decode()
    assert not made.reasons and text.index("nn.Flatten())") < text.index("model.module.compile()")
    assert text.index("model.module.to(memory_format=") < text.index("optimizer = ")


def test_a_wrapper_within_a_model_counts_too(watched):
    facts = watched.run("""\
        import torch
        from torch import nn

        class Task(nn.Module):
            def __init__(self, net):
                super().__init__()
                self.net = nn.DataParallel(net)

            def to(self, *args, **kwargs):
                self.device = torch.empty(0).to(*args, **kwargs).device
                return super().to(*args, **kwargs)

            def forward(self, x):
                return self.net(x)

        task = Task(nn.Conv2d(3, 4, 3))
        optimizer = torch.optim.SGD(task.parameters(), 0.1)
        for _ in range(2):
            task(torch.rand(4, 3, 8, 8)).mean().backward()
            optimizer.step()
        """)
    assert facts["models"][0]["own_to"]
    text = advice.write("channels_last", facts)
    assert text.startswith("above train.py:7  self.net = nn.DataParallel(net)\n")
    assert "for weights in net.parameters()" in text and "net.to(" not in text


def test_a_to_of_its_own_takes_no_layout(watched):
    facts = watched.run("""\
        import torch
        from torch import nn

        class Task(nn.Conv2d):
            def to(self, device):
                return super().to(device)

        model = Task(3, 4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.rand(4, 3, 8, 8)).mean().backward()
            optimizer.step()
        """)
    text = advice.write("channels_last", facts)
    lines = text.split("\n")[1:4]
    space = dict(torch=torch, model=watched.space["model"])
    exec(textwrap.dedent("\n".join(lines)), space)  # it runs as it stands
    assert space["model"].weight.is_contiguous(memory_format=torch.channels_last)
    assert "channels_last" in reasons(facts | dict(seen=inside_facts.traits(space["model"])))


@pytest.mark.parametrize(
    "words, has_images",
    [
        ("torch.rand(8, 4, 9)", False),
        ("[torch.rand(8, 1, 4, 9)]", True),
        ("torch.rand(8, 4, 9), torch.rand(8, 1, 1, 1)", False),
    ],
)
def test_only_images_get_the_layout(watched, words, has_images):
    """channels_last of three dimensions is an error, and of one value for each sample useless."""
    facts = watched.run(f"""\
        import torch
        from torch import nn
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Conv2d(1, 2, (3, 9))
            def forward(self, x, scale=1):
                return scale * self.layer(x[0] if isinstance(x, list) else x[:, None])
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net({words}).sum().backward()
        optimizer.step()
        """)
    text = advice.write("channels_last", facts)
    assert "net.to(memory_format=torch.channels_last)" in text
    assert ("its images as" in text) == has_images


def test_networks_that_only_take_time_are_named(watched):
    facts = watched.run("""\
        import torch
        from torch import nn
        teacher = nn.Linear(8, 8)
        student = nn.Linear(8, 8).eval()
        critic = nn.Linear(8, 8).requires_grad_(False)
        optimizer = torch.optim.SGD(student.parameters(), 0.1)
        for _ in range(2):
            with torch.no_grad():
                goal = teacher(torch.rand(4, 8))
            output = student(torch.rand(4, 8))
            loss = nn.MSELoss()(critic(output), goal)
            loss.backward()
            optimizer.step()
        """)
    assert {each["local"]: each["role"] for each in facts["models"]} == {
        "teacher": "frozen",
        "student": "eval",
        "critic": "frozen",
        "model": "",
    }
    amp = advice.write("amp bfloat16", facts)
    assert amp.startswith("train.py:10  output = student(")
    assert "likewise: teacher (frozen) (train.py:9), critic (frozen) (train.py:11)" in amp
    assert "teacher (frozen) (train.py:9)" in advice.write("compile", facts)
    seen = report.also_seen(facts)
    assert "train.py:9: teacher (Linear) does not train, but each step computes it" in seen


def test_autocast_of_float32_is_not_amp(watched):
    facts = watched.run("""\
        import torch
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for dtype, on in ((torch.float32, True), (torch.bfloat16, False)):
            context = torch.autocast("cpu", torch.bfloat16, enabled=on)
            context.fast_dtype = dtype  # without a GPU torch turns float32 off
            with context:
                output = model(torch.rand(4, 8))
            output.mean().backward()
            optimizer.step()
        """)
    assert [each["half"] for each in facts["autocasts"]] == ["", ""]
    assert not reasons(facts, ["amp bfloat16"])
    own = "or at train.py:7  with context: enabled=True, dtype=torch.bfloat16"
    assert own in advice.write("amp bfloat16", facts)
    assert own not in advice.write("amp bfloat16", on_gpu(facts))  # it is one for a CPU


def test_autocast_in_a_half_type_is_amp(watched):
    facts = watched.run("""\
        import torch
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(torch.rand(4, 8))
            output.mean().backward()
            optimizer.step()
        """)
    assert [each["half"] for each in facts["autocasts"]] == ["bfloat16"] * 2
    assert reasons(facts, ["amp bfloat16"]) == {"amp bfloat16": "already there"}
    assert "amp float16" in reasons(facts)


def test_captured_graphs_keep_out_what_changes_a_forward(watched):
    facts = watched.run("""\
        import torch
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.rand(4, 8)).mean().backward()
            optimizer.step()
        """) | {"seen": ["graphs"], "device": "cuda"}
    found = reasons(facts)
    assert {name for name in found if "replays CUDA graphs" in found[name]} == {
        "amp bfloat16",
        "amp float16",
        "compile",
        "compile reduce-overhead",
    }  # the others have other reasons, as that nothing is a convolution
    assert found.keys() >= {*NAMES} - {"fused", "workers"} and "fused" not in found
    facts["seen"] = ["graphs", "compile"]  # compiled code captures anew
    assert not any("replays CUDA graphs" in why for why in reasons(facts).values())


# ------------------------------------------------------------------------------------- arguments
LOADER = (
    """
import torch
from torch.utils.data import DataLoader
data = torch.utils.data.TensorDataset(torch.rand(64, 8))
{lines}
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
    + LOOP
)


@pytest.mark.parametrize(
    "lines, told",
    [
        ("loader = DataLoader(data, batch_size=4)", "num_workers=2, persistent_workers=True"),
        (
            "loader = DataLoader(data, 4, num_workers=0)",
            "persistent_workers=True|num_workers=2 in place of num_workers=0",
        ),
        (
            "loader = DataLoader(data, 4, True, None, None, 0)",
            "persistent_workers=True|2 as argument 6 (num_workers)",
        ),
        (
            "options = dict(batch_size=4, num_workers=0)\nloader = DataLoader(data, **options)",
            "in options (train.py:5): num_workers=2, persistent_workers=True",
        ),
        (
            'options = {"batch_size": 4, "num_workers": 0}\nloader = DataLoader(data, **options)',
            'in options (train.py:5): "num_workers": 2, "persistent_workers": True',
        ),
        (
            "options = dict(batch_size=4)\nloader = DataLoader(data, **options)",
            "num_workers=2, persistent_workers=True",
        ),
        (
            "options = dict(batch_size=4)\noptions.update(num_workers=0)\n"
            "loader = DataLoader(data, **options)",
            'DataLoader(data, **{**options, "num_workers": 2, "persistent_workers": True})',
        ),
        (
            "options = {'batch_size': 4}\noptions['num_workers'] = 0\n"
            "loader = DataLoader(data, **options)\noptions['shuffle'] = True",
            'DataLoader(data, **{**options, "num_workers": 2, "persistent_workers": True})',
        ),
        (
            "def build(data, **options):\n    return DataLoader(data, **options)\n"
            "loader = build(data, num_workers=0)",
            'DataLoader(data, **{**options, "num_workers": 2, "persistent_workers": True})',
        ),
        (
            "loader = DataLoader(data, **dict(num_workers=0, batch_size=4))",
            'DataLoader(data, **{**dict(num_workers=0, batch_size=4), "num_workers": 2, '
            '"persistent_workers": True})',
        ),
        (
            "class Loader(DataLoader):\n    def __init__(self, data, **options):\n"
            "        super().__init__(data, **options)\nloader = Loader(data, num_workers=0)",
            'super().__init__(data, **{**options, "num_workers": 2, "persistent_workers": True})',
        ),
        (
            "import types\nargs = types.SimpleNamespace(workers=0)\n"
            "loader = DataLoader(\n    data, 4,\n    num_workers=args.workers)",
            "persistent_workers=True|num_workers=2 in place of num_workers=args.workers",
        ),
        (
            "loader = [DataLoader(data, **each) for each in [dict(num_workers=0)]][0]",
            'DataLoader(data, **{**each, "num_workers": 2, "persistent_workers": True})',
        ),
    ],
    ids=[
        "none",
        "keyword",
        "position",
        "dict",
        "braces",
        "elsewhere",
        "update",
        "item",
        "function",
        "call",
        "subclass",
        "args",
        "comprehension",
    ],
)
def test_arguments_are_not_given_twice(watched, lines, told):
    facts = watched.run(LOADER.format(lines=lines))
    text = advice.write("workers", facts, dict(workers=2))
    _, *rest = text.split("\n")
    assert [line.strip() for line in rest[:-1]] == told.split("|")
    if "**{**" in told:  # it is an expression
        ast.parse(told)


def test_workers_stay_where_a_line_makes_loaders_with_and_without(watched):
    """DataLoader refuses persistent_workers=True without workers."""
    lines = """
def make(workers):
    options = dict(batch_size=4)
    options["num_workers"] = workers
    return DataLoader(data, **options)
loader, other = make(2), make(0)
"""
    facts = watched.run(LOADER.format(lines=lines)) | dict(training=[0])
    told = advice.write("workers", facts, dict(workers=2))
    assert '  persistent_workers=options["num_workers"] > 0\n' in told
    made = patch.make(facts, ("workers",), dict(workers=2), watched.folder)
    (text,) = [each.decode() for each in made.files.values()]
    assert '"persistent_workers": options["num_workers"] > 0})' in text and not made.reasons
    exec(text.split("model = ")[0], space := {})  # both loaders are made
    assert space["loader"].persistent_workers and not space["other"].persistent_workers


CHANGING = """\
import torch
from torch.utils.data import DataLoader

class Data(torch.utils.data.TensorDataset):
    scale, weights = 1, [1, 2]
    dataset = property(lambda self: self)

    def scaled(self, scale):
        self.scale = scale

data, other = Data(torch.ones(4, 2)), Data(torch.ones(4, 2))
loader, val_loader = DataLoader(data, batch_size=2, num_workers=1), DataLoader(dataset=other)
net, wrapper = torch.nn.Linear(2, 1), other
sgd = torch.optim.SGD(net.parameters(), 0.1)
data.scale = 1

def train(loader):
    {function}
    for _ in range(1):
        {inner}
    for x in [torch.ones(2, 2)]:
        net(x).mean().backward()
        sgd.step()

for epoch in range(2):
    {line}
    train(loader)
"""


@pytest.mark.parametrize(
    "where, line, changed",
    [
        ("line", "loader.dataset.scaled(2)", True),
        ("line", "loader.dataset.weights[0] += 1", True),
        ("line", "data.scale = epoch", True),
        ("line", "data.scaled(epoch)", True),
        ("function", "loader.dataset.scale = 2", True),
        ("function", "data.scale = 2", False),
        ("inner", "data.scaled(2)", False),  # it may be a list there
        ("line", "val_loader.dataset.scaled(2)", False),
        ("line", "wrapper.dataset.scaled(2)", False),  # a dataset round another one
        ("line", "other.scale = epoch", False),
        ("line", "scale = len(loader.dataset.weights) + data.scale", False),
    ],
)
def test_workers_do_not_stay_if_the_dataset_changes(watched, where, line, changed):
    """They have a copy of it from the first epoch."""
    lines = dict.fromkeys(("line", "function", "inner"), "pass") | {where: line}
    source = CHANGING.format(**lines)
    facts = watched.run(source) | dict(training=[0])
    number = [each.strip() for each in source.splitlines()].index(line) + 1
    at = f"train.py:{number}" if changed else ""
    assert facts["loaders"][0]["changed"] == at
    text, told = advice.write("workers", facts), "; ".join(report.also_seen(facts))
    made = patch.make(facts, ("workers",), dict(workers=2), watched.folder)
    (written,) = [each.decode() for each in made.files.values()]
    assert not made.reasons and "num_workers=2" in written
    for each in text, written:
        assert ("persistent_workers=True" in each) != changed
    assert (f"{at} changes the dataset" in text) == (f"{at}: this" in told) == changed
    facts["loaders"][0] |= dict(workers=4)
    assert ("workers" in reasons(facts, ["workers"])) == changed  # nothing else is left


def test_statements_and_calls_that_share_a_line_keep_their_names(watched):
    facts = watched.run(
        """
        import torch
        from torch import nn
        a = nn.Linear(2, 2); b = nn.Linear(2, 2)
        one, two = torch.optim.SGD(a.parameters(), 0.1), torch.optim.Adam(b.parameters(), 0.1)
        three = torch.optim.SGD(a.parameters(), 0.2); four = torch.optim.SGD(b.parameters(), 0.3)
        x = a(torch.ones(1, 2)); y = b(x)
        """
    )
    if sys.version_info >= (3, 11):
        assert [each["name"] for each in facts["optimizers"]] == ["one", "two", "three", "four"]
        assert [each["spots"][0]["name"] for each in facts["models"]] == ["a", "b"]
        assert [each["target"] for each in facts["models"]] == ["x", "y"]
    made = patch.make(facts, ["fused"], {}, watched.folder)
    assert "shares its line" in made.reasons["fused"]
    facts["optimizers"] = facts["optimizers"][:2]
    made = patch.make(facts, ["fused"], {}, watched.folder)
    assert next(iter(made.files.values())).count(b"fused=True") == 2


def test_a_scripted_model_of_float64(watched):
    facts = watched.run(
        """
        import torch
        from torch import nn
        net = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3))).double()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net(torch.ones(1, 3, 8, 8).double())
        """
    )
    assert "float64" in reasons(facts)["amp bfloat16"]
    assert "channels_last" not in reasons(facts)


def test_a_layer_of_its_own_may_be_a_convolution(watched):
    """Weights of the shape of kernels go to F.conv2d; positions have the shape of an image."""
    facts = watched.run(
        """
        import torch
        from torch import nn
        from torch.nn import functional as F
        class Conv(nn.Module):
            def __init__(self):
                super().__init__()
                self.weights = nn.ParameterList([nn.Parameter(torch.ones(4, 3, 3, 3))])
            def forward(self, images):
                return F.conv2d(images, self.weights[0])
        class Positions(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(1, 3, 16, 16))
            def forward(self, images):
                return images + self.weight
        conv, add = Conv(), Positions()
        optimizer = torch.optim.SGD([*conv.parameters(), *add.parameters()], 0.1)
        conv(add(torch.ones(1, 3, 16, 16)))
        """
    )
    assert not {"channels_last", "cudnn"} & {*reasons(on_gpu(facts))}
    traits = {each["name"]: each["traits"] for each in facts["models"]}
    assert traits == {"conv": ["convolution", "image"], "add": []}


def test_a_setting_stands_below_the_line_that_undoes_it(watched):
    script = """\
        import torch
        from torch.backends import cudnn

        def seed(config):
            config.cudnn.benchmark = True
            cudnn.benchmark, cudnn.deterministic = False, True

        def main(config):
            seed(config)
            net = torch.nn.Conv2d(3, 4, 3)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            net(torch.ones(1, 3, 8, 8))

        import types
        main(types.SimpleNamespace(cudnn=types.SimpleNamespace()))
        """
    facts = on_gpu(watched.run(script))
    assert facts["settings"] == dict(cudnn="train.py:6")
    assert advice.write("cudnn", facts).startswith("""\
above train.py:11  optimizer = torch.optim.SGD(net.parameters(), 0.1)
            torch.backends.cudnn.benchmark = True  # train.py:6 sets it too
""")
    assert advice.write("tf32", facts).startswith("at the top")
    made = patch.make(facts, ("cudnn", "tf32"), {}, watched.folder)
    lines = next(iter(made.files.values())).decode().splitlines()
    at = lines.index("    torch.backends.cudnn.benchmark = True")
    assert lines[at + 2] == "    optimizer = torch.optim.SGD(net.parameters(), 0.1)"
    at = lines.index('torch.set_float32_matmul_precision("high")')
    assert at < lines.index("def seed(config):")


def test_a_model_may_give_its_parameters_as_a_list(watched):
    facts = watched.run(
        """
        import torch
        from torch import nn
        class Net(nn.Linear):
            def parameters(self):
                return [self.weight, self.bias]
        net = Net(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net(torch.ones(1, 2))
        """
    )
    assert [(each["name"], each["role"]) for each in facts["models"]] == [("net", "trains")]


def test_a_function_that_calls_the_model_gets_no_images(watched):
    """The place of an argument in the model's forward is another one in functional_call."""
    facts = watched.run(
        """
        import torch
        from torch import nn
        net, images = nn.Conv2d(3, 4, 3), torch.rand(1, 3, 8, 8)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net(images)
        torch.func.functional_call(net, dict(net.named_parameters()), (images,))
        """
    )
    assert [each.get("images", []) for each in facts["models"][0]["spots"]] == [[0], []]


def test_a_function_that_passes_arguments_on_is_no_place(watched):
    """A factory makes all kinds of objects, so the line that calls it gets the arguments."""
    facts = watched.run("""\
        import torch

        def call(function, *args, **kwargs):
            return function(*args, **kwargs)

        def make(*args, class_name, **kwargs):
            return call(*args, function=getattr(torch.optim, class_name), **kwargs)

        class Loader(torch.utils.data.DataLoader):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)

        net, options = torch.nn.Linear(8, 8), dict(class_name="Adam", lr=0.1)
        optimizer = make(params=net.parameters(), **options)
        loader = Loader(range(8), batch_size=2)
        net(torch.ones(1, 8))
        """)
    assert advice.write("fused", facts).startswith("""\
train.py:14  optimizer = make(params=net.parameters(), **options)
            fused=True
""")
    made = patch.make(facts, ("fused", "workers"), dict(workers=2), watched.folder)
    text = next(iter(made.files.values())).decode()
    assert 'optimizer = make(params=net.parameters(), **{**options, "fused": True})' in text
    assert "loader = Loader(range(8), batch_size=2, num_workers=2, persistent_workers=True)" in text


def test_each_optimizer_has_its_own_line(watched):
    facts = watched.run("""\
        import itertools, torch
        G, D = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        kind = dict(lr=0.1, foreach=True)
        opt_G = torch.optim.Adam(itertools.chain(G.parameters()), lr=0.1)
        opt_D = torch.optim.Adam(D.parameters(), **kind)
        rest = torch.optim.Adadelta([torch.nn.Parameter(torch.zeros(2))])
        fast = torch.optim.SGD(D.parameters(), 0.1, fused=True)
        for _ in range(2):
            output = G(torch.rand(4, 8))
            D(output).mean().backward()
            opt_G.step()
            opt_D.step()
        """)
    assert [each["name"] for each in facts["optimizers"]] == ["opt_G", "opt_D", "rest", "fast"]
    assert not reasons(facts, ["fused"])
    text = advice.write("fused", facts)
    assert text.startswith("""\
train.py:4  opt_G = torch.optim.Adam(itertools.chain(G.parameters()), lr=0.1)
            fused=True
        train.py:5  opt_D = torch.optim.Adam(D.parameters(), **kind)
            in kind (train.py:3): fused=True in place of foreach=True
        watch: """)
    scaler = advice.write("amp float16", on_gpu(facts))
    assert "scaler.scale(loss).backward(); scaler.step(opt_G); scaler.step(opt_D)" in scaler
    steps = [dict(at="train.py:11", name="self.opt.step", is_direct=False, optimizer=0)]
    named = advice.write("amp float16", on_gpu(facts | dict(sites=dict(steps=steps))))
    assert "scaler.step(self.opt); scaler.step(opt_D)" in named  # as it is called there
    both = [*steps, steps[0] | dict(name="self.other.step")]  # two that one line made
    named = advice.write("amp float16", on_gpu(facts | dict(sites=dict(steps=both))))
    assert "scaler.step(self.opt); scaler.step(self.other); scaler.step(opt_D)" in named
    steps[0]["name"] = "super().step"
    named = advice.write("amp float16", on_gpu(facts | dict(sites=dict(steps=steps))))
    assert "scaler.step(opt_G); scaler.step(opt_D)" in named
    for called, loss in ("cost", "cost"), ("cost.mean()", "cost.mean()"), ("(a / 2)", "a / 2"):
        back = dict(at="train.py:10", name=f"{called}.backward", is_direct=True)
        named = advice.write("amp float16", on_gpu(facts | dict(sites=dict(backwards=[back]))))
        assert f"for {called}.backward(), " in named
        assert f"scaler.scale({loss}).backward(); " in named
    back = dict(at="train.py:10", name="self.scaler.scale(cost).backward", is_direct=True)
    named = advice.write("amp float16", on_gpu(facts | dict(sites=dict(backwards=[back]))))
    assert "where self.scaler is made, the script's own GradScaler\n" in named  # and is off
    assert "enabled=True" in named and "unscale_" not in named and ".step(" not in named
    # a critic that steps more often needs an update before its next step
    assert "scaler.update() after these steps, before the next backward()" in scaler
    assert reasons(facts | dict(optimizers=facts["optimizers"][2:3]))["fused"] == (
        "torch has no fused Adadelta"
    )
    assert reasons(facts | dict(optimizers=[]))["fused"].startswith("the optimizer is made")


# ------------------------------------------------------------------------------------- libraries
FIT = """
    import torch

    class Trainer:
        def fit(self, model, *data):
            optimizer = model.configure_optimizers() if hasattr(
                model, "configure_optimizers") else torch.optim.SGD(model.parameters(), 0.1)
            loader = model.train_dataloader() if hasattr(
                model, "train_dataloader") else torch.utils.data.DataLoader(*data, batch_size=4)
            loader = torch.utils.data.DataLoader(loader.dataset, batch_size=4)
            for batch in loader:
                loss = model.training_step(batch) if hasattr(
                    model, "training_step") else model(batch).mean()
                loss.backward()
                optimizer.step()
    """
MODULE = """\
import torch
from torch import nn
import {library} as library

class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())

    def training_step(self, batch):
        output = self.net(batch)
        return output.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        options = dict(batch_size=4, num_workers=0)
        return torch.utils.data.DataLoader(torch.rand(8, 3, 8, 8), **options)

module = Module()
trainer = library.Trainer()
trainer.fit(module)
"""


@pytest.mark.parametrize("library", ["lightning", "pytorch_lightning"])
def test_lightning(watched, library, tmp_path):
    watched.patch.syspath_prepend(package(tmp_path / "site-packages", library, FIT))
    facts = on_gpu(watched.run(MODULE.format(library=library)))
    write = functools.partial(advice.write, facts=facts, extra=dict(workers=2))
    entry = "train.py:23  trainer.fit(module)"
    for name, precision in ("amp bfloat16", "bf16-mixed"), ("amp float16", "16-mixed"):
        text = write(name)
        assert f'Trainer(precision="{precision}")' in text and "GradScaler" not in text
        assert "scaler" not in text and "inside" not in text
    assert write("compile").startswith(
        f"above {entry}\n            module = torch.compile(module)\n"
    )
    assert 'torch.compile(module, mode="reduce-overhead")' in write("compile reduce-overhead")
    layout = write("channels_last")
    assert layout.startswith(f"above {entry}\n            module.to(memory_format=")
    assert "images" not in layout
    assert "Trainer(benchmark=True)" in write("cudnn")
    assert write("tf32").startswith("at the top")
    # the user's own loader and optimizer are the user's, though the library makes one anew
    assert {each["at"] for each in facts["loaders"]} == {"train.py:19"}
    assert write("workers").split("\n")[1].strip() == (
        "in options (train.py:18): num_workers=2, persistent_workers=True, pin_memory=True"
    )
    assert write("fused").startswith("train.py:15  return torch.optim.SGD(self.parameters(), 0.1)")


def test_transformers_trainer(watched, tmp_path):
    watched.patch.syspath_prepend(package(tmp_path / "site-packages", "transformers", FIT))
    facts = on_gpu(
        watched.run("""\
        import torch, transformers
        model = torch.nn.Linear(8, 8)
        trainer = transformers.Trainer()
        trainer.fit(model, torch.rand(8, 8))
        """)
    )
    assert {each["library"] for each in facts["loaders"] + facts["optimizers"]} == {"transformers"}
    for name, words in {
        "amp bfloat16": "bf16=True",
        "amp float16": "fp16=True",
        "tf32": "tf32=True",
        "compile": "torch_compile=True",
        "fused": 'optim="adamw_torch_fused"',
        "workers": "dataloader_num_workers=2, dataloader_persistent_workers=True",
        "batch x2": "per_device_train_batch_size=8",
    }.items():
        text = advice.write(name, facts, dict(workers=2, times=2))
        assert f"TrainingArguments({words})" in text, name
        assert "GradScaler" not in text and text.count("TrainingArguments") == 1
    text = advice.write("amp bfloat16", facts | dict(device="cpu"))
    assert "TrainingArguments(bf16=True, use_cpu=True)" in text  # or it wants a GPU for it


def test_a_library_that_is_given_no_model_where_it_runs(watched, tmp_path):
    """Its line names a loader or data: neither is what is compiled."""
    ignite = """
    class Trainer:
        def __init__(self, *parts):
            self.model, self.optimizer = parts
        def run(self, loader, epochs):
            for batch in loader:
                self.model(batch).mean().backward()
                self.optimizer.step()
    """
    watched.patch.syspath_prepend(package(tmp_path / "site-packages", "ignite", ignite))
    facts = watched.run("""\
        import ignite, torch
        model = torch.nn.Conv2d(3, 4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = torch.utils.data.DataLoader(torch.rand(8, 3, 8, 8), 4)
        ignite.Trainer(model, optimizer).run(loader, 1)
        """)
    above = "above train.py:3  optimizer = torch.optim.SGD(model.parameters(), 0.1)\n            "
    assert advice.write("compile", facts).startswith(f"{above}model.compile()\n")
    assert advice.write("channels_last", facts).startswith(f"{above}model.to(memory_format=")
    facts["models"][0] |= dict(driver="skorch", above=None)
    assert "net.module_.to(memory_format=" in advice.write("channels_last", facts)


def test_accelerate_is_told_by_its_state(watched, monkeypatch):
    state = types.SimpleNamespace(_shared_state={"device": "cpu"})
    monkeypatch.setitem(
        sys.modules, "accelerate.state", types.SimpleNamespace(AcceleratorState=state)
    )
    facts = watched.run(LOADER.format(lines="loader = DataLoader(data, 4)"))
    assert 'Accelerator(mixed_precision="bf16")' in advice.write("amp bfloat16", facts)
    assert "GradScaler" not in advice.write("amp float16", on_gpu(facts))
    assert advice.write("workers", facts, dict(workers=2)).startswith("train.py:5  loader = ")
    assert 'dynamo_backend="inductor"' in advice.write("compile", facts)


def test_what_an_unknown_library_makes_and_calls(watched, tmp_path):
    watched.patch.syspath_prepend(package(tmp_path / "site-packages", "fitter", FIT))
    facts = watched.run("""\
        import fitter, torch
        fitter.Trainer().fit(torch.nn.Linear(8, 8), torch.rand(64, 8))
        """)
    begin = (
        "inside fitter, which has to be told to do this:\n"
        "        train.py:2  fitter.Trainer().fit(torch.nn.Linear"
    )
    for name in "amp bfloat16", "workers", "fused":
        assert advice.write(name, facts, dict(workers=2)).startswith(begin)
    assert 'model(...): torch.autocast("cpu", torch.bfloat16)(model)(...).float()\n' in (
        advice.write("amp bfloat16", facts)
    )
    for of in facts["loaders"] + facts["optimizers"]:
        of["library"] = "transformers"
    facts["models"][0]["library"] = ""  # as in a Trainer with a compute_loss of the user's
    assert "TrainingArguments(bf16=True, use_cpu" in advice.write("amp bfloat16", facts)


@pytest.mark.parametrize("devices, copies", [([], False), ([0], False), ([0, 1], True)])
def test_data_parallel_slows_down_on_several_gpus_only(devices, copies):
    """With one GPU or none it calls the model as it is."""
    wrapper = nn.DataParallel(nn.Linear(2, 2))
    wrapper.device_ids = devices
    assert ("DataParallel" in inside_facts.traits(wrapper)) == copies
