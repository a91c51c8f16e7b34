"""whatif --write: the lines of each technique in many small scripts, and the patch of them."""

import ast
import copy
import os
import re
import sys
import textwrap

import pytest
import torch

from helpers import AMP_OPTION, ROOT, run
from test_whatif_advice import Watched
from whatif import advice, scriptoptions
from whatif.inside.facts import form_of, has_loss
from whatif.write import extras, overlay, patch, sources
from whatif.write.sources import MARK

pytestmark = pytest.mark.fault("patch of unusual files")

LOOP = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

model = nn.Conv2d(3, 8, 3)
loss_function = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8)
for images, labels in loader:
    output = model(images)
    loss = loss_function(output, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
AUTOCAST = """\
    # new #
    # convolutions and matrix products run in half precision; the output is float32 again
    with torch.autocast("cpu", torch.bfloat16):
        output = model(images)
    output = output.float()

    loss = loss_function(output, labels)
"""
ALL = ["amp bfloat16", "channels_last", "fused", "compile", "workers", "cudnn", "tf32"]


# ------------------------------------------------------------------ facts, as a run would see them
class Seen:
    """Facts of a script whose models, optimizers and loaders have known names."""

    def __init__(
        self,
        text,
        file="train.py",
        models=("model",),
        optimizers=("optimizer",),
        images=(0,),
        device="cpu",
        holds="tensor",
        floats=(),
        has_loss=False,
        unseen=(),
        traces=(),
        **about,
    ):
        self.tree, self.file = ast.parse(text), file
        self.parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        self.optimizers, self.device = optimizers, device
        self.output = dict(holds=holds, floats=[*floats], has_loss=has_loss)
        made = {name: self.made(name) for name in (*models, *optimizers)}
        self.facts = dict(
            seen=[],
            device=device,
            cores=4,
            processes=1,
            options=[],
            files=[file],
            loaders=[],
            training=[],
            autocasts=[],
            sites={},
            capability=9,
            models=[
                self.model(name, made[optimizers[min(number, len(optimizers) - 1)]], images) | about
                for number, name in enumerate(models)
            ],
            optimizers=[self.optimizer(name, made[name]) for name in optimizers],
        )
        self.facts["sites"]["traces"] = [
            dict(at=f"{file}:{line}", text="", is_early=is_early) for line, is_early in traces
        ]
        for number, node in enumerate(self.calls("DataLoader")):
            self.facts["loaders"].append(self.loader(node))
            self.facts["training"].append(number)
        for what, names in dict(
            backwards=["backward"], steps=["step"], clips=["clip_grad_norm_", "clip_grad_value_"]
        ).items():
            self.facts["sites"][what] = [
                self.site(node)
                for name in names
                for node in self.calls(name)
                if (what != "steps" or ast.unparse(node.func).rpartition(".")[0] in optimizers)
                and text.splitlines()[node.lineno - 1].strip() not in unseen
            ]

    def calls(self, name):
        """Return the calls whose name ends so, in the order of lines."""
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and re.search(rf"(^|\.){name}$", ast.unparse(node.func))
        ]
        return sorted(found, key=lambda node: (node.lineno, node.col_offset))

    def at(self, node):
        return f"{self.file}:{node.lineno}"

    def made(self, name):
        return [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets)
        ][-1]

    def model(self, name, optimizer, images):
        calls = [node for node in self.calls(re.escape(name)) if ast.unparse(node.func) == name]
        first = calls[0]
        return dict(
            name=name,
            local=name,
            kind="Net",
            role="trains",
            traits=["image", "convolution"],
            at=self.at(first),
            text="",
            is_tensor=True,
            are_tensors=False,
            own_to=False,
            is_wrapped=False,
            before=None,
            bare="",
            above=dict(at=self.at(optimizer), text=""),
            driver="",
            library="",
            entry={},
            made={},
            statement="",
            target="",
            calls=[self.at(node) for node in calls],
            spots=[
                dict(at=self.at(node), name=name, images=[*images], **self.output) for node in calls
            ],
        )

    def arguments(self, node, positional):
        return dict(
            call=ast.unparse(node),
            function=ast.unparse(node.func),
            positional=positional[: len(node.args)],
            spreads=[],
            keywords={each.arg: ast.unparse(each.value) for each in node.keywords},
        )

    def optimizer(self, name, made):
        words = {each.arg: ast.unparse(each.value) for each in made.value.keywords}
        return dict(
            name=name,
            kind=ast.unparse(made.value.func).rpartition(".")[2],
            at=self.at(made),
            text="",
            library="",
            can_fuse=True,
            fused=words.get("fused") == "True",
            foreach=words.get("foreach") == "True",
            momentum="momentum" in words,
            driver="",
            entry={},
            arguments=self.arguments(made.value, ["params", "lr"]),
        )

    def loader(self, node):
        words = {each.arg: ast.unparse(each.value) for each in node.keywords}
        names = ["dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers"]
        given = dict(zip(names, map(ast.unparse, node.args))) | words
        number = given.get("num_workers", "0")
        return dict(
            at=self.at(node),
            text="",
            workers=int(number) if number.isdigit() else 2,
            pin=words.get("pin_memory") == "True",
            persistent=False,
            library="",
            driver="",
            threaded=False,
            method="fork",
            arguments=self.arguments(node, names),
        )

    def site(self, node):
        name = ast.unparse(node.func)
        owner = name.rpartition(".")[0]
        number = (
            self.optimizers.index(owner)
            if owner in self.optimizers
            else (0 if len(self.optimizers) == 1 else None)
        )
        return dict(at=self.at(node), name=name, optimizer=number)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a script and makes its patch for some techniques."""
    monkeypatch.chdir(tmp_path)

    def make(text, names, with_extras=(), workers=2, encoding="utf-8", version="2.3.0", **seen):
        text = text if isinstance(text, bytes) else text.encode(encoding)
        (tmp_path / "train.py").write_bytes(text)
        plain = text.removeprefix(b"\xef\xbb\xbf").decode(encoding).replace("\r\n", "\n")
        facts = Seen(plain, **seen).facts | dict(torch=version)
        return patch.make(facts, names, dict(workers=workers), tmp_path, with_extras)

    return make


def text_of(made):
    return next(iter(made.files.values())).decode()


def only(made, name):
    """Return the new text of a patch in which a technique was written."""
    assert made.written == (name,) and not made.reasons, made.reasons
    return text_of(made)


def blocks_of(text):
    """Return the marked blocks of a script, without their indents."""
    lines, found = text.splitlines(), []
    for number, line in enumerate(lines):
        if line.strip() == MARK:
            end = next((n for n in range(number, len(lines)) if not lines[n].strip()), len(lines))
            found.append(textwrap.dedent("\n".join(lines[number + 1 : end])))
    return found


# ------------------------------------------------------------------------------------- amp
def test_autocast_around_a_call(write):
    text = only(write(LOOP, ["amp bfloat16"]), "amp bfloat16")
    assert text == LOOP.replace(
        "    output = model(images)\n    loss = loss_function(output, labels)\n", AUTOCAST
    )


@pytest.mark.parametrize(
    "line, new, about",
    [
        (
            "loss = loss_function(model(images), labels)",
            ["    output = model(images)", "loss = loss_function(output.float(), labels)"],
            {},
        ),
        (
            "loss = loss_function(model(images).squeeze(1), labels)",
            [
                "    output = model(images)",
                "loss = loss_function(output.float().squeeze(1), labels)",
            ],
            {},
        ),
        (
            "output = model(images).squeeze(1)",
            ["    output = model(images).squeeze(1)", "output = output.float()"],
            {},
        ),
        (
            "output, extra = model(images)",
            [
                "    output, extra = model(images)",
                "output, extra = (each.float() for each in (output, extra))",
            ],
            dict(holds="tuple"),
        ),
        (
            "output, _, _ = model(images)",
            ["    output, _, _ = model(images)", "output = output.float()"],
            dict(holds="tuple"),
        ),
        (
            "output = model(images)",
            ["    output = model(images)", "output = tuple(each.float() for each in output)"],
            dict(holds="tuple"),
        ),
        (
            "output = model(images)",
            ["    output = model(images)", "output = [each.float() for each in output]"],
            dict(holds="list"),
        ),
        (
            "loss = model(images) - model(labels)",
            [
                "    output = model(images)",
                "    outputs = model(labels)",
                "loss = output.float() - outputs.float()",
            ],
            {},
        ),
        ("total += model(images)", ["    output = model(images)", "total += output.float()"], {}),
    ],
)
def test_autocast_around_calls_in_other_statements(write, line, new, about):
    source = LOOP.replace("    output = model(images)\n", f"    {line}\n").replace(
        "    loss = loss_function(output, labels)\n", "    loss = 1\n"
    )
    found = blocks_of(only(write(source, ["amp bfloat16"], **about), "amp bfloat16"))
    assert found == [
        "\n".join(
            [
                "# convolutions and matrix products run in half precision; the output is float32 again",
                'with torch.autocast("cpu", torch.bfloat16):',
                *new,
            ]
        )
    ]


def test_calls_at_several_lines_of_a_statement_are_changed_once(write):
    """One line is too long with both: the model's spots have two lines."""
    calls = "loss = loss_function(draw(), model(images),\n                         model(labels))"
    source = LOOP.replace("output = model(images)", calls).replace(
        "    loss = loss_function(output, labels)\n", ""
    )
    made = write(source, ["amp bfloat16", "channels_last"])
    assert made.written == ("amp bfloat16", "channels_last") and not made.reasons
    layout, half = "memory_format=torch.channels_last", 'autocast("cpu", torch.bfloat16)(model)'
    for name in "images", "labels":
        assert f"torch.{half}({name}.to({layout})).float()" in text_of(made)


