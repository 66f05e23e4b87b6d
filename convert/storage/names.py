"""Names of a drafter's tensors without what wrappers put before and into them, and which tensors are a drafter's."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path

from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.tensors import Tensor

Named = list[tuple[str, Tensor]]

DRAFTER_WRAPPERS = ("draft_model", "eagle_module")
"""Attributes under which training code hangs the drafter beside the base model."""

FRONT = ("module", "model", "_orig_mod", *DRAFTER_WRAPPERS)
"""Wrappers that come off the front, in any nesting."""

INSIDE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Wrappers of single layers (torch.compile, FSDP, activation checkpointing), which come off wherever they stand."""

TRAINING_STATE = ("optim", "optimizer", "optimizers", "optimizer_state_dict", "lr_scheduler", "scheduler", "rng_state")
"""Beginnings of names that belong to the run, not to the network."""

NESTED = ("state_dict", "model_state_dict", "draft_state_dict", "model", "module")
"""Keys under which trainers keep the network's state dict among other things; the third is SpecForge's."""

MARKS = ("fc.", "midlayer.", "layers.0.hidden_norm.")
"""Beginnings of names that an EAGLE-3 drafter has and a base model or a head lacks."""

VOCABULARY = frozenset(
    [
        "fc",
        "midlayer",
        "layers",
        "norm",
        "lm_head",
        "embed_tokens",
        "d2t",
        "t2d",
        "input_norm",
        "fc_norm",
        "aux_norm_low",
        "aux_norm_mid",
        "aux_norm_high",
        "input_embeds_norm",
        "hidden_norm",
    ]
)
"""First parts of a drafter's names."""


def bare_name(name: str) -> str:
    """The name without wrappers: `module.draft_model.midlayer._orig_mod.mlp` -> `midlayer.mlp`."""
    parts = name.split(".")
    inner = [place for place, part in enumerate(parts[:-1]) if part in DRAFTER_WRAPPERS]
    parts = [part for part in parts[inner[-1] + 1 if inner else 0 :] if part not in INSIDE]
    while len(parts) > 1 and parts[0] in FRONT:
        parts = parts[1:]
    return ".".join(parts)


def drafter_names(raw: Named, where: Path | str) -> tuple[Named, list[str]]:
    """The drafter's tensors by bare name, and notes on those that were passed over.

    Where some names stand below a drafter wrapper, the others belong to the base model.

    Raises:
        DraftsmithError: names that become one without their wrappers.
    """
    notes = []
    kept = [(name, tensor) for name, tensor in raw if name.split(".")[0] not in TRAINING_STATE]
    if len(kept) < len(raw):
        notes.append(f"passed over {len(raw) - len(kept):,} tensors of the optimizer and the run")
    wrapped = [(name, tensor) for name, tensor in kept if _is_wrapped(name)]
    if wrapped and len(wrapped) < len(kept):
        outside = [name for name, _ in kept if not _is_wrapped(name)]
        strays = sorted(name for name in outside if bare_name(name).startswith((*MARKS, "d2t", "t2d")))
        if strays:
            raise DraftsmithError(
                "tensors that only a drafter has stand inside and outside of its wrapper", where=where,
                found=f"outside: {', '.join(strays[:8])}; inside: {wrapped[0][0]}, ...", mend="keep one drafter in the file",
            )  # fmt: skip
        notes.append(
            f"passed over {len(outside):,} tensors outside the drafter, as the base model's: {', '.join(outside[:3])}, ..."
        )
        kept = wrapped
    seen: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in kept:
        seen.setdefault(bare_name(name), []).append((name, tensor))
    double = [pairs for pairs in seen.values() if len(pairs) > 1]
    if double:
        raise DraftsmithError(
            "tensors become one when the wrappers' names come off:\n  "
            + "\n  ".join(
                f"{bare_name(pairs[0][0])}: " + " and ".join(f"{name} ({tensor.origin})" for name, tensor in pairs)
                for pairs in double
            ),
            where=where,
            mend="keep one of them",
        )
    return [(bare, pairs[0][1]) for bare, pairs in seen.items()], notes


def _is_wrapped(name: str) -> bool:
    return not set(name.split(".")[:-1]).isdisjoint(DRAFTER_WRAPPERS)


def has_marks(named: Named) -> bool:
    """Whether an EAGLE-3 drafter's own tensors are among them, with elements."""
    return any(name.startswith(MARKS) and prod(tensor.shape) for name, tensor in named)


def only_placeholders(named: Named) -> bool:
    """Whether the drafter's own tensors are all there without elements, as ZeRO-3 leaves them."""
    marks = [tensor for name, tensor in named if name.startswith(MARKS)]
    return bool(marks) and not any(prod(tensor.shape) for tensor in marks)


def may_be_part(named: Named, taken: Iterable[str]) -> bool:
    """Whether these tensors can be a part of the drafter that holds `taken` already."""
    names = {name for name, _ in named}
    return bool(names) and not names & set(taken) and all(name.split(".")[0] in VOCABULARY for name in names)
