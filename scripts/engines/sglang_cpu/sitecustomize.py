"""Prepares a Python process to import SGLang without triton, without its compiled operators, beside a CPU torch.

Python imports this module at start-up when its folder is on PYTHONPATH, which only the engine's launcher sets. Nothing
happens until `sglang` or `torchvision` is first imported, and nothing at all without SGLANG_USE_CPU_ENGINE=1. Then:

- before `sglang`: torch reports AMX tile support, so that SGLang takes its `intel_amx` path, the only CPU path with
  EAGLE; the operators of that path come from the `sgl_kernel` folder beside this file and need no AMX.
- before `sglang`: without triton (1 GB, of no use on a CPU) its kernels' definitions are swallowed by the mock modules
  that SGLang ships for Apple machines. torch is told first that there is no triton.
- before `sglang`: torch.compile becomes the identity, so that no C++ compiler is needed and torch's compiler is not
  imported (6 s of start-up).
- before `torchvision`: the two operators that its Python side refers to are declared, since the PyPI build's compiled
  side does not load beside a CPU torch.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path


def _declare_torchvision_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch._draftsmith_torchvision_library = library  # a Library undoes its definitions when it is collected


def _mock_triton() -> None:
    """Install SGLang's own triton stubs (sglang/_platform_stubs.py), without importing the sglang package for it."""
    from torch.utils._triton import has_triton, has_triton_package

    has_triton_package()  # both cache their answer; asked now, it stays "no"
    has_triton()
    source = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "_platform_stubs.py"
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", source)
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    sys.meta_path.insert(0, stubs._TritonFinder())
    triton = stubs._make_mock("triton")
    triton.__version__ = "3.0.0"
    triton.cdiv, triton.next_power_of_2, triton.Config = stubs._cdiv, stubs._next_power_of_2, stubs._Config
    triton.language = stubs._make_mock("triton.language")
    triton.language.constexpr = type("constexpr", (), {"__init__": lambda self, value=None: None})
    jit = stubs._make_mock("triton.runtime.jit")
    jit.JITFunction = type("JITFunction", (), {})
    jit.KernelInterface = type("KernelInterface", (stubs._StubBase,), {})


def _eager(model=None, **options):
    """torch.compile, both as a function and as a decorator with options, without compiling."""
    return (lambda function: function) if model is None else model


def _prepare_sglang() -> None:
    import torch

    torch.cpu._is_amx_tile_supported = lambda: True
    torch.compile = _eager
    if importlib.util.find_spec("triton") is None:
        _mock_triton()


class _Preparer(importlib.abc.MetaPathFinder):
    """Finds no module itself; runs a preparation the first time that a name is looked for."""

    def __init__(self) -> None:
        self.pending = {"sglang": _prepare_sglang, "torchvision": _declare_torchvision_operators}

    def find_spec(self, name, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        prepare = self.pending.pop(name, None)
        if prepare is not None:
            prepare()
        return None


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.insert(0, _Preparer())
