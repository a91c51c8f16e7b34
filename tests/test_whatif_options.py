"""The options of scripts: how whatif finds them, and which it takes for a technique."""

import argparse
import enum
import json
import re
import sys
import types

import pytest

from whatif import options, techniques
from whatif.inside import parsers
from whatif.scriptoptions import add_words, options_for
from whatif.search import kind

NAMES = [*dict.fromkeys("batch" if kind(name) == "batch" else name for name in techniques.NAMES)]

EXTRA = dict(workers=8, times=2)
FLAG = dict(action="store_true")


def string_to_bool(value):
    return value.lower() in ("true", "1")


def str2bool(value):
    return value.lower() in ("yes", "true")


class ParseKwargs(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, dict(each.split("=") for each in values))


class OptimizerNames(str, enum.Enum):
    ADAMW_TORCH = "adamw_torch"


BOOL = dict(type=string_to_bool, default=False, nargs="?", const=True)
SCRIPTS = {  # {script: (its options, {technique: words}, libraries)}; a technique left out has none
    "timm": (
        {
            ("--amp",): FLAG | dict(help="use mixed precision training"),
            ("--amp-dtype",): dict(default="float16", help="lower precision AMP dtype"),
            ("--model-dtype",): dict(default=None, help="Model dtype override (non-AMP)"),
            ("--channels-last",): FLAG,
            ("--no-prefetcher",): FLAG,
            ("--torchscript",): FLAG,
            ("--torchcompile",): dict(nargs="?", type=str, default=None, const="inductor"),
            ("--torchcompile-mode",): dict(type=str, default=None),
            ("--opt",): dict(default="sgd"),
            ("--opt-kwargs",): dict(nargs="*", default={}, action=ParseKwargs),
            ("-j", "--workers"): dict(type=int, default=4),
            ("-b", "--batch-size"): dict(type=int, default=128),
            ("-vb", "--validation-batch-size"): dict(type=int, default=None),
        },
        {
            "amp bfloat16": "--amp --amp-dtype bfloat16",
            "amp float16": "--amp",
            "channels_last": "--channels-last",
            "compile": "--torchcompile",
            "compile reduce-overhead": "--torchcompile --torchcompile-mode reduce-overhead",
            "fused": "--opt-kwargs fused=True",
            "workers": "--workers 8",
            "batch": "--batch-size 256",
        },
        (),
    ),
    "torchvision's references": (
        {
            ("--amp",): FLAG | dict(help="Use torch.cuda.amp for mixed precision training"),
            ("-j", "--workers"): dict(type=int, default=16),
            ("-b", "--batch-size"): dict(type=int, default=32),
            ("--backend",): dict(default="PIL"),
            ("--use-deterministic-algorithms",): FLAG,
            ("--test-only",): FLAG,
            ("--model-ema",): FLAG,
        },
        {
            "amp bfloat16": "--amp",
            "amp float16": "--amp",
            "workers": "--workers 8",
            "batch": "--batch-size 64",
        },
        (),
    ),
    "SimCLR of sthalles": (
        {
            ("--fp16-precision",): FLAG | dict(help="Whether or not to use 16-bit precision GPU"),
            ("-j", "--workers"): dict(type=int, default=12),
            ("-b", "--batch-size"): dict(type=int, default=256),
        },
        {
            "amp float16": "--fp16-precision",
            "workers": "--workers 8",
            "batch": "--batch-size 512",
        },
        (),
    ),
    "yolov5": (
        {
            ("--workers",): dict(type=int, default=8, help="max dataloader workers (per RANK)"),
            ("--batch-size",): dict(type=int, default=16),
            ("--noval",): FLAG,
            ("--optimizer",): dict(choices=["SGD", "Adam", "AdamW"], default="SGD"),
            ("--cache",): dict(type=str, nargs="?", const="ram"),
            ("--sync-bn",): FLAG,
        },
        {"batch": "--batch-size 32"},
        (),
    ),  # it has eight workers
    "open_clip": (
        {
            ("--precision",): dict(
                default="amp",
                choices=[
                    "amp",
                    "amp_bf16",
                    "amp_bfloat16",
                    "bf16",
                    "fp16",
                    "pure_bf16",
                    "pure_fp16",
                    "fp32",
                ],
            ),
            ("--workers",): dict(type=int, default=4),
            ("--torchcompile",): FLAG,
            ("--torchscript",): FLAG,
            ("--batch-size",): dict(type=int, default=64),
        },
        {
            "amp bfloat16": "--precision amp_bf16",
            "compile": "--torchcompile",
            "workers": "--workers 8",
            "batch": "--batch-size 128",
        },
        (),
    ),
    "transformers": (
        {
            ("--bf16",): BOOL,
            ("--fp16",): BOOL,
            ("--tf32",): BOOL | dict(default=None),
            ("--fp16_full_eval",): BOOL,
            ("--fp16_opt_level",): dict(default="O1"),
            ("--half_precision_backend",): dict(default="auto"),
            ("--torch_compile",): BOOL,
            ("--torch_compile_mode",): dict(default=None),
            ("--optim",): dict(default=OptimizerNames.ADAMW_TORCH),
            ("--optim_args",): dict(default=None),
            ("--dataloader_num_workers",): dict(type=int, default=0),
            ("--dataloader_persistent_workers",): BOOL,
            ("--per_device_eval_batch_size",): dict(type=int, default=8),
            ("--per_device_train_batch_size",): dict(type=int, default=8),
        },
        {
            "amp bfloat16": "--bf16 True",
            "amp float16": "--fp16 True",
            "tf32": "--tf32 True",
            "compile": "--torch_compile True",
            "fused": "--optim adamw_torch_fused",
            "compile reduce-overhead": "--torch_compile True --torch_compile_mode reduce-overhead",
            "workers": "--dataloader_num_workers 8 --dataloader_persistent_workers True",
            "batch": "--per_device_train_batch_size 16",
        },
        ("transformers",),
    ),
    "pytorch-cifar": ({("--lr",): dict(default=0.1, type=float), ("--resume", "-r"): FLAG}, {}, ()),
    "accelerate's examples": (
        {
            ("--mixed_precision",): dict(default=None, choices=["no", "fp16", "bf16", "fp8"]),
            ("--cpu",): FLAG,
        },
        {"amp bfloat16": "--mixed_precision bf16", "amp float16": "--mixed_precision fp16"},
        ("accelerate",),
    ),
    "diffusers": (
        {
            ("--mixed_precision",): dict(default=None, choices=["no", "fp16", "bf16"]),
            ("--allow_tf32",): FLAG,
            ("--use_8bit_adam",): FLAG,
            ("--dataloader_num_workers",): dict(type=int, default=0),
            ("--train_batch_size",): dict(type=int, default=16),
        },
        {
            "amp bfloat16": "--mixed_precision bf16",
            "amp float16": "--mixed_precision fp16",
            "tf32": "--allow_tf32",
            "workers": "--dataloader_num_workers 8",
            "batch": "--train_batch_size 32",
        },
        (),
    ),
    "Pytorch-UNet": (
        {
            ("--amp",): FLAG | dict(default=False, help="Use mixed precision"),
            ("--bilinear",): FLAG,
            ("--batch-size", "-b"): dict(type=int, default=1),
        },
        {"amp bfloat16": "--amp", "amp float16": "--amp", "batch": "--batch-size 2"},
        (),
    ),
    "Swin": (
        {
            ("--amp-opt-level",): dict(choices=["O0", "O1", "O2"]),
            ("--disable_amp",): FLAG,
            ("--fused_layernorm",): FLAG | dict(help="Use fused layernorm."),
            ("--fused_window_process",): FLAG | dict(help="Fused window shift & partition"),
            ("--batch-size",): dict(type=int),
        },
        {},
        (),
    ),
    "ConvNeXt": (
        {
            ("--use_amp",): dict(type=str2bool, default=False, help="Use PyTorch's AMP or not"),
            ("--num_workers",): dict(default=10, type=int),
        },
        {
            "amp bfloat16": "--use_amp True",
            "amp float16": "--use_amp True",
            "workers": "--num_workers 8",
        },
        (),
    ),
    "super_resolution": (
        {
            ("--batchSize",): dict(type=int, default=64),
            ("--testBatchSize",): dict(type=int, default=10),
            ("--threads",): dict(
                type=int, default=4, help="number of threads for data loader to use"
            ),
        },
        {"workers": "--threads 8", "batch": "--batchSize 128"},
        (),
    ),
    "CycleGAN": (
        {
            ("--num_threads",): dict(default=4, type=int, help="# threads for loading data"),
            ("--batch_size",): dict(type=int, default=1),
        },
        {"workers": "--num_threads 8", "batch": "--batch_size 2"},
        (),
    ),
    "apex's ImageNet": (
        {("--channels-last",): dict(type=bool, default=False), ("--opt-level",): dict(type=str)},
        {"channels_last": "--channels-last True"},
        (),
    ),
    "DeepLearningExamples": (
        {
            ("--amp",): FLAG,
            ("--memory-format",): dict(default="nchw", choices=["nchw", "nhwc"]),
            ("--static-loss-scale",): dict(default=1),
        },
        {"amp bfloat16": "--amp", "amp float16": "--amp", "channels_last": "--memory-format nhwc"},
        (),
    ),
    "kohya": (
        {
            ("--mixed_precision",): dict(default="no", choices=["no", "fp16", "bf16"]),
            ("--max_data_loader_n_workers",): dict(
                type=int, default=4, help="max num workers for DataLoader"
            ),
            ("--torch_compile",): FLAG,
            ("--full_bf16",): FLAG,
        },
        {
            "amp bfloat16": "--mixed_precision bf16",
            "amp float16": "--mixed_precision fp16",
            "compile": "--torch_compile",
            "workers": "--max_data_loader_n_workers 8",
        },
        (),
    ),
    "fairseq": (
        {
            ("--fp16",): FLAG,
            ("--bf16",): FLAG,
            ("--memory-efficient-fp16",): FLAG,
            ("--fp16-no-flatten-grads",): FLAG,
            ("--num-workers",): dict(type=int, default=1),
        },
        {"amp bfloat16": "--bf16", "amp float16": "--fp16", "workers": "--num-workers 8"},
        (),
    ),
    "Lightning's command line": (
        {
            ("--trainer.precision",): dict(default=None),
            ("--trainer.benchmark",): dict(default=None),
            ("--data.init_args.num_workers",): dict(type=int, default=0),
            ("--data.init_args.batch_size",): dict(type=int, default=4),
        },
        {
            "amp bfloat16": "--trainer.precision bf16-mixed",
            "cudnn": "--trainer.benchmark True",
            "amp float16": "--trainer.precision 16-mixed",
            "batch": "--data.init_args.batch_size 8",
            "workers": "--data.init_args.num_workers 8",
        },
        ("lightning",),
    ),
    "one that says what it is": (
        {
            ("--fast",): FLAG | dict(help="train under autocast in bfloat16"),
            ("--graph",): FLAG | dict(help="call torch.compile on the network"),
            ("--no-amp-in-eval",): FLAG | dict(help="no amp in validation"),
            ("--cudnn-benchmark",): dict(action=argparse.BooleanOptionalAction, default=False),
            ("--val-workers",): dict(type=int, default=2),
            ("--matmul-precision",): dict(default="highest"),
        },
        {
            "amp bfloat16": "--fast",
            "compile": "--graph",
            "cudnn": "--cudnn-benchmark",
            "tf32": "--matmul-precision high",
        },
        (),
    ),
}


