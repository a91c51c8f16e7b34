"""Find the option of a script, or of its library, that switches a technique on.

Names are matched without their first words (use_, torch_) and the part before a dot
(trainer.precision); help texts decide where names do not. An option that has the value already is
no advice.
"""

import re

FIRST_WORDS = ("use", "enable", "with", "do", "is", "torch", "native", "pytorch", "set")
NEVER = {
    "no",
    "disable",
    "not",
    "without",
    "dont",
    "off",
    "eval",
    "val",
    "test",
    "infer",
    "opt",
    "level",
    "backend",
    "scale",
    "scaler",
    "init",
    "ema",
    "export",
    "path",
    "dir",
    "file",
}
TRUE = {"true", "1", "yes", "on"}
SWITCHES = {  # names of options that switch a technique on
    "amp": {
        "amp",
        "mixed_precision",
        "autocast",
        "mixed",
        "amp_training",
        "fp16_amp",
        "mixed_precision_training",
        "automatic_mixed_precision",
    },
    "bfloat16": {"bf16", "bfloat16", "amp_bf16", "bf16_amp", "amp_bfloat16", "bf16_precision"},
    "float16": {
        "fp16",
        "float16",
        "half",
        "half_precision",
        "amp_fp16",
        "fp16_training",
        "fp16_precision",
    },
    "channels_last": {
        "channels_last",
        "channel_last",
        "nhwc",
        "memory_format",
        "channels_last_format",
        "to_channels_last",
    },
    "compile": {
        "compile",
        "torchcompile",
        "compile_model",
        "model_compile",
        "compiled",
        "dynamo",
        "torch_2",
        "inductor",
    },
    "fused": {
        "fused",
        "fused_optimizer",
        "fused_adam",
        "fused_adamw",
        "fused_sgd",
        "optim_fused",
        "adam_fused",
        "fused_optim",
        "optimizer_fused",
    },
    "cudnn": {"cudnn_benchmark", "cudnn", "cudnn_bench", "benchmark_cudnn"},
    "tf32": {"tf32", "allow_tf32", "tf32_matmul", "matmul_tf32"},
}
HELP = {  # what the help of a switch says if its name does not
    "amp": r"mixed[- ]precision|\bamp\b|autocast",
    "channels_last": r"channels[-_ ]last|\bnhwc\b",
    "compile": r"torch\.compile|compile the (model|network)",
    "fused": r"\bfused\b.{0,40}\b(optimi[sz]er|adam|adamw|sgd|kernel)",
    "cudnn": r"cudnn.{0,12}benchmark",
    "tf32": r"\btf32\b|tensorfloat",
}
PRECISION = {
    "precision",
    "mixed_precision",
    "amp_dtype",
    "autocast_dtype",
    "dtype",
    "ptdtype",
    "precision_mode",
    "amp_type",
    "mp_dtype",
    "amp_precision",
    "mixed_precision_type",
    "train_precision",
    "compute_dtype",
    "half_dtype",
    "mixed_precision_dtype",
}
WORDS = {  # values of such an option, the best first; never those that train in a half type only
    "amp bfloat16": (
        "bf16-mixed",
        "amp_bf16",
        "amp_bfloat16",
        "amp-bf16",
        "bf16_mixed",
        "mixed_bfloat16",
        "mixed_bf16",
        "bf16",
        "bfloat16",
        "torch.bfloat16",
    ),
    "amp float16": (
        "16-mixed",
        "amp_fp16",
        "amp_float16",
        "amp-fp16",
        "fp16_mixed",
        "mixed_float16",
        "mixed_fp16",
        "amp",
        "fp16",
        "float16",
        "torch.float16",
    ),
}
WORKERS = {
    "workers",
    "num_workers",
    "n_workers",
    "nworkers",
    "nb_workers",
    "number_workers",
    "data_workers",
    "dataloader_num_workers",
    "dataloader_workers",
    "loader_workers",
    "loader_num_workers",
    "num_data_workers",
    "num_workers_per_gpu",
    "workers_per_gpu",
    "num_worker",
    "nthreads",
    "n_threads",
    "data_loader_workers",
    "num_loader_workers",
    "train_num_workers",
    "num_workers_dataloader",
    "train_workers",
    "numworkers",
    "dl_workers",
    "num_cpu_workers",
    "workers_per_device",
    "dataloader_worker_num",
    "cpu_workers",
    "j",
    "nw",
}
BATCH = {
    "batch_size",
    "batch",
    "batchsize",
    "bs",
    "train_batch_size",
    "train_batchsize",
    "per_device_train_batch_size",
    "batch_size_per_gpu",
    "batch_size_train",
    "b",
    "micro_batch_size",
    "minibatch_size",
    "mini_batch_size",
    "bsz",
    "n_batch",
    "train_bs",
    "batch_size_per_device",
    "device_batch_size",
    "per_gpu_train_batch_size",
}
MODES = {"compile_mode", "torchcompile_mode", "torch_compile_mode", "compile_model_mode"}
PERSISTENT = {"persistent_workers", "dataloader_persistent_workers"}


