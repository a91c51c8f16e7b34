"""Trackers and uploads: what they are told from now on goes nowhere."""

import functools
import re
import socket
import sys
from contextlib import suppress
from urllib.parse import urlsplit

from whatif.imports import after_import, before, replace

# what is silenced in each module: names of its functions, and of its classes' methods
TRACKERS = {
    "wandb": r"log|log_\w+|save|alert|link_\w+|define_metric|watch",
    "wandb.sdk.wandb_run": r"log|log_\w+|save|alert|link_\w+|define_metric",
    "mlflow": r"log_\w+|set_tags?|set_experiment_tags?",
    "mlflow.tracking.client": r"log_\w+|set_tag|update_run",
    "mlflow.tracking.fluent": r"log_\w+|set_tags?",
    "comet_ml": r"log_\w+|add_tags?|send_\w+",
    "neptune": r"append|extend|log|assign|upload|upload_files",
    "neptune.handler": r"append|extend|log|assign|upload|upload_files",
    "clearml": r"report_\w+|upload_artifact|update_output_model|update_weights",
    "aim": r"track|log_\w+",
    "swanlab": r"log|log_\w+",
    "trackio": r"log|log_\w+|alert|save",
    "tensorboardX": r"add_\w+",
    "torch.utils.tensorboard": r"add_\w+",
    "torch.utils.tensorboard.writer": r"add_\w+",
}
SENDS = ("POST", "PUT", "PATCH", "DELETE")


def nothing(*_, **__):
    """Take the place of a function that would log."""


def silence(module, names):
    """Replace what a module logs with: its functions, and the methods of its classes."""
    module = sys.modules[module]
    is_logger, found = re.compile(names).fullmatch, {}
    root = module.__name__.split(".")[0]
    root = "torch.utils.tensorboard" if root == "torch" else root

    def is_own(value):
        return f"{getattr(value, '__module__', '')}.".startswith(f"{root}.")

    for name, value in [*vars(module).items()]:
        if isinstance(value, type):
            for owner in filter(is_own, value.__mro__):
                for method in filter(is_logger, [*vars(owner)]):
                    if callable(getattr(owner, method)):
                        with suppress(AttributeError, TypeError):
                            setattr(owner, method, nothing)
        elif is_logger(name) and callable(value) and is_own(value):
            found[id(value)] = nothing
            with suppress(AttributeError, TypeError):
                setattr(module, name, nothing)
    replace(found)


def hold_trackers():
    """Let the functions of trackers do nothing, also of those that are imported later."""
    for name, names in TRACKERS.items():
        after_import(name, functools.partial(silence, name, names))


def is_here(host):
    """Return whether a host is this machine."""
    host = str(host).strip("[]").lower()
    return host in ("", "localhost", "::1", socket.gethostname().lower()) or (
        host.startswith("127.") or host == "0.0.0.0"
    )


def refuse(method, host):
    """Raise an error for a request that sends something to another machine."""
    if str(method).upper() in SENDS and not is_here(host):
        raise ConnectionRefusedError(f"whatif holds back {method} to {host}")


def hold_uploads():
    """Refuse HTTP requests that send something to another machine; other sockets stay.

    requests, urllib3 and urllib use http.client; httpx and aiohttp have their own.
    """
    after_import(
        "http.client",
        lambda: before(
            sys.modules["http.client"].HTTPConnection,
            "putrequest",
            lambda self, method, url, *_, **__: refuse(
                method, urlsplit(url).hostname or self._tunnel_host or self.host
            ),
        ),
    )  # of a proxy
    for name in ("Client", "AsyncClient"):
        after_import(
            "httpx",
            lambda name=name: before(
                getattr(sys.modules["httpx"], name),
                "send",
                lambda self, request, *_, **__: refuse(request.method, request.url.host),
            ),
        )
    after_import(
        "aiohttp",
        lambda: before(
            sys.modules["aiohttp"].ClientSession,
            "_request",
            lambda self, method, url, *_, **__: refuse(method, getattr(url, "host", None) or url),
        ),
    )