@pytest.fixture
def watch(monkeypatch):
    """Return the Parsers that watch argparse during a test."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    owner = argparse.ArgumentParser
    for name in "_parse_known_args", "parse_known_args":
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    watch = parsers.Parsers()
    watch.install()
    return watch


def found(watch):
    """Return the options as they come out of a record."""
    return json.loads(json.dumps(parsers.options_of(watch)))


@pytest.mark.parametrize("name", SCRIPTS)
def test_options_of_public_scripts(name, watch):
    options, wanted, libraries = SCRIPTS[name]
    parser = argparse.ArgumentParser()
    for flags, about in options.items():
        parser.add_argument(*flags, **about)
    parser.parse_args()
    told = {
        technique: " ".join(options_for(technique, found(watch), libraries, EXTRA))
        for technique in NAMES
    }
    assert {technique: words for technique, words in told.items() if words} == wanted
    changing = {**EXTRA, "keeps": False}  # the dataset changes, which workers that stay do not see
    words = " ".join(options_for("workers", found(watch), libraries, changing))
    assert words == re.sub(r" --\w+persistent_workers True", "", wanted.get("workers", ""))
    for words in wanted.values():  # the script takes them, and then it has them
        parser.parse_args(words.split())
    for technique, words in wanted.items():
        if technique in ("batch", "amp float16"):
            continue
        sys.argv[1:] = words.split()
        parser.parse_args()
        again = options_for(technique, found(watch), libraries, EXTRA)
        assert again == [] or "amp" in technique and name == "torchvision's references", technique


def test_all_parsers_of_the_command_line_count_and_no_other(watch):
    sys.argv[1:] = ["--config", "a.yaml", "--amp"]
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--config")
    known, rest = first.parse_known_args()
    second = argparse.ArgumentParser()
    second.add_argument("--amp", action="store_true")
    second.parse_args(rest)
    inner = argparse.ArgumentParser()
    inner.add_argument("--compile", action="store_true")
    inner.parse_args([])
    inner.parse_args(["--compile"])
    assert {option["dest"]: option["value"] for option in found(watch)} == {
        "config": "a.yaml",
        "amp": True,
    }


def test_a_script_that_parsed_before_it_imported_torch(monkeypatch):
    main = types.ModuleType("__main__")
    main.parser = argparse.ArgumentParser()
    main.parser.add_argument("--amp", action="store_true")
    main.args = main.parser.parse_args(["--amp"])
    monkeypatch.setitem(sys.modules, "__main__", main)
    watch = parsers.Parsers()
    watch.look_back()
    (option,) = parsers.options_of(watch)
    assert option["flags"] == ["--amp"] and option["value"] is True


def test_words_stand_where_the_script_takes_them(watch):
    sys.argv[1:] = ["fit", "--epochs", "3"]
    parser = argparse.ArgumentParser()
    parser.add_argument("--amp", action="store_true")
    fit = parser.add_subparsers().add_parser("fit")
    fit.add_argument("--epochs", type=int)
    fit.add_argument("--workers", type=int, default=0)
    parser.parse_args()
    options = found(watch)
    for technique, words in (
        ("amp float16", ["--amp", "fit", "--epochs", "3"]),
        ("workers", ["fit", "--epochs", "3", "--workers", "8"]),
    ):
        new = add_words(sys.argv[1:], options_for(technique, options, (), EXTRA), options)
        assert new == words
        parser.parse_args(new)


def test_click(watch):
    click = pytest.importorskip("click")
    seen = []

    @click.command()
    @click.option("--amp/--no-amp", default=False, help="mixed precision")
    @click.option("--num-workers", "-w", type=int, default=2)
    @click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32")
    def main(amp, num_workers, precision):
        seen.extend(found(watch))

    main(["--num-workers", "3"], standalone_mode=False)
    assert {option["dest"]: option["value"] for option in seen} == {
        "amp": False,
        "num_workers": 3,
        "precision": "fp32",
    }
    assert options_for("amp float16", seen) == ["--amp"]
    assert options_for("amp bfloat16", seen) == ["--precision", "bf16"]
    assert options_for("workers", seen, (), EXTRA) == ["--num-workers", "8"]


def test_globals_of_a_configurator(watch, monkeypatch):
    main = types.ModuleType("__main__")
    vars(main).update(
        dtype="float32",
        compile=False,
        batch_size=12,
        out_dir="out",
        config_keys=["dtype", "compile", "batch_size", "out_dir"],
    )
    monkeypatch.setitem(sys.modules, "__main__", main)
    options = found(watch)
    told = {technique: options_for(technique, options, (), EXTRA) for technique in NAMES}
    assert {technique: words for technique, words in told.items() if words} == {
        "amp bfloat16": ["--dtype=bfloat16"],
        "amp float16": ["--dtype=float16"],
        "compile": ["--compile=True"],
        "batch": ["--batch_size=24"],
    }
    main.dtype, main.compile = "bfloat16", True
    assert not options_for("amp bfloat16", found(watch))
    assert not options_for("compile", found(watch))


def test_fire(watch):
    space = dict(__name__="fire.core")
    exec("def call(function, **options):\n    return function(**options)", space)

    def main(use_fp16=False, num_workers_dataloader=1):
        return parsers.options_of(watch, sys._getframe())

    options = space["call"](main, use_fp16=False)
    assert options_for("amp float16", options) == ["--use_fp16=True"]
    assert options_for("workers", options, (), EXTRA) == ["--num_workers_dataloader=8"]


class DictConfig(dict):
    """As much of omegaconf's as is used."""