def name_of(option):
    """Return an option's name without the words before it: amp for --use-amp."""
    flags = [each for each in option["flags"] if not each.startswith("--no-")] or option["flags"]
    name = max(flags, key=len).lstrip("-")
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2])
    words = name.lower().replace("-", "_").split("_")
    while len(words) > 1 and words[0] in FIRST_WORDS:
        words = words[1:]
    return "_".join(words)


def is_switch(option):
    """Return whether an option is on or off."""
    action, kind = option["action"] or "", (option["type"] or "").lower()
    if action in ("StoreTrue", "BooleanOptional", "StoreConst", "ActionYesNo"):
        return True
    if action in ("StoreFalse", "Count", "Append"):
        return False
    return (
        "bool" in kind or isinstance(option["value"], bool) or (isinstance(option["default"], bool))
    )


def is_on(option):
    """Return whether a switch is on, or an option such as --torchcompile [BACKEND] is given."""
    value = option["value"]
    if isinstance(value, str) and not is_switch(option):
        return value.lower() not in ("", "none", "no", "false", "off")
    return value.lower() in TRUE if isinstance(value, str) else bool(value)


def words_of(option, value=None):
    """Return the words that give an option a value; None is to switch it on."""
    flags = [each for each in option["flags"] if not each.startswith("--no-")] or option["flags"]
    flag = next((each for each in flags if each.startswith("--")), flags[0])
    if option["style"] in ("--key=value", "key=value"):
        return [f"{flag}={'True' if value is None else value}"]
    if option["style"] == "absl" and value is not None:
        return [f"{flag}={value}"]
    if value is not None:
        return [flag, str(value)]
    takes_none = option["action"] in ("StoreTrue", "BooleanOptional", "StoreConst", "ActionYesNo")
    if takes_none or option["style"] == "absl":
        return [flag]
    if option["nargs"] == "?" and not is_switch(option):
        return [flag]
    return [flag, "True"]


def switches(names, options, help_text=""):
    """Return the options that are switches of these names; else those whose help says it."""
    found = [
        each
        for each in options
        if name_of(each) in names and (is_switch(each) or each["nargs"] == "?")
    ]
    if not found and help_text:
        found = [
            each
            for each in options
            if is_switch(each)
            and re.search(help_text, each["help"] or "", re.I)
            and not NEVER & set(name_of(each).split("_"))
        ]
    return found


def chosen(option, values, libraries):
    """Return the best of `values` for an option of several types, or ""."""
    choices = [str(each) for each in option["choices"] or ()]
    if choices:
        return next((each for each in values if each in choices), "")
    known = f"{option['help']} {option['default']} {option['value']}".lower()
    told = next(
        (
            each
            for each in values
            if each != "amp" and re.search(rf"(?<![\w.-]){re.escape(each)}(?![\w-])", known)
        ),
        "",
    )
    if told:
        return told
    if {"lightning", "pytorch_lightning", "fabric"} & {*libraries}:
        return values[0]
    if "accelerate" in libraries and name_of(option) == "mixed_precision":
        return "bf16" if "bf16" in values else "fp16"
    short = str(option["value"]).lower()
    if short in ("float16", "bfloat16", "float32", "half"):
        return "bfloat16" if "bfloat16" in values else "float16"
    if short in ("fp16", "bf16", "fp32"):
        return "bf16" if "bf16" in values else "fp16"
    return ""


