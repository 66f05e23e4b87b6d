"""The store of harvested hidden states: what is on disk, and reading rows of it.

    manifest.json              provenance and the list of shards
    shard-00012.safetensors    T tokens of n whole conversations
        input_ids int32 (T,)   generated bool (T,)   offsets int64 (n+1,)
        argmax int32 (T,)      the target's most likely next token where it wrote the next one, -1 elsewhere
        codec bfloat16:        taps bf16 (T, K, H), the residual stream entering layer k, for each tap k;
                               final bf16 (T, H), after the final norm: the input of the target's head
        codec fp8:             taps float8_e4m3fn (T, K, H), taps_scale float32 (T, K);
                               final int8 (T, H), final_scale bf16 (T, H/32)

No padding is stored. While a store is being written, its manifest lists no shard and every finished shard has a record
of its own, shard-00012.json; the finished manifest, written last, takes their place. Shards and their bytes do not
depend on how many processes wrote them.
"""

from __future__ import annotations

import json
import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import safe_open

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import absolute_url, read_json, sha256_file
from draftsmith.configs.target import read_header
from draftsmith.data.codec import Codec, decode, layout
from draftsmith.data.remote_shards import RemoteFolder, RemoteShard
from draftsmith.data.shard_rows import LocalShard, ShardRows

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
RECORDS = "shard-*.json"
"""What says that a shard of an unfinished store is whole."""

AXES = {"taps": "token, tap, hidden", "final": "token, hidden"}
"""Written into every shard's header, so that no reader has to guess."""

TOKENS = {"input_ids": "I32", "generated": "BOOL", "argmax": "I32"}
"""Tensors with one value a token, and their safetensors dtypes."""


Model = TypeVar("Model", bound=BaseModel)


class StoredConversation(BaseModel):
    """What the manifest says of one conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: str
    length: int = Field(gt=0, description="tokens")
    generated: int = Field(ge=0, description="of which the target wrote so many")
    greedy: bool
    mean_logprob: float | None = Field(default=None, allow_inf_nan=False, description="at generation, in nats")
    temperature: float = Field(
        default=1.0, gt=0.0, allow_inf_nan=False, description="of sampling; mean_logprob is at 1 or at this"
    )


class Shard(BaseModel):
    """One file of the store."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    file: str
    tokens: int
    bytes: int
    sha256: str
    conversations: tuple[StoredConversation, ...]

    @model_validator(mode="after")
    def _adds_up(self) -> Shard:
        tokens = sum(conversation.length for conversation in self.conversations)
        if tokens != self.tokens:
            raise ValueError(f"the conversations of {self.file} have {tokens:,} tokens, not {self.tokens:,}")
        return self


