"""draftsmith.json, beside a converted drafter's config.json: what training said of it. Engines do not read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftsmith import __version__
from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import read_json
from draftsmith.configs.target import INDEX, Target
from draftsmith.convert.canonical import CanonicalDrafter
from draftsmith.convert.rope import check_rope

RECORD = "draftsmith.json"

OUR_FILES = frozenset({"config.json", "model.safetensors", RECORD, INDEX, "README.md"})
"""What a drafter folder may hold; a folder with anything else is never overwritten."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class TapsRecord(_Part):
    """Layer ids never stand without their convention."""

    convention: Literal["layer-input"] = "layer-input"
    layers: list[int]


class TargetRecord(_Part):
    """The target that the drafter was converted for."""

    name: str
    architecture: str
    context_length: int
    fingerprint: dict[str, str]


class TensorRecord(_Part):
    """Shape, and XXH3-128 of the stored bytes."""

    shape: list[int]
    xxh3: str


class Record(_Part):
    """All of draftsmith.json; keys of later versions are passed over."""

    version: Literal[2] = Field(default=2, alias="schema")
    tool_version: str
    spec: DrafterSpec
    taps: TapsRecord
    trained_length: int | None
    dtype: Literal["bfloat16", "float16", "float32"]
    target: TargetRecord
    provenance: dict[str, Any]
    tensors: dict[str, TensorRecord]

    @model_validator(mode="after")
    def _taps_agree(self) -> Record:
        if tuple(self.taps.layers) != self.spec.taps:
            raise ValueError(f"taps {self.taps.layers} and spec.taps {list(self.spec.taps)} differ")
        return self

    @property
    def trained_on(self) -> dict[str, Any]:
        """Fingerprint of the target of training, or of conversion if the trainer recorded none."""
        trained = self.provenance.get("target")
        return trained if isinstance(trained, dict) and trained else dict(self.target.fingerprint)

    @property
    def store_manifest(self) -> str | None:
        """Hash of the manifest of the store that training read."""
        store = self.provenance.get("store")
        return store.get("manifest") if isinstance(store, dict) else None


def make_record(
    drafter: CanonicalDrafter,
    target: Target,
    dtype: str,
    shapes: Mapping[str, tuple[int, ...]],
    hashes: Mapping[str, str],
) -> dict[str, Any]:
    """What conversion writes to draftsmith.json, as JSON values. No time stamp: equal input gives equal bytes.

    Args:
        shapes: of the tensors by the names that the written form gives them.
        hashes: XXH3-128 of their bytes, by the same names.
    """
    spec = drafter.spec.model_copy(update={"max_position_embeddings": target.longest_context})
    return {
        "schema": 2,
        "tool_version": __version__,
        "spec": spec.model_dump(mode="json"),
        "taps": {"convention": "layer-input", "layers": list(spec.taps)},
        "trained_length": spec.trained_length,
        "dtype": dtype,
        "target": {
            "name": target.path.resolve().name,
            "architecture": target.architecture,
            "context_length": target.context_length,
            "fingerprint": target.fingerprint(),
        },
        "provenance": {"target_path": str(target.path.resolve()), **drafter.provenance},
        "tensors": {name: {"shape": list(shapes[name]), "xxh3": digest} for name, digest in hashes.items()},
    }


def read_record(folder: Path) -> Record | None:
    """draftsmith.json of a drafter folder, None if there is none.

    Raises:
        DraftsmithError: it is damaged.
    """
    file = folder / RECORD
    if not file.is_file():
        return None
    mend = f"convert the training checkpoint again; or, to take config.json on trust: rm {file}"
    text = read_json(file, what="the drafter's record", mend=mend)
    try:
        record = Record(**text | {"spec": DrafterSpec(**text["spec"])})
    except (ValidationError, KeyError, TypeError) as error:
        said = (
            "; ".join(f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in error.errors())
            if isinstance(error, ValidationError)
            else str(error)
        )
        raise DraftsmithError(f"the drafter's record is damaged: {said}", where=file, mend=mend) from None
    check_rope(record.spec.rope, where=file)
    return record