def precision(name, options, libraries):
    """Return the words for an option such as --precision bf16-mixed."""
    values = WORDS[name]
    for option in options:
        is_named = name_of(option) in PRECISION
        if not is_named or is_switch(option) or "/" in str(option["value"]):
            continue
        if name_of(option) == "dtype" and re.search(r"weight|parameter|load", option["help"] or ""):
            continue  # the whole model in that type
        value = chosen(option, values, libraries)
        is_dtype_of = re.match(r"amp|autocast|half|mp_", name_of(option))
        if value and str(option["value"]) == value and not is_dtype_of:
            return None  # it is so already
        if value:
            return words_of(option, value) if str(option["value"]) != value else []
    return []


def amp(name, options, libraries, extra):
    """Return the words for mixed precision in a type."""
    half = name.split()[1]
    exact = switches(SWITCHES[half], options)
    for option in exact:
        if is_on(option):
            return []
        return words_of(option)
    of_type = [each for each in options if re.match(r"amp|autocast|half|mp_", name_of(each))]
    rest = [each for each in options if each not in of_type]
    if found := precision(name, rest, libraries):
        return found
    if found is None:
        return []
    switch = next(iter(switches(SWITCHES["amp"], options, HELP["amp"])), None)
    if switch is None:
        return []
    about = (switch["help"] or "").lower()
    only = {"float16": r"\bbf(loat)?16", "bfloat16": r"\b(fp|float)16"}[half]
    mine = {"float16": r"\b(fp|float)16", "bfloat16": r"\bbf(loat)?16"}[half]
    typed = precision(name, of_type, libraries)
    if not of_type and re.search(only, about) and not re.search(mine, about):
        return []
    words = [] if is_on(switch) else words_of(switch)
    return [*words, *(typed or [])]


def compiled(name, options, libraries, extra):
    """Return the words for torch.compile, with its mode."""
    mode = name.partition(" ")[2]
    found = switches(SWITCHES["compile"], options, HELP["compile"])
    modes = [
        each
        for each in options
        if name_of(each) in {*MODES, *(each.removeprefix("torch_") for each in MODES)}
    ]
    if mode and not modes:
        return []
    words = []
    if found and not is_on(found[0]):
        words = words_of(found[0])
    elif not found and not modes:
        return []
    if mode and (not modes[0]["choices"] or mode in modes[0]["choices"]):
        words += words_of(modes[0], mode) if modes[0]["value"] != mode else []
    return words


def fused(name, options, libraries, extra):
    """Return the words for fused kernels: a switch, a kind of optimizer, or further arguments."""
    for option in switches(SWITCHES["fused"], options, HELP["fused"]):
        return [] if is_on(option) else words_of(option)
    for option in options:
        value = str(option["value"])
        choices = [str(each) for each in option["choices"] or ()]
        if name_of(option) in ("optim", "optimizer") and "fused" not in value:
            to = next(
                (
                    each
                    for each in (f"{value}_fused", "adamw_torch_fused")
                    if each in choices and (each.startswith(value) or value == "adamw_torch")
                ),
                "",
            )
            if not choices and "transformers" in libraries and value.endswith("adamw_torch"):
                to = "adamw_torch_fused"
            if to:
                return words_of(option, to)
        if name_of(option) in ("opt_kwargs", "optimizer_kwargs", "optim_args") and (
            option["nargs"] == "*" and "fused" not in value
        ):
            return words_of(option, "fused=True")
    return []


def layout(name, options, libraries, extra):
    """Return the words for channels_last: a switch, or --memory-format channels_last."""
    for option in switches(SWITCHES[name], options, HELP[name]):
        return [] if is_on(option) and is_switch(option) else words_of(option)
    for option in options:
        if name_of(option) in ("memory_format", "layout", "data_format"):
            choices = [str(each) for each in option["choices"] or ()]
            to = next(
                (
                    each
                    for each in choices
                    if each.lower() in ("channels_last", "channels-last", "nhwc")
                ),
                "",
            )
            if to and str(option["value"]) != to:
                return words_of(option, to)
    return []


def cudnn(name, options, libraries, extra):
    """Return the words for cuDNN's benchmark; Lightning's Trainer calls it benchmark."""
    named = [
        each for each in options if re.search(r"(^|[-.])trainer\.benchmark$", each["flags"][0])
    ]
    for option in named or switches(SWITCHES[name], options, HELP[name]):
        return [] if is_on(option) else words_of(option, "True" if named else None)
    return []


