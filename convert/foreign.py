"""Make a canonical drafter of a foreign checkpoint: names, dimensions, taps, RoPE, draft vocabulary, embedding.

What can be mended without loss is mended and said; what would need a guess stops with the flag that settles it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isclose, prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftsmith.configs.drafter import RopeSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import Target
from draftsmith.convert.canonical import CanonicalDrafter, check_tensors
from draftsmith.convert.config_fields import config_rope, config_taps, quantisation, refuse, settle_theta
from draftsmith.convert.derived import RowsTensor, all_zero, fold_norm
from draftsmith.convert.dialects import (
    ANGELSLIM,
    CONVENTIONS,
    MISSING,
    MODELOPT,
    Convention,
    Dialect,
    flattened,
    look_up,
)
from draftsmith.convert.dimensions import dimensions, make_spec
from draftsmith.convert.embedding import without_copy
from draftsmith.convert.tensors import (
    FLOATS,
    Array,
    Tensor,
    ValueTensor,
    file_tensors,
    from_ref,
    read_array,
    to_float32,
)
from draftsmith.convert.vocab_map import MapError, Maps, Reading, settle_maps

HEAD = "lm_head.weight"
ANGELSLIM_BASE = 10000.0
"""The base of the rotary table in AngelSlim's drafter class, which is never given the config's."""

LEFT_OUT = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.", "midlayer.self_attn.rotary_emb.")
"""Beginnings of names that trainers save beside the drafter: frozen parts of the target, and RoPE's constants."""


@dataclass(frozen=True)
class ReadOptions:
    """What only the user can know of a foreign checkpoint.

    Attributes:
        ids_are: what its layer ids mean.
        rope_theta: the base that training used.
        rope_scaling: whether the config's RoPE scaling is what training used, or was added at export.
        config: the drafter's config, where it does not lie beside the weights.
        vocab: a safetensors file with d2t (and t2d), for a checkpoint that lacks them or has a full head.
        d2t_is: how d2t is to be read.
        head_from_target: take the target's rows for a missing lm_head.
        repair_double_norm: fold Model-Optimizer's second norm into hidden_norm.
    """

    ids_are: Convention | None = None
    rope_theta: float | None = None
    rope_scaling: Literal["keep", "none"] | None = None
    config: Path | None = None
    vocab: Path | None = None
    d2t_is: Reading | None = None
    head_from_target: bool = False
    repair_double_norm: bool = False

    @property
    def given(self) -> list[str]:
        """The options that were given, as the command line spells them."""
        return [
            "--" + field.name.replace("_", "-") for field in fields(self) if getattr(self, field.name) != field.default
        ]

    @classmethod
    def checked(cls, **values: Any) -> ReadOptions:
        """From a command line's words.

        Raises:
            DraftsmithError: a word that means nothing, or a base that is no positive number.
        """
        allowed = {"ids_are": CONVENTIONS, "rope_scaling": ("keep", "none"), "d2t_is": ("offsets", "absolute")}
        for name, words in allowed.items():
            if values.get(name) not in (None, *words):
                raise DraftsmithError(
                    "this option has other values", where="--" + name.replace("_", "-"), found=values[name],
                    expected=", ".join(words),
                )  # fmt: skip
        theta = values.get("rope_theta")
        if theta is not None and not 0 < theta < float("inf"):
            raise DraftsmithError("the RoPE base must be a positive number", where="--rope-theta", found=theta)
        return cls(**values)


