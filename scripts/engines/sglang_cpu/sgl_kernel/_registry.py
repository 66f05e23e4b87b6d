"""Registers the stand-in's functions as `torch.ops.sgl_kernel.*`, where SGLang looks them up."""

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("sgl_kernel", "DEF")


def operator(schema: str) -> Callable[[Callable], Callable]:
    """Decorator: register the function under `schema`, e.g. "initialize(int size, int rank) -> ()"."""

    def register(function: Callable) -> Callable:
        _LIBRARY.define(schema)
        _LIBRARY.impl(schema.split("(", maxsplit=1)[0], function, "CompositeExplicitAutograd")
        return function

    return register


def declare_unused(*names: str) -> None:
    """Make `torch.ops.sgl_kernel.<name>` exist without an implementation: calling one raises NotImplementedError."""
    for name in names:
        _LIBRARY.define(f"{name}() -> ()")
