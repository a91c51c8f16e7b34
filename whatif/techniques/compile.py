"""torch.compile of the outermost module's forward."""

import functools
import types

NAMES = ("compile", "compile reduce-overhead")


def forward(plain, name, run):
    """Return `plain`, compiled; each call makes a function that shares nothing with another."""
    import torch
    config = torch._dynamo.config
    for limit in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit",
                  "accumulated_cache_size_limit"):  # functions below `plain` belong to all sets
        if hasattr(config, limit):
            setattr(config, limit, max(getattr(config, limit), 1024))
    mode = name.removeprefix("compile").strip() or None
    compiled = torch.compile(copied(plain), mode=mode)

    def call(*args, **kwargs):
        return compiled(*args, **kwargs)
    return call


def copied(plain):
    """Return the same function with a code object of its own.

    What torch.compile makes is kept by code object, so a function that was compiled under another
    autocast or layout cannot be taken for this one.
    """
    function = getattr(plain, "__func__", plain)
    if not isinstance(function, types.FunctionType):
        def function(*args, **kwargs):
            return plain(*args, **kwargs)
        plain = function
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__,
                             function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(own, function)
    return types.MethodType(own, plain.__self__) if hasattr(plain, "__self__") else own