@pytest.mark.parametrize(
    "line, new",
    [
        (
            "loss = loss_function(draw(), model(images))",
            'loss = loss_function(draw(), torch.autocast("cpu", torch.bfloat16)(model)(images).float())',
        ),
        (
            "ask = lambda x: model(x)",
            'ask = lambda x: torch.autocast("cpu", torch.bfloat16)(model)(x).float()',
        ),
        (
            "all = [model(x) for x in images]",
            'all = [torch.autocast("cpu", torch.bfloat16)(model)(x).float() for x in images]',
        ),
        (
            "loss = model(images) if labels else 0",
            'loss = torch.autocast("cpu", torch.bfloat16)(model)(images).float() if labels else 0',
        ),
        (
            "if model(images).sum() > 0: pass",
            'if torch.autocast("cpu", torch.bfloat16)(model)(images).float().sum() > 0: pass',
        ),
        (
            "a = 1; output = model(images)",
            'a = 1; output = torch.autocast("cpu", torch.bfloat16)(model)(images).float()',
        ),
    ],
)
def test_autocast_of_a_call_that_cannot_move(write, line, new):
    """In a lambda or a comprehension, beside another statement, or after another call."""
    text = only(
        write(LOOP.replace("output = model(images)", line), ["amp bfloat16"]), "amp bfloat16"
    )
    assert f"    {new}\n" in text


def test_autocast_at_both_places_that_call_a_model(write):
    source = LOOP.replace(
        "    optimizer.zero_grad()\n",
        "    more = model(images.flip(3))\n    optimizer.zero_grad()\n",
    )
    text = only(write(source, ["amp bfloat16"]), "amp bfloat16")
    assert text.count("with torch.autocast") == 2 and "        more = model(images.flip(3))" in text


def test_a_call_over_several_lines_keeps_them(write):
    call = "    output = model(\n        images,  # a batch\n    )\n"
    text = only(
        write(LOOP.replace("    output = model(images)\n", call), ["amp bfloat16"]), "amp bfloat16"
    )
    assert (
        "        output = model(\n            images,  # a batch\n        )\n"
        "    output = output.float()\n"
    ) in text


def test_a_long_text_in_a_call_is_not_indented(write):
    call = '    output = model(images, """\nfirst\n  second""")\n'
    text = only(
        write(LOOP.replace("    output = model(images)\n", call), ["amp bfloat16"]), "amp bfloat16"
    )
    assert '        output = model(images, """\nfirst\n  second""")\n' in text


@pytest.mark.parametrize(
    "about, why",
    [
        (dict(holds=""), "is no tensor"),
        (dict(library="lib"), "lib calls the model"),
        (dict(driver="lightning"), "lightning runs the loop"),
        (dict(spots=[{}]), "is not known"),
    ],
)
def test_amp_that_is_not_safe_is_not_written(write, about, why):
    made = write(LOOP, ["amp bfloat16"], **about)
    assert not made.files and re.search(why, made.reasons["amp bfloat16"])


def test_a_model_that_gives_its_loss_needs_no_cast(write):
    source = LOOP.replace("loss = loss_function(output, labels)", "loss = output.loss")
    text = only(write(source, ["amp bfloat16"], holds="mixed", has_loss=True), "amp bfloat16")
    assert ".float()" not in text and "        output = model(images)\n" in text


HOLDS = """\
import collections
import dataclasses
import torch
from torch import nn

Pair = collections.namedtuple("Pair", "logits aux")


@dataclasses.dataclass
class Data:
    logits: torch.Tensor
    size: int = 2


class ModelOutput(collections.OrderedDict):
    def __getattr__(self, name):
        return self[name]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x):
        logits = self.layer(x)
        seen.append(logits.dtype)
        return OUTPUT


def criterion(logits, y):
    seen.append(logits.dtype)
    return nn.functional.cross_entropy(logits, y)


def of_output(output, y):
    return criterion(output["logits"], y)


seen, model = [], Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for key in range(2):
    x, y = torch.rand(4, 8), torch.arange(4) % 2
    LINE
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
DICT, USE = "output = model(x)", 'loss = criterion(output["logits"], y)'
MIXED = [
    "for keys, value in [*output.items()]:",
    '    if getattr(value, "dtype", None) == torch.bfloat16:',
    "        output[keys] = value.float()",
]


@pytest.mark.parametrize(
    "output, lines, cast",
    [
        (
            '{"logits": logits, "aux": logits}',
            (DICT, USE),
            ["output = {key: each.float() for key, each in output.items()}"],
        ),
        (
            "collections.OrderedDict(logits=logits)",
            (DICT, USE),
            ["output = {key: each.float() for key, each in output.items()}"],
        ),
        ('{"logits": logits, "mask": x > 0, "size": 2, "more": None}', (DICT, USE), MIXED),
        ("ModelOutput(logits=logits)", (DICT, "loss = criterion(output.logits, y)"), MIXED),
        (
            "ModelOutput(loss=logits.mean(), logits=logits, states=(logits, logits))",
            (DICT, "loss = criterion(output.logits, y) + output.loss"),
            MIXED,
        ),
        (
            "Pair(logits, logits)",
            (DICT, "loss = criterion(output.logits, y)"),
            ["output = output._make(each.float() for each in output)"],
        ),
        (
            "Pair(logits, logits)",
            ("one, two = model(x)", "loss = criterion(one, y)"),
            ["one, two = (each.float() for each in (one, two))"],
        ),
        (
            '{"logits": logits}',
            ("loss = of_output(model(x), y)",),
            ["outputs = {key: each.float() for key, each in outputs.items()}"],
        ),
        (
            '{"logits": logits, "states": [logits]}',
            ('loss = criterion(model(x)["logits"], y)',),
            [],
        ),
        (
            '{"logits": logits, "states": [logits]}',
            ('output = model(x)["logits"]', "loss = criterion(output, y)"),
            ["output = output.float()"],
        ),
        (
            "(logits, (logits, logits), None)",
            ("out, state, _ = model(x)", "loss = criterion(out + state[1], y)"),
            ["out = out.float()", "state = tuple(each.float() for each in state)"],
        ),
        (
            "(logits, None)",
            ("out, *others = model(x)", "loss = criterion(out, y)"),
            ["out = out.float()"],
        ),
        (
            "(logits, [logits], None)",
            ("out, parts, _ = model(x)", "loss = criterion((parts + [out])[0], y)"),
            ["out = out.float()", "parts = [each.float() for each in parts]"],
        ),
        (
            "(logits, 3)",
            (DICT, "loss = criterion(output[0], y)"),
            ["output = output[0].float(), output[1]"],
        ),
        ("Data(logits)", ("loss = criterion(model(x).logits, y)",), []),
        ("(logits, None)", ("loss = criterion(model(x)[0], y)",), []),
        (
            '{"logits": logits}',
            ('loss = min(criterion(model(each)["logits"], y) for each in [x])',),
            [],
        ),
    ],
    ids=range(17),
)
def test_tensors_that_an_output_holds_are_float32_for_the_loss(
    tmp_path, monkeypatch, output, lines, cast
):
    monkeypatch.chdir(tmp_path)
    watched = Watched(tmp_path, monkeypatch)
    facts = watched.run(HOLDS.replace("OUTPUT", output).replace("LINE", "\n    ".join(lines)))
    watched.hook.remove()
    text = only(patch.make(facts, ["amp bfloat16"], {}, tmp_path), "amp bfloat16")
    assert "\n".join(f"    {line}" for line in cast) in text
    space = {"__name__": "train"}
    exec(text, space)
    assert space["seen"] == [torch.bfloat16, torch.float32] * 2


def test_an_object_that_fails_does_not_fail_the_script():
    class Output:
        def __getattr__(self, name):
            return {}[name]

    assert not has_loss(Output()) and form_of(Output()) == ("", [])


@pytest.mark.parametrize("kind", [tuple, list])
def test_an_output_keeps_its_type(kind):
    """A loss may ask for it, as that of a model with an auxiliary output does."""
    assert form_of(kind([torch.ones(1)] * 2)) == (kind.__name__, [0, 1])


@pytest.mark.parametrize(
    "output, line",
    [
        ('{"logits": logits, "states": [logits]}', 'loss = criterion(output["logits"], y)'),
        ("Data(logits)", "loss = criterion(output.logits, y)"),
        ("(logits, Data(logits))", "loss = criterion(output[0], y)"),  # it stays in half precision
    ],
)
def test_an_output_that_cannot_be_cast_is_not_written(tmp_path, monkeypatch, output, line):
    monkeypatch.chdir(tmp_path)
    watched = Watched(tmp_path, monkeypatch)
    facts = watched.run(HOLDS.replace("OUTPUT", output).replace("LINE", f"{DICT}\n    {line}"))
    watched.hook.remove()
    made = patch.make(facts, ["amp bfloat16"], {}, tmp_path)
    assert not made.diff and "is no tensor" in made.reasons["amp bfloat16"]


def test_an_output_that_has_a_part_only_at_times_is_mixed(write):
    spots = [
        dict(at="train.py:10", name="model", images=[], holds=holds, floats=floats)
        for holds, floats in (("dict", ["out"]), ("mixed", ["out", "aux"]))
    ]
    text = only(write(LOOP, ["amp bfloat16"], spots=spots), "amp bfloat16")
    assert "    for key, value in [*output.items()]:\n        if getattr(value, " in text


# ------------------------------------------------------------------------------------- float16
def float16(made):
    assert not made.reasons, made.reasons
    return text_of(made)


def test_float16_scales_the_loss(write):
    text = float16(write(LOOP, ["amp float16"], device="cuda"))
    assert text.endswith("""\
    optimizer.zero_grad()
    # new #
    # small gradients would become zero in float16, so the loss is scaled
    scaler.scale(loss).backward()

    # new #
    # the scaler divides gradients again, and skips a step that overflowed
    scaler.step(optimizer)
    scaler.update()