def tf32(name, options, libraries, extra):
    """Return the words for TF32: a switch, or --float32_matmul_precision high."""
    for option in switches(SWITCHES[name], options, HELP[name]):
        return [] if is_on(option) else words_of(option)
    for option in options:
        if name_of(option) in ("float32_matmul_precision", "matmul_precision", "fp32_precision"):
            return words_of(option, "high") if option["value"] in (None, "highest") else []
    return []


def is_number(option):
    value = option["value"] if option["value"] is not None else option["default"]
    return not is_switch(option) and (
        isinstance(value, int) or "int" in (option["type"] or "").lower()
    )


def workers(name, options, libraries, extra):
    """Return the words for workers, and for keeping them between epochs if there is an option."""
    found = [
        each
        for each in options
        if is_number(each)
        and name_of(each) in WORKERS
        and not NEVER & set(each["flags"][0].lower().replace("-", "_").split("_"))
    ]
    found = found or [
        each
        for each in options
        if is_number(each)
        and re.search(r"data ?-?load|load(ing)? (the )?data", each["help"] or "", re.I)
        and re.search(r"worker|thread|process", f"{each['help']} {name_of(each)}", re.I)
        and not NEVER & set(name_of(each).split("_"))
    ]
    number = extra.get("workers")
    if not found or number is None or found[0]["value"] == number:
        return []
    words = words_of(found[0], number)
    for each in options if number and extra.get("keeps", True) else ():
        if name_of(each) in PERSISTENT and is_switch(each) and not is_on(each):
            words += words_of(each)
    return words


def batch(name, options, libraries, extra):
    """Return the words for a larger batch."""
    for option in options:
        if name_of(option) in BATCH and type(option["value"]) is int and option["value"] > 0:
            return words_of(option, option["value"] * extra.get("times", 2))
    return []


FINDERS = {
    "amp": amp,
    "channels_last": layout,
    "compile": compiled,
    "fused": fused,
    "cudnn": cudnn,
    "tf32": tf32,
    "workers": workers,
    "batch": batch,
}


def options_for(technique, options, libraries=(), extra=None):
    """Return the words of the command line that switch a technique on, or [].

    `options` are those of inside/parsers.py, `libraries` those that the script uses. `extra` has
    workers and times, for the techniques of these names.
    """
    options = [option for option in options if option["flags"]]
    find = FINDERS.get(technique.split()[0], lambda *_: [])
    found = find(technique, options, libraries, extra or {})
    return found or hydra_argument(technique, options)


def hydra_argument(technique, options):
    """Return the override that adds an argument to what a hydra config makes, or [].

    That is Lightning's Trainer, and an optimizer of torch.optim.
    """
    owner, argument = {
        "amp": (r"lightning\..*Trainer$", f"precision={WORDS.get(technique, [''])[0]}"),
        "cudnn": (r"lightning\..*Trainer$", "benchmark=True"),
        "fused": (r"torch\.optim\.", "fused=True"),
    }.get(technique.split()[0], ("", ""))
    flags = {option["flags"][0] for option in options}
    for option in options if owner else ():
        path, _, last = option["flags"][0].rpartition(".")
        if (
            option["style"] == "key=value"
            and last == "_target_"
            and re.match(owner, str(option["value"]))
            and "lr_scheduler" not in str(option["value"])
            and (f"{path}.{argument.partition('=')[0]}" not in flags)
        ):
            return [f"+{path}.{argument}"]
    return []


def add_words(arguments, words, options):
    """Return a script's arguments with the words of an option, where it takes them.

    That is at the end, so that the last of two counts, or in front of a subcommand. A setting such
    as key=value takes the place of an earlier one.
    """
    flag = words[0].partition("=")[0] if words else ""
    is_front = any(flag in option["flags"] and option["front"] for option in options)
    settings = {flag for option in options if is_setting(option) for flag in option["flags"]}
    settings &= {word.partition("=")[0] for word in words}
    arguments = [  # but `--key` of `--key value` stays with its value
        each for each in arguments if "=" not in each or each.partition("=")[0] not in settings
    ]
    return [*words, *arguments] if is_front else [*arguments, *words]


def new_command(command, kind, words, options):
    """Return a command line with the words of the script's own options."""
    head = {"script": 2, "module": 3, "command": len(command)}[kind]
    return [*command[:head], *add_words(command[head:], words, options)]


def takes_words(options):
    """Return whether settings such as key=value are words of the command line."""
    return any(map(is_setting, options))


def is_setting(option):
    return option["style"] in ("key=value", "--key=value", "absl")
