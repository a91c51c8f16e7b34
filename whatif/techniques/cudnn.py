"""cudnn.benchmark: cuDNN tries its algorithms for each new size."""

NAMES = ("cudnn",)


def on(run, name):
    """Switch cudnn.benchmark on."""
    import torch
    torch.backends.cudnn.benchmark = True


def off(run, name):
    """Put back what the script had."""
    import torch
    torch.backends.cudnn.benchmark = run.settings["cudnn"]
