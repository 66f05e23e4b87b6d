"""Read a target's config.json and weight index: dimensions, context, RoPE, and where embedding, norm and head lie.

The model itself is never loaded; tensor shapes come from safetensors headers.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from draftsmith.configs.drafter import DrafterSpec, RopeSpec, default_taps
from draftsmith.configs.errors import DraftsmithError, sensible
from draftsmith.configs.files import read_json, sha256_file, sha256_json
from draftsmith.configs.weight_sample import weight_sample

if TYPE_CHECKING:
    import torch

PREFIXES = (
    "model.",
    "language_model.model.",
    "model.language_model.",
    "language_model.",
    "llm.model.",
    "transformer.",
    "",
)
"""Where wrappers keep the language model's trunk, most common first."""

INDEX = "model.safetensors.index.json"
INDEX_MEND = "fetch the folder again, or delete an index that belongs to other files"

ROLES: dict[str, tuple[str, ...]] = {
    "embedding": ("embed_tokens.weight", "tok_embeddings.weight"),
    "final_norm": ("norm.weight",),
    "head": ("lm_head.weight", "output.weight"),
}
"""What a drafter needs of its target -> names, after a prefix; the second is that of consolidated files."""

CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
"""The engines' own order (SGLang `get_context_length`); the first that is present counts."""

MEND = (
    "name a folder that holds the target's config.json; for the small everyday target run: "
    "python scripts/make_smollm2.py DIR"
)

LONGEST_CONTEXT = 1 << 30
"""More positions than any model has."""

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format itself."""

ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
ELEMENT_BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
"""safetensors dtype -> bytes of an element."""


@dataclass(frozen=True)
class TensorRef:
    """A tensor in a safetensors file: its name there, the file, its shape, its safetensors dtype (`BF16`, ...), and where
    its bytes begin and end in the file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    span: tuple[int, int]

    def load(self) -> torch.Tensor:
        """Read this one tensor (memory-mapped; nothing else of the file is read)."""
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as handle:
            return handle.get_tensor(self.name)


@dataclass(frozen=True)
class Target:
    """A target as its files describe it. `text_config` is the nested language-model config where there is one."""

    path: Path
    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeSpec
    dtype: str
    tied: bool
    config: dict[str, Any] = field(repr=False)
    text_config: dict[str, Any] = field(repr=False)
    tensors: dict[str, TensorRef] = field(repr=False)
    embedding: TensorRef | None
    final_norm: TensorRef | None
    head: TensorRef | None

    @property
    def longest_context(self) -> int:
        """Tokens that the target can be served with: `context_length`, or more where its YaRN stretches beyond that.

        Engines derive `context_length` from a config that keeps the native max_position_embeddings; people then ask for
        the stretched length at launch, and the drafter has to allow it.
        """
        scaling = self.rope.scaling or {}
        original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
        if scaling.get("rope_type") != "yarn" or not isinstance(original, int | float):
            return self.context_length
        return max(self.context_length, int(original * factor) if isinstance(factor, int | float) else 0)

    def require(self, role: str) -> TensorRef:
        """The embedding, final_norm or head; an error that names the file when its weights are not in the folder."""
        ref: TensorRef | None = getattr(self, role)
        if ref is None:
            missing = _absent_shard(self.path, ROLES[role])
            if missing:
                raise DraftsmithError(
                    f"the shard with the target's {role.replace('_', ' ')} is not there",
                    where=self.path / INDEX,
                    found=f"{missing[0]} in {missing[1]}, an absent file",
                    expected=str(self.path / missing[1]),
                    mend=f"fetch {missing[1]} into {self.path}",
                )
            raise DraftsmithError(
                f"the target's {role.replace('_', ' ')} cannot be found",
                where=self.path,
                expected=f"a safetensors file that names it under a known prefix: {', '.join(filter(None, PREFIXES))} or none",
                mend="put the shard that holds it beside config.json",
            )
        return ref

    def fingerprint(self) -> dict[str, str]:
        """Hashes that tell this target from another: config, weight index or headers, tokenizer, chat template, and, where
        all weights are there, a sample of their bytes."""
        marks = {"config": sha256_json(self.config)}
        for label, name in (
            ("index", INDEX),
            ("tokenizer", "tokenizer.json"),
            ("chat_template", "chat_template.jinja"),
        ):
            if (self.path / name).is_file():
                marks[label] = sha256_file(self.path / name)
        if "chat_template" not in marks and (self.path / "tokenizer_config.json").is_file():
            template = read_json(self.path / "tokenizer_config.json", what="the tokenizer's config").get(
                "chat_template"
            )
            if template is not None:
                marks["chat_template"] = sha256_json(template)
        for role in ("final_norm", "head"):
            ref: TensorRef | None = getattr(self, role)
            if ref is not None:
                marks[role] = sha256_json([ref.name, list(ref.shape), ref.dtype])
        named = read_weight_map(self.path / INDEX).keys() if "index" in marks else self.tensors.keys()
        if self.tensors and named <= self.tensors.keys():
            marks["weights"] = weight_sample(self.tensors)
        return marks


