"""Load the target as transformers sees it, and find its trunk, layers, final norm and head by name.

Import of torch and transformers happens when a function is called, so that quick commands stay quick.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import sha256_json
from draftsmith.configs.schema import RunConfig, Split, TargetSection
from draftsmith.configs.target import Target
from draftsmith.data.chat import ChatFormat
from draftsmith.data.quantised import loading_arguments, method, refuse_unreadable
from draftsmith.data.slices import refuse_whole, slicing

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class LoadedTarget:
    """A target ready to run: weights loaded, evaluation mode, gradients off."""

    model: Any
    trunk: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Module
    device: torch.device
    dtype: torch.dtype
    cache_argument: str
    """The trunk's name for its key-value cache: `cache`, or `past_key_values` before transformers 5.24."""


def target_mark(target: Target) -> str:
    """One short hash of the target's fingerprint (16 hex digits): it travels with conversations, store and vocabulary."""
    return sha256_json(target.fingerprint())[:16]


def split_dtype(config: RunConfig, split: Split, target: Target) -> str:
    """The dtype in which the target answers and is harvested: `target.dtype`, or for held-out `synthesize.heldout_dtype`.

    Text of one dtype and states of another disagree: float32 text of SmolLM2-135M is the argmax of bfloat16 states at
    97.8 % of its tokens, of float32 states at 100 %.
    """
    chosen = config.synthesize.heldout_dtype
    name = config.target.dtype if split == "train" or chosen == "target" else chosen
    return target.dtype.removeprefix("torch.") if name == "auto" else name


def load_target(
    section: TargetSection, dtype: str, *, share: tuple[int, int] = (0, 1), together: int = 1
) -> LoadedTarget:
    """Load the weights: on the accelerators where there are any (spread over them), otherwise on the CPU.

    A quantised target loads as its config.json says. Of a model that sees pictures too, the language model runs.

    Args:
        dtype: `bfloat16`, `float16` or `float32`.
        share: this process's number on its machine and how many there are: each takes its part of the accelerators.
        together: so many processes, all there are, hold the target together: see data/slices.py.

    Raises:
        DraftsmithError: transformers cannot load the folder, makes up a weight that its files lack, or its trunk has no layers and final norm where expected.
    """
    import torch
    from transformers import AutoConfig, logging

    logging.disable_progress_bar()
    config = None
    try:
        config = AutoConfig.from_pretrained(section.path, trust_remote_code=section.trust_remote_code)
        model, loading = _model_class(config).from_pretrained(
            section.path,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # named below, where transformers would refer to a table that it printed
            dtype=getattr(torch, dtype),
            trust_remote_code=section.trust_remote_code,
            **loading_arguments(config),
            **(
                slicing(section, config, together)
                if together > 1
                else _placement(section, torch.cuda.device_count(), *share)
            ),
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if config is not None:
            refuse_unreadable(section, config, error)
        raise DraftsmithError(
            f"transformers cannot load the target: {error}",
            where=section.path,
            mend="check the folder's files; set target.trust_remote_code=true only if you trust the code it ships",
        ) from error
    _refuse_made_up(section.path, loading, method(config))
    if together > 1:
        refuse_whole(section, model)
    model.eval().requires_grad_(False)
    trunk, head = model.get_decoder(), model.get_output_embeddings()
    parts = {
        "layers": getattr(trunk, "layers", None),
        "norm": getattr(trunk, "norm", None),
        "output embeddings": head,
    }
    missing = [name for name, part in parts.items() if part is None]
    if missing:
        raise DraftsmithError(
            f"the target's trunk has no {', '.join(missing)}",
            where=f"{type(model).__name__} -> {type(trunk).__name__}",
            expected="a decoder with `layers` and a final `norm`, and a language-model head",
        )
    names = inspect.signature(trunk.forward).parameters
    return LoadedTarget(
        model=model,
        trunk=trunk,
        layers=trunk.layers,
        norm=trunk.norm,
        head=head,
        device=trunk.get_input_embeddings().weight.device,
        dtype=getattr(torch, dtype),
        cache_argument="cache" if "cache" in names else "past_key_values",
    )


def _refuse_made_up(path: Path, loading: dict[str, Any], quantisation: str | None) -> None:
    """transformers fills a weight that the files lack, or have in another shape, at random: it would be another model."""
    faults = {name: "no such tensor" for name in loading["missing_keys"]}
    shapes = {}
    for name, found, expected in loading["mismatched_keys"]:
        faults[name], shapes[name] = str(tuple(found)), str(tuple(expected))
    if faults:
        first = min(faults)
        more = f" and {len(faults) - 1:,} more" if faults.keys() - {first} else ""
        cause = "config.json and weights must be of one model"
        if quantisation is not None:
            cause += (
                f", and transformers must read this quantisation ({quantisation}); harvest.backend=vllm or sglang may"
            )
        raise DraftsmithError(
            f"the target's files do not have the weight {first}{more}", where=path, found=faults[first],
            expected=shapes.get(first), mend=f"fetch the target's files again; {cause}",
        )  # fmt: skip


def _model_class(config: Any) -> Any:
    """The class of transformers that reads the target with its head."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    only_pictures = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and (
        type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    )
    return AutoModelForImageTextToText if only_pictures else AutoModelForCausalLM


def _placement(section: TargetSection, devices: int, number: int, count: int) -> dict[str, Any]:
    """`from_pretrained`'s device_map for process `number` of `count` on a machine with `devices` accelerators."""
    if section.device_map is not None:
        return {"device_map": section.device_map}
    if not devices:
        return {}
    if devices < 2 * count:
        return {"device_map": {"": number % devices}}
    import torch

    each = devices // count
    mine = range(number * each, (number + 1) * each)
    room = {device: torch.cuda.mem_get_info(device)[0] for device in mine}
    return {"device_map": "auto", "max_memory": room | {"cpu": 0} if count > 1 else None}


def load_tokenizer(section: TargetSection) -> Any:
    """The target's tokenizer.

    Raises:
        DraftsmithError: transformers cannot load it.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(section.path, trust_remote_code=section.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DraftsmithError(
            f"transformers cannot load the target's tokenizer: {error}",
            where=section.path,
            mend="put tokenizer.json and tokenizer_config.json beside config.json",
        ) from error


def chat_format(config: RunConfig) -> ChatFormat:
    """The target's chat template under this run's template kwargs.

    Raises:
        DraftsmithError: no tokenizer, or a template that cannot be used.
    """
    return ChatFormat(
        load_tokenizer(config.target), configured_stop_ids(config.target.path), config.synthesize.template_kwargs
    )


def configured_stop_ids(path: Path) -> tuple[int, ...]:
    """The `eos_token_id` (one or a list) of generation_config.json, or of config.json where that file is missing."""
    from transformers import AutoConfig, GenerationConfig

    if (path / "generation_config.json").is_file():
        value = GenerationConfig.from_pretrained(path).eos_token_id
    else:
        value = AutoConfig.from_pretrained(path).get_text_config().eos_token_id
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
