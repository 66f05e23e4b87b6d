"""What a drafter folder says it is, taken at its word: nothing is mended, so that a wrong word can be found out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.errors import DraftsmithError, sensible
from draftsmith.configs.target import Target, read_rope
from draftsmith.convert.canonical import EMBEDDING
from draftsmith.convert.dialects import NESTED_IDS, TOP_IDS, look_up
from draftsmith.convert.layer_ids import resolve_sglang, resolve_vllm
from draftsmith.convert.read import read_drafter
from draftsmith.convert.tensors import Tensor as StoredTensor
from draftsmith.convert.tensors import read_array, to_float32
from draftsmith.convert.verify import examine
from draftsmith.train.model import Drafter


@dataclass(frozen=True)
class Network:
    """A drafter as a description and tensors.

    Attributes:
        spec: the description.
        weights: float32, every name of `spec.trainable_shapes()`; what the files lack is what a loader would leave.
        d2t: int64 (D,), as stored.
        embedding: (V, hidden) float32.
        missing: names that the files lack: norms are ones and matrices drawn at random, as engines leave them.
        recorded: the description that training or conversion recorded beside it, None if there is none.
    """

    spec: DrafterSpec
    weights: dict[str, Tensor]
    d2t: Tensor
    embedding: Tensor
    missing: tuple[str, ...]
    recorded: DrafterSpec | None


def read_network(folder: Path, target: Target) -> Network:
    """Read a converted folder by its config.json, as an engine does, or a training checkpoint by its record.

    Raises:
        DraftsmithError: neither is there, or config.json does not say what an engine needs.
    """
    if not (folder / "config.json").is_file():
        canonical = read_drafter(folder, target)
        return _network(canonical.spec, dict(canonical.tensors), target, None)
    subject = examine(folder, target, store=None, deep=False)
    if subject.spec is None or subject.raw is None:
        raise DraftsmithError(
            f"the drafter cannot be probed: {subject.spec_fault or subject.raw_fault}", where=folder,
            mend=f"draftsmith verify {folder} --target {target.path} lists every fault",
        )  # fmt: skip
    config = dict(subject.config)
    with sensible("the drafter's config.json", folder / "config.json"):
        rope = read_rope(config)
        ids = look_up(config, TOP_IDS if subject.speculators else NESTED_IDS)
        named = ids if isinstance(ids, list) else None
        taps = (
            resolve_vllm("v1", named, None, target.num_layers)
            if subject.speculators
            else resolve_sglang(target.architecture, named, target.num_layers)
        )
    spec = subject.spec.model_copy(update={"rope": rope, "taps": taps})
    recorded = subject.record.spec if subject.record else None
    return _network(spec, dict(subject.tensors), target, recorded)


def _network(
    spec: DrafterSpec, stored: dict[str, StoredTensor], target: Target, recorded: DrafterSpec | None
) -> Network:
    weights, missing = {}, []
    generator = torch.Generator().manual_seed(0)
    for name, shape in spec.trainable_shapes().items():
        tensor = stored.get(name)
        if tensor is None:
            missing.append(name)
            weights[name] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
            continue
        if tuple(tensor.shape) != shape:
            raise DraftsmithError(
                "a tensor's shape is not that of the description", where=name, found=list(tensor.shape),
                expected=list(shape), mend="draftsmith verify DRAFTER --target TARGET lists every fault",
            )  # fmt: skip
        weights[name] = torch.from_numpy(to_float32(read_array(tensor), tensor.dtype))
    own = stored.get(EMBEDDING)
    if own is not None and spec.hidden_size != spec.target_hidden_size:
        embedding = torch.from_numpy(to_float32(read_array(own), own.dtype))
    else:
        embedding = target.require("embedding").load().float()
    if "d2t" in stored:
        d2t = torch.from_numpy(read_array(stored["d2t"]).astype("int64"))
    else:
        d2t = torch.zeros(spec.draft_vocab_size, dtype=torch.int64)
        if spec.draft_vocab_size != spec.vocab_size:
            missing.append("d2t")
    return Network(spec, weights, d2t, embedding, tuple(missing), recorded)


def build(network: Network, spec: DrafterSpec, weights: dict[str, Tensor]) -> Drafter:
    """The module of a description and weights that need not be the network's own."""
    drafter = Drafter(spec, network.embedding)
    drafter.load_state_dict(weights)
    return drafter
