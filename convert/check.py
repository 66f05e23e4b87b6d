"""One named finding of `verify`, and what the checks look at."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.target import Target
from draftsmith.convert.dialects import is_speculators
from draftsmith.convert.record import OUR_FILES, Record
from draftsmith.convert.tensors import FileTensor

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """`message` says what was found and what an engine does with it; `mend` is the command or edit that mends it."""

    name: str
    status: Status
    message: str
    mend: str | None = None


@dataclass(frozen=True)
class Subject:
    """A drafter folder under examination.

    Attributes:
        raw: every tensor as the files name it, duplicates included; None if the files cannot be read.
        tensors: the same by canonical name.
        record: draftsmith.json, None if there is none.
        written: config.json to the letter.
        config: the same; of the speculators format the flat form, as vLLM makes it.
        spec: the dimensions as an engine takes them from config.json; None if it does not tell them.
        spec_fault: why `spec` is None.
        deep: whether all values may be read.
    """

    folder: Path
    target: Target
    written: Mapping[str, Any]
    config: Mapping[str, Any]
    raw: list[FileTensor] | None
    raw_fault: str | None
    tensors: Mapping[str, FileTensor]
    record: Record | None
    spec: DrafterSpec | None
    spec_fault: str | None
    store: Path | None
    deep: bool

    @property
    def speculators(self) -> bool:
        """Whether the folder is in the speculators format, which vLLM alone loads."""
        return is_speculators(self.written)

    @property
    def trained_taps(self) -> tuple[int, ...] | None:
        """The taps of training, by the record."""
        return self.record.spec.taps if self.record else None

    @property
    def convert_command(self) -> str:
        """The command that writes the folder afresh."""
        if all(entry.name in OUR_FILES for entry in self.folder.iterdir()):
            place, overwrite = self.folder, ["--overwrite"]
        else:  # other files would go with it
            place, overwrite = self.folder.with_name(self.folder.resolve().name + "-mended"), []
        words = ["draftsmith", "convert", str(self.folder), "--target", str(self.target.path), "--out", str(place)]
        return shlex.join([*words, *overwrite, *(["--to", "vllm"] if self.speculators else [])])


def passed(name: str, message: str) -> Check:
    """A check that found nothing wrong."""
    return Check(name, "pass", message)


def warned(name: str, message: str, mend: str | None = None) -> Check:
    """A finding that a person should know of, with which the drafter still serves as trained."""
    return Check(name, "warn", message, mend)


def failed(name: str, message: str, mend: str | None = None) -> Check:
    """A fault: the drafter does not load, or drafts other tokens than it was trained to."""
    return Check(name, "fail", message, mend)
