"""Targets whose weights are quantised: how transformers is asked for them, and what is said where a package is missing."""

from __future__ import annotations

import warnings
from typing import Any

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import TargetSection

PACKAGES = {
    "aqlm": "aqlm", "auto-round": "auto-round", "awq": "gptqmodel", "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors", "eetq": "kernels", "fbgemm_fp8": "fbgemm-gpu", "gptq": "gptqmodel optimum",
    "hqq": "hqq", "mxfp4": "kernels", "quanto": "optimum-quanto", "quark": "amd-quark", "spqr": "spqr_quant",
    "torchao": "torchao", "vptq": "vptq",
}  # fmt: skip
"""What transformers needs beside itself to read weights of a `quant_method`. Those of `fp8` it reads alone."""


def method(config: Any) -> str | None:
    """The `quant_method` of a transformers config or of the text config in it; none: weights as they are."""
    for place in (config, config.get_text_config()):
        found = getattr(place, "quantization_config", None)
        if found:
            name = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
            return str(getattr(name, "value", name))
    return None


def loading_arguments(config: Any) -> dict[str, Any]:
    """What `from_pretrained` is told beyond the target's own config.

    compressed-tensors would leave weights packed until the whole model is called. A harvest calls its trunk, which finds no
    weights then; so they are unpacked as they are loaded, into the same numbers.
    """
    if method(config) != "compressed-tensors":
        return {}
    from transformers import CompressedTensorsConfig

    warnings.filterwarnings(
        "ignore", message="You passed `quantization_config`"
    )  # it is the target's own, with one switch
    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def refuse_unreadable(section: TargetSection, config: Any, error: Exception) -> None:
    """Raise the refusal of a quantised target that transformers cannot load on this machine; return if it is not one.

    Raises:
        DraftsmithError: names the quantisation, and the command that installs what is missing.
    """
    name = method(config)
    if name is None:
        return
    missing = isinstance(error, ImportError) and name in PACKAGES
    other = "harvest.backend=vllm or sglang where the engine reads it"
    raise DraftsmithError(
        f"the target is quantised ({name}), and transformers "
        + ("lacks a package that reads such weights" if missing else "cannot load such weights here"),
        where=section.path, found=str(error), mend=f"pip install {PACKAGES[name]}; or {other}" if missing else other,
    ) from error  # fmt: skip