""")
    assert "lr=0.1)\n# new #\n# small gradients" in text
    assert '\nscaler = torch.amp.GradScaler("cuda")\n' in text


def test_float16_unscales_before_clipping_and_with_accumulation(write):
    source = LOOP.replace(
        "    optimizer.step()\n",
        """\
    if number % 4 == 3:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
""",
    )
    text = float16(write(source, ["amp float16"], device="cuda"))
    assert (
        """\
        # gradients are clipped at their own size
        scaler.unscale_(optimizer)

        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""
    ) in text
    assert "        scaler.step(optimizer)\n        scaler.update()\n" in text


def test_float16_keeps_the_scaler_in_the_checkpoint(write):
    source = (
        LOOP.replace(
            "for images",
            """\
if resume:
    checkpoint = torch.load('last.pt')
    model.load_state_dict(checkpoint['model'])
    optimizer.load_state_dict(checkpoint['optimizer'])
for images""",
        )
        + """\
    torch.save({
        'model': model.state_dict(),
        'optimizer': optimizer.state_dict(),
    }, 'last.pt')
"""
    )
    text = float16(write(source, ["amp float16"], device="cuda"))
    assert "        'scaler': scaler.state_dict(),\n    }, 'last.pt')" in text
    assert (
        "    if 'scaler' in checkpoint:\n        scaler.load_state_dict(checkpoint['scaler'])\n"
    ) in text


@pytest.mark.parametrize(
    "best, times",
    [
        (
            "save({'optimizer': optimizer.state_dict(), 'old': optimizer.state_dict()}, 'best.pt')",
            2,
        ),
        ("kept = optimizer.state_dict()", 1),
        ("keep(optimizer=optimizer.state_dict())", 1),  # it may take no other keyword
    ],
)
def test_float16_keeps_the_scaler_in_each_checkpoint(write, best, times):
    source = (
        f"{LOOP}    if best:\n        {best}\n    save(dict(optimizer=optimizer.state_dict()))\n"
    )
    text = float16(write(source, ["amp float16"], device="cuda"))
    assert text.count("scaler.state_dict()") == times
    assert "save(dict(optimizer=optimizer.state_dict(), scaler=scaler.state_dict()))" in text


def test_float16_loads_the_scaler_with_each_checkpoint(write):
    line = "optimizer.load_state_dict(saved['opt'])"
    source = LOOP.replace("loader = ", f"if resume:\n    {line}\n    {line}\nloader = ")
    source += f"    if is_worse:\n        if again:\n            {line}\n"
    text = float16(write(source, ["amp float16"], device="cuda"))
    assert text.count("scaler.load_state_dict(saved['scaler'])") == 2


GAN = """\
import torch
from torch import nn
G, D = None, None
G = nn.Linear(2, 2)
D = nn.Linear(2, 2)
opt_G = torch.optim.Adam(G.parameters())
opt_D = torch.optim.Adam(D.parameters())
for real in data:
    fake = G(real)
    loss_D = D(fake.detach()).mean()
    loss_D.backward()
    opt_D.step()
    loss_G = D(fake).mean()
    loss_G.backward()
    opt_G.step()
"""


def test_float16_of_two_optimizers_updates_after_each(write):
    text = float16(
        write(GAN, ["amp float16"], device="cuda", models=("G", "D"), optimizers=("opt_G", "opt_D"))
    )
    assert text.count("scaler.update()") == 2 and text.count("GradScaler(") == 1
    assert "    scaler.step(opt_D)\n    scaler.update()\n" in text


def test_float16_of_two_optimizers_that_step_together_updates_once(write):
    source = GAN.replace("    opt_D.step()\n", "").replace(
        "    opt_G.step()\n", "    opt_D.step()\n    opt_G.step()\n"
    )
    text = float16(
        write(
            source, ["amp float16"], device="cuda", models=("G", "D"), optimizers=("opt_G", "opt_D")
        )
    )
    assert text.count("scaler.update()") == 1
    assert text.endswith("    scaler.step(opt_G)\n    scaler.update()\n")


def test_float16_of_a_step_in_a_function_makes_the_scaler_at_the_top(write):
    body = LOOP[LOOP.index("for images") :].replace(
        "for images, labels in loader:\n", "def step(images, labels):\n"
    )
    source = LOOP[: LOOP.index("for images")] + body
    text = float16(write(source, ["amp float16"], device="cuda"))
    assert "DataLoader\n\n# new #\n# small gradients would become zero in float16" in text


def test_float16_scales_what_did_not_run_yet(write):
    """A penalty of each 100th step, and clipping by an option, are below no hook as yet."""
    source = LOOP.replace(
        "    optimizer.step()\n",
        """\
    if number % 100 == 0:
        penalty(model).backward()
    if args.clip:
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
""",
    )
    lines = [
        "penalty(model).backward()",
        "nn.utils.clip_grad_norm_(model.parameters(), args.clip)",
    ]
    text = float16(write(source, ["amp float16"], device="cuda", unseen=lines))
    assert "        scaler.scale(penalty(model)).backward()\n" in text
    assert "        scaler.unscale_(optimizer)\n\n        nn.utils.clip_grad_norm_(" in text


def test_float16_with_an_optimizer_that_starts_later_is_not_written(write):
    unseen = ["loss_G.backward()", "opt_G.step()"]
    about = dict(device="cuda", models=("G", "D"), optimizers=("opt_G", "opt_D"), unseen=unseen)
    made = write(GAN, ["amp float16"], **about)
    assert not made.files and "which optimizer" in made.reasons["amp float16"]


def test_float16_of_a_step_below_the_loop_is_not_written(write):
    """It takes what is left of accumulated gradients, and did not run yet."""
    source = LOOP + "optimizer.step()  # the rest\n"
    unseen = ["optimizer.step()  # the rest"]
    made = write(source, ["amp float16"], device="cuda", unseen=unseen)
    assert not made.files and "steps again" in made.reasons["amp float16"]


@pytest.mark.parametrize(
    "name, line, why",
    [
        ("clip", "model.weight.grad.clamp_(-1, 1)", "reads gradients"),
        ("clip", "nn.utils.clip_grad_norm_(model.parameters(), 1)", "did not run yet"),
        ("clip", "penalty(model).backward()", "did not run yet"),
        ("clip", "return torch.autograd.grad(model(x).sum(), x)", "calls autograd.grad"),
        ("other", "model.weight.grad.clamp_(-1, 1)", ""),
    ],
)
def test_float16_where_a_function_has_to_do_with_gradients(write, name, line, why):
    body = textwrap.indent(LOOP[LOOP.index("for images") :], "    ").replace(
        "        optimizer.step()\n", "        clip(model)\n        optimizer.step()\n"
    )
    functions = f"def {name}(model):\n    {line}\ndef main():\n{body}main()\n"
    source = LOOP[: LOOP.index("for images")] + functions
    made = write(source, ["amp float16"], device="cuda", unseen=[line])
    assert made.files if not why else why in made.reasons["amp float16"]


@pytest.mark.parametrize(
    "old, new, why",
    [
        (
            "    optimizer.step()\n",
            "    g = model.weight.grad\n    optimizer.step()\n",
            "reads gradients",
        ),
        (
            "    optimizer.step()\n",
            "    optimizer.step(lambda: loss)\n",
            "gives step.. an argument",
        ),
        (
            "    optimizer.step()\n",
            "    x = model.weight.grad.norm()\n    optimizer.step()\n",
            "reads gradients",
        ),
        (
            "    optimizer.step()\n",
            "    torch.autograd.grad(loss, w)\n    optimizer.step()\n",
            "autograd.grad",
        ),
        ("    loss.backward()\n", "    torch.autograd.backward(loss)\n", "autograd.backward"),
        ("    loss.backward()\n", "    engine.backward(loss)\n", r"gives backward\(\) an argument"),
        ("    loss.backward()\n", "    x = loss.backward()\n", "part of another statement"),
        ("loader = ", "scaler = StandardScaler()\nloader = ", "variable called scaler"),
        ("backward()\n    optimizer", "backward(); optimizer", "shares its line with another"),
    ],
)
def test_float16_that_is_not_safe_is_not_written(write, old, new, why):
    made = write(LOOP.replace(old, new), ["amp float16"], device="cuda")
    assert not made.files and re.search(why, made.reasons["amp float16"]), made.reasons