def read_foreign(
    dialect: Dialect,
    config: Mapping[str, Any],
    named: list[tuple[str, Tensor]],
    target: Target,
    where: Path,
    folder: Path,
    options: ReadOptions,
) -> CanonicalDrafter:
    """The canonical drafter of a foreign checkpoint.

    Args:
        config: as it stands in the file `where`.
        named: every tensor by the name that the checkpoint gives it; two of one name stay two.
        folder: of the weights, for messages.

    Raises:
        DraftsmithError: something is missing, contradicts itself, cannot be carried over, or needs a flag.
    """
    notes = quantisation(dialect, config, named, where)
    refuse(dialect, config, where)
    twice_normed = dialect is MODELOPT and any(name.startswith("layers.0.") for name, _ in named)
    named = [(canonical_name(dialect, name), tensor) for name, tensor in named]
    _check_layers(named, folder)
    _check_elements(named, folder)
    named = _without_biases(_without_extras(named, notes), folder, notes)
    tensors, flat = dict(named), flattened(dialect, config)
    values, said = dimensions(flat, tensors, target, where)
    notes += said
    values["taps"], said = config_taps(
        dialect, config, target, _tap_count(tensors, values["target_hidden_size"], folder), where, options.ids_are
    )
    notes += said
    values["rope"] = _rope(dialect, flat, target, where, options, notes)
    named = _with_head(named, flat, target, folder, options, notes)
    maps, named = _with_maps(named, values["vocab_size"], folder, options, notes)
    values["draft_vocab_size"] = int(maps.ids.size)
    _draft_vocab_note(flat, values["draft_vocab_size"], notes)
    if values["max_position_embeddings"] < target.longest_context:
        values["trained_length"] = values["max_position_embeddings"]
        notes.append(
            f"max_position_embeddings {values['trained_length']:,} -> {target.longest_context:,}, the target's; "
            f"{values['trained_length']:,} is recorded as the trained length"
        )
    spec = make_spec(values, where)
    trained = flat.get("embed_requires_grad") is True
    named, said_of_embedding = without_copy(named, spec, target, folder, trained=trained)
    notes.append(said_of_embedding)
    if twice_normed:
        named = _double_norm(named, options, notes)
    elif options.repair_double_norm:
        notes.append("WARNING: --repair-double-norm had no effect: only Model-Optimizer's layers.0.* heads need it")
    return CanonicalDrafter(spec, check_tensors(spec, named, where=folder), dialect.name, folder, {}, tuple(notes))


def canonical_name(dialect: Dialect, name: str) -> str:
    """The canonical name of a tensor that `dialect` calls `name`."""
    for foreign, ours in dialect.renames.items():
        if name.startswith(foreign):
            return ours + name.removeprefix(foreign)
    return name


def _check_layers(named: list[tuple[str, Tensor]], folder: Path) -> None:
    more = sorted({name.split(".")[1] for name, _ in named if name.startswith("layers.")} - {"0"})
    if more:
        raise DraftsmithError(
            "the drafter has more than one decoder layer", where=folder, found=f"layers 0, {', '.join(more)}",
            expected="one layer", mend="train a drafter of one layer",
        )  # fmt: skip


def _check_elements(named: list[tuple[str, Tensor]], folder: Path) -> None:
    """Frozen parameters that ZeRO-3 saved without gathering; sizes must not be taken from them."""
    empty = sorted(name for name, tensor in named if not prod(tensor.shape))
    if empty:
        raise DraftsmithError(
            "tensors have no elements, as ZeRO-3 saves parameters that were not gathered",
            where=folder,
            found=", ".join(empty),
            mend="convert the folder of the run's DeepSpeed checkpoint, or a file that was saved gathered",
        )


def _without_extras(named: list[tuple[str, Tensor]], notes: list[str]) -> list[tuple[str, Tensor]]:
    extra = sorted({name for name, _ in named if name.startswith(LEFT_OUT)})
    if extra:
        notes.append(f"left out, no part of a drafter: {', '.join(extra)}")
    return [(name, tensor) for name, tensor in named if name not in extra]


def _without_biases(named: list[tuple[str, Tensor]], folder: Path, notes: list[str]) -> list[tuple[str, Tensor]]:
    """Biases that are zero do nothing; of the others only fc's can be served, by SGLang."""
    biases = [(name, tensor) for name, tensor in named if name.endswith(".bias")]
    zero = {name for name, tensor in biases if tensor.dtype in FLOATS and all_zero(tensor)}
    kept = sorted(name for name, _ in biases if name not in zero and name != "fc.bias")
    if kept:
        raise DraftsmithError(
            "the drafter has biases that engines drop in silence", where=folder, found=", ".join(kept),
            expected="no bias, or zeros", mend="train without biases",
        )  # fmt: skip
    if zero:
        notes.append(f"left out, all zeros: {', '.join(sorted(zero))}")
    return [(name, tensor) for name, tensor in named if name not in zero]


