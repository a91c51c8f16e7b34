"""cuDNN's choice of the fastest algorithm for each convolution."""

from .. import advice
from ..write import anchors

NAMES = ("cudnn",)


def why_not(name, facts):
    """Return why it cannot be tried, or ""."""
    if why := advice.needs_gpu(facts) or advice.is_seen(name, facts):
        return why
    return "" if "convolution" in facts["seen"] else "the model has no convolution"


def write(name, facts, extra):
    """Return what to write: an option, or the line at the top."""
    driver, entry = advice.driven(facts)
    note = "watch: it tries every new input size; runs differ in the last bits"
    if option := advice.by_option(name, facts, extra) or advice.by_library(
            name, [driver], extra, entry):
        return advice.paragraphs(option, note)
    return advice.paragraphs(f"at the top{advice.INDENT}torch.backends.cudnn.benchmark = True",
                             note, advice.example(name))


def edit(name, facts, extra, sources):
    """Write the setting at the top."""
    source = anchors.main_source(facts, sources)
    torch = anchors.torch_name(source)
    anchors.put_at_top(source, f"{torch}.backends.cudnn.benchmark = True",
                       "cuDNN tries its algorithms on each new shape and keeps the fastest")


def on(run, name):
    """Switch cudnn.benchmark on."""
    import torch
    torch.backends.cudnn.benchmark = True


def off(run, name):
    """Put back what the script had."""
    import torch
    torch.backends.cudnn.benchmark = run.settings["cudnn"]