# ------------------------------------------------------------------------- layout and compile
def test_two_models_that_one_line_calls_and_one_of_them_is_optional(tmp_path, monkeypatch):
    """Such are the coarse and the fine model of a NeRF; without the fine one it is None."""
    source = """\
import torch
def train(with_fine):
    coarse = torch.nn.Conv2d(3, 4, 1)
    weights = [*coarse.parameters()]
    fine = None
    if with_fine:
        fine = torch.nn.Conv2d(3, 4, 1)
        weights += fine.parameters()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for _ in range(2):
        loss = 0
        for net in (coarse, fine) if fine else (coarse,):
            loss = loss + sum(net(part).mean() for part in torch.rand(2, 1, 3, 4, 4))
        loss.backward()
        optimizer.step()
train(True)
"""
    monkeypatch.chdir(tmp_path)
    watched = Watched(tmp_path, monkeypatch)
    facts = watched.run(source)
    watched.hook.remove()
    made = patch.make(facts, ["amp bfloat16", "channels_last", "compile"], {}, tmp_path)
    assert not made.reasons
    text = text_of(made)
    assert text.count(".float()") == text.count("net)(part.to(memory_format=") == 1
    assert "    weights += fine" in text.split("fine.compile()")[1]
    changed = text.replace("train(True)", "train(False)").replace("coarse.compile()", "pass")
    exec(changed, {"__name__": "train"})  # without the fine model
    assert "likewise" not in advice.write("amp bfloat16", facts)


def test_channels_last_of_model_and_images(write):
    text = only(write(LOOP, ["channels_last"]), "channels_last")
    assert blocks_of(text) == [
        "# convolutions are faster in this layout, which images get as well\n"
        "model.to(memory_format=torch.channels_last)",
        "# images get the same layout as the weights\n"
        "output = model(images.to(memory_format=torch.channels_last))",
    ]
    text = only(write(LOOP, ["channels_last"], images=()), "channels_last")  # uint8 images
    assert blocks_of(text) == [
        "# convolutions are faster in this layout\nmodel.to(memory_format=torch.channels_last)"
    ]


def test_channels_last_of_an_expression_and_a_keyword(write):
    source = LOOP.replace("model(images)", "model(images - 1, mask=images)")
    text = only(write(source, ["channels_last"], images=(0, "mask")), "channels_last")
    assert (
        "model((images - 1).to(memory_format=torch.channels_last), "
        "mask=images.to(memory_format=torch.channels_last))"
    ) in text


def test_channels_last_where_to_may_fail_goes_weight_by_weight(write):
    text = only(write(LOOP, ["channels_last"], own_to=True), "channels_last")
    assert "\nfor weights in model.parameters():\n    if weights.dim() == 4:\n" in text


DDP = """\
import torch as th
from torch import nn

def main(args):
    model = nn.Conv2d(3, 8, 3)
    if args.distributed:
        if args.gpu:
            model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
        else:
            model = nn.parallel.DistributedDataParallel(model)
    else:
        model.to(device)

    if args.adam:
        optimizer = th.optim.Adam(model.parameters())
    for images in loader:
        loss = model(images).mean()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "name, line",
    [
        ("compile", "model.compile()"),
        ("compile reduce-overhead", 'model.compile(mode="reduce-overhead")'),
        ("channels_last", "model.to(memory_format=th.channels_last)"),
    ],
)
def test_a_model_is_changed_before_ddp_in_all_branches(write, name, line):
    """Also if this run has no DDP, and the optimizer is made in one branch."""
    text = only(write(DDP, [name]), name)
    before, after = text.split(f"    {line}\n")
    assert before.endswith(
        "nn.Conv2d(3, 8, 3)\n    # new #\n    " + before.splitlines()[-1].strip() + "\n"
    )
    assert after.startswith("\n    if args.distributed:")


def test_compile_stands_below_the_last_change_of_a_model(write):
    source = LOOP.replace("loader = ", "model = nn.Sequential(model, nn.Flatten())\nloader = ")
    text = only(write(source, ["compile"]), "compile")
    assert "nn.Flatten())\n# new #\n# layers are fused" in text


@pytest.mark.parametrize(
    "line, is_written",
    [
        ("writer.add_graph(model, images)", False),
        ("traced = torch.jit.trace(model, images)", False),
        ("print(FlopCountAnalysis(model, images).total())", False),
        ("torch.onnx.export(model, (images,), 'model.onnx')", False),
        ("torch.onnx.export(model, (images,), 'model.onnx', dynamo=True)", True),
        ("torch.onnx.export(model, (images,), 'model.onnx')  # torch 2.10", True),
        ("torch.onnx.export(model, (images,), 'model.onnx', dynamo=False)  # torch 2.10", False),
        ("scripted = torch.jit.script(model)", True),
        ("found.trace(model)", True),
        ("from torch.jit import trace as draw; draw(model, images)", False),
        ("import fvcore.nn as fv; fv.flop_count(model, images)", False),
        ("flop_count(model, images)", True),
        ("torch.onnx.export(model, (images,), 'model.onnx', **options)  # torch 2.10", False),
    ],
)
def test_a_model_that_is_traced_is_not_compiled(write, line, is_written):
    """torch.jit.trace refuses a compiled model, also in TensorBoard's graph."""
    version = "2.10.0+cu130" if line.endswith("# torch 2.10") else "2.8.0"
    made = write(LOOP + line + "\n", ["compile"], version=version)
    assert (made.written == ("compile",)) == is_written
    assert is_written or made.reasons["compile"].startswith("train.py:15 traces a model, which")


TRACED = LOOP.replace("loader = ", "if args.graph:\n    writer.add_graph(model, images)\nloader = ")


@pytest.mark.parametrize("call", ["writer.add_graph", "draw"])  # draw may be a package's
def test_compile_stands_below_a_line_that_traces_before_the_training(write, call):
    source = TRACED.replace("writer.add_graph", call)
    text = only(write(source, ["compile"], traces=[(9, True)]), "compile")
    assert f"    {call}(model, images)\n# new #\n# layers are" in text


def test_compile_stands_below_a_count_of_fvcore(write):
    """Its object traces the model where it is asked, which is not where it is made."""
    made = "flops = FlopCountAnalysis(model, images)\n"
    source = LOOP.replace("loader = ", f"{made}print(flops.total())\nloader = ")
    text = only(write(source, ["compile"], traces=[(9, True)]), "compile")
    assert f"{made}print(flops.total())\n# new #" in text


def test_compile_stands_between_a_trace_and_ddp(write):
    source = LOOP.replace("loader = ", "net = DDP(model)\nloader = ")
    source = source.replace("= model(images)", "= net(images)")
    ddp, trace = dict(at="train.py:8", text=""), "writer.add_graph(model, images)\n"
    about = dict(models=["net"], bare="model", is_wrapped=True)
    early = source.replace("optimizer = ", f"{trace}optimizer = ", 1)
    text = only(
        write(early, ["compile"], traces=[(7, True)], before=ddp | dict(at="train.py:9"), **about),
        "compile",
    )
    assert f"{trace}optimizer = " in text and "model.compile()\n\nnet = DDP(model)" in text
    late = source.replace("loader = ", f"{trace}loader = ", 1)
    made = write(late, ["compile"], traces=[(9, True)], before=ddp, **about)
    assert made.reasons["compile"].startswith("train.py:9 traces a model, which fails")


@pytest.mark.parametrize(
    "source, traces, at",
    [
        (TRACED, (), 9),  # it has not been seen
        (TRACED, [(9, False)], 9),
        (TRACED + "writer.add_graph(model, images)\n", [(9, True)], 17),  # nor has the last one
        (TRACED.replace("if args.graph", "for each in loaders"), [(9, True)], 9),
        (
            LOOP.replace(
                "import torch\n", "import torch\ndef graph():\n    add_graph(model)\n", 1
            ).replace("loader = ", "graph()\nloader = "),
            [(3, True)],
            3,
        ),  # it may be called again
        (
            LOOP.replace(
                "import torch\n", "import torch\ndef graph():\n    add_graph(model)\n", 1
            ).replace("loader = ", "graph()\nwriter.add_graph(model, images)\nloader = "),
            [(3, True), (11, True)],
            3,
        ),
        (LOOP + "    draw(model)\n", [(15, False)], 15),  # a function of a package
        (
            LOOP.replace("optimizer =", "if 1:\n    add_graph(model)\noptimizer =", 1)
            .replace("\noptimizer", "\n    optimizer")
            .replace("\nloader", "\n    loader")
            .replace("\nfor", "\n    for")
            .replace("labels in loader:\n    output", "labels in loader:\n        output")
            .replace("\n    loss", "\n        loss")
            .replace("\n    optimizer.", "\n        optimizer."),
            [(8, True)],
            8,
        ),  # the training is in the same branch
    ],
)
def test_compile_is_not_written_where_a_trace_may_come_later(write, source, traces, at):
    made = write(source, ["compile"], traces=traces)
    assert made.reasons["compile"].startswith(f"train.py:{at} traces a model, which fails")