def _tap_count(tensors: Mapping[str, Tensor], width: int, folder: Path) -> int:
    fc = tensors.get("fc.weight")
    if fc is None or len(fc.shape) != 2:
        raise DraftsmithError(
            "the drafter's tensors are not those that engines need:\n  missing: fc.weight", where=folder,
            mend="convert a checkpoint that has it",
        )  # fmt: skip
    if fc.shape[1] % width or not fc.shape[1]:
        raise DraftsmithError(
            "fc was not made for this target", where=fc.origin, found=f"{fc.shape[1]} columns",
            expected=f"a multiple of the target's hidden size {width}", mend="name the target that it was trained on",
        )  # fmt: skip
    return fc.shape[1] // width


def _rope(
    dialect: Dialect, flat: Mapping[str, Any], target: Target, where: Path, options: ReadOptions, notes: list[str]
) -> RopeSpec:
    if options.rope_scaling is not None and not any(flat.get(key) for key in ("rope_scaling", "rope_parameters")):
        notes.append("WARNING: --rope-scaling had no effect: the config has no scaling")
    scaled = any(look_up(flat, f"{key}.factor") not in (MISSING, None) for key in ("rope_scaling", "rope_parameters"))
    if dialect is MODELOPT and scaled and options.rope_scaling is None:
        raise DraftsmithError(
            "Model-Optimizer replaces the RoPE that it trained with by a scaled one at export; which one is true?",
            where=where,
            found=f"rope_theta {flat.get('rope_theta')}, rope_scaling {flat.get('rope_scaling') or flat.get('rope_parameters')}",
            mend="pass --rope-scaling none if it was trained on plain RoPE, --rope-scaling keep if with this scaling",
        )
    if options.rope_scaling == "none":
        base = next(
            (flat[key]["rope_theta"] for key in ("rope_scaling", "rope_parameters")
             if isinstance(flat.get(key), Mapping) and flat[key].get("rope_theta")), None,
        )  # fmt: skip
        flat = {key: value for key, value in flat.items() if key not in ("rope_scaling", "rope_parameters")}
        flat = ({} if base is None else {"rope_theta": base}) | flat
    rope = config_rope(flat, where, base=options.rope_theta)
    settle_theta(rope, target, where, said=options.rope_theta is not None)
    if dialect is ANGELSLIM and options.rope_theta is None and not isclose(rope.theta, ANGELSLIM_BASE):
        notes.append(
            f"WARNING: AngelSlim 0.5.0 trains with rope_theta {ANGELSLIM_BASE:g} whatever its config says, here "
            f"{rope.theta:g}. If that release trained this drafter, pass --rope-theta {ANGELSLIM_BASE:g}"
        )
    return rope


def _with_head(
    named: list[tuple[str, Tensor]],
    flat: Mapping[str, Any],
    target: Target,
    folder: Path,
    options: ReadOptions,
    notes: list[str],
) -> list[tuple[str, Tensor]]:
    """The tensors with an lm_head: the drafter's own, else the target's where the config or the user says so."""
    if any(name == HEAD for name, _ in named):
        if flat.get("tie_word_embeddings") is True:
            notes.append("tie_word_embeddings was true: false, or SGLang would drop lm_head")
        if options.head_from_target:
            notes.append("WARNING: --head-from-target had no effect: the checkpoint has an lm_head")
        return named
    told = flat.get("draft_vocab_size")
    borrowed = told is None or told == target.vocab_size
    if not borrowed and not options.head_from_target:
        raise DraftsmithError(
            f"{HEAD} is missing: SGLang would keep a random one in silence",
            where=folder,
            found=f"draft_vocab_size {told}",
            expected=f"{HEAD} of {told} rows",
            mend="convert a checkpoint that has it; if training froze the target's head, pass --head-from-target",
        )
    head = from_ref(target.require("head"))
    notes.append(f"{HEAD} is absent: the target's, {head.origin}")
    return [*named, (HEAD, head)]