def read_target(path: Path | str) -> Target:
    """Read the folder at `path`.

    Raises:
        DraftsmithError: no folder, no config.json, a needed field is missing or of the wrong kind, or the weight
            index names a file outside the folder or one that is unreadable.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise DraftsmithError("the target folder does not exist", where=folder, mend=MEND)
    with sensible("the target's config.json or weight index", folder, MEND):
        return parse_target(folder / "config.json", locate_tensors(folder))


def parse_target(config_file: Path, tensors: dict[str, TensorRef]) -> Target:
    """Read a target from its config.json and the places of its tensors (which may be empty).

    Raises:
        DraftsmithError: the file is missing or lacks a needed field.
    """
    config = read_json(config_file, what="the target's config.json", mend=MEND)
    text = _text_config(config)
    hidden, heads = _integer(text, "hidden_size", config_file), _integer(text, "num_attention_heads", config_file)
    tied = any(bool(part.get("tie_word_embeddings")) for part in (text, config))
    embedding = _find(tensors, "embedding")
    head = _find(tensors, "head") or (embedding if tied else None)
    architectures = config.get("architectures") or text.get("architectures")
    if not architectures:
        raise DraftsmithError(
            "the target's config names no architecture", where=config_file, expected='"architectures": ["..."]'
        )
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise DraftsmithError("the target's architectures are no list of names", where=config_file, found=architectures)
    context = derived_context(text)
    if not 0 < context <= LONGEST_CONTEXT:
        raise DraftsmithError(
            "the target's context length makes no sense", where=config_file, found=context,
            expected=f"1 to {LONGEST_CONTEXT:,} tokens: {', '.join(CONTEXT_KEYS[-2:])} times the RoPE factor",
            mend="fetch the target's config.json again",
        )  # fmt: skip
    dtype = next((c[k] for c in (text, config) for k in ("dtype", "torch_dtype") if c.get(k)), "bfloat16")
    return Target(
        path=config_file.parent,
        architecture=architectures[0],
        model_type=str(config.get("model_type", "")),
        hidden_size=hidden,
        intermediate_size=_integer(text, "intermediate_size", config_file),
        num_layers=_integer(text, "num_hidden_layers", config_file),
        num_attention_heads=heads,
        num_key_value_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        vocab_size=_integer(text, "vocab_size", config_file),
        context_length=context,
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        rope=read_rope(text),
        dtype=str(dtype),
        tied=tied,
        config=config,
        text_config=text,
        tensors=tensors,
        embedding=embedding,
        final_norm=_find(tensors, "final_norm"),
        head=head,
    )


def default_drafter(target: Target, draft_vocab_size: int, **changes: Any) -> DrafterSpec:
    """The drafter that fits `target`: its widths, heads and RoPE, one layer, default taps; `changes` win."""
    values: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": target.hidden_size,
        "target_num_layers": target.num_layers,
        "taps": default_taps(target.num_layers),
        "rms_norm_eps": target.rms_norm_eps,
        "rope": target.rope,
        "max_position_embeddings": target.longest_context,
    }
    values |= {key: value for key, value in changes.items() if value is not None}
    try:
        return DrafterSpec(**values)
    except ValidationError as error:
        faults = [
            ".".join(map(str, fault["loc"])) + ": " * bool(fault["loc"]) + fault["msg"].removeprefix("Value error, ")
            for fault in error.errors()
        ]
        raise DraftsmithError(
            f"no drafter of these dimensions can be served: {'; '.join(faults)}",
            where="the configuration: drafter section, target.taps, vocab.size",
        ) from None


def derived_context(text: dict[str, Any]) -> int:
    """The context length that SGLang derives from a text config: the first CONTEXT_KEYS entry times the RoPE factor.

    The factor does not count for scalings with `original_max_position_embeddings`, which transformers 5 fills in for
    YaRN, llama3 and longrope when it parses the config.
    """
    given = next((text[key] for key in CONTEXT_KEYS if text.get(key) is not None), 2048)
    if type(given) not in (int, float):
        raise ValueError(f"the context length is {given!r}")
    base = int(given)
    scaling = _rope_block(text)
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind in ("yarn", "llama3", "longrope") or scaling.get("original_max_position_embeddings"):
        return base
    factor = scaling.get("factor")
    return int(base * factor) if isinstance(factor, int | float) and factor else base


def read_rope(text: dict[str, Any]) -> RopeSpec:
    """RoPE base and scaling as transformers 5 reads them.

    A filled `rope_scaling` wins over `rope_parameters`; a base inside the block that counts wins over `rope_theta`.
    """
    scaling = dict(_rope_block(text))
    theta = float(scaling.pop("rope_theta", None) or text.get("rope_theta") or 10000.0)
    kind = scaling.pop("type", None)
    scaling["rope_type"] = scaling.get("rope_type") or kind or "default"
    return RopeSpec(theta=theta, scaling=None if scaling["rope_type"] == "default" else scaling)


def _rope_block(text: dict[str, Any]) -> dict[str, Any]:
    block = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if isinstance(block, dict) and "full_attention" in block:
        block = block["full_attention"]
    return block if isinstance(block, dict) else {}


def locate_tensors(folder: Path) -> dict[str, TensorRef]:
    """Name -> place of every tensor whose safetensors file is in `folder`; files that an index names but that are
    absent are passed over (a target folder may hold only the shards with embedding, norm and head).

    Raises:
        DraftsmithError: an index that names a path outside the folder, or an unreadable safetensors header.
    """
    index = folder / INDEX
    if index.is_file():
        weight_map = read_weight_map(index)
        files = [folder / name for name in sorted(set(weight_map.values())) if (folder / name).is_file()]
    else:
        weight_map = None
        files = sorted(folder.glob("*.safetensors"))
    found: dict[str, TensorRef] = {}
    for file in files:
        for ref in tensors_of(file):
            if weight_map is None or weight_map.get(ref.name) == file.name:
                found[ref.name] = ref
    return found


def tensors_of(file: Path) -> list[TensorRef]:
    """Every tensor of one safetensors file, by its header alone; errors as `read_header`."""
    header = read_header(file)
    base = file.stat().st_size - max((entry["data_offsets"][1] for entry in header.values()), default=0)
    return [
        TensorRef(name, file, tuple(entry["shape"]), entry["dtype"], (base + first, base + last))
        for name, entry in header.items()
        for first, last in [entry["data_offsets"]]
    ]


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, as a weight index says; whether the files are there is not looked at.

    Raises:
        DraftsmithError: no usable map, or a file outside the folder.
    """
    weight_map = read_json(index, what="the weight index").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise DraftsmithError("the weight index has no usable weight_map", where=index, mend=INDEX_MEND)
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or name in ("", ".", ".."):
            raise DraftsmithError(
                "the weight index names a file outside its folder", where=index, found=name, expected="a bare file name"
            )
    return weight_map


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file: name -> {dtype, shape, data_offsets}, `__metadata__` left out.

    Raises:
        DraftsmithError: truncated file, header over the format's limit, a name that stands twice, or byte ranges that
            leave gaps, overlap, or do not fit shape and dtype.
    """
    size = file.stat().st_size
    mend = "fetch the file again; it is damaged or still being written"
    try:
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"header of {length:,} bytes in a file of {size:,}")
            header = json.loads(handle.read(length), object_pairs_hook=_no_duplicates)
        header.pop("__metadata__", None)
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            wanted = prod(entry["shape"]) * ELEMENT_BYTES.get(entry["dtype"], 0)
            if first != end or (entry["dtype"] in ELEMENT_BYTES and last - first != wanted):
                raise ValueError(f"{name} has the byte range {first:,}..{last:,} instead of {end:,}..{end + wanted:,}")
            end = last
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DraftsmithError(f"not a readable safetensors file: {error}", where=file, mend=mend) from None
    if 8 + length + end != size:
        raise DraftsmithError(
            "the safetensors file is cut off or padded",
            where=file,
            found=f"{size:,} bytes",
            expected=f"{8 + length + end:,} bytes",
            mend=mend,
        )
    return header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} stands twice in the header")
        found[name] = value
    return found


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    for key in ("text_config", "llm_config", "language_config"):
        nested = config.get(key)
        if isinstance(nested, dict) and "hidden_size" in nested:
            return nested
    return config


def _integer(text: dict[str, Any], key: str, where: Path) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise DraftsmithError(
            f"the target's config has no usable {key}", where=where, found=value, expected="a positive integer"
        )
    return value


def _find(tensors: dict[str, TensorRef], role: str) -> TensorRef | None:
    """The trunk's tensor, or the head, which wrappers keep beside the trunk rather than inside it."""
    return next((tensors[name] for name in _candidates(ROLES[role]) if name in tensors), None)


def _candidates(suffixes: tuple[str, ...]) -> list[str]:
    found = []
    for suffix in suffixes:
        for prefix in PREFIXES:
            found.append(prefix + suffix)
            if suffix in ROLES["head"]:
                found.append(prefix.removesuffix("model.") + suffix)
    return found


def _absent_shard(folder: Path, suffixes: tuple[str, ...]) -> tuple[str, str] | None:
    """The first of these tensors that the index places in a file which is not there, and that file."""
    if not (folder / INDEX).is_file():
        return None
    weight_map = read_weight_map(folder / INDEX)
    return next(
        (
            (n, weight_map[n])
            for n in _candidates(suffixes)
            if n in weight_map and not (folder / weight_map[n]).is_file()
        ),
        None,
    )