def test_a_compiled_model_is_scripted_and_not_traced():
    """As in the test above; if this changes, so may `traces` in whatif/techniques/compile.py."""
    model, images, trace = torch.nn.Linear(2, 2), torch.ones(1, 2), torch.jit.trace
    model.compile(backend="eager")
    assert torch.jit.script(model)(images).shape == (1, 2)
    with pytest.raises(RuntimeError, match="torch.jit.trace"):
        trace(model, images)  # written so, since another test takes this file for a user's


def test_a_model_that_is_made_in_a_loop_is_not_compiled(write):
    source = LOOP.replace("optimizer = ", "for fold in folds:\n    optimizer = ")
    assert "is in a loop" in write(source, ["compile"]).reasons["compile"]


@pytest.mark.parametrize("technique", ["compile", "channels_last"])
def test_a_function_that_makes_two_models_is_changed_once(write, technique):
    source = GAN.replace(
        "G, D = None, None\n", "def make():\n    net = nn.Linear(2, 2)\n    return net\n"
    )
    about = dict(models=("G", "D"), optimizers=("opt_G", "opt_D"), images=())
    text = only(
        write(source, [technique], name="net", above=dict(at="train.py:5"), **about), technique
    )
    assert len(blocks_of(text)) == 1 and "    return net\n" in text


def test_a_frozen_model_is_compiled_below_its_line(write):
    source = LOOP.replace("optimizer = ", "teacher = nn.Linear(2, 2)\noptimizer = ").replace(
        "    output = model(images)\n", "    output = model(images)\n    t = teacher(images)\n"
    )
    made = write(source, ["compile"], models=("model", "teacher"), above=None)
    assert "teacher = nn.Linear(2, 2)\n# new #" in only(made, "compile")


def test_a_frozen_model_is_compiled_before_its_wrapper(write):
    source = LOOP.replace(
        "optimizer = ",
        "teacher = Net().to('cpu')\nif parallel:\n    teacher = nn.DataParallel(teacher)\noptimizer = ",
    ).replace(
        "    output = model(images)\n", "    output = model(images)\n    t = teacher(images)\n"
    )
    made = write(source, ["compile"], models=("model", "teacher"), above=None)
    assert "teacher = Net().to('cpu')\n# new #" in only(made, "compile")


@pytest.mark.parametrize(
    "branches, wanted",
    [
        ("    use(extra)\n", "    extra = Net()\n    # new #"),  # in its branch
        ("    use(extra)\nprint(extra)\n", "print(extra)\n# new #"),
        ("else:\n    extra = Net()\n", "else:\n    extra = Net()\n# new #"),
        ("else:\n    sys.exit(1)\n", "    sys.exit(1)\n# new #"),
        ("elif other:\n    extra = Net()\n", ""),
        # names of functions and classes are their own
        ("def build():\n    extra = Net()\n", "    extra = Net()\n    # new #"),
        ("match kind:\n    case 1:\n        extra = Net()\n", ""),
        ("else:\n    assert False, hint\n", "False, hint\n# new #"),
        ("if more:\n    extra = Net()\nprint(extra if more else 0)\n", ""),
        ("try:\n    extra = Net()\nexcept OSError:\n    pass\n", ""),
    ],
)
def test_a_model_that_some_runs_do_not_make(write, branches, wanted):
    """The optimizer's line, above which models are changed, comes in all runs."""
    source = LOOP.replace("optimizer = ", f"if hint:\n    extra = Net()\n{branches}optimizer = ")
    source = source.replace("    loss = ", "    if hint:\n        t = extra(images)\n    loss = ")
    above = dict(at=f"train.py:{source.splitlines().index(SGD) + 1}")
    made = write(source, ["compile"], models=("model", "extra"), above=above)
    if wanted:
        assert wanted in only(made, "compile").partition("extra.compile()")[0]
    else:
        assert made.reasons == {"compile": "extra is not made in each run of train.py"}


# ------------------------------------------------------------------------ arguments of a call
@pytest.mark.parametrize(
    "old, new",
    [
        ("SGD(model.parameters(), lr=0.1)", "SGD(model.parameters(), lr=0.1, fused=True)"),
        (
            "SGD(model.parameters(), lr=0.1, foreach=True)",
            "SGD(model.parameters(), lr=0.1, fused=True)",
        ),
        (
            "SGD(model.parameters(), **options)",
            'SGD(model.parameters(), **{**options, "fused": True})',
        ),
        (
            "SGD(model.parameters(), lr=0.1, fused=False)",
            "SGD(model.parameters(), lr=0.1, fused=True)",
        ),
        ("SGD((model.parameters()))", "SGD((model.parameters()), fused=True)"),
        (
            "SGD(model.parameters(),  # all\n    lr=0.1)",
            "SGD(model.parameters(),  # all\n    lr=0.1, fused=True)",
        ),
        (
            "SGD(\n    model.parameters(),\n    lr=0.1,  # high\n)",
            "SGD(\n    model.parameters(),\n    lr=0.1,  # high\n    fused=True,\n)",
        ),
        ("SGD(model.parameters(), lr = 0.1)", "SGD(model.parameters(), lr = 0.1, fused = True)"),
        (
            "SGD(\n    model.parameters(),\n    lr=0.1  # high\n)",
            "SGD(\n    model.parameters(),\n    lr=0.1,  # high\n    fused=True\n)",
        ),
    ],
)
def test_fused_in_the_call_of_the_optimizer(write, old, new):
    text = only(write(LOOP.replace("SGD(model.parameters(), lr=0.1)", old), ["fused"]), "fused")
    assert f"# one kernel updates all weights\noptimizer = torch.optim.{new}\n" in text


@pytest.mark.parametrize("above", ["", "# %%\n"])
def test_a_block_stands_above_the_comment_of_a_statement(write, above):
    source = LOOP.replace("optimizer = ", f"{above}# all weights\noptimizer = ")
    text = text_of(write(source, ["fused", "compile"]))
    assert f"{above}# new #\n" in text and "\nmodel.compile()\n\n# all weights\n# new #\n" in text


def test_an_argument_is_not_aligned_far_to_the_right(write):
    kinds = f"dict(sgd=torch.optim.SGD, {'other' * 16}=0)['sgd']"
    source = LOOP.replace("torch.optim.SGD(", f"{kinds}(")
    text = text_of(write(source, ["fused"]))
    assert f"{kinds}(model.parameters(), lr=0.1,\n        fused=True)\n" in text


def test_a_diff_of_a_long_file_has_no_line_that_stays(write):
    source = LOOP.replace("(data, batch_size=8)", "(\n    data, batch_size=8\n)")
    made = write(source + "print(\n    1\n)\n" * 80, ["workers"])
    assert b"\n-    data, batch_size=8\n" in made.diff and b"\n-)" not in made.diff


@pytest.mark.parametrize(
    "line",
    [
        "optimizer.load_state_dict(torch.load('x'))",
        "parts[name].load_state_dict(torch.load('x'))",
        "optimizer.load_state_dict(torch.load('x').state_dict())",
        "[each.load_state_dict(one) for each, one in zip(parts, torch.load('x'))]",
        "each = parts[0]\neach.load_state_dict(torch.load('x'))",
        "each = make_adam(optimizer)\neach.load_state_dict(torch.load('x'))",
        "load = lambda part: part.load_state_dict(torch.load('x'))",
    ],
)
def test_fused_stays_on_after_a_checkpoint(write, line):
    """In the layout of the weights: a fused step of another one is silently wrong."""
    source = LOOP.replace("loader = ", f"{line}\nloader = ")
    text = only(write(source, ["fused"]), "fused")
    assert "\n\n# new #\n# a checkpoint from before" in text
    assert "\n@optimizer.register_load_state_dict_post_hook\ndef stay_fused(optimizer):\n" in text


@pytest.mark.parametrize(
    "line",
    [
        "model.load_state_dict(torch.load('x'))",
        "target.load_state_dict(model.state_dict())",
        "inception.load_state_dict(load_url('x'))",
    ],
)
def test_a_checkpoint_of_a_model_alone_needs_no_more(write, line):
    source = LOOP.replace("loader = ", f"{line}\nloader = ")
    assert "stay_fused" not in only(write(source, ["fused"]), "fused")


def test_a_checkpoint_of_an_optimizer_with_another_name_at_its_step(tmp_path):
    source = LOOP.replace("for images", "solver.load_state_dict(torch.load('x'))\nfor images")
    (tmp_path / "train.py").write_text(source)
    facts = Seen(source).facts
    facts["sites"]["steps"][0]["name"] = "solver.step"
    assert "stay_fused" in only(patch.make(facts, ["fused"], {}, tmp_path), "fused")


