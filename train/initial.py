"""Where a drafter's first weights come from: another drafter, the target's head and last layer, or random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import TrainSection
from draftsmith.configs.target import Target, locate_tensors
from draftsmith.train.model import Drafter
from draftsmith.train.warm import WarmStart


def build_drafter(
    spec: DrafterSpec,
    target: Target,
    embedding: Tensor,
    targets: Tensor,
    settings: TrainSection,
    start: WarmStart | None = None,
) -> Drafter:
    """A drafter before its first step, the same for the same seed on every process.

    With `start` it has that drafter's weights. Else matrices are normal with deviation 0.02 (the range of the Llama
    family) and a bias is zero, unless `settings` takes them from the target: `head_init: target` copies the head's rows
    at `targets` (int64 (D,)); `layer_init: target` copies the last decoder layer into the half of the layer that reads
    the hidden state, with fc passing on the highest tap.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    with _unfilled():
        drafter = Drafter(spec, embedding)
    if start is not None:
        drafter.load_state_dict(start.weights)
        return drafter
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim > 1:
                torch.randn(parameter.shape, generator=generator, out=parameter.data).mul_(0.02)
            elif name.endswith("bias"):
                parameter.zero_()
        if settings.head_init == "target":
            head = target.require("head").load()
            drafter.lm_head.weight.copy_(head[targets].float())
        if settings.layer_init == "target":
            _copy_last_layer(drafter, spec, target)
    return drafter


@contextmanager
def _unfilled() -> Iterator[None]:
    """Matrices made here hold whatever is in memory: PyTorch's own random numbers, half a minute at Kimi's size, are for nothing."""
    filling = nn.Linear.reset_parameters
    nn.Linear.reset_parameters = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.reset_parameters = filling  # type: ignore[method-assign]


def _copy_last_layer(drafter: Drafter, spec: DrafterSpec, target: Target) -> None:
    """Drafter(h) starts as the target's last layer applied to the highest tap."""
    tensors = locate_tensors(target.path)
    prefix = target.require("final_norm").name.removesuffix("norm.weight") + f"layers.{target.num_layers - 1}."
    hidden = spec.hidden_size

    def read(name: str, shape: torch.Size) -> Tensor:
        ref = tensors.get(prefix + name)
        if ref is None or ref.shape != tuple(shape):
            raise DraftsmithError(
                "the drafter's layer cannot start from the target's last layer",
                where=f"{target.path}: {prefix + name}",
                found="no such tensor" if ref is None else list(ref.shape),
                expected=list(shape),
                mend="train.layer_init=random",
            )
        return ref.load().float()

    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    for parameter, weight in attention.named_parameters():
        name = parameter.removesuffix(".weight")
        if name in attention.reads_input:
            weight[:, hidden:] = read(f"self_attn.{parameter}", torch.Size((weight.shape[0], hidden)))
        else:
            weight.copy_(read(f"self_attn.{parameter}", weight.shape))
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(layer.mlp, name).weight
        weight.copy_(read(f"mlp.{name}.weight", weight.shape))
    layer.hidden_norm.weight.copy_(read("input_layernorm.weight", layer.hidden_norm.weight.shape))
    layer.post_attention_layernorm.weight.copy_(
        read("post_attention_layernorm.weight", layer.post_attention_layernorm.weight.shape)
    )
    drafter.norm.weight.copy_(target.require("final_norm").load().float())
    if spec.target_hidden_size == hidden:
        drafter.fc.weight[:, -hidden:] += torch.eye(hidden)