def _with_maps(
    named: list[tuple[str, Tensor]], vocab_size: int, folder: Path, options: ReadOptions, notes: list[str]
) -> tuple[Maps, list[tuple[str, Tensor]]]:
    """Right maps, and the tensors with them and with lm_head's rows in their order."""
    held = dict(named)
    if options.vocab is not None and held[HEAD].shape[:1] != (vocab_size,):
        _check_vocab_file(options.vocab, held, folder)
    if options.vocab is not None:
        held = {name: tensor for name, tensor in named if name not in ("d2t", "t2d")} | _vocab_file(options.vocab)
        notes.append(f"the draft vocabulary is that of {options.vocab}")
    found = {name: _read(held[name]) if name in held else None for name in ("d2t", "t2d")}
    try:
        maps = settle_maps(found["d2t"], found["t2d"], held[HEAD].shape[0], vocab_size, options.d2t_is)
    except MapError as fault:
        raise DraftsmithError(
            f"the draft vocabulary's map is wrong: {fault}", where=options.vocab or folder, mend=fault.mend
        ) from None
    notes += maps.notes
    origin = "the draft vocabulary of " + str(options.vocab or folder)
    values: dict[str, Tensor] = {
        "d2t": ValueTensor(maps.d2t.astype("<i8"), origin),
        "t2d": ValueTensor(maps.t2d(vocab_size), origin),
    }
    rest = [(name, tensor) for name, tensor in named if name not in values]
    if maps.rows is not None:
        rest = [(n, RowsTensor(tensor, maps.rows) if n == HEAD else tensor) for n, tensor in rest]
    return maps, [*rest, *values.items()]


def _read(tensor: Tensor) -> Array:
    """The values; bfloat16 as the numbers that its bits stand for."""
    values = read_array(tensor)
    return to_float32(values, tensor.dtype) if tensor.dtype == "BF16" else values


def _check_vocab_file(file: Path, held: Mapping[str, Tensor], folder: Path) -> None:
    """A head of D rows belongs to the map it was trained with: another one would name other tokens."""
    given = _vocab_file(file)
    for name in ("d2t", "t2d"):
        if name in held and name in given and not np.array_equal(_read(held[name]), _read(given[name])):
            raise DraftsmithError(
                f"the checkpoint has a {name} of its own, and --vocab another", where=file, found=f"{folder} differs",
                mend="leave --vocab out; it is for a checkpoint that lacks its map or has a head of the whole vocabulary",
            )  # fmt: skip


def _vocab_file(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise DraftsmithError("the vocabulary file does not exist", where=file, mend="name a safetensors file with d2t")
    held: dict[str, Tensor] = {tensor.name: tensor for tensor in file_tensors(file) if tensor.name in ("d2t", "t2d")}
    if not held:
        raise DraftsmithError(
            "the vocabulary file has neither d2t nor t2d", where=file, mend="name the vocab.safetensors of the training"
        )
    return held


def _draft_vocab_note(flat: Mapping[str, Any], size: int, notes: list[str]) -> None:
    told = flat.get("draft_vocab_size")
    if told != size:
        notes.append(f"draft_vocab_size was {'absent or null' if told is None else told}; it is {size:,}")


def _double_norm(named: list[tuple[str, Tensor]], options: ReadOptions, notes: list[str]) -> list[tuple[str, Tensor]]:
    """Model-Optimizer's layers.0.* heads were trained with input_layernorm on the hidden state as well."""
    if not options.repair_double_norm:
        notes.append(
            "WARNING: Model-Optimizer trained this head with input_layernorm on the hidden state too, before "
            "hidden_norm; engines norm once. --repair-double-norm folds the one into the other, nearly exactly"
        )
        return named
    held = dict(named)
    if not {"midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"} <= held.keys():
        return named  # whose absence is reported with that of all others
    folded = fold_norm(held["midlayer.hidden_norm.weight"], held["midlayer.input_layernorm.weight"])
    notes.append(
        "hidden_norm = hidden_norm * gamma / rms(gamma), gamma being input_layernorm: the double norm repaired"
    )
    return [(name, folded if name == "midlayer.hidden_norm.weight" else tensor) for name, tensor in named]