def test_fused_sgd_is_not_written_where_weights_train_later(tmp_path):
    source = LOOP.replace("lr=0.1)", "lr=0.1, momentum=0.9)")
    (tmp_path / "train.py").write_text(source)
    facts = Seen(source).facts
    facts["optimizers"][0]["has_idle"] = True
    made = patch.make(facts, ["fused"], {}, tmp_path)
    assert made.is_empty() and "first gradient later" in made.reasons["fused"]


def test_fused_with_float16_makes_momentum(write):
    source = LOOP.replace("lr=0.1)", "lr=0.1, momentum=0.9)")
    text = float16(write(source, ["amp float16", "fused"], device="cuda"))
    assert 'optimizer.state[weights]["momentum_buffer"] = torch.zeros_like(weights)' in text


def test_momentum_has_the_layout_that_weights_get_later(write):
    """In another layout a fused step is right, but its checkpoint has the wrong momentum."""
    source = LOOP.replace("lr=0.1)", "lr=0.1, momentum=0.9)").replace(
        "for images, labels in loader:\n    output = model(images)",
        "net = nn.Sequential(model)\nfor images, labels in loader:\n    output = net(images)",
    )
    made = write(source, ["amp float16", "channels_last", "fused"], models=("net",))
    assert made.written == ("amp float16", "channels_last", "fused"), made.reasons
    text = text_of(made).replace("DataLoader(data, batch_size=8)", "[]")
    found = {}
    exec(text.replace("scaler = ", "scaler = 0 and "), found)
    model, optimizer = found["model"], found["optimizer"]
    assert text.index("make_momentum") < text.index("channels_last")
    model(torch.randn(2, 3, 9, 9)).square().mean().backward()
    optimizer.step()
    for weights in model.parameters():
        state = optimizer.state[weights]
        assert state["momentum_buffer"].stride() == weights.stride()
        assert torch.equal(state["momentum_buffer"], weights.grad)


def test_fused_makes_momentum_only_beside_a_scaler(tmp_path):
    """A scaler of the script's own may skip the first step; a refused one is not there."""
    source = LOOP.replace("lr=0.1)", "lr=0.1, momentum=0.9)")
    (tmp_path / "train.py").write_text(source)
    facts = Seen(source, device="cuda").facts
    for has_scaler in True, False:
        made = patch.make(facts | dict(has_scaler=has_scaler), ["fused"], {}, tmp_path)
        assert ("momentum_buffer" in only(made, "fused")) == has_scaler
    facts["optimizers"][0]["dampening"] = True
    made = patch.make(facts | dict(has_scaler=True), ["fused"], {}, tmp_path)
    assert made.is_empty() and "dampening" in made.reasons["fused"]

    source = source.replace("loss.backward()", "loss.backward(); scaler = 1")
    (tmp_path / "train.py").write_text(source)
    made = patch.make(Seen(source, device="cuda").facts, ["amp float16", "fused"], {}, tmp_path)
    assert made.written == ("fused",) and "scaler" in made.reasons["amp float16"]
    assert "momentum_buffer" not in text_of(made)


@pytest.mark.parametrize(
    "old, new",
    [
        (
            "DataLoader(data, batch_size=8)",
            "DataLoader(data, batch_size=8, num_workers=2, persistent_workers=True)",
        ),
        (
            "DataLoader(data, 8, True, None, None, 1)",
            "DataLoader(data, 8, True, None, None, 2, persistent_workers=True)",
        ),
        (
            "DataLoader(data, num_workers=0, batch_size=8)",
            "DataLoader(data, num_workers=2, batch_size=8, persistent_workers=True)",
        ),
        (
            "DataLoader(data, **options)",
            'DataLoader(data, **{**options, "num_workers": 2, "persistent_workers": True})',
        ),
        (
            "DataLoader(\n    data,\n    batch_size=8,\n)",
            "DataLoader(\n    data,\n    batch_size=8,\n    num_workers=2,\n    persistent_workers=True,\n"
            ")",
        ),
    ],
)
def test_workers_in_the_call_of_the_loader(write, old, new):
    text = only(write(LOOP.replace("DataLoader(data, batch_size=8)", old), ["workers"]), "workers")
    assert f"loader = {new}\n" in text


@pytest.mark.parametrize(
    "line", ["import torch.optim as optim", "from torch import optim", "from models import *"]
)
def test_a_setting_in_a_file_without_the_name_of_torch(write, line):
    source = LOOP.replace("import torch\n", f"{line}\n", 1).replace("torch.optim.", "optim.")
    if "*" in line:
        source = "".join(each for each in source.splitlines(True) if "from torch" not in each)
    text = only(write(source, ["tf32"]), "tf32")
    assert text.index("import torch\n") < text.index('torch.set_float32_matmul_precision("high")')


@pytest.mark.parametrize("number", ["count", "args.workers", "int(count)", "(n // 2)"])
def test_workers_that_another_run_may_not_have(write, number):
    """DataLoader refuses persistent_workers=True without workers."""
    call = f"DataLoader(data, batch_size=8, num_workers={number}"
    text = only(write(LOOP.replace("DataLoader(data, batch_size=8", call), ["workers"]), "workers")
    assert f"persistent_workers={number} > 0)\n" in text


def test_workers_on_a_gpu_pin_memory(write):
    text = only(write(LOOP, ["workers"], device="cuda"), "workers")
    assert "persistent_workers=True, pin_memory=True)" in text


def test_a_line_that_would_be_too_long_is_broken(write):
    call = "DataLoader(data, batch_size=8, collate_fn=put_together, generator=torch.Generator())"
    text = only(write(LOOP.replace("DataLoader(data, batch_size=8)", call), ["workers"]), "workers")
    assert (
        f"loader = {call[:-1]},\n                    num_workers=2, persistent_workers=True)\n"
    ) in text


# ---------------------------------------------------------------------------------- the top
def test_settings_stand_below_the_imports(write):
    made = write(LOOP, ["cudnn", "tf32"], device="cuda")
    assert text_of(made).startswith(
        LOOP[: LOOP.index("\nmodel")]
        + """
# new #
# cuDNN tries its algorithms on each new shape and keeps the fastest
torch.backends.cudnn.benchmark = True

# new #
# products of float32 matrices use TensorFloat-32
torch.set_float32_matmul_precision("high")

model = nn"""
    )


def test_torch_is_imported_where_it_is_not(write):
    source = LOOP.replace("import torch\n", "from torch.optim import SGD\n", 1).replace(
        "torch.optim.SGD", "SGD"
    )
    text = only(write(source, ["amp bfloat16"]), "amp bfloat16")
    assert "import DataLoader\n# new #\n# the lines below need it\nimport torch\n" in text


# --------------------------------------------------------------------------- kinds of files
def test_tabs_stay_tabs(write):
    text = only(write(LOOP.replace("    ", "\t"), ["amp bfloat16"]), "amp bfloat16")
    assert "\t# new #\n" in text and "\t\toutput = model(images)\n\toutput = output.fl" in text
    source = LOOP.replace("model = ", "if True:\n\tprint()\nmodel = ")  # tabs elsewhere
    assert AUTOCAST in only(write(source, ["amp bfloat16"]), "amp bfloat16")
    assert "    " not in text


def test_two_spaces_stay_two(write):
    text = only(write(LOOP.replace("    ", "  "), ["amp bfloat16"]), "amp bfloat16")
    assert "\n    output = model(images)\n  output = output.float()\n" in text


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.rstrip("\n").encode(),
        lambda text: text.replace("    loss.", "\x0c\n    loss.").encode(),
        lambda text: ("# coding: latin-1\nname = 'é'\n" + text).encode("latin-1"),
        lambda text: text.replace(
            "import torch\n", "import torch\nlong = '" + 300 * "x" + "'\n"
        ).encode(),
    ],
    ids=["crlf", "bom", "no-newline-at-the-end", "form-feed", "latin-1", "long-line"],
)
def test_patches_apply_to_the_byte(write, change, tmp_path):
    """Once, with git apply and with patch -p1; the second time each says so."""
    text = change(LOOP)
    encoding = "latin-1" if b"latin-1" in text else "utf-8"
    made = write(text, ALL, encoding=encoding)
    assert not made.reasons, made.reasons
    new = next(iter(made.files.values()))
    assert (b"\r\n" in text) == (b"\r\n" in new) and new.count(b"\r") in (0, new.count(b"\n"))
    file = tmp_path / "fast.patch"
    file.write_bytes(made.diff)
    for command, told in (
        (["patch", "-p1", "-N", "-i", file], "previously applied"),
        (["git", "apply", file], "does not apply"),
    ):
        (tmp_path / "train.py").write_bytes(text)
        done = run(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / "train.py").read_bytes() == new
        again = run(*command, cwd=tmp_path)
        assert again.returncode and told in again.stdout + again.stderr
    assert (tmp_path / "train.py").read_bytes() == new


NOTEBOOK = """\
#!/usr/bin/env python
# coding: utf-8

# In[1]:


import torch
from torch import nn


# # Training
#
# In[2]:


from torch.utils.data import DataLoader
get_ipython().system('nvidia-smi')
""" + LOOP.split("DataLoader\n", 1)[1].replace("for images", "\n# In[ ]:\n\n\nfor images")