def test_hydra(watch, monkeypatch):
    config = DictConfig(
        trainer=DictConfig(_target_="lightning.pytorch.trainer.Trainer", max_epochs=1),
        data=DictConfig(num_workers=0, batch_size=64),
        model=DictConfig(compile=False),
    )
    omegaconf = types.SimpleNamespace(
        DictConfig=DictConfig, OmegaConf=types.SimpleNamespace(is_missing=lambda *_: False)
    )
    monkeypatch.setitem(sys.modules, "omegaconf", omegaconf)
    monkeypatch.setitem(sys.modules, "hydra", types.ModuleType("hydra"))

    def main(cfg):
        return parsers.options_of(watch, sys._getframe())

    options = main(config)
    for technique, words in {
        "amp bfloat16": "+trainer.precision=bf16-mixed",
        "compile": "model.compile=True",
        "workers": "data.num_workers=8",
        "batch": "data.batch_size=128",
    }.items():
        assert options_for(technique, options, ("lightning",), EXTRA) == [words]
    config["trainer"]["precision"] = "32"
    assert options_for("amp float16", main(config), ("lightning",)) == [
        "trainer.precision=16-mixed"
    ]


def test_absl(watch, monkeypatch):
    flags = [
        types.SimpleNamespace(
            name=name,
            value=value,
            default=value,
            help=text,
            boolean=isinstance(value, bool),
            parser=None,
        )
        for name, value, text in (
            ("use_amp", False, "mixed precision"),
            ("num_workers", 2, "of the loader"),
        )
    ]
    module = types.SimpleNamespace(
        FLAGS=types.SimpleNamespace(get_key_flags_for_module=lambda name: flags)
    )
    monkeypatch.setitem(sys.modules, "absl.flags", module)
    options = found(watch)
    assert options_for("amp float16", options) == ["--use_amp"]
    assert options_for("workers", options, (), EXTRA) == ["--num_workers=8"]


def test_a_library_that_changed_costs_its_options_only(watch, monkeypatch):
    monkeypatch.setitem(sys.modules, "absl.flags", types.SimpleNamespace())
    parser = argparse.ArgumentParser()
    parser.add_argument("--amp", action="store_true")
    parser.parse_args()
    assert [option["dest"] for option in found(watch)] == ["amp"]


def test_help_names_whatif_as_it_was_started(monkeypatch, tmp_path):
    (tmp_path / "whatif.pyz").touch()
    for path, words in {
        tmp_path: "python whatif",
        tmp_path / "whatif.pyz": "python whatif.pyz",
        options.__file__.replace("options.py", "__main__.py"): "python -m whatif",
        "-m": "python -m whatif",
    }.items():
        monkeypatch.setattr(sys, "argv", [str(path)])
        assert options.own_parser().usage.startswith(f"{words} [OPTIONS] my_train.py")