class Provenance(BaseModel):
    """Where the states come from; a store is continued only with an equal one."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    target: dict[str, str] = Field(description="the target's fingerprint")
    target_mark: str = Field(description="short hash of the fingerprint, as in the conversations")
    taps: tuple[int, ...]
    tap_convention: Literal["layer-input"] = "layer-input"
    final_state: Literal["post-norm"] = "post-norm"
    hidden_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    computed_in: str = Field(description="dtype of the target while harvesting")
    computed_by: Literal["transformers", "vllm", "sglang"] = Field(
        default="transformers", description="what held the target"
    )
    computed_over: int = Field(default=1, description="processes that held the target together, a slice of it each")
    stored_in: Codec = Field(default="bfloat16", description="codec of the states")
    source: str = Field(description="sha256 of the conversations file")
    planned: int = Field(ge=0, description="conversations of the finished store")
    max_length: int = Field(gt=0, description="conversations were cut here")
    shard_tokens: int = Field(gt=0)
    location: str | None = Field(default=None, description="URL of the folder that holds the shards; none: this one")


class StoreManifest(Provenance):
    """manifest.json."""

    schema_version: Literal[1] = 1
    tool_version: str
    complete: bool
    shards: tuple[Shard, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def stored(self) -> list[StoredConversation]:
        """The conversations of all shards, in store order."""
        return [conversation for shard in self.shards for conversation in shard.conversations]


@dataclass(frozen=True)
class HarvestedConversation:
    """Tokens and states of one conversation, or of some of its rows.

    Attributes:
        input_ids: int64 (T,).
        generated: bool (T,), True where the target wrote the token.
        taps: bf16 (T, K, H), the residual stream entering each tapped layer.
        final: bf16 (T, H), the input of the target's head.
        argmax: int64 (T,), the target's most likely next token where it wrote the next one (greedy text: that token),
            -1 elsewhere.
    """

    id: str
    input_ids: torch.Tensor
    generated: torch.Tensor
    taps: torch.Tensor
    final: torch.Tensor
    argmax: torch.Tensor
    greedy: bool
    mean_logprob: float | None
    temperature: float = 1.0


def read_manifest(path: Path) -> StoreManifest:
    """The manifest of the store at `path`.

    Raises:
        DraftsmithError: missing, not JSON, another schema version, or a field that does not fit.
    """
    file = path / MANIFEST
    mend = "draftsmith harvest CONFIG"
    content = read_json(file, what="the store's manifest", mend=f"rm -r {path}; {mend}" if file.is_file() else mend)
    if content.get("schema_version") != SCHEMA_VERSION:
        raise DraftsmithError(
            "the store has another schema version",
            where=file,
            found=content.get("schema_version"),
            expected=SCHEMA_VERSION,
            mend=f"rm -r {path}; {mend}",
        )
    manifest = _fitting(StoreManifest, content, file, f"rm -r {path}; {mend}")
    if manifest.complete:
        return manifest
    shards = [
        _fitting(Shard, read_json(record, what="the record of a shard"), record, f"rm {record}; {mend}")
        for record in sorted(path.glob(RECORDS))
    ]
    return manifest.model_copy(update={"shards": (*manifest.shards, *shards)})


def _fitting(model: type[Model], content: dict[str, Any], file: Path, mend: str) -> Model:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        fault = error.errors()[0]
        raise DraftsmithError(
            f"{file.name} does not fit a store: {'.'.join(map(str, fault['loc']))}: {fault['msg']}",
            where=file,
            mend=mend,
        ) from None


class HarvestReader:
    """A finished store, as a sequence of conversations; each access reads that conversation's rows only.

    Args:
        without: shard files to leave out, as if the manifest did not list them.

    Raises (when opened):
        DraftsmithError: unfinished store, a shard that is missing or has another size, or a tensor of a shard that is
            missing or has another dtype or shape than the manifest implies.
    """

    def __init__(self, path: Path | str, *, without: Collection[str] = ()) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        if without:
            kept = tuple(shard for shard in self.manifest.shards if shard.file not in without)
            self.manifest = self.manifest.model_copy(update={"shards": kept})
        if not self.manifest.complete:
            raise DraftsmithError(
                "the store is unfinished",
                where=self.path,
                found=f"{len(self.manifest.stored):,} conversations",
                expected=f"{self.manifest.planned:,}",
                mend="draftsmith harvest CONFIG (it goes on where it stopped)",
            )
        check_shards(self.path, self.manifest.shards, self.manifest)
        conversations = self.manifest.stored
        self.ids = [conversation.id for conversation in conversations]
        self.lengths = [conversation.length for conversation in conversations]
        self._conversations = conversations
        self._firsts = list(accumulate((len(shard.conversations) for shard in self.manifest.shards), initial=0))
        self._starts = [
            start
            for shard in self.manifest.shards
            for start in list(accumulate((one.length for one in shard.conversations), initial=0))[:-1]
        ]
        self._handles: dict[int, ShardRows] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> HarvestedConversation:
        return self.window(index)

    def window(self, index: int, start: int = 0, stop: int | None = None) -> HarvestedConversation:
        """Rows [start, stop) of a conversation; only these are read."""
        index = range(len(self))[index]
        conversation = self._conversations[index]
        tokens, states = self.stored(index, start, stop)
        taps, final = decode(self.manifest.stored_in, states)
        return HarvestedConversation(
            id=conversation.id,
            input_ids=tokens["input_ids"].long(),
            generated=tokens["generated"],
            taps=taps,
            final=final,
            argmax=tokens["argmax"].long(),
            greedy=conversation.greedy,
            mean_logprob=conversation.mean_logprob,
            temperature=conversation.temperature,
        )

    def stored(
        self, index: int, start: int = 0, stop: int | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Rows [start, stop) as they lie on disk: the tensors of tokens, and those of the codec."""
        shard, first, last = self._locate(range(len(self))[index])
        rows = range(first, last)[start:stop]
        here = slice(rows.start, rows.stop)
        states = layout(self.manifest.stored_in, len(self.manifest.taps), self.manifest.hidden_size)
        return shard.rows(list(TOKENS), here), shard.rows(list(states), here)

    def about(self, index: int) -> StoredConversation:
        """What the manifest says of a conversation."""
        return self._conversations[index]

    def shard_tokens(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids int32 (T,) and generated bool (T,) of a whole shard."""
        rows = self._open(number).rows(["input_ids", "generated"], slice(0, self.manifest.shards[number].tokens))
        return rows["input_ids"], rows["generated"]

    @contextmanager
    def shard_file(self, number: int) -> Iterator[Path]:
        """A shard as a local file; one that lies on shared storage is fetched for as long as the context lasts."""
        name = self.manifest.shards[number].file
        if self.manifest.location is None:
            yield self.path / name
            return
        try:
            temporary = tempfile.TemporaryDirectory()
        except OSError as error:
            raise DraftsmithError(
                f"no folder can be made for a copy of {name}: {error.strerror}", where=os.environ.get("TMPDIR"),
                mend="name a temporary folder that can be written: TMPDIR=FOLDER",
            ) from error  # fmt: skip
        with temporary as folder:
            RemoteFolder(self.manifest.location).get(name, Path(folder) / name)
            yield Path(folder) / name

    def __iter__(self) -> Iterator[HarvestedConversation]:
        return (self[index] for index in range(len(self)))

    def tokens(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids int64 (T,) and generated bool (T,) of a conversation, without its states."""
        rows = self._token_rows(index, ["input_ids", "generated"])
        return rows["input_ids"].long(), rows["generated"]

    def argmax(self, index: int) -> torch.Tensor:
        """argmax int64 (T,) of a conversation, without its states."""
        return self._token_rows(index, ["argmax"])["argmax"].long()

    def verify(self, done: Callable[[], object] = bool) -> None:
        """Compare every shard's bytes with its recorded SHA-256; `done` is called after each.

        Raises:
            DraftsmithError: a shard whose bytes have changed.
        """
        for number in range(len(self.manifest.shards)):
            with self.shard_file(number) as file:
                self.verify_shard(number, file)
            done()

    def verify_shard(self, number: int, file: Path) -> None:
        """Compare the bytes of `file`, a shard or a copy of it, with the shard's recorded SHA-256.

        Raises:
            DraftsmithError: they have changed.
        """
        shard, found = self.manifest.shards[number], sha256_file(file)
        if found != shard.sha256:
            raise DraftsmithError(
                "a shard's bytes have changed since it was written",
                where=self.path / shard.file
                if self.manifest.location is None
                else f"{self.manifest.location}/{shard.file}",
                found=f"sha256 {found}",
                expected=shard.sha256,
                mend=f"rm -r {self.path}; draftsmith harvest CONFIG",
            )

    def __getstate__(self) -> dict[str, Any]:
        """Shards' headers stay behind when a reader is sent to a worker process."""
        return self.__dict__ | {"_handles": {}}

    def _token_rows(self, index: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        shard, start, end = self._locate(range(len(self))[index])
        return shard.rows(names, slice(start, end))

    def _locate(self, index: int) -> tuple[ShardRows, int, int]:
        number = bisect_right(self._firsts, index) - 1
        start = self._starts[index]
        return self._open(number), start, start + self.lengths[index]

    def _open(self, number: int) -> ShardRows:
        if number not in self._handles:
            name, location = self.manifest.shards[number].file, self.manifest.location
            self._handles[number] = (
                LocalShard(self.path / name) if location is None else RemoteShard(RemoteFolder(location), name)
            )
        return self._handles[number]


def shard_note(provenance: Provenance) -> dict[str, Any]:
    """What a shard's header says of its tensors beside their shapes."""
    return {"axes": AXES, "codec": provenance.stored_in, "final": provenance.final_state,
            "taps": list(provenance.taps), "tap_convention": provenance.tap_convention}  # fmt: skip


def check_shards(folder: Path, shards: Sequence[Shard], provenance: Provenance) -> None:
    """`check_shard` for each; of shards on shared storage the sizes are compared, by one listing."""
    if provenance.location is None:
        for shard in shards:
            check_shard(folder, shard, provenance)
        return
    sizes = RemoteFolder(provenance.location).sizes() if shards else {}
    relative = absolute_url(provenance.location) != provenance.location
    for shard in shards:
        if sizes.get(shard.file) != shard.bytes:
            raise DraftsmithError(
                "a shard of the store is missing on the shared storage or has another size",
                where=f"{provenance.location}/{shard.file}",
                found=f"{sizes[shard.file]:,} bytes" if shard.file in sizes else "no such file",
                expected=f"{shard.bytes:,} bytes",
                mend="run the command in the folder where it was harvested: its location is a relative path"
                if relative
                else f"rm -r {folder}; draftsmith harvest CONFIG",
            )


def check_shard(folder: Path, shard: Shard, provenance: Provenance) -> None:
    """Compare a shard's size and header with the manifest; nothing but the header is read.

    Raises:
        DraftsmithError: the shard is missing, has another size, a tensor is missing or has another dtype or shape, or
            the header calls axes or taps by other names.
    """
    if provenance.location is not None:
        check_shards(folder, [shard], provenance)
        return
    file = folder / shard.file
    mend = f"rm -r {folder}; draftsmith harvest CONFIG"
    if not file.is_file():
        raise DraftsmithError("a shard of the store is missing", where=file, mend=mend)
    if file.stat().st_size != shard.bytes:
        raise DraftsmithError(
            "a shard is cut off or was changed",
            where=file,
            found=f"{file.stat().st_size:,} bytes",
            expected=f"{shard.bytes:,} bytes",
            mend=mend,
        )
    header = read_header(file)
    rows = shard.tokens
    expectation: dict[str, tuple[str, list[int]]] = {name: (code, [rows]) for name, code in TOKENS.items()}
    expectation["offsets"] = ("I64", [len(shard.conversations) + 1])
    for name, stored in layout(provenance.stored_in, len(provenance.taps), provenance.hidden_size).items():
        expectation[name] = (stored.code, [rows, *stored.shape])
    for name, expected in expectation.items():
        found = (header[name]["dtype"], header[name]["shape"]) if name in header else None
        if found != expected:
            raise DraftsmithError(
                f"tensor {name} of a shard does not fit the manifest",
                where=file,
                found=found or "no such tensor",
                expected=expected,
                mend=mend,
            )
    with safe_open(file, framework="pt") as handle:
        said = json.loads((handle.metadata() or {}).get("draftsmith", "{}"))
    wanted = shard_note(provenance)
    for name, value in said.items():
        if name in wanted and value != wanted[name]:
            raise DraftsmithError(
                f"the header of a shard speaks of other {name} than the manifest", where=file, found=value,
                expected=wanted[name], mend=mend,
            )  # fmt: skip