def test_an_exported_notebook(write):
    made = write(NOTEBOOK, ALL)
    assert not made.reasons and "# In[ ]:\n\n\nfor images" in text_of(made)
    assert "import DataLoader\n\n# new #\n# cuDNN" in text_of(made)


def test_a_line_of_more_than_200_columns_keeps_its_length(write):
    call = f"DataLoader(data, batch_size=8, collate_fn={200 * 'c'})"
    text = only(write(LOOP.replace("DataLoader(data, batch_size=8)", call), ["workers"]), "workers")
    assert f"loader = {call[:-1]},\n" in text


def test_decorated_functions(write):
    body = LOOP[LOOP.index("for images") :].replace(
        "for images, labels in loader:\n", "@timed\ndef step(images, labels):\n"
    )
    source = (
        LOOP[: LOOP.index("for images")].replace(
            "optimizer = ", "@once\ndef f():\n    pass\noptimizer = "
        )
        + body
    )
    made = write(source, ALL)
    assert not made.reasons and "    pass\n# new #\n# convolutions are" in text_of(made)
    assert "@timed\ndef step(images, labels):\n    # new #" in text_of(made)


def test_code_of_exec_is_not_changed(write):
    facts = Seen(LOOP).facts
    for each in (*facts["models"], *facts["models"][0]["spots"], *facts["optimizers"]):
        each["at"] = "<string>:10"
    facts["models"][0]["above"] = dict(at="<string>:7", text="")
    made = patch.make(facts, ["amp bfloat16", "compile", "fused"], {}, ".")
    assert made.is_empty() and all("<string>" in why for why in made.reasons.values())


def test_installed_packages_are_not_changed(tmp_path):
    inside = tmp_path / "venv/lib/python3/site-packages/train.py"
    inside.parent.mkdir(parents=True)
    inside.write_text(LOOP)
    made = patch.make(Seen(LOOP, file=str(inside)).facts, ["amp bfloat16"], {}, tmp_path)
    assert made.is_empty() and "an installed package" in made.reasons["amp bfloat16"]


# ----------------------------------------------------------------------------- twice, and all
def test_all_techniques_together_are_python_with_marked_blocks(write):
    text = text_of(write(LOOP, ALL))
    assert len(blocks_of(text)) == text.count(MARK) == 7
    assert all(
        block.startswith("# ") and not block.splitlines()[-1].startswith("#")
        for block in blocks_of(text)
    )
    kept = [
        line
        for line in LOOP.splitlines()
        if line.strip() in [each.strip() for each in text.splitlines()]
    ]
    assert len(kept) == len(LOOP.splitlines()) - 3  # a loader, an optimizer, a call with images


@pytest.mark.parametrize("line", ["import torch", "import torch as th"])
def test_what_is_there_is_not_written_again(write, line):
    source = LOOP.replace("import torch", line, 1)
    new = text_of(write(source, ["amp bfloat16", "compile", "channels_last"]))
    made = write(new, ["amp bfloat16", "compile", "channels_last"])
    assert made.is_empty() and {*made.reasons.values()} == {"already there"}


def test_options_of_the_script_take_the_place_of_lines(write, tmp_path):
    write(LOOP, ["amp bfloat16"])
    facts = Seen(LOOP).facts | dict(options=[AMP_OPTION])
    made = patch.make(facts, ["amp bfloat16", "fused"], {}, tmp_path)
    assert made.options == {"amp bfloat16": ["--amp"]} and made.written == ("fused",)
    command = ["python", "train.py", "--epochs", "3"]
    assert patch.new_command(command, "script", made, [AMP_OPTION]) == [*command, "--amp"]


def test_a_setting_takes_the_place_of_an_earlier_one():
    arguments, words = ["--dtype=float32", "--dtype", "x", "--lr=0.1"], ["--dtype=bfloat16"]
    for style, kept in (("--key=value", arguments[1:]), ("flag", arguments)):  # others may add up
        option = dict(flags=["--dtype"], style=style, front=False)
        assert scriptoptions.add_words(arguments, words, [option]) == [*kept, *words]


# ------------------------------------------------------------------------------ extra lines
def test_copies_and_sums_of_a_gpu(write):
    source = (
        LOOP.replace(
            "for images, labels in loader:\n",
            """\
total = 0.0
for images, labels in loader:
    images, labels = images.to(device), labels.cuda()
""",
        )
        + "    total += loss.item() * len(images)\nprint(total / 10)\n"
    )
    assert write(source, ["fused"], extras.NAMES, device="cuda").extras == ("sums",)  # not pinned
    made = write(source, ["fused", "workers"], extras.NAMES, device="cuda")
    assert made.extras == ("non_blocking", "sums")
    assert (
        "    images, labels = images.to(device, non_blocking=True), "
        "labels.cuda(non_blocking=True)\n"
    ) in text_of(made)
    assert "    total += loss.detach().double() * len(images)\n" in text_of(made)
    assert "\n# one copy to the host for all steps\ntotal = float(total)\n\nprint" in text_of(made)


def test_several_copies_in_a_long_line_are_not_broken(write):
    line = "    images, labels, more = images.to(the_device), labels.to(the_device), more.to(the_device)\n"
    source = LOOP.replace("for images, labels in", "for images, labels, more in").replace(
        "    output = ", f"{line}    output = "
    )
    made = write(source, ["workers"], ["non_blocking"], device="cuda")
    found = [each for each in text_of(made).splitlines() if "non_blocking" in each]
    assert len(found) == 1 and found[0].count("(the_device, non_blocking=True)") == 3


def test_what_is_computed_from_a_batch_is_not_pinned(write):
    source = LOOP.replace(
        "    output = ",
        "    images = torch.cat(images)\n    images = images.to(device)\n    output = ",
    )
    made = write(source, ["workers"], ["non_blocking"], device="cuda")
    assert made.written and not made.extras


@pytest.mark.parametrize("given, is_written", [("device", False), ("device, **rest", True)])
def test_a_batch_may_have_a_copy_of_its_own(write, given, is_written):
    """As DETR's NestedTensor, whose to() takes a device and no more."""
    own = f"class Batch:\n    def to(self, {given}):\n        return self\n\nmodel = "
    source = LOOP.replace("    output = ", "    images = images.to(device)\n    output = ")
    made = write(source.replace("model = ", own, 1), ["workers"], ["non_blocking"], device="cuda")
    assert made.written and bool(made.extras) == is_written


@pytest.mark.parametrize("line", ["if total > 3: break", "history.append(total)"])
def test_a_sum_that_is_used_in_the_loop_stays(write, line):
    source = LOOP.replace("for images, ", "total = 0\nfor images, ") + (
        f"    total += loss.item()\n    {line}\n"
    )
    assert write(source, ["fused"], ["sums"], device="cuda").extras == ()


