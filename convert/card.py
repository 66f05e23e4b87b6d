"""README.md of an exported drafter: a model card with front matter, from the record and the numbers measured beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draftsmith.configs.console import warn
from draftsmith.configs.files import read_json
from draftsmith.configs.target import Target
from draftsmith.convert.identity import weight_digests
from draftsmith.convert.launch import HERE, serving_lines
from draftsmith.convert.read import read_drafter
from draftsmith.convert.record import RECORD, Record

MEASUREMENTS = (
    "evaluate.json",
    "evaluate-{drafter}.json",
    "serve-check-sglang.json",
    "serve-check-vllm.json",
    "serve.json",
)
"""Results that the run leaves in the drafter's folder or beside it; {drafter} is the folder's name."""

MOST_NUMBERS = 40
"""Lines of one result that the card shows."""


def model_card(drafter: Path, target: Target, record: Record, config: Mapping[str, Any]) -> str:
    """Markdown with YAML front matter; equal input gives equal text. `config` is the drafter's config.json."""
    spec = record.spec
    base = _model_name(target)
    engines = serving_lines(HERE, target, config)
    front = [
        "---",
        f"base_model: {json.dumps(base)}",
        f"library_name: {next(iter(engines))}",
        "pipeline_tag: text-generation",
        "tags: [eagle3, speculative-decoding, drafter]",
        "---",
    ]
    facts = {
        "target": f"{base} ({target.architecture})",
        "taps (inputs of layers)": ", ".join(map(str, spec.taps)),
        "hidden size, heads, KV heads, head dim": f"{spec.hidden_size}, {spec.num_attention_heads}, {spec.num_key_value_heads}, {spec.head_dim}",
        "parameters": f"{spec.parameter_count():,}",
        "draft vocabulary": f"{spec.draft_vocab_size:,} of {spec.vocab_size:,}",
        "context served": f"{spec.max_position_embeddings:,}",
        "trained length": f"{spec.trained_length:,}" if spec.trained_length else "not recorded",
        "RoPE": f"theta {spec.rope.theta:g}" + (f", {json.dumps(spec.rope.scaling)}" if spec.rope.scaling else ""),
        "weights": record.dtype,
    }
    lines = [*front, "", f"# EAGLE-3 drafter for {base}", "", *_table("what", "value", facts.items())]
    results, strangers = _results(drafter, target, record)
    for name, content in results.items():
        numbers = list(_numbers(content))[:MOST_NUMBERS]
        lines += ["", f"## Measured ({name})", "", *_table("quantity", "value", numbers)]
    if strangers:
        lines += [
            "",
            f"Results beside the drafter that were left out, as not known to be of these weights: {', '.join(strangers)}.",
        ]
    # Paths of the machine that trained mean nothing to a reader of shared storage.
    provenance = {key: value for key, value in _leaves(record.provenance) if not key.endswith("path")}
    if provenance:
        lines += ["", "## Provenance", "", *_table("what", "value", provenance.items())]
    serve = [line.replace(str(target.path.resolve()), "TARGET") for line in engines.values()]
    lines += ["", "## Serve", "", "```", *serve, "```", "", "## Files", ""]
    lines += [
        "`manifest.json` has the size and SHA-256 of every file of this version. It is written last: a folder or prefix "
        "without it is an unfinished delivery and must not be read.",
        "",
    ]
    return "\n".join(lines)


def _results(drafter: Path, target: Target, record: Record) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Name -> content of the results of this drafter; and the names of those left out, each with a warning.

    `weights` of a result decides where it is there, for names and folders are used again: its digest in the drafter's
    dtype must be that of the drafter's own weights. Else the folder that was measured must be this one, and no newer
    than the result.
    """
    shown: dict[str, dict[str, Any]] = {}
    strange: list[str] = []
    own: str | None = None
    for pattern in MEASUREMENTS:
        name = pattern.format(drafter=drafter.resolve().name)
        for file in (drafter / name, drafter.parent / name):
            if name in shown or not file.is_file():
                continue
            content = read_json(file, what=name)
            if isinstance(content.get("weights"), dict):
                own = own or weight_digests(read_drafter(drafter, target), [record.dtype])[record.dtype]
                fault = None if content["weights"].get(record.dtype) == own else "it is of other weights"
            else:
                fault = _other_folder(content, file, drafter)
            if fault is None:
                shown[name] = content
            else:
                strange.append(name)
                warn(f"{file} is left out of the model card: {fault} (recorded drafter: {content.get('drafter')})")
    return shown, list(dict.fromkeys(strange))


def _other_folder(content: Mapping[str, Any], file: Path, drafter: Path) -> str | None:
    """Why a result without digests cannot be this drafter's; None if nothing speaks against it."""
    named = content.get("drafter")
    if not isinstance(named, str) or not named:
        return "it does not say which drafter it is of"
    if Path(named).resolve() != drafter.resolve():
        return f"it is of another folder than {drafter}, and has no digest of the weights; measure again"
    if file.stat().st_mtime_ns < (drafter / RECORD).stat().st_mtime_ns:
        return "the drafter was written after it; measure again"
    return None


def _model_name(target: Target) -> str:
    """The target as the Hub names models; a folder's name where its config holds a path of some machine."""
    name = str(target.config.get("_name_or_path") or "")
    return name if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) else target.path.resolve().name


def _table(first: str, second: str, rows: Any) -> list[str]:
    return [f"| {first} | {second} |", "|---|---|", *(f"| {_cell(key)} | {_cell(value)} |" for key, value in rows)]


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _leaves(item, f"{prefix}{key}.")
        elif item is not None:
            yield prefix + str(key), item


def _numbers(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, item in _leaves(value):
        if isinstance(item, int | float) and not isinstance(item, bool):
            yield key, f"{item:,}" if isinstance(item, int) else f"{item:.4g}"