# -------------------------------------------------------------------------- where it applies
def git(*words, cwd):
    return run("git", "-c", "user.name=x", "-c", "user.email=x", *words, cwd=cwd)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder in a git repository, with a change that is not committed."""
    folder = tmp_path / "repository" / "training"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text(LOOP)
    for words in ["init", "-q"], ["add", "."], ["commit", "-qm", "first"]:
        assert git(*words, cwd=folder.parent if words[0] == "init" else folder).returncode == 0
    (folder / "train.py").write_text(LOOP.replace("lr=0.1", "lr=0.2"))
    return folder


def test_a_repository_with_changes_that_are_not_committed(repository):
    text = (repository / "train.py").read_text()
    made = patch.make(Seen(text).facts, ["fused"], {}, repository)
    assert (repository / "train.py").read_text() == text
    (repository / "fast.patch").write_bytes(made.diff)
    command = patch.command_to_apply(made, "fast.patch", str(repository))
    assert command.startswith("git apply fast.patch ")
    done = run("bash", "-c", command, cwd=repository)
    assert done.returncode == 0, done.stderr
    assert (repository / "train.py").read_text() == text.replace(
        "optimizer =", "# new #\n# one kernel updates all weights\noptimizer ="
    ).replace("lr=0.2)\n", "lr=0.2, fused=True)\n\n")


def test_a_link_leads_to_its_file(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "code" / "real.py").write_text(LOOP)
    (tmp_path / "work" / "train.py").symlink_to("../code/real.py")
    monkeypatch.chdir(tmp_path / "work")
    made = patch.make(Seen(LOOP).facts, ["fused"], {}, tmp_path / "work")
    assert made.root == str(tmp_path / "code") and made.changed == ["real.py"]
    (tmp_path / "work" / "fast.patch").write_bytes(made.diff)
    command = patch.command_to_apply(made, "fast.patch", str(tmp_path / "work"))
    done = run("bash", "-c", command, cwd=tmp_path / "work")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "work" / "train.py").is_symlink()
    assert "fused=True" in (tmp_path / "code" / "real.py").read_text()


def test_a_read_only_folder_is_read_only(write, tmp_path):
    before = write(LOOP, ["fused"])
    os.chmod(tmp_path / "train.py", 0o444)
    os.chmod(tmp_path, 0o555)
    try:
        made = patch.make(Seen(LOOP).facts, ["fused"], {}, tmp_path)
    finally:
        os.chmod(tmp_path, 0o755)
    assert made.diff == before.diff and os.listdir(tmp_path) == ["train.py"]


def test_the_text_of_a_file_stays_while_a_technique_is_refused(write):
    """What a technique has written before it is refused is taken back."""
    made = write(
        LOOP, ["fused", "amp bfloat16"], spots=[dict(at="train.py:10", name="model", images=[]), {}]
    )
    assert made.written == ("fused",) and "autocast" not in text_of(made)


def test_no_line_of_the_original_changes_its_number(tmp_path):
    (tmp_path / "train.py").write_text(LOOP)
    source = sources.Source(str(tmp_path / "train.py"), "train.py")
    source.put_before(source.statement_at(7), ["first()", "second()"], "one")
    source.put_after(source.statement_at(7), ["third()"], "two")
    assert [line for line, origin in zip(source.lines, source.origins) if origin] == source.before


# ------------------------------------------------------------------ the own calls of a library
@pytest.mark.parametrize(
    "library, technique, old, new",
    [
        (
            "lightning",
            "amp bfloat16",
            "Trainer(max_epochs=3)",
            "Trainer(max_epochs=3, precision='bf16-mixed')",
        ),
        ("accelerate", "amp float16", "Accelerator()", "Accelerator(mixed_precision='fp16')"),
        (
            "accelerate",
            "compile",
            "Accelerator(log_with='all') if tracks else lib.Accelerator()",
            "Accelerator(log_with='all', dynamo_backend='inductor') if tracks else "
            "lib.Accelerator(dynamo_backend='inductor')",
        ),
        (
            "transformers",
            "workers",
            "TrainingArguments(bf16=True)",
            "TrainingArguments(bf16=True, dataloader_num_workers=2, dataloader_persistent_workers=True)",
        ),
        (
            "transformers",
            "amp bfloat16",
            "Seq2SeqTrainingArguments('out', bf16=False)",
            "Seq2SeqTrainingArguments('out', bf16=True, use_cpu=True)",
        ),
        (
            "trl",
            "compile",
            "SFTConfig(output_dir='out')",
            "SFTConfig(output_dir='out', torch_compile=True)",
        ),
    ],
)
def test_a_library_that_runs_the_loop_gets_an_argument(write, library, technique, old, new):
    source = LOOP.replace("loader = ", f"it = lib.{old}\ntexts = ['a', 'b', 'c']\nloader = ")
    text = only(write(source, [technique], driver=library), technique)
    assert f"# new #\n# {library} has this built in\nit = lib.{new}\n" in text


def test_two_calls_of_a_library_are_not_changed(write):
    source = LOOP.replace("loader = ", "a = Trainer()\nb = Trainer()\nloader = ")
    made = write(source, ["amp bfloat16"], driver="lightning")
    assert made.is_empty() and "lightning runs the loop" in made.reasons["amp bfloat16"]


def test_a_patch_of_several_files(write, tmp_path):
    write(LOOP, ["amp bfloat16"])
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "make.py").write_text(
        "import torch\n\n\ndef make(model):\n    return torch.optim.SGD(model.parameters())\n"
    )
    facts = Seen(LOOP).facts
    facts["optimizers"][0] |= dict(at="lib/make.py:5", name="")
    facts["optimizers"][0]["arguments"] |= dict(function="torch.optim.SGD")
    made = patch.make(facts, ["amp bfloat16", "fused"], {}, tmp_path)
    assert made.changed == ["lib/make.py", "train.py"] and not made.reasons
    (tmp_path / "fast.patch").write_bytes(made.diff)
    assert run("git", "apply", "fast.patch", cwd=tmp_path).returncode == 0
    assert (
        "    return torch.optim.SGD(model.parameters(), fused=True)\n"
        in (tmp_path / "lib" / "make.py").read_text()
    )


# ------------------------------------------------------------- copies laid over the originals
SCRIPT = '''\
"""A script."""
import inspect, multiprocessing, os, sys
import helper
value = "original"
def tell(queue):
    queue.put([value, helper.value])
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=tell, args=(queue,))
    child.start()
    print([value, helper.value, *queue.get()], inspect.getsource(helper.f).strip())
    print(__file__, sys.argv[1:], os.path.basename(sys.path[0]), __doc__, os.path.exists("new.py"))
'''
HELPER = 'value = "original"\n\n\ndef f():\n    return "original"\n'
HOOK = """\
import sys
sys.path.insert(0, {root!r})
from whatif.write import overlay
sys.path.pop(0)
overlay.lay({files!r}, {starter!r})
"""


@pytest.mark.parametrize(
    "words",
    [["train.py", "a", "b"], ["-m", "train", "a", "b"], ["-u", "link.py", "a", "b"]],
    ids=["script", "module", "link"],
)
def test_copies_are_laid_over_a_script_and_its_modules(words, tmp_path):
    """The script, a module, a link to the script, and a process that it spawns get the copies."""
    folder, hook = tmp_path / "work", tmp_path / "hook"
    for each in folder, hook:
        each.mkdir()
    files = {}
    for name, text in ("train.py", SCRIPT), ("helper.py", HELPER):
        (folder / name).write_text(text)
        (hook / f"0-{name}").write_text(text.replace('"original"', '"changed"'))
        files[str(folder / name)] = str(hook / f"0-{name}")
    (folder / "link.py").symlink_to("train.py")
    (hook / "start.py").write_text(overlay.STARTER)
    (hook / "sitecustomize.py").write_text(
        HOOK.format(root=str(ROOT), files=files, starter=str(hook / "start.py"))
    )
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done = run(sys.executable, "-B", *words, cwd=folder, env={"PYTHONPATH": str(hook)})
    assert done.returncode == 0, done.stderr
    first, source, last = done.stdout.splitlines()
    assert first.startswith("['changed', 'changed', 'changed', 'changed'] def f():")
    assert source == '    return "changed"'
    name = words[1] if words[0] == "-u" else words[0]
    name = str(folder / "train.py") if name == "-m" else name
    assert last == f"{name} ['a', 'b'] work A script. False"
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.fault("fused or foreach of your own")
@pytest.mark.parametrize("kind, more", [("SGD", dict(momentum=0.9)), ("AdamW", {})])
def test_a_fused_step_after_an_old_checkpoint_is_right(kind, more):
    """The lines that are written, with a contiguous, unfused checkpoint and channels_last."""
    import torch

    from whatif.techniques import FOUND

    def make(is_new):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 8, 3)
        if is_new:
            model.to(memory_format=torch.channels_last)
        optimizer = getattr(torch.optim, kind)(model.parameters(), 0.1, fused=is_new, **more)
        if is_new:
            exec(
                FOUND["fused"].KEEP.format(name="optimizer", torch="torch"),
                dict(torch=torch, optimizer=optimizer),
            )
        return model, optimizer

    def train(model, optimizer, seed):
        for k in range(5):
            images = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(seed + k))
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()

    old, new = make(False), make(True)
    train(*old, 0)
    for one, other in zip(new, old, strict=True):
        one.load_state_dict(copy.deepcopy(other.state_dict()))
    assert new[1].param_groups[0]["fused"]
    for each in old, new:
        train(*each, 9)
    assert torch.allclose(old[0].weight, new[0].weight, atol=1e-5)


def test_blocks_of_two_models_in_one_statement_end_each(write):
    line = "    loss = loss_function(head(model(images)), labels)\n"
    text = LOOP.replace("optimizer =", "head = nn.Flatten()\noptimizer =", 1).replace(
        "    output = model(images)\n    loss = loss_function(output, labels)\n", line
    )
    new = only(write(text, ["amp bfloat16"], models=("model", "head")), "amp bfloat16")
    assert [each.splitlines()[2:] for each in blocks_of(new)] == [
        ["    output = model(images)"],
        ["    outputs = head(output.float())", "loss = loss_function(outputs.float(), labels)"],
    ]


@pytest.mark.parametrize(
    "line, new",
    [
        ("(loss / 2).backward()", "scaler.scale(loss / 2).backward()"),
        ("((loss) / 2).backward()", "scaler.scale((loss) / 2).backward()"),
        ("(loss / 2) .backward()", "(scaler.scale(loss / 2)) .backward()"),
        ("(loss\n     / 2).backward()", "scaler.scale(loss\n     / 2).backward()"),
        ("loss.mean().backward()", "scaler.scale(loss.mean()).backward()"),
    ],
)
def test_a_scaled_loss_has_no_parentheses_twice(write, line, new):
    text = LOOP.replace("loss.backward()", line)
    made = write(text, ["amp float16"], device="cuda")
    assert not made.reasons and f"    {new}\n" in text_of(made)


@pytest.mark.parametrize("quote", ["'", '"'])
def test_names_with_a_text_keep_their_quotes(write, quote):
    name = f"models[{quote}net{quote}]"
    text = LOOP.replace("model = ", f"models = {{}}\n{name} = ").replace("model(", f"{name}(")
    text = text.replace("model.", f"{name}.")
    made = write(text, ["compile", "channels_last"], models=("models['net']",))
    assert {*made.written} == {"compile", "channels_last"}
    new = text_of(made)
    assert f"{name}.to(memory_format=" in new and f"{name}.compile()" in new
